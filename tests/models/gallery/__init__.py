"""Small models of many architectures, with random weights: what docs/models.md lists.

`scripts/models.py` runs them; `MODELS` has them by name. Nothing of the model libraries is imported
until one is built.
"""

from __future__ import annotations

from tests.models.gallery import (
    decoders,
    detectors,
    encoders,
    generators,
    graphs,
    images,
    language,
    media,
    packages,
    pairs,
    plain,
    scenes,
    sizes,
    speech,
    times,
    vision,
)
from tests.models.gallery.model import Model

_ROOMS = (
    plain, generators, graphs, vision, images, language, encoders, decoders, media, speech, pairs, scenes, times,
    packages, detectors, sizes,
)  # fmt: skip
MODELS: dict[str, Model] = {model.name: model for room in _ROOMS for model in room.MODELS}

__all__ = ["MODELS", "Model"]
