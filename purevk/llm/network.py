"""The layers that architectures of language models are made of, with the weights of a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from purevk.dtypes import DType
from purevk.errors import FileFormatError, UnsupportedProgramError
from purevk.ir import TensorType, Value
from purevk.ir.graph import BorrowedConstant
from purevk.llm import blocks
from purevk.llm.gguf import GgufFile, Tensor
from purevk.llm.graphs import GraphBuilder
from purevk.mapped import own

_FLOATS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True)
class Matrix:
    """A weight of a file in a graph: elements, or quantized values with their scales."""

    values: Value
    form: blocks.Form | None = None
    scales: Value | None = None
    minimums: Value | None = None


class Network(GraphBuilder):
    """The graph of a method of a model.

    Args:
        name: of the method.
        file: has the weights. Tensors that a graph reads are uploaded from the mapped file.
        dtype: what is computed in.
        rows: of the cache.
    """

    def __init__(self, name: str, file: GgufFile, dtype: DType, rows: int) -> None:
        super().__init__(name)
        self.file, self.dtype, self.rows = file, dtype, rows
        self._matrices: dict[str, Matrix] = {}

    # -- weights ----------------------------------------------------------------------------------
    def _tensor(self, name: str, dims: tuple[int, ...]) -> Tensor:
        tensor = self.file.tensors.get(name)
        if tensor is None or tensor.dims != dims:
            there = "is missing" if tensor is None else f"has sizes {list(tensor.dims)}"
            raise FileFormatError(
                f"the tensor {name} {there}",
                where=self.file.name,
                why=f"sizes {list(dims)} are expected",
                next="convert the model again",
            )
        return tensor

    def has(self, name: str) -> bool:
        """Whether the file has a tensor."""
        return name in self.file.tensors

    def vector(self, name: str, size: int, order: np.ndarray | None = None) -> Value:
        """A weight of one dim; `order` as for `matrix`."""
        tensor = self._vector(name, size)
        return self._borrowed(name, "", self.dtype, (size,), lambda: self._elements(tensor, order))

    def numbers(self, name: str, size: int) -> np.ndarray:
        """The elements of a weight of one dim, float32."""
        return _floats(self._vector(name, size))

    def _vector(self, name: str, size: int) -> Tensor:
        tensor = self._tensor(name, (size,))
        if tensor.type.name not in _FLOATS:
            raise UnsupportedProgramError(
                f"the tensor {name} is {tensor.type.name}",
                where=self.file.name,
                why=f"vectors are {', '.join(_FLOATS)}",
            )
        return tensor

    def matrix(self, name: str, rows: int, columns: int, order: np.ndarray | None = None) -> Matrix:
        """A weight of two dims, packed as it is in the file.

        Args:
            order: the rows of the file that become rows 0, 1, ...; None: the same.
        """
        if name in self._matrices:
            return self._matrices[name]
        tensor = self._tensor(name, (rows, columns))
        form = blocks.FORMS.get(tensor.type.name)
        if form is None:
            value = self._borrowed(
                name, "", self.dtype, (rows, columns), lambda: self._elements(tensor, order)
            )
            made = Matrix(value)
        else:
            made = self._quantized(tensor, form, order)
        self._matrices[name] = made
        return made

    def _quantized(self, tensor: Tensor, form: blocks.Form, order: np.ndarray | None) -> Matrix:
        (rows, columns), kind = tensor.dims, tensor.type.name

        def in_order() -> np.ndarray:
            data = np.frombuffer(own(tensor.data), np.uint8).reshape(rows, -1)
            return (data if order is None else data[order]).reshape(-1, tensor.type.nbytes)

        half = blocks.scales(kind, in_order())["scales"].dtype == np.float16
        dtype = DType.float16 if half else DType.float32

        def part(which: str) -> Value:
            def read() -> np.ndarray:
                return blocks.scales(kind, in_order())[which]

            return self._borrowed(tensor.name, which, dtype, (rows, columns // form.group), read)

        values = self._borrowed(
            tensor.name,
            "values",
            DType.uint8 if form.bits == 4 else DType.int8,
            (rows, columns * form.bits // 8),
            lambda: blocks.weight(kind, in_order()),
        )
        least = part("minimums") if form.has_minimums else None
        return Matrix(values, form, part("scales"), least)

    def _elements(self, tensor: Tensor, order: np.ndarray | None) -> np.ndarray:
        numbers = _floats(tensor)
        numbers = numbers if order is None else numbers[order]
        if self.dtype is DType.bfloat16:
            bits = numbers.view(np.uint32)
            return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        return numbers.astype(self.dtype.numpy)

    def _borrowed(
        self,
        name: str,
        part: str,
        dtype: DType,
        dims: tuple[int, ...],
        read: Callable[[], np.ndarray],
    ) -> Value:
        value = Value(f"{name}.{part}" if part else name, TensorType(dtype, dims))
        key = (id(self.file), name, part, dtype)

        def data() -> memoryview:
            return np.ascontiguousarray(read()).reshape(-1).view(np.uint8).data

        self._constants[value] = BorrowedConstant(key, value.type.nbytes, data)
        return value

    # -- layers -----------------------------------------------------------------------------------
    def linear(self, x: Value, name: str, rows: int, order: np.ndarray | None = None) -> Value:
        """x [..., K] times the weight NAME.weight [rows, K], plus NAME.bias if there is one."""
        matrix = self.matrix(f"{name}.weight", rows, int(x.type.dims[-1]), order)
        bias = None
        if self.has(f"{name}.bias"):
            bias = self.vector(f"{name}.bias", rows, order)
        if matrix.form is None:
            return self.op("linear.default", x, matrix.values, bias)
        form = matrix.form
        parts = (matrix.values, matrix.scales, form.group, None, form.bits, matrix.minimums)
        made = self._narrow(self.purevk.quantized_linear(self._wide(x), *parts))
        return made if bias is None else self.op("add.Tensor", made, bias, 1)

    def _wide(self, x: Value) -> Value:
        """A value as kernels of quantized weights take it: not in bfloat16."""
        is_bfloat16 = self.dtype is DType.bfloat16
        return self.op("_to_copy.default", x, DType.float32) if is_bfloat16 else x

    def _narrow(self, x: Value) -> Value:
        return self.op("_to_copy.default", x, self.dtype) if x.type.dtype is not self.dtype else x

    def embedding(self, tokens: Value, name: str, rows: int, columns: int) -> Value:
        """Rows of a weight: [..., columns]."""
        matrix = self.matrix(f"{name}.weight", rows, columns)
        if matrix.form is None:
            return self.op("embedding.default", matrix.values, tokens, -1, False, False)
        parts = (matrix.scales, tokens, self.dtype, matrix.form.bits, matrix.minimums)
        return self.purevk.quantized_table(matrix.values, *parts)

    def rms_norm(self, x: Value, name: str, eps: float) -> Value:
        width = int(x.type.dims[-1])
        return self.op("rms_norm.default", x, (width,), self.vector(f"{name}.weight", width), eps)

    def heads(self, x: Value, count: int) -> Value:
        """[1, S, count * D] as [1, count, S, D]."""
        _, length, width = x.type.dims
        split = self.op("view.default", x, (1, length, count, int(width) // count))
        return self.op("transpose.int", split, 1, 2)

    def angles(self, frequencies: np.ndarray, positions: Value) -> tuple[Value, Value]:
        """Cosines and sines of positions times frequencies [D / 2], each [S, D], for `rotate`."""
        angles = np.arange(self.rows)[:, None] * frequencies.astype(np.float64)
        tables = (np.tile(function(angles), 2) for function in (np.cos, np.sin))
        cos, sin = (self.op("index.Tensor", self._table(table), (positions,)) for table in tables)
        return cos, sin

    def _table(self, table: np.ndarray) -> Value:
        if self.dtype is DType.bfloat16:
            wide = self.constant(table, DType.float32)
            return self.op("_to_copy.default", wide, DType.bfloat16)
        return self.constant(table, self.dtype)

    def rotate(self, x: Value, angles: tuple[Value, Value]) -> Value:
        """x [1, heads, S, D], of which the first half is rotated with the second."""
        cos, sin = angles
        first, second = self.aten.split_with_sizes.all(x, (int(x.type.dims[-1]) // 2,) * 2, dim=-1)
        swapped = self.op("cat.default", (self.op("neg.default", second), first), -1)
        return self.op(
            "add.Tensor", self.op("mul.Tensor", x, cos), self.op("mul.Tensor", swapped, sin), 1
        )

    def attend(
        self, layer: int, q: Value, k: Value, v: Value, positions: Value, mask: Value
    ) -> Value:
        """Attention of queries [1, H, S, D] over a cache, to which keys and values are written.
        Returns [1, S, H * D]."""
        _, count, length, width = q.type.dims
        caches = []
        for name, rows in (("keys", k), ("values", v)):
            _, heads, _, columns = rows.type.dims
            type = TensorType(self.dtype, (1, heads, self.rows, columns))
            cache = self.state(type, name=f"layers.{layer}.{name}")
            written = self.op("index_copy.default", cache, 2, positions, rows)
            self.store(cache, written)
            caches.append(written)
        attended = self.op(
            "scaled_dot_product_attention.default", q, *caches, mask, 0.0, False, None, True
        )
        joined = self.op("transpose.int", attended, 1, 2)
        return self.op("view.default", joined, (1, length, int(count) * int(width)))


def _floats(tensor: Tensor) -> np.ndarray:
    """The elements of a tensor that is not quantized, as float32."""
    data = np.frombuffer(own(tensor.data), _FLOATS[tensor.type.name]).reshape(tensor.dims)
    if tensor.type.name == "BF16":
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32)
