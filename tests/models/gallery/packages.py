"""Models of packages that the tests do not install: YOLO of ultralytics, Kokoro, e3nn.

pip install --no-deps ultralytics ultralytics-thop opencv-python-headless kokoro loguru e3nn opt_einsum_fx opt_einsum
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

from tests.models.gallery.model import Model, lively, seeded
from tests.models.zoo import Built

_SIZES = ((64, 96), (96, 64), (128, 96))
_TASKS = {"detect": "", "segment": "-seg", "pose": "-pose", "obb": "-obb"}


def _yolo(family: str, task: str) -> Callable[[], Built]:
    """A whole YOLO with its head, as `torch.export` takes it: the head keeps no anchors."""

    def build() -> Built:
        import torch
        from ultralytics.nn import tasks

        generator = seeded()
        kinds = {
            "detect": tasks.DetectionModel,
            "segment": tasks.SegmentationModel,
            "pose": tasks.PoseModel,
            "obb": tasks.OBBModel,
        }
        module = kinds[task](f"{family}{_TASKS[task]}.yaml", verbose=False)
        samples = tuple((torch.randn(1, 3, *size, generator=generator),) for size in _SIZES)
        module = lively(module).requires_grad_(False)
        module.model[-1].dynamic = True
        height, width = (torch.export.Dim(name, min=2, max=20) for name in ("height", "width"))
        shapes = ({2: 32 * height, 3: 32 * width},)
        return Built(module, samples[0], samples, dynamic_shapes=shapes)

    return build


def _kokoro(part: str) -> Any:
    """A module of Kokoro's, without what the package imports for phonemes."""
    if "kokoro" not in sys.modules:
        spec = importlib.util.find_spec("kokoro")
        if spec is None or spec.submodule_search_locations is None:
            raise ModuleNotFoundError("kokoro")
        package = types.ModuleType("kokoro")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["kokoro"] = package
    return importlib.import_module(f"kokoro.{part}")


_WIDTH, _STYLE = 32, 16
_LENGTHS = (9, 17, 40)


def _no_padding(length: int) -> tuple[Any, Any]:
    import torch

    return torch.tensor([length]), torch.zeros(1, length, dtype=torch.bool)


def _text() -> Built:
    import torch

    generator = seeded()
    module = lively(_kokoro("modules").TextEncoder(_WIDTH, 5, 2, 20))
    samples = tuple(
        (torch.randint(0, 20, (1, length), generator=generator), *_no_padding(length))
        for length in _LENGTHS
    )
    steps = torch.export.Dim("steps", min=2, max=200)
    return Built(module, samples[0], samples, dynamic_shapes=({1: steps}, None, {1: steps}))


def _durations() -> Built:
    import torch

    class Durations(torch.nn.Module):
        """Encoded text [1, W, T] and a style to durations in frames [1, T]."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = _kokoro("modules").ProsodyPredictor(_STYLE, _WIDTH, 2, max_dur=10)

        def forward(self, text: Any, style: Any, lengths: Any, mask: Any) -> Any:
            encoded = self.inner.text_encoder(text, style, lengths, mask)
            hidden, _ = self.inner.lstm(encoded)
            return encoded, self.inner.duration_proj(hidden).sigmoid().sum(-1)

    generator = seeded()
    samples = tuple(
        (
            torch.randn(1, _WIDTH, length, generator=generator),
            torch.randn(1, _STYLE, generator=generator),
            *_no_padding(length),
        )
        for length in _LENGTHS
    )
    steps = torch.export.Dim("steps", min=2, max=200)
    shapes = ({2: steps}, None, None, {1: steps})
    return Built(lively(Durations()), samples[0], samples, dynamic_shapes=shapes)


def _prosody() -> Built:
    import torch

    class Prosody(torch.nn.Module):
        """Aligned text [1, W + S, F] and a style to pitch and energy [1, 2 F]."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = _kokoro("modules").ProsodyPredictor(_STYLE, _WIDTH, 2, max_dur=10)

        def forward(self, text: Any, style: Any) -> Any:
            return self.inner.F0Ntrain(text, style)

    generator = seeded()
    samples = tuple(
        (
            torch.randn(1, _WIDTH + _STYLE, length, generator=generator),
            torch.randn(1, _STYLE, generator=generator),
        )
        for length in _LENGTHS
    )
    frames = torch.export.Dim("frames", min=2, max=400)
    return Built(lively(Prosody()), samples[0], samples, dynamic_shapes=({2: frames}, None))


def _equivariant() -> Built:
    import e3nn
    import torch
    from e3nn import nn, o3

    e3nn.set_optimization_defaults(jit_script_fx=False)

    class Convolution(torch.nn.Module):
        """Features [N, 10], edges [2, E] and their vectors [E, 3] to features [N, 10]."""

        def __init__(self) -> None:
            super().__init__()
            features = o3.Irreps("4x0e + 2x1o")
            self.harmonics = o3.Irreps.spherical_harmonics(2)
            self.product = o3.FullyConnectedTensorProduct(
                features, self.harmonics, features, shared_weights=False
            )
            self.weights = nn.FullyConnectedNet([5, 16, self.product.weight_numel], torch.relu)
            self.linear = o3.Linear(features, features)
            self.activation = nn.NormActivation(features, torch.sigmoid)

        def forward(self, x: Any, edges: Any, vectors: Any) -> Any:
            angles = o3.spherical_harmonics(self.harmonics, vectors, True, "component")
            lengths = vectors.norm(dim=1)[:, None] - torch.linspace(0, 3, 5)
            messages = self.product(x[edges[0]], angles, self.weights((-(lengths**2)).exp()))
            sums = torch.zeros_like(x).index_add(0, edges[1], messages)
            return self.activation(self.linear(sums))

    generator = seeded()
    samples = tuple(
        (
            torch.randn(count, 10, generator=generator),
            torch.randint(0, count, (2, 3 * count), generator=generator),
            torch.randn(3 * count, 3, generator=generator),
        )
        for count in (5, 9, 20)
    )
    nodes = torch.export.Dim("nodes", min=2, max=100)
    shapes = ({0: nodes}, {1: 3 * nodes}, {0: 3 * nodes})
    return Built(lively(Convolution()), samples[0], samples, dynamic_shapes=shapes)


MODELS = (
    *(
        Model(
            f"{family}_{task}",
            "ultralytics",
            f"{task}, 64 x 96, 96 x 64 and 128 x 96 pixels",
            _yolo(family, task),
        )
        for family in ("yolov8n", "yolo11n", "yolo26n")
        for task in _TASKS
    ),
    Model("kokoro_text", "kokoro", "text encoder, 9, 17 and 40 phonemes", _text),
    Model("kokoro_durations", "kokoro", "duration predictor, the same", _durations),
    Model("kokoro_prosody", "kokoro", "pitch and energy, 9, 17 and 40 frames", _prosody),
    Model("e3nn_convolution", "e3nn", "messages of 5, 9 and 20 nodes", _equivariant),
)
