"""Small models of many architectures, with random weights: what docs/models.md lists.

`scripts/models.py` runs them; `MODELS` has them by name. Nothing of the model libraries is imported
until one is built.
"""

from __future__ import annotations

from tests.models.gallery import language, media, plain, vision
from tests.models.gallery.model import Model

MODELS: dict[str, Model] = {
    model.name: model for room in (plain, vision, language, media) for model in room.MODELS
}  # fmt: skip

__all__ = ["MODELS", "Model"]
