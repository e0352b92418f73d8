"""purevk beside what a user of torch would pick on a GPU: `python bench/gpu.py --out FILE.json`.

ResNet-50, ViT-B/16 and BERT with seeded random weights, matmuls, and attention, in half precision,
bfloat16 and float32; with `--layers`, single layers and operators of many kinds; with `--models`,
models of transformers; with `--diffusion`, models of diffusers. The figures are milliseconds of
device time for a call, with inputs and outputs in the memory of the device:

- purevk: between timestamps of the device, dispatches overlap as in a call;
- torch: eager, as a CUDA graph, and compiled by `torch.compile` and then captured as a CUDA graph;
  networks of images also with channels last. float32 is computed as float32, not as TF32.

The contenders take turns after a time of warming up. The table has the best of torch. Every output is
compared with eager torch in float32 on the same weights, and a wrong one is marked and not compared.
Without CUDA, torch runs on the CPU, and its figure is wall time.

`--budget` ends the run in time: what does not fit is left out, and the table says so.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import json
import os
import statistics
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy
import torch

from bench import torch_cuda
from bench.diffusion import diffusion
from bench.layers import layers
from bench.models import models
from bench.networks import Sample, Work, works
from bench.timing import (
    Budget,
    Sampler,
    array_of,
    error_of,
    exact_float32,
    floats_of,
    interleave,
    machine,
    of_timestamps,
    of_wall,
    reason_of,
)

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
LIMIT = {"fp16": 3e-2, "bf16": 1e-1, "fp32": 1e-3}
"""The largest accepted error relative to the largest output: of 16 bits, and of other algorithms in
float32. Deep networks of random weights enlarge rounding errors, those of torch too: an error is
accepted as well if it is at most `LIKE_EAGER` times that of eager torch in the same dtype."""
LIKE_EAGER = 1.5


@dataclass
class Row:
    """One work in one variant. `times`: median milliseconds of each contender; `errors` of its
    output; `why` it was not measured."""

    work: str
    about: str
    variant: str
    batch: int
    dispatches: int | None = None
    times: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)

    def right(self, name: str) -> bool:
        """Whether a contender was measured and its output is right."""
        limit = max(LIMIT[self.variant], LIKE_EAGER * self.errors.get("eager", 0.0))
        return name in self.times and self.errors[name] <= limit

    @property
    def best(self) -> str | None:
        """The fastest contender of torch."""
        found = [name for name in self.times if name != "purevk" and self.right(name)]
        return min(found, key=self.times.__getitem__, default=None)

    @property
    def ratio(self) -> float | None:
        """The time of purevk over that of the best of torch."""
        if self.best is None or not self.right("purevk"):
            return None
        return self.times["purevk"] / self.times[self.best]


def sample_of(work: Work, batch: int, variant: str) -> Sample:
    """The module and its inputs in a dtype, with the same weights at each call."""
    torch.manual_seed(0)
    module, inputs = work.build(batch)
    dtype = DTYPES[variant]
    given = tuple(each.to(dtype) if each.is_floating_point() else each for each in inputs)
    return module.to(dtype).requires_grad_(False), given


def expected_output(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> numpy.ndarray:
    """What eager torch gives in float32 for the same weights and inputs."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wide = copy.deepcopy(module).float().to(device)
    given = [each.to(device, torch.float32) if each.is_floating_point() else each.to(device)
             for each in inputs]  # fmt: skip
    with torch.no_grad():
        return wide(*given).cpu().numpy()


def measure(
    work: Work, batch: int, variant: str, options: argparse.Namespace, budget: Budget
) -> Row:
    """Times one line."""
    import purevk

    row = Row(work.name, work.about, variant, batch)
    if budget.left <= 0:
        row.why["all"] = "no time was left"
        return row
    module, inputs = sample_of(work, batch, variant)
    expected = expected_output(module, inputs)
    samplers: dict[str, Sampler] = {}
    program = None
    try:
        program = purevk.compile(copy.deepcopy(module), inputs)
        arrays = [array_of(each) for each in inputs]
        row.errors["purevk"] = error_of(floats_of(program.forward(*arrays)), expected)
        executable = program.method("forward").executable
        row.dispatches = len(executable.plan.dispatches)
        samplers["purevk"] = of_timestamps(executable, arrays)
    except Exception as error:  # the table says what happened to one contender; the others go on
        row.why["purevk"] = reason_of(error)
    if torch.cuda.is_available():
        found = torch_cuda.contenders(module, inputs, expected, work.images, options, budget)
        samplers |= found.samplers
        row.errors |= found.errors
        row.why |= found.why
        del found
    else:

        def eager() -> torch.Tensor:
            with torch.inference_mode():
                return module(*inputs)

        row.errors["torch on the CPU"] = error_of(eager().float(), expected)
        samplers["torch on the CPU"] = of_wall(eager, 3)
    for name, times in interleave(samplers, options.seconds, options.settle).items():
        row.times[name] = statistics.median(times)
    if program is not None:
        program.close()
    samplers.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return row


def table(rows: list[Row]) -> list[str]:
    """A table in Markdown."""
    lines = [
        "| work | dtype | purevk | best of torch | which | purevk / torch |",
        "|---|---|--:|--:|---|--:|",
    ]
    for row in rows:
        name = row.about + (f", batch {row.batch}" if row.batch else "")
        ours = f"{row.times['purevk']:.3f}" if "purevk" in row.times else "-"
        if "purevk" in row.times and not row.right("purevk"):
            ours += f" (wrong: {row.errors['purevk']:.1e})"
        best = row.best
        theirs = "-" if best is None else f"{row.times[best]:.3f}"
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        dtype = str(DTYPES[row.variant]).removeprefix("torch.")
        lines.append(f"| {name} | {dtype} | {ours} | {theirs} | {best or '-'} | {ratio} |")
    return lines


def show(rows: list[Row]) -> None:
    """Prints the table, all times and errors, and what was not measured."""
    print("\n".join(table(rows)))
    for row in rows:
        title = f"{row.work} {row.variant} batch {row.batch or '-'}"
        times = ", ".join(
            f"{name} {ms:.4f}" + ("" if row.right(name) else " WRONG")
            for name, ms in row.times.items()
        )
        errors = ", ".join(f"{name} {error:.1e}" for name, error in row.errors.items())
        print(f"{title}: {row.dispatches} dispatches; ms: {times}; errors: {errors}")
        for name, why in row.why.items():
            print(f"{title}: not measured: {name}: {why}")


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints the table and writes JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="WORK", help=f"of {', '.join(works())}")
    of = parser.add_mutually_exclusive_group()
    add = functools.partial(of.add_argument, dest="works", action="store_const", default=works)
    add("--layers", const=layers, help="single layers of many kinds instead")
    add("--models", const=models, help="models of transformers instead")
    add("--diffusion", const=diffusion, help="models of diffusers instead")
    parser.add_argument("--tiny", action="store_true", help="small ones of the same structure")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32], help="of networks")
    parser.add_argument(
        "--variant", choices=tuple(DTYPES), action="append", help="default: fp16 and fp32"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="of sampling a line")
    parser.add_argument("--settle", type=float, default=2.0, help="seconds of warming up a line")
    torch_cuda.add_arguments(parser)
    parser.add_argument("--out", type=Path, help="write all figures there, as JSON")
    options = parser.parse_args(arguments)
    os.environ.setdefault("PUREVK_PROGRESS", "0")
    exact_float32()
    known = options.works(options.tiny)
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"no such work: {', '.join(unknown)}; there are {', '.join(known)}")
    budget, found = Budget(options.budget), machine()
    print(json.dumps(found), flush=True)
    rows: list[Row] = []
    for name in options.names or known:
        work = known[name]
        for batch in options.batch if work.batched else [0]:
            for variant in options.variant or ("fp16", "fp32"):
                if variant not in work.variants:
                    continue
                rows.append(measure(work, batch, variant, options, budget))
                if options.out:
                    figures: dict[str, Any] = {"machine": found, "rows": [asdict(r) for r in rows]}
                    options.out.write_text(json.dumps(figures, indent=1), encoding="utf-8")
                print(
                    f"{name} {variant} {batch}: {budget.left:.0f} s left",
                    file=sys.stderr,
                    flush=True,
                )
    show(rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
