"""One model on several devices beside one device: `python bench/devices.py --out FILE.json`.

ResNet-50 and ViT-B/16 with seeded random weights and a dynamic batch, in half precision, from numpy
to numpy:

- forward: one call at a time;
- submit: calls that overlap, several for each device;
- split "batch": each device has the whole model. `forward` splits a call among them, `submit` gives
  whole calls to them;
- split "layers": each device has a part of the layers, and calls follow one another through them.

Each figure is a rate of images, after `--settle` seconds of warming up. The efficiency is the rate
with all devices over that of one device, called in the same way, for each device. Every output is
compared with that of one device and with eager torch in float32 on the same weights; a wrong one is
marked.

*alone* is the time of the dispatches on one device, *part* that for the part of a batch that a
device gets. *copy* is the time in which the host copies an input into memory of the device, *fresh*
into new memory of its own, as `submit` does first.

A device that is named twice gets two contexts, which stand for two devices on a machine with one.
Without `--devices` these are all with the name of the default device, or that device twice.
`--models` keeps the exported models in a folder, and `--prepare` does nothing else. `--budget` ends
the run in time: what does not fit is left out, and the table says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy
import torch

from bench.gpu import LIKE_EAGER, LIMIT, expected_output, sample_of
from bench.networks import Work, works
from bench.timing import (
    Budget,
    TimeLimitError,
    array_of,
    error_of,
    exact_float32,
    machine,
    of_timestamps,
    reason_of,
)

MODELS = ("resnet50", "vit_b_16")
CALLS = ("forward", "submit")
IN_FLIGHT = 3
"""Calls of `submit` for each device whose results are still to come. A program has two unfinished
ones at a time, so that the results of one more can be read meanwhile."""


@dataclass
class Row:
    """One model with one batch. The keys of `rates`, in images a second, are a split ("one" for one
    device) and a way to call; those of `latency`, in milliseconds for a call, and of `errors`,
    relative to the largest output, are splits. `host` has the milliseconds that explain the rates;
    `why` what was not measured."""

    work: str
    about: str
    variant: str
    batch: int
    devices: int
    rates: dict[str, float] = field(default_factory=dict)
    latency: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)

    def efficiency(self, split: str, call: str) -> float | None:
        """The rate of all devices over that of one, for each device."""
        one, many = self.rates.get(f"one {call}"), self.rates.get(f"{split} {call}")
        return None if one is None or many is None else many / one / self.devices

    def right(self, split: str) -> bool:
        """Whether the output is that of torch, and that of one device but for rounding."""
        limit = LIMIT[self.variant]
        accepted = max(limit, LIKE_EAGER * self.errors.get("eager", 0.0))
        return self.errors[split] <= accepted and self.differences.get(split, 0.0) <= limit


# -- models and devices --------------------------------------------------------------------------
def model_file(folder: Path, work: Work, variant: str, most: int, tiny: bool) -> Path:
    """The model with a dynamic batch, exported if the folder lacks it."""
    import purevk

    path = folder / f"{work.name}-{variant}-{most}{'-tiny' * tiny}.pvk"
    if not path.exists():
        module, inputs = sample_of(work, 2, variant)
        batch = torch.export.Dim("batch", min=1, max=most)
        with purevk.compile(module, inputs, dynamic_shapes=({0: batch},)) as program:
            program.save(path)
    return path


def default_devices() -> list[int]:
    """All devices with the name of the default one; that one twice if there is no other."""
    import purevk

    found = purevk.devices()
    (default,) = (each for each in found if each.default)
    same = [each.index for each in found if each.name == default.name]
    named = bool(os.environ.get("PUREVK_DEVICE"))
    return same if len(same) > 1 and not named else [default.index] * 2


@contextlib.contextmanager
def contexts_on(devices: Sequence[int]) -> Iterator[list[Any]]:
    """A context for each device, and a further one where a device is named again."""
    from purevk import api
    from purevk.graph.context import Context
    from purevk.graph.devices import choose_context

    made: list[Context] = []
    with contextlib.ExitStack() as stack:
        for number, device in enumerate(devices):
            if device in devices[:number]:
                made.append(stack.enter_context(Context(api.open_device(device))))
            else:
                made.append(choose_context(device, None))
        yield made


# -- measuring -----------------------------------------------------------------------------------
def forward_calls(program: Any, given: Any, until: Callable[[int], bool]) -> int:
    """Calls one after the other until a function of their number says so."""
    done = 0
    while not until(done):
        program.forward(given)
        done += 1
    return done


def submitted_calls(program: Any, given: Any, until: Callable[[int], bool], depth: int) -> int:
    """The same with calls that overlap; all are finished when it returns."""
    pending: deque[Any] = deque()
    done = 0
    while not until(done):
        pending.append(program.submit(given))
        if len(pending) >= depth:
            pending.popleft().result()
            done += 1
    while pending:
        pending.popleft().result()
        done += 1
    return done


def calls_a_second(
    program: Any, given: Any, call: str, devices: int, options: argparse.Namespace
) -> float:
    """The rate of calls for `options.seconds`, after `options.settle` seconds that do not count."""

    def run(seconds: float, least: int) -> float:
        start = time.perf_counter()

        def ended(done: int) -> bool:
            return done >= least and time.perf_counter() - start >= seconds

        if call == "forward":
            done = forward_calls(program, given, ended)
        else:
            done = submitted_calls(program, given, ended, IN_FLIGHT * devices)
        return done / (time.perf_counter() - start)

    run(options.settle, 1)
    return run(options.seconds, 2)


def milliseconds(call: Callable[[], Any], seconds: float) -> float:
    """The median time of a call on the host."""
    times, end = [], time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def host_times(program: Any, given: Any, devices: int, seconds: float) -> dict[str, float]:
    """What the rates are made of, in milliseconds; see the module."""
    executable = program.method("forward").executable
    found = {}
    for name, array in (("alone", given), ("part", given[: max(len(given) // devices, 1)])):
        sampler, times, end = of_timestamps(executable, [array]), [], time.perf_counter() + seconds
        while not times or time.perf_counter() < end:
            times += sampler()
        found[name] = statistics.median(times)
    memory = executable.graph.memory
    (value,) = executable.plan.assignment.graph.inputs
    target = numpy.frombuffer(memory.upload_view(value), given.dtype)[: given.size]
    found["copy"] = milliseconds(
        lambda: numpy.copyto(target.reshape(given.shape), given), seconds / 4
    )
    found["fresh"] = milliseconds(given.copy, seconds / 4)
    return found


def measure(
    file: Path,
    work: Work,
    contexts: Sequence[Any],
    options: argparse.Namespace,
    budget: Budget,
) -> list[Row]:
    """Times one model: a row for each batch."""
    import purevk

    variant, count = options.variant, len(contexts)
    rows, samples, expected = [], [], []
    for batch in options.batch:
        row = Row(work.name, work.about, variant, batch, count)
        module, inputs = sample_of(work, batch, variant)
        expected.append(expected_output(module, inputs))
        row.errors["eager"] = eager_error(module, inputs, expected[-1])
        samples.append(array_of(inputs[0]))
        rows.append(row)
    first: list[Any] = [None] * len(rows)
    for split in ("one", *options.split):
        try:
            if budget.left <= 0:
                raise TimeLimitError("no time was left")
            program: Any = (
                purevk.load(file, device=contexts[0])
                if split == "one"
                else purevk.load(file, device=list(contexts), split=split)
            )
        except Exception as error:  # the table says what happened to one split; the others go on
            for row in rows:
                row.why[split] = reason_of(error)
            continue
        with program:
            for at, row in enumerate(rows):
                try:
                    output = numpy.array(program.forward(samples[at]))
                    first[at] = output if first[at] is None else first[at]
                    row.errors[split] = error_of(output, expected[at])
                    row.differences[split] = error_of(output, first[at])
                    time_calls(row, split, program, samples[at], options, budget)
                except Exception as error:
                    row.why[split] = reason_of(error)
    return rows


def time_calls(
    row: Row,
    split: str,
    program: Any,
    given: numpy.ndarray,
    options: argparse.Namespace,
    budget: Budget,
) -> None:
    """Fills in the figures of one split."""
    devices = 1 if split == "one" else row.devices
    for call in CALLS:
        if budget.left <= 0:
            raise TimeLimitError("no time was left")
        rate = calls_a_second(program, given, call, devices, options)
        row.rates[f"{split} {call}"] = rate * row.batch
        if call == "forward":
            row.latency[split] = 1e3 / rate
    if split == "one":
        row.host = host_times(program, given, row.devices, min(options.seconds, 1.0))


def eager_error(
    module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], expected: numpy.ndarray
) -> float:
    """The error of eager torch in the dtype of the model."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.no_grad():
        made = module.to(device)(*(each.to(device) for each in inputs)).float().cpu().numpy()
    module.cpu()
    return error_of(made, expected)


# -- results -------------------------------------------------------------------------------------
def table(rows: Sequence[Row]) -> list[str]:
    """Tables in Markdown: rates, then latencies and what explains them."""
    count = max((row.devices for row in rows), default=0)
    lines = [
        f"| model | batch | split | call | one device, images/s | {count} devices | efficiency |",
        "|---|--:|---|---|--:|--:|--:|",
    ]
    for row in rows:
        for key, rate in row.rates.items():
            split, call = key.split()
            found = row.efficiency(split, call)
            if split == "one" or found is None:
                continue
            mark = "" if row.right(split) else " WRONG"
            lines.append(
                f"| {row.about} | {row.batch} | {split} | {call} |"
                f" {row.rates[f'one {call}']:.1f} | {rate:.1f}{mark} | {found:.1%} |"
            )
    names = ("alone", "part", "copy", "fresh")
    splits = list(dict.fromkeys(split for row in rows for split in row.latency))
    lines += [
        "",
        f"| model | batch | {' | '.join(f'call, {each}, ms' for each in splits)} |"
        f" {' | '.join(f'{name}, ms' for name in names)} |",
        f"|---|--:|{'--:|' * (len(splits) + len(names))}",
    ]
    for row in rows:
        cells = [*map(row.latency.get, splits), *map(row.host.get, names)]
        shown = " | ".join("-" if each is None else f"{each:.2f}" for each in cells)
        lines.append(f"| {row.about} | {row.batch} | {shown} |")
    return lines


def show(rows: Sequence[Row]) -> None:
    """Prints the tables, the errors, and what was not measured."""
    print("\n".join(table(rows)))
    for row in rows:
        title = f"{row.work} {row.variant} batch {row.batch}"
        errors = ", ".join(f"{name} {error:.1e}" for name, error in row.errors.items())
        apart = ", ".join(f"{name} {error:.1e}" for name, error in row.differences.items())
        print(f"{title}: errors: {errors}; from one device: {apart}")
        for name, why in row.why.items():
            print(f"{title}: not measured: {name}: {why}")


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints the tables and writes JSON. 1: an output is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="MODEL", help=f"default: {' '.join(MODELS)}")
    parser.add_argument("--tiny", action="store_true", help="small ones of the same structure")
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--variant", choices=("fp16", "fp32"), default="fp16")
    parser.add_argument("--devices", type=int, nargs="+", help="indices of `purevk info`")
    parser.add_argument("--split", choices=("batch", "layers"), nargs="+")
    parser.add_argument("--seconds", type=float, default=3.0, help="of timing a figure")
    parser.add_argument("--settle", type=float, default=2.0, help="seconds of warming up a figure")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds of the whole run")
    parser.add_argument("--models", type=Path, help="folder that keeps the exported models")
    parser.add_argument("--prepare", action="store_true", help="export the models, and end")
    parser.add_argument("--out", type=Path, help="write all figures there, as JSON")
    options = parser.parse_args(arguments)
    options.split = options.split or ["batch", "layers"]
    os.environ.setdefault("PUREVK_PROGRESS", "0")
    exact_float32()
    known = {name: work for name, work in works(options.tiny).items() if work.images}
    names = options.names or MODELS
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no such model: {', '.join(unknown)}; there are {', '.join(known)}")
    budget, rows = Budget(options.budget), []
    with contextlib.ExitStack() as stack:
        folder = options.models or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        most = max(options.batch)
        files = {
            name: model_file(folder, known[name], options.variant, most, options.tiny)
            for name in names
        }
        if options.prepare:
            return 0
        found = machine()
        contexts = stack.enter_context(contexts_on(options.devices or default_devices()))
        found["devices"] = [f"{each.device.physical.index} {each.device.name}" for each in contexts]
        print(json.dumps(found), flush=True)
        for name in names:
            rows += measure(files[name], known[name], contexts, options, budget)
            if options.out:
                figures = {"machine": found, "rows": [asdict(row) for row in rows]}
                options.out.write_text(json.dumps(figures, indent=1), encoding="utf-8")
            print(f"{name}: {budget.left:.0f} s left", file=sys.stderr, flush=True)
    show(rows)
    return int(any(not row.right(split) for row in rows for split in row.differences))


if __name__ == "__main__":
    raise SystemExit(main())
