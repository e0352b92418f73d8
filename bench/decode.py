"""Decoding and prefill of a Llama beside torch: `python bench/decode.py --out FILE.json`.

The reference is a Llama of 1.1 billion parameters in plain torch operators, with random weights: 16
layers, 2048 columns, 32 heads, 8 of keys and values, 8192 columns in between, 32,000 tokens, a cache
of 2048 rows that `index_copy_` writes, and a rotary embedding by halves. For one token at position
1024 and for prompts of 512 and 2048 tokens:

- a call of purevk from numpy to numpy, and its part from submission to the end of the wait;
- the number of dispatches, and their time by kernel, each timed alone;
- in turns, after a time of warming up: purevk between timestamps of the device; torch on CUDA, eager
  and captured as a CUDA graph, plain and compiled, without copies from and to host memory; and calls
  of llama.cpp's Vulkan (`bench/peers/llama_cpp.py`), as wall time.

Each output is compared with eager torch on the same weights, and a wrong one is marked. With
`--variant q4`, weights have 4 bits in groups of 32 (Q4_0 in llama.cpp), and torch has no column.
`--tiny` takes a model of the same structure that a software device runs in seconds. llama.cpp takes a
software device only if the variable GGML_VK_VISIBLE_DEVICES is 0.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import torch_cuda
from bench.peers.base import Unavailable
from bench.peers.llama_cpp import LlamaCpp, write_gguf
from bench.timing import (
    Budget,
    Sampler,
    error_of,
    floats_of,
    interleave,
    machine,
    of_timestamps,
    of_wall,
)

GROUP = 32
LIMIT = {"fp32": 1e-4, "fp16": 3e-2, "bf16": 1e-1, "q4": 3e-2}
"""The largest accepted error relative to the largest logit: of other algorithms in float32, of
halves in the others."""


@dataclass(frozen=True)
class Form:
    """The sizes of a Llama, and what is timed: decoding at a position, prompts of some lengths."""

    layers: int = 16
    width: int = 2048
    heads: int = 32
    kv_heads: int = 8
    inner: int = 8192
    vocab: int = 32000
    rows: int = 2048
    position: int = 1024
    prompts: tuple[int, ...] = (512, 2048)


REFERENCE = Form()
TINY = Form(2, 256, 4, 2, 512, 500, 64, 20, (7, 64))


class QuantizedLinear(nn.Module):
    """A linear layer with weights of 4 bits in groups."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(rows, columns // 2, dtype=torch.uint8))
        self.register_buffer("scales", torch.zeros(columns // GROUP, rows))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return quantized_linear(x, self.weight, self.scales, GROUP)


def quantized_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    group: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """executorch's operator in an export. Otherwise the same in torch: that of executorch takes
    float32 alone."""
    if torch.compiler.is_exporting():
        _define_quantized_linear()
        return torch.ops.et_vk.linear_q4gsw(x, weight, scales, group, bias)
    return _multiply(x, weight, scales, group, bias)


def _multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    group: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    values = torch.stack((weight & 15, weight >> 4), -1).flatten(1).float() - 8
    matrix = values * scales.t().float().repeat_interleave(group, 1)
    made = functional.linear(x.float(), matrix, None if bias is None else bias.float())
    return made.to(x.dtype)


def _define_quantized_linear() -> None:
    """Defines executorch's operator where there is no executorch."""
    with contextlib.suppress(ImportError):
        import executorch.backends.vulkan.custom_ops_lib  # noqa: F401
    if hasattr(torch.ops.et_vk, "linear_q4gsw"):
        return
    library = torch.library.Library("et_vk", "FRAGMENT")
    library.define(
        "linear_q4gsw(Tensor self, Tensor weights, Tensor weight_scales, int group_size, "
        "Tensor? bias = None) -> Tensor"
    )
    torch.library.register_fake(
        "et_vk::linear_q4gsw", lambda x, w, s, g, b=None: x.new_empty(*x.shape[:-1], w.shape[0])
    )
    library.impl("linear_q4gsw", _multiply, "CompositeExplicitAutograd")
    _LIBRARIES.append(library)


_LIBRARIES: list[Any] = []  # a library takes its operators along when it goes


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [B, H, S, D] rotated by halves, the angles [S, D]."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Layer(nn.Module):
    """Attention over a cache, and a gated feed-forward network."""

    def __init__(self, form: Form, linear: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.heads, self.kv_heads = form.heads, form.kv_heads
        self.head_width = form.width // form.heads
        kv = self.kv_heads * self.head_width
        self.norm1, self.norm2 = (nn.RMSNorm(form.width, eps=1e-5) for _ in range(2))
        self.wq, self.wk = linear(form.width, form.width), linear(form.width, kv)
        self.wv, self.wo = linear(form.width, kv), linear(form.width, form.width)
        self.gate, self.up = (linear(form.width, form.inner) for _ in range(2))
        self.down = linear(form.inner, form.width)
        for name in ("keys", "values"):
            self.register_buffer(
                name, torch.zeros(1, self.kv_heads, form.rows, self.head_width), persistent=False
            )

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        batch, rows, width = x.shape

        def split(projected: torch.Tensor, heads: int) -> torch.Tensor:
            return projected.view(batch, rows, heads, self.head_width).transpose(1, 2)

        h = self.norm1(x)
        q = rotate(split(self.wq(h), self.heads), cos, sin)
        k = rotate(split(self.wk(h), self.kv_heads), cos, sin)
        self.keys.index_copy_(2, positions, k)
        self.values.index_copy_(2, positions, split(self.wv(h), self.kv_heads))
        attended = functional.scaled_dot_product_attention(
            q, self.keys, self.values, attn_mask=mask, enable_gqa=True
        )
        x = x + self.wo(attended.transpose(1, 2).reshape(batch, rows, width))
        h = self.norm2(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Tokens int64 [1, S] and the first one's position, int64 [1], to logits of the last [1,
    vocab]."""

    def __init__(self, form: Form, quantized: bool = False) -> None:
        super().__init__()
        linear: Callable[[int, int], nn.Module] = (
            QuantizedLinear if quantized else lambda a, b: nn.Linear(a, b, bias=False)
        )
        self.embedding = nn.Embedding(form.vocab, form.width)
        self.layers = nn.ModuleList(Layer(form, linear) for _ in range(form.layers))
        self.norm, self.head = nn.RMSNorm(form.width, eps=1e-5), linear(form.width, form.vocab)
        half = form.width // form.heads // 2
        angles = torch.arange(form.rows)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)
        self.register_buffer("rows", torch.arange(form.rows), persistent=False)

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        positions = position + self.rows[: tokens.shape[1]]
        cos, sin = self.cos[positions], self.sin[positions]
        mask = self.rows[None, :] <= positions[:, None]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions, mask, cos, sin)
        return self.head(self.norm(x[:, -1]))


def build(form: Form, variant: str) -> Llama:
    """The model with random weights, the same for each call."""
    with torch.device("meta"):
        model = Llama(form, variant == "q4")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(variant, torch.float16)
    model = model.to(dtype).to_empty(device="cpu").eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    angles = Llama(Form(0, *_sizes(form)), False)
    for name, value in model.state_dict(keep_vars=True).items():
        if value.dtype is torch.uint8:
            value.random_(0, 256, generator=generator)
        elif name.endswith("scales"):
            value.fill_(0.2 / (value.shape[0] * GROUP) ** 0.5)
        elif value.ndim == 1:
            value.uniform_(0.8, 1.2, generator=generator)
        else:
            deviation = 1.0 if name.startswith("embedding") else value.shape[1] ** -0.5
            value.normal_(0.0, deviation, generator=generator)
    for name in ("cos", "sin", "rows"):
        getattr(model, name).copy_(getattr(angles, name))
    for layer in model.layers:
        for cache in (layer.keys, layer.values):
            cache.normal_(generator=generator)
    return model


def _sizes(form: Form) -> tuple[Any, ...]:
    return (form.width, form.heads, form.kv_heads, form.inner, 1, form.rows)


@dataclass
class Row:
    """One case. Times are medians in milliseconds; None: not measured.

    `call` is a call from numpy to numpy, `device` its part from submission to the end of the wait,
    `kernels` the sum of its dispatches timed one by one. `by_kernel`: calls and milliseconds.
    `turns`: the times of the contenders that take turns, `errors` of their outputs, and `why` they
    were not measured.
    """

    case: str
    variant: str
    dispatches: int | None = None
    call: float | None = None
    device: float | None = None
    kernels: float | None = None
    by_kernel: dict[str, tuple[int, float]] = field(default_factory=dict)
    turns: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)


def cases(form: Form) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The inputs of each case."""
    generator = torch.Generator().manual_seed(1)

    def given(length: int, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(form.vocab, (1, length), generator=generator)
        return tokens, torch.tensor([position])

    found = {f"decode at {form.position}": given(1, form.position)}
    return found | {f"prefill of {length}": given(length, 0) for length in form.prompts}


def method_name(case: str) -> str:
    """The method of a case."""
    return "_".join(case.split())


def measure(
    model: Llama,
    rows: Sequence[Row],
    given: dict[str, tuple[torch.Tensor, torch.Tensor]],
    options: argparse.Namespace,
    budget: Budget,
) -> None:
    """Fills in all figures of a model."""
    import purevk

    form, settle = TINY if options.tiny else REFERENCE, options.settle
    expected = expected_outputs(model, given)
    methods = {method_name(case): (model, inputs) for case, inputs in given.items()}
    with purevk.compile(methods) as program, llama_cpp(model, form, rows) as peer:
        for row, wanted in zip(rows, expected, strict=True):
            method = program.methods[method_name(row.case)]
            arrays = [each.numpy() for each in given[row.case]]
            row.errors["purevk"] = error_of(floats_of(method(*arrays)), wanted)
            anatomy(row, program, method, arrays, options.seconds, settle)
            samplers: dict[str, Sampler] = {"purevk": of_timestamps(method.executable, arrays)}
            if torch.cuda.is_available() and row.variant != "q4":
                found = torch_cuda.contenders(
                    model, given[row.case], wanted, False, options, budget
                )  # each with caches of its own, as they were before the call
                samplers |= found.samplers
                row.errors |= found.errors
                row.why |= found.why
                del found
            if peer is not None:
                add_llama_cpp(row, samplers, peer, given[row.case], wanted)
            for name, times in interleave(samplers, options.seconds, settle).items():
                row.turns[name] = statistics.median(times)
            del samplers
            if torch.cuda.is_available():
                gc.collect()
                torch.cuda.empty_cache()


def anatomy(
    row: Row, program: Any, method: Any, arrays: list[Any], seconds: float, settle: float
) -> None:
    """Fills in where the time of a call of purevk goes."""
    from purevk.cli.stopwatch import Stopwatch
    from purevk.graph.limits import device_limits
    from purevk.report.timings import table, time_dispatches

    row.dispatches = len(method.executable.plan.dispatches)
    end = time.perf_counter() + settle
    while time.perf_counter() < end:
        method(*arrays)
    whole, device = [], []
    with Stopwatch(program.device) as watch:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(whole) < 3:
            watch.reset()
            start = time.perf_counter()
            method(*arrays)
            whole.append(time.perf_counter() - start)
            device.append(watch.device)
    row.call, row.device = (1e3 * statistics.median(each) for each in (whole, device))
    timings = time_dispatches(method.executable, arrays, settle=settle / 2)
    row.kernels = 1e3 * sum(timing.seconds for timing in timings)
    for line in table(timings, "operator", device_limits(program.context)):
        row.by_kernel[line["label"]] = (line["calls"], 1e3 * line["seconds"])


@contextlib.contextmanager
def llama_cpp(model: Llama, form: Form, rows: Sequence[Row]) -> Iterator[LlamaCpp | None]:
    """llama.cpp with the same weights, or None with the reason in the rows."""
    peer = None
    with tempfile.TemporaryDirectory() as folder:
        try:
            if rows[0].variant in ("fp32", "bf16"):
                raise Unavailable("it computes with halves")
            path = Path(folder) / "llama.gguf"
            write_gguf(model, form, path)
            peer = LlamaCpp(path, form.rows)
        except Unavailable as error:
            for row in rows:
                row.why["llama.cpp"] = str(error)
        try:
            yield peer
        finally:
            if peer is not None:
                peer.close()


def add_llama_cpp(
    row: Row,
    samplers: dict[str, Sampler],
    peer: LlamaCpp,
    inputs: tuple[torch.Tensor, torch.Tensor],
    wanted: numpy.ndarray,
) -> None:
    """Adds llama.cpp. Its cache is filled by a prompt, so what it decodes is not compared."""
    tokens, position = inputs[0][0].tolist(), int(inputs[1])
    if position:
        peer.run([number % wanted.size for number in range(position)], 0)
    peer.run(tokens, position)
    if not position:
        row.errors["llama.cpp"] = error_of(peer.logits(wanted.size), wanted[0])
    samplers["llama.cpp"] = of_wall(lambda: peer.run(tokens, position), 3)


def expected_outputs(model: Llama, given: dict[str, Any]) -> list[numpy.ndarray]:
    """What eager torch gives for each case, in their order: each writes the caches."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    caches = [cache for layer in model.layers for cache in (layer.keys, layer.values)]
    before = [cache.clone() for cache in caches]
    model = model.to(device)
    with torch.inference_mode():
        made = [
            model(*(each.to(device) for each in inputs)).double().cpu().numpy()
            for inputs in given.values()
        ]
    model = model.to("cpu")
    caches = [cache for layer in model.layers for cache in (layer.keys, layer.values)]
    for cache, was in zip(caches, before, strict=True):
        cache.copy_(was)
    return made


def show(rows: Sequence[Row]) -> None:
    """Prints a table of the cases, and one of the kernels of each."""
    for row in rows:
        print(
            f"{row.variant} {row.case}: {row.dispatches} dispatches; ms: call {row.call:.3f}, "
            f"device {row.device:.3f}, kernels {row.kernels:.3f}"
        )
        for name, ms in row.turns.items():
            error = row.errors.get(name)
            wrong = error is not None and not error <= LIMIT[row.variant]
            compared = "not compared" if error is None else f"error {error:.1e}"
            print(f"    {ms:9.4f} ms  {name}, {compared}" + ("  WRONG" if wrong else ""))
        for name, why in row.why.items():
            print(f"    {name} was not measured: {why}")
        print("  kernels, each timed alone:")
        for label, (calls, ms) in row.by_kernel.items():
            print(f"    {ms:9.4f} ms  {calls:5}  {label}")


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints the tables and writes JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a small model of the same structure")
    parser.add_argument("--variant", choices=tuple(LIMIT), action="append", help="default: fp16")
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing each case, twice")
    parser.add_argument("--settle", type=float, default=2.0, help="seconds of warming up")
    parser.add_argument("--cases", help="only the cases whose names have this in them")
    torch_cuda.add_arguments(parser)
    parser.add_argument("--out", type=Path, help="write all figures there, as JSON")
    options = parser.parse_args(arguments)
    os.environ.setdefault("PUREVK_PROGRESS", "0")
    found, done, budget = machine(), [], Budget(options.budget)
    print(json.dumps(found))
    form = TINY if options.tiny else REFERENCE
    for variant in options.variant or ["fp16"]:
        given = {n: each for n, each in cases(form).items() if (options.cases or "") in n}
        if not given:
            parser.error(f"no case has {options.cases} in its name")
        rows = [Row(case, variant) for case in given]
        measure(build(form, variant), rows, given, options, budget)
        done += rows
        show(rows)
        if options.out:
            text = json.dumps({"machine": found, "rows": [asdict(row) for row in done]}, indent=1)
            options.out.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
