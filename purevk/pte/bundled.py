"""Files with an ExecuTorch program, inputs for its methods, and the results that they should give."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from purevk.dtypes import DType
from purevk.errors import InputError
from purevk.pte.flatbuffer import (
    Blob,
    Many,
    Reader,
    Schema,
    Table,
    Text,
    Union,
    f64,
    flag,
    i8,
    i32,
    i64,
    numbers,
    u8,
    u32,
)

_TENSOR = Schema(
    "Tensor", scalar_type=i8(), sizes=numbers(i32()), data=Blob(), dim_order=numbers(u8())
)
_NUMBERS = (Schema("Int", value=i64()), Schema("Bool", value=flag()), Schema("Double", value=f64()))
_VALUES = Many(Schema("Value", val=Union(_TENSOR, *_NUMBERS)))
_CASES = Many(Schema("BundledMethodTestCase", inputs=_VALUES, expected_outputs=_VALUES))
_SUITES = Many(Schema("BundledMethodTestSuite", method_name=Text(), test_cases=_CASES))
_ROOT = Schema("BundledProgram", version=u32(), method_test_suites=_SUITES, program=Blob())
_IDENTIFIER = b"BP08"


class BundledProgram:
    """The content of a file.

    Attributes:
        program: the bytes of the .pte file.
    """

    def __init__(self, data: bytes) -> None:
        self._root = Reader(memoryview(data), "bundled program").root(_ROOT, _IDENTIFIER)
        self.program = bytes(self._root["program"])

    def case(self, method: str, index: int) -> tuple[list[Any], list[Any]]:
        """The inputs and the expected outputs of a case: numbers, and torch tensors where torch is
        imported, else numpy arrays. Raises InputError if there is no such case."""
        cases = [
            case
            for suite in self._root["method_test_suites"]
            if suite["method_name"] == method
            for case in suite["test_cases"]
        ]
        if not 0 <= index < len(cases):
            raise InputError(f"method {method} has no case {index}", why=f"{len(cases)} cases")
        inputs, outputs = (
            [_value(row.union("val")) for row in cases[index][field]]
            for field in ("inputs", "expected_outputs")
        )
        return inputs, outputs


def _value(row: Table) -> Any:
    if row.schema is not _TENSOR:
        return row["value"]
    dtype, sizes = DType.from_pte(row["scalar_type"]), row["sizes"]
    order = row["dim_order"] or tuple(range(len(sizes)))
    if dtype is None:
        row.fail(f"scalar type {row['scalar_type']}", "purevk has no such type")
    if sorted(order) != list(range(len(sizes))) or min(sizes, default=0) < 0:
        row.fail(f"sizes {list(sizes)} in the order {list(order)}")
    data = row["data"]
    if len(data) != math.prod(sizes) * dtype.itemsize:
        row.fail(f"{len(data)} bytes", f"{dtype} of {list(sizes)} has another size")
    stored = np.frombuffer(data, dtype.numpy).reshape([sizes[dim] for dim in order])
    made = np.ascontiguousarray(stored.transpose(np.argsort(order))).reshape(sizes)
    torch = sys.modules.get("torch")
    return torch.from_numpy(made.copy()).view(dtype.to_torch()) if torch else made
