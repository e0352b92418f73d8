"""What the tests of quantized operators share: packing as the files have it, and a program of one
operator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from purevk import knobs
from purevk.dtypes import DType
from purevk.errors import FallbackError
from purevk.ir import TensorType
from purevk.program import Program
from purevk.tuning import DEFAULT
from purevk.tuning.families.amd import AMD
from purevk.tuning.families.mobile import MOBILE
from tests.ops.harness import Recorder, context, dispatches, host_nodes


def pack_low_first(values: torch.Tensor) -> torch.Tensor:
    """Values in [-8, 7] as bytes whose low nibble has the even column. Columns are padded with zeros
    to a multiple of 8."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % 8)).to(torch.uint8) + 8
    return (padded[:, 1::2] << 4 | padded[:, ::2]).to(torch.uint8)


def pack_high_first(values: torch.Tensor) -> torch.Tensor:
    """Values in [-8, 7] as bytes whose high nibble has the even column."""
    padded = torch.nn.functional.pad(values, (0, values.shape[1] % 2)).to(torch.uint8) + 8
    return (padded[:, ::2] << 4 | padded[:, 1::2]).to(torch.uint8)


def pad_last(values: torch.Tensor, multiple: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, -values.shape[-1] % multiple))


@contextlib.contextmanager
def kernels_of(device: str) -> Iterator[None]:
    """Within this, kernels are chosen for another device.

    "cpu" is the software device. "gpu" is a GPU with its features and one multiprocessor. "plain" is
    such a GPU without subgroup arithmetic and integer dot products, "amd" and "mobile" ones with the
    tiles of these families. "small" is the software device with bindings of 2048 bytes.
    """
    shared = context()
    traits = shared.traits
    if device == "small":
        shared.traits = replace(traits, max_storage_range=2048)
    elif device != "cpu":
        lacking = {"subgroup_arithmetic", "integer_dot_product"} if device == "plain" else set()
        profile = {"amd": AMD, "mobile": MOBILE}.get(device, DEFAULT)
        shared.traits = replace(
            traits, profile=profile, cores=1, features=traits.features - lacking
        )
    try:
        yield
    finally:
        shared.traits = traits


def run(
    name: str,
    args: Sequence[Any],
    results: Sequence[TensorType] = (),
    constants: Sequence[int] = (),
) -> Any:
    """Runs one operator on the device; fails if any of it runs on the CPU, unless that is for a
    feature in PUREVK_DISABLE.

    Args:
        args: tensors become inputs, those at the positions `constants` constants.
        results: types that a file would record.
    """
    made, _, _ = _run(name, args, results, constants)
    return made


def run_with_templates(
    name: str,
    args: Sequence[Any],
    results: Sequence[TensorType] = (),
    constants: Sequence[int] = (),
) -> tuple[Any, list[str]]:
    """The same with the names of the templates that ran. On the CPU there is none: the test is
    skipped."""
    made, templates, on_host = _run(name, args, results, constants)
    if on_host:
        pytest.skip(f"PUREVK_DISABLE: {on_host[0]}")
    return made, templates


def _run(
    name: str, args: Sequence[Any], results: Sequence[TensorType], constants: Sequence[int]
) -> tuple[Any, list[str], list[str]]:
    recorder = Recorder()
    given, values = [], []
    for position, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            if position in constants:
                values.append(recorder.constant(arg))
                continue
            given.append(arg)
            arg = recorder.input(arg)
        elif isinstance(arg, torch.dtype):
            arg = DType.from_torch(arg)
        elif isinstance(arg, list):
            arg = tuple(arg)
        values.append(arg)
    made = recorder.importer.emit(name, values, list(results), [False] * len(results), name)
    graph = recorder.importer.finish(made)
    with Program("test", {"forward": lambda sizes: graph}, context()) as program:
        on_host = host_nodes(program)
        for node in on_host:
            assert knobs.DISABLE() and "needs the device feature" in node, on_host
        try:
            made = program.forward(*given)
        except FallbackError as error:
            if not on_host or "torch does not know it" not in str(error):
                raise
            assert "needs the device feature" in str(error)
            pytest.skip(f"no CPU function: {on_host[0]}")
        return made, dispatches(program), on_host


def quantize(numbers: np.ndarray, scale: float, zero: int, low: int = -128) -> np.ndarray:
    """float32 numbers as int8, each step rounded to float32."""
    steps = numbers.astype(np.float32) * np.float32(1.0 / scale)
    return np.clip(np.rint(steps) + np.float32(zero), low, 127).astype(np.int8)
