"""Tiny random language models as .pte files, called as ExecuTorch's runners call them, with eager
torch's answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

VOCAB, WIDTH, HEADS, LAYERS, CONTEXT = 96, 32, 2, 2, 48
END = 2


class Attention(nn.Module):
    """Attention with a cache that is written by position, as examples of ExecuTorch have it."""

    def __init__(self, cached: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.cached = cached
        if cached:
            shape = (1, HEADS, CONTEXT, WIDTH // HEADS)
            self.register_buffer("k_cache", torch.zeros(shape))
            self.register_buffer("v_cache", torch.zeros(shape))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rows = x.shape[1]
        q, k, v = (
            layer(x).view(1, rows, HEADS, WIDTH // HEADS).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        keys = torch.arange(CONTEXT if self.cached else rows)
        if self.cached:
            self.k_cache[:, :, positions] = k
            self.v_cache[:, :, positions] = v
            k, v = self.k_cache, self.v_cache
        scores = q @ k.transpose(2, 3) / (WIDTH // HEADS) ** 0.5
        scores = scores + torch.where(keys[None] <= positions[:, None], 0.0, -1e9)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(1, rows, WIDTH))


class Decoder(nn.Module):
    """Layers and a head. `last`: only the logits of the last token are returned."""

    def __init__(self, cached: bool, last: bool) -> None:
        super().__init__()
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.attention = nn.ModuleList(Attention(cached) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2 * LAYERS))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.last = last

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = x + self.places(positions)
        for at in range(LAYERS):
            x = x + self.attention[at](self.norms[2 * at](x), positions)
            x = x + self.down[at](torch.relu(self.up[at](self.norms[2 * at + 1](x))))
        return self.head(x[:, -1] if self.last else x)


class Model(nn.Module):
    """A model of tokens.

    Args:
        form: "input_pos": it is called with the position of the first token, as those of
            `export_llm`; "cache_position": of each token, as those of optimum-executorch; "": it
            has no cache.
    """

    def __init__(self, form: str = "input_pos", last: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.decoder = Decoder(bool(form), last)
        self.form = form
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.5)

    def forward(self, tokens: torch.Tensor, position: torch.Tensor | None = None) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1])
        if self.form == "cache_position":
            positions = position
        elif self.form:
            positions = positions + position
        return self.decoder(self.tokens(tokens), positions)


def greedy(prompt: Sequence[int], count: int) -> list[int]:
    """The tokens that eager torch generates, without a cache."""
    model, tokens = Model("", last=False).eval(), list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def inputs_of(form: str, rows: int) -> tuple[torch.Tensor, ...]:
    tokens = torch.arange(rows)[None] + 1
    if not form:
        return (tokens,)
    return tokens, torch.arange(rows if form == "cache_position" else 1)


def export(
    form: str, dynamic: bool, delegated: bool = True, last: bool = True, **numbers: Any
) -> bytes:
    """A model as a .pte file, see `program`."""
    buffer: bytes = program(form, dynamic, delegated, last, **numbers).buffer
    return buffer


def program(
    form: str, dynamic: bool, delegated: bool = True, last: bool = True, **numbers: Any
) -> Any:
    """A model as ExecuTorch's program.

    Args:
        dynamic: it takes up to 16 tokens at once, or, without a cache, `CONTEXT`; else one.
        delegated: to the Vulkan backend; else it is of portable kernels.
        numbers: what further methods return.
    """
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    from tests.models.export import trace_patterns_once

    trace_patterns_once()
    shapes: Any = None
    if dynamic:
        rows = torch.export.Dim("rows", min=1, max=16 if form else CONTEXT)
        shapes = [{1: rows}]
        if form:
            shapes.append({0: rows} if form == "cache_position" else {})
    numbers = {
        "get_max_seq_len": CONTEXT,
        "get_max_context_len": CONTEXT,
        "get_vocab_size": VOCAB,
        "get_bos_id": 1,
        "get_eos_ids": [END],
        "use_kv_cache": bool(form),
        "enable_dynamic_shape": dynamic,
        **numbers,
    }
    with torch.no_grad():
        exported = torch.export.export(
            Model(form, last).eval(),
            inputs_of(form, 3 if dynamic else 1),
            dynamic_shapes=shapes,
            strict=False,
        )
        edge = to_edge_transform_and_lower(
            exported,
            partitioner=[VulkanPartitioner({"require_dynamic_shapes": dynamic})] * delegated,
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
            constant_methods=numbers,
        )
        return edge.to_executorch()


class Seeing(Model):
    """A model of tokens and images: 3 x 8 x 8 elements become 4 positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)

    def see(self, image: torch.Tensor) -> torch.Tensor:
        return self.patches(image).flatten(2).transpose(1, 2)


class _Method(nn.Module):
    """A method of a model."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, first: torch.Tensor, position: torch.Tensor | None = None) -> torch.Tensor:
        if self.name == "vision_encoder":
            return self.model.see(first)
        if self.name == "token_embedding":
            return self.model.tokens(first)
        return self.model.decoder(first, torch.arange(first.shape[1]) + position)


def export_seeing(delegated: bool) -> bytes:
    """A `Seeing` as a .pte file, with the methods of ExecuTorch's multimodal models."""
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    from tests.models.export import trace_patterns_once

    trace_patterns_once()
    model = Seeing().eval()
    rows = torch.export.Dim("rows", min=1, max=16)
    position = torch.zeros(1, dtype=torch.int64)
    calls: dict[str, tuple[Any, Any]] = {
        "vision_encoder": ((torch.zeros(1, 3, 8, 8),), None),
        "token_embedding": (inputs_of("", 3), [{1: rows}]),
        "text_decoder": ((torch.zeros(1, 3, WIDTH), position), [{1: rows}, {}]),
    }
    numbers = {
        "get_max_seq_len": CONTEXT,
        "get_vocab_size": VOCAB,
        "get_eos_ids": [END],
        "use_kv_cache": True,
        "enable_dynamic_shape": True,
    }
    with torch.no_grad():
        exported = {
            name: torch.export.export(
                _Method(model, name), inputs, dynamic_shapes=shapes, strict=False
            )
            for name, (inputs, shapes) in calls.items()
        }
        partitioner = VulkanPartitioner({"require_dynamic_shapes": True})
        edge = to_edge_transform_and_lower(
            exported,
            partitioner={name: [partitioner] * delegated for name in calls},
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
            constant_methods=numbers,
        )
        buffer: bytes = edge.to_executorch().buffer
        return buffer


def greedy_seeing(parts: Sequence[Any], count: int) -> list[int]:
    """The tokens that eager torch generates after parts of a prompt: lists of tokens, and images
    [1, 3, 8, 8]."""
    model = Seeing().eval()
    with torch.inference_mode():
        embedded = [
            model.see(part) if torch.is_tensor(part) else model.tokens(torch.tensor([part]))
            for part in parts
        ]
        rows, tokens = torch.cat(embedded, 1), []
        while True:
            logits = model.decoder(rows, torch.arange(rows.shape[1]))
            tokens.append(int(logits[0].argmax()))
            if len(tokens) == count or tokens[-1] == END:
                return tokens
            rows = torch.cat([rows, model.tokens(torch.tensor([tokens[-1:]]))], 1)


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer.json of bytes-level BPE with `VOCAB` tokens: printable characters, and the control
    tokens <s> (1), which begins a sequence, and </s> (2)."""
    from purevk.llm.tokenizer import byte_codes

    codes = byte_codes()
    letters = [chr(codes[byte]) for byte in (10, *range(32, 124))]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {letter: at for at, letter in enumerate(letters, 3)}
    special = [
        {"id": at, "content": text, "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}
        for text, at in list(vocab.items())[:3]
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True,
                  "trim_offsets": True}  # fmt: skip
    data = {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(data))
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    about = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return path


def write_small(path: Path) -> None:
    """Writes tests/data/llm/language_model.pte: `python -m tests.llm.executorch_models FILE`."""
    sizes = {"VOCAB": 24, "WIDTH": 8, "LAYERS": 1, "CONTEXT": 16}
    globals().update(sizes)
    path.write_bytes(export("input_pos", dynamic=False))


if __name__ == "__main__":
    write_small(Path(sys.argv[1]))
