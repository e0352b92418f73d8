"""Programs with bundled inputs and results, as ExecuTorch writes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import purevk.portable_lib as portable
from purevk.errors import DifferenceError, FileFormatError, InputError
from purevk.pte.bundled import BundledProgram

pytestmark = pytest.mark.export
torch = pytest.importorskip("torch")
core = pytest.importorskip("executorch.devtools.bundled_program.core")


class Model(torch.nn.Module):
    def forward(self, x: Any, n: int, f: float, h: Any) -> tuple[Any, ...]:
        return x * f + n, h + 1, (x > 0).to(torch.int64)


ARGS = (
    torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    3,
    2.5,
    torch.randn(3).bfloat16(),
)


def written(expected: Any) -> bytes:
    """The bytes of a file with one case."""
    from executorch.devtools.bundled_program.config import MethodTestCase, MethodTestSuite
    from executorch.devtools.bundled_program.serialize import (
        serialize_from_bundled_program_to_flatbuffer as serialize,
    )
    from executorch.exir import to_edge

    program = to_edge(torch.export.export(Model(), ARGS)).to_executorch()
    case = MethodTestCase(inputs=ARGS, expected_outputs=expected)
    return bytes(serialize(core.BundledProgram(program, [MethodTestSuite("forward", [case])])))


def test_values_are_those_that_were_written() -> None:
    results = Model()(*ARGS)
    inputs, outputs = BundledProgram(written(results)).case("forward", 0)
    for made, wanted in zip(inputs + outputs, [*ARGS, *results], strict=True):
        assert type(made) is type(wanted)
        if isinstance(wanted, torch.Tensor):
            assert made.dtype == wanted.dtype and torch.equal(made, wanted)
        else:
            assert made == wanted


@pytest.mark.device
def test_results_are_compared() -> None:
    results = Model()(*ARGS)
    data = written(results)
    made = portable._load_bundled_program_from_buffer(data)
    for one, two in zip(
        made.verify_result_with_bundled_expected_output("forward", 0), results, strict=True
    ):
        torch.testing.assert_close(one, two)
    with pytest.raises(InputError, match="method forward has no case 1"):
        made.verify_result_with_bundled_expected_output("forward", 1)
    for number, wrong in enumerate(
        (results[0] + 1e-3, results[1] + torch.tensor([0, 0, 1]), results[2].mT)
    ):
        others = [*results[:number], wrong, *results[number + 1 :]]
        bundle = portable._load_bundled_program_from_buffer(written(others))
        with pytest.raises(DifferenceError, match=f"result {number} is not the expected one"):
            bundle.verify_result_with_bundled_expected_output("forward", 0)


def test_damaged_files_are_refused() -> None:
    data = bytearray(written(Model()(*ARGS)))
    random, refused = np.random.default_rng(0), 0
    for _ in range(300):
        changed = data.copy()
        at = random.integers(0, 600)  # the tables
        changed[at] ^= 1 << random.integers(0, 8)
        try:
            BundledProgram(bytes(changed[: len(data) - random.integers(0, 2) * 100])).case(
                "forward", 0
            )
        except (FileFormatError, InputError):
            refused += 1
    assert refused
