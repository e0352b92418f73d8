"""Matmuls of experts beside torch's grouped_mm on a GPU: `python bench/experts.py --out FILE.json`.

For the experts of some models, and for numbers of tokens from one (a decoding step) to a long
prompt: the time of purevk's dispatches on the device, the time of torch's grouped_mm under CUDA
(events around many calls), and the rate of each as a share of the rate of a copy, with the matrices
of the experts in use read once. Tokens choose their experts at random. The results are compared with
float32 arithmetic on the CPU, for some rows.

Without CUDA, only purevk is timed. Run it where the checkout can be imported.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.timing import cuda_seconds


@dataclass(frozen=True)
class Experts:
    """The first projection of the experts of a model: matrices [experts, columns, depth]."""

    model: str
    experts: int
    chosen: int  # for each token
    depth: int
    columns: int


MODELS = (
    Experts("small", 16, 2, 256, 384),
    Experts("Qwen3-30B-A3B", 128, 8, 2048, 1536),
    Experts("gpt-oss-20b", 32, 4, 2880, 5760),
    Experts("Mixtral-8x7B", 8, 2, 4096, 28672),
)
TOKENS = (1, 16, 512, 4096)
DTYPES = ("bfloat16", "float16", "float32")


@dataclass
class Row:
    """One case. Times are microseconds on the device; None: not measured."""

    model: str
    dtype: str
    tokens: int
    used: int
    bytes: int
    purevk: float
    share: float
    templates: list[str]
    error: float
    torch: float | None = None
    torch_share: float | None = None


def inputs_of(form: Experts, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows sorted by expert, and the first row behind those of each expert."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(tokens, form.experts, generator=generator)
    counts = scores.topk(form.chosen).indices.flatten().bincount(minlength=form.experts)
    x = torch.randn(tokens * form.chosen, form.depth, generator=generator) / form.depth**0.5
    return x.to(dtype), counts.cumsum(0).to(torch.int32)


def error_of(
    made: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor
) -> float:
    """The largest difference of some rows, relative to the largest value."""
    worst = 0.0
    for row in {0, x.shape[0] // 2, x.shape[0] - 1}:
        expert = int((offs <= row).sum())
        wanted = weight[expert].float() @ x[row].float()
        worst = max(worst, float((made[row].float() - wanted).abs().max() / wanted.abs().max()))
    return worst


def time_purevk(
    context: Any, x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor
) -> tuple[float, list[str], float]:
    """Seconds on the device, the templates, and the error."""
    from purevk.program import Program
    from purevk.report.timings import time_dispatches
    from tests.ops.harness import Recorder

    recorder = Recorder()
    rows, ends = recorder.input(x), recorder.input(offs)
    matrices = recorder.call(torch.ops.aten.transpose.int, (recorder.constant(weight), 1, 2), {})
    made = recorder.call(torch.ops.aten._grouped_mm.default, (rows, matrices, ends), {})
    graph = recorder.importer.finish([made])
    with Program("experts", {"forward": lambda sizes: graph}, context) as program:
        error = error_of(program.forward(x, offs), x, weight, offs)
        bits = x.view(torch.uint16) if x.dtype is torch.bfloat16 else x
        given = [bits.numpy(), offs.numpy()]
        executable = program.method("forward").executable
        timings = time_dispatches(executable, given, 3, settle=0.2)
        templates = [each.kernel.template for each in executable.plan.dispatches]
    return sum(timing.seconds for timing in timings), templates, error


def time_cuda(
    x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, seconds: float
) -> float | None:
    """The median of the seconds of a call of torch under CUDA; None if it does not run there."""
    if not torch.cuda.is_available():
        return None
    x, offs, matrices = x.cuda(), offs.cuda(), weight.cuda().transpose(1, 2)
    try:
        return cuda_seconds(lambda: torch.nn.functional.grouped_mm(x, matrices, offs=offs), seconds)
    except RuntimeError as error:
        print(f"torch: {error}", file=sys.stderr)
        return None


def measure(
    context: Any, form: Experts, dtype: str, tokens: int, rate: float, seconds: float
) -> Row:
    """Times one case; `rate` is that of a copy in bytes a second."""
    kind = getattr(torch, dtype)
    x, offs = inputs_of(form, tokens, kind)
    generator = torch.Generator().manual_seed(1)
    sizes = (form.experts, form.columns, form.depth)
    weight = torch.empty(sizes, dtype=kind)
    for matrix in weight:
        matrix.copy_(torch.randn(sizes[1:], generator=generator))
    used = int((offs.diff(prepend=offs.new_zeros(1)) > 0).sum())
    elements = used * form.columns * form.depth + x.shape[0] * (form.depth + form.columns)
    nbytes = elements * kind.itemsize
    ours, templates, error = time_purevk(context, x, weight, offs)
    theirs = time_cuda(x, weight, offs, seconds)
    row = Row(
        form.model, dtype, tokens, used, nbytes, 1e6 * ours, nbytes / rate / ours, templates, error
    )
    if theirs is not None:
        row.torch, row.torch_share = 1e6 * theirs, nbytes / rate / theirs
    return row


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(form.model for form in MODELS[1:]))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--dtypes", default="bfloat16,float16")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each case of torch")
    parser.add_argument("--out", help="file for the figures, as JSON")
    args = parser.parse_args(arguments)
    from purevk.graph.context import default_context
    from purevk.graph.limits import device_limits, warm_up

    context = default_context()
    limits = device_limits(context, False)
    if context.device.kind != "cpu":
        warm_up(context, 2.0)
    print(f"{context.device.name}: a copy moves {limits.bytes_per_second / 1e9:.0f} GB/s")
    print(
        "model            dtype     tokens   used         us   of copy   torch us   of copy  error"
    )
    rows = []
    for form in (each for each in MODELS if each.model in args.models.split(",")):
        for dtype in args.dtypes.split(","):
            for tokens in map(int, args.tokens.split(",")):
                row = measure(context, form, dtype, tokens, limits.bytes_per_second, args.seconds)
                rows.append(asdict(row))
                theirs = "-" if row.torch is None else f"{row.torch:.0f}"
                share = "-" if row.torch_share is None else f"{100 * row.torch_share:.0f} %"
                print(
                    f"{row.model:16} {row.dtype:9} {tokens:6} {row.used:6} {row.purevk:10.0f}"
                    f" {100 * row.share:7.0f} % {theirs:>10} {share:>9}  {row.error:.1e}",
                    flush=True,
                )
    if args.out:
        Path(args.out).write_text(
            json.dumps({"device": context.device.name, "rows": rows}, indent=1), encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
