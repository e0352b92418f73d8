"""The layers that architectures of language models are made of, with the weights of a file."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from purevk.dtypes import DType, dtype_named
from purevk.errors import FileFormatError, UnsupportedProgramError
from purevk.frontends.reading import check_nodes
from purevk.ir import Arg, TensorType, Value
from purevk.llm.files import DECIDING, DTYPES, MOST_HEAD_WIDTH, ModelFile, Tensor, damaged
from purevk.llm.graphs import GraphBuilder
from purevk.llm.sequences import PAGE, STATE, pages_of
from purevk.llm.sources import Angles, Weight, constant_of
from purevk.ops.attention.attention import head_width_fits
from purevk.pte import blocks

_FLOAT8 = DType.float8_e4m3fn
_MOST_ROTATIONS = 8  # tables of angles; models have one or two


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
        rows: tokens that the cache holds.
        cache: what the cache holds: the name of a dtype, "int8" or "float8"; "": `dtype`.

    Attributes:
        tokens: int64 [1, S].
        start: position of the first token, int64 [1].
        positions: of all of them, int64 [S]. These three are set before layers are added.
    """

    tokens: Value
    start: Value
    positions: Value

    def __init__(
        self, name: str, file: ModelFile, dtype: DType, rows: int, cache: str = ""
    ) -> None:
        super().__init__(name)
        self.file, self.dtype, self.rows = file, dtype, rows
        self.cache = cache or dtype.name
        self._matrices: dict[str, Matrix] = {}
        self._masks: dict[int, Value] = {}
        self._angles: dict[tuple[bytes, float], tuple[Value, Value]] = {}
        self._caches: dict[int, tuple[Value, Value]] = {}
        self._pages = pages_of(rows)

    def emit_all(
        self,
        op: str,
        *args: Arg,
        results: tuple[TensorType, ...] | None = None,
        **keywords: Arg,
    ) -> tuple[Value, ...]:
        check_nodes(len(self.nodes), self.file.name)  # before a file has had more be made
        return super().emit_all(op, *args, results=results, **keywords)

    # -- weights ----------------------------------------------------------------------------------
    def _tensor(self, name: str, dims: tuple[int, ...]) -> Tensor:
        tensor = self.file.tensors.get(name)
        if tensor is None or tensor.dims != dims or 0 in dims:
            there = "is missing" if tensor is None else f"has sizes {list(tensor.dims)}"
            expected = f"sizes {list(dims)} are expected"
            raise damaged(self.file.name, expected, f"the tensor {name} {there}")
        return tensor

    def has(self, name: str) -> bool:
        """Whether the file has a tensor."""
        return name in self.file.tensors

    def dims(self, name: str) -> tuple[int, ...]:
        """The sizes of a weight."""
        there = self.file.tensors.get(name)
        return self._tensor(name, there.dims if there else ()).dims

    def vector(
        self, name: str, *dims: int, heads: int = 0, plus: float = 0.0, wide: bool = False
    ) -> Value:
        """A weight that is not quantized; `heads` and `plus` as for `Weight`; `wide`: float32."""
        self._vector(name, dims)
        dtype = DType.float32 if wide else self.dtype
        return self._weight(Weight(name, "", dtype.name, heads, plus), dims)

    def numbers(self, name: str, *dims: int) -> np.ndarray:
        """The elements of a weight that graphs depend on, float32, see `ModelFile.about`."""
        assert name.startswith(DECIDING), name
        return self._vector(name, dims).floats()

    def _vector(self, name: str, dims: tuple[int, ...]) -> Tensor:
        tensor = self._tensor(name, dims)
        if tensor.form is not None:
            raise UnsupportedProgramError(
                f"the tensor {name} is {tensor.kind}",
                where=self.file.name,
                why="F32, F16 or BF16 is expected",
            )
        return tensor

    def matrix(self, name: str, *dims: int, heads: int = 0) -> Matrix:
        """A weight of two dims or more, packed as it is in the file; `heads` as for `Weight`.
        Quantized ones become [rows, columns], with the rows of all outer dims."""
        if name not in self._matrices:
            self._matrices[name] = self._matrix(name, dims, heads)
        return self._matrices[name]

    def _matrix(self, name: str, dims: tuple[int, ...], heads: int) -> Matrix:
        tensor = self._tensor(name, dims)
        form = tensor.form
        if form is None:
            return Matrix(self._weight(Weight(name, "", self.dtype.name, heads), dims))
        rows, columns = math.prod(dims[:-1]), dims[-1]

        def part(part: str, dtype: DType, columns: int) -> Value:
            return self._weight(Weight(name, part, dtype.name, heads), (rows, columns))

        dtype = DType.uint8 if form.bits == 4 else DType.int8
        parts = ("scales", "minimums") if form.has_minimums else ("scales",)
        return Matrix(
            part("values", dtype, columns * form.bits // 8),
            form,
            *(part(each, tensor.scale_dtype, columns // form.group) for each in parts),
        )

    def _weight(self, content: Weight | Angles, dims: tuple[int, ...], name: str = "") -> Value:
        if isinstance(content, Weight):
            name = f"{content.tensor}.{content.part}" if content.part else content.tensor
        value = Value(name, TensorType(dtype_named(content.dtype), dims))
        self._constants[value] = constant_of(self.file, content, value.type.nbytes)
        return value

    # -- layers -----------------------------------------------------------------------------------
    def linear(self, x: Value, name: str, rows: int, heads: int = 0) -> Value:
        """x [..., K] times the weight NAME.weight [rows, K], plus NAME.bias if there is one."""
        matrix = self.matrix(f"{name}.weight", rows, int(x.type.dims[-1]), heads=heads)
        bias = None
        if self.has(f"{name}.bias"):
            bias = self.vector(f"{name}.bias", rows, heads=heads)
        if matrix.form is None:
            return self.op("linear.default", x, matrix.values, bias)
        form = matrix.form
        parts = (matrix.values, matrix.scales, form.group, None, form.bits, matrix.minimums)
        if self.dtype is DType.bfloat16:  # kernels of quantized weights do not take it
            x = self.wide(x)
        made = self.narrow(self.purevk.quantized_linear(x, *parts))
        return made if bias is None else self.op("add.Tensor", made, bias, 1)

    def wide(self, x: Value) -> Value:
        """A value as float32."""
        is_wide = x.type.dtype is DType.float32
        return x if is_wide else self.op("_to_copy.default", x, DType.float32)

    def narrow(self, x: Value) -> Value:
        """A value as `dtype`."""
        return self.op("_to_copy.default", x, self.dtype) if x.type.dtype is not self.dtype else x

    def embedding(self, tokens: Value, name: str, rows: int, columns: int) -> Value:
        """Rows of a weight: [..., columns]."""
        matrix = self.matrix(f"{name}.weight", rows, columns)
        if matrix.form is None:
            return self.op("embedding.default", matrix.values, tokens, -1, False, False)
        parts = (matrix.scales, tokens, self.dtype, matrix.form.bits, matrix.minimums)
        return self.purevk.quantized_table(matrix.values, *parts)

    def expert_weights(
        self, name: str, count: int, rows: int, columns: int, chosen: Value | None
    ) -> Value:
        """NAME.weight [count, rows, columns], not quantized any more; only the experts `chosen` int64
        [N] if that is not None."""
        matrix = self.matrix(f"{name}.weight", count, rows, columns)
        if matrix.form is None:
            weights = matrix.values
            return weights if chosen is None else self.op("index.Tensor", weights, (chosen,))
        parts = [
            part and self.op("view.default", part, (count, rows * int(part.type.dims[-1])))
            for part in (matrix.values, matrix.scales, matrix.minimums)
        ]
        if chosen is None:
            chosen = self.constant(np.arange(count), DType.int64)
        values, scales, least = parts
        assert values is not None
        picked = self.purevk.quantized_table(
            values, scales, chosen, self.dtype, matrix.form.bits, least
        )
        return self.op("view.default", picked, (chosen.type.dims[0], rows, columns))

    def first_zero(self, state: Value) -> Value:
        """A state, or zeros if the first token is that of a sequence."""
        goes_on = self.op("_to_copy.default", self.op("gt.Scalar", self.start, 0), state.type.dtype)
        return self.op("mul.Tensor", state, goes_on)

    def short_convolution(self, x: Value, name: str, taps: int) -> Value:
        """Each channel of x [1, S, K] is convolved with its row of NAME.weight [K, taps], over the
        tokens before; plus NAME.bias if there is one."""
        _, length, width = x.type.dims
        state = self.state(TensorType(self.dtype, (1, taps - 1, int(width))), name=f"{name}.state")
        joined = self.op("cat.default", (self.first_zero(state), x), 1)
        after = self.op("slice.Tensor", joined, 1, length, length + taps - 1, 1)
        self.store(state, after)
        weight = self.vector(f"{name}.weight", int(width), taps)
        total: Value | None = None
        for tap in range(taps):
            rows = self.op("slice.Tensor", joined, 1, tap, length + tap, 1)
            part = self.op("mul.Tensor", rows, self.op("select.int", weight, 1, tap))
            total = part if total is None else self.add(total, part)
        assert total is not None
        has_bias = self.has(f"{name}.bias")
        return self.add(total, self.vector(f"{name}.bias", int(width))) if has_bias else total

    def integer(self, number: int) -> Value:
        """A constant int64 [1]."""
        return self.constant(np.array([number]), DType.int64)

    def rms_norm(self, x: Value, name: str, eps: float, plus: float = 0.0) -> Value:
        """x [..., K] normed, times NAME.weight plus a number."""
        width = int(x.type.dims[-1])
        weight = self.vector(f"{name}.weight", width, plus=plus)
        return self.op("rms_norm.default", x, (width,), weight, eps)

    def add(self, x: Value, y: Value) -> Value:
        return self.op("add.Tensor", x, y, 1)

    def capped(self, x: Value, cap: float) -> Value:
        """tanh(x / cap) * cap; x if the cap is 0."""
        if not cap:
            return x
        bounded = self.op("tanh.default", self.op("mul.Scalar", x, 1 / cap))
        return self.op("mul.Scalar", bounded, cap)

    def split(self, x: Value, *sizes: int) -> list[Value]:
        """Parts of the last dim, of these sizes."""
        return list(self.aten.split_with_sizes.all(x, sizes, dim=-1))

    def heads(self, x: Value, count: int) -> Value:
        """[1, S, count * D] as [1, count, S, D]."""
        _, length, width = x.type.dims
        split = self.op("view.default", x, (1, length, count, int(width) // count))
        return self.op("transpose.int", split, 1, 2)

    def joined(self, x: Value) -> Value:
        """[1, count, S, D] as [1, S, count * D]."""
        _, count, length, width = x.type.dims
        rows = self.op("transpose.int", x, 1, 2)
        return self.op("view.default", rows, (1, length, int(count) * int(width)))

    @functools.cached_property
    def row_numbers(self) -> Value:
        """The positions of the tokens that the cache holds, int64 [rows]."""
        return self.constant(np.arange(self.rows), DType.int64)

    @functools.cached_property
    def page_table(self) -> Value:
        """The first row of each page in the caches, int32 [pages]: see `Pages`."""
        return self.state(TensorType(DType.int32, (self._pages,)), name=STATE)

    @functools.cached_property
    def new_rows(self) -> Value:
        """The rows of the caches that the tokens get, int32 [S]."""
        return self.purevk.page_rows(self.page_table, self.positions, PAGE)

    @functools.cached_property
    def all_rows(self) -> Value:
        """The rows of the caches in the order of positions, int32 [rows]."""
        rows = self.purevk.page_rows(self.page_table, self.row_numbers, PAGE)
        return self.op("clamp.default", rows, 0, self._pages * PAGE - 1)

    def mask(self, window: int = 0) -> Value:
        """The positions that each token attends to: bool [S, rows]. All up to its own; with a window,
        only the last so many."""
        if window not in self._masks:
            columns = self.op("unsqueeze.default", self.row_numbers, 0)
            lines = self.op("unsqueeze.default", self.positions, 1)
            mask = self.op("le.Tensor", columns, lines)
            if 0 < window < self.rows:
                first = self.op("sub.Tensor", lines, window, 1)
                mask = self.op("logical_and.default", mask, self.op("gt.Tensor", columns, first))
            self._masks[window] = mask
        return self._masks[window]

    def angles(self, frequencies: np.ndarray, factor: float = 1.0) -> tuple[Value, Value]:
        """Cosines and sines of positions times frequencies [N / 2], each [S, N], for `rotate`;
        `factor`: that both are multiplied by."""
        key = frequencies.tobytes(), factor
        if key not in self._angles:
            width, tables = 2 * len(frequencies), len(self._angles)
            if width > MOST_HEAD_WIDTH or tables >= _MOST_ROTATIONS:
                what = f"the model has a rotation of {width} elements, and {tables} others"
                why = f"{_MOST_ROTATIONS} of {MOST_HEAD_WIDTH} elements are accepted"
                raise damaged(self.file.name, why, what)
            if not (np.isfinite(frequencies).all() and math.isfinite(factor)):
                raise FileFormatError("a rotation is no number", where=self.file.name)
            dtype = DType.float32 if self.dtype is DType.bfloat16 else self.dtype
            numbers = tuple(frequencies.astype(np.float64).tolist())
            rows = []
            for function in ("cos", "sin"):
                content = Angles(function, dtype.name, self.rows, factor, numbers)
                name = f"angles.{tables}.{function}"
                table = self._weight(content, (self.rows, width), name)
                rows.append(self.op("index.Tensor", self.narrow(table), (self.positions,)))
            self._angles[key] = rows[0], rows[1]
        return self._angles[key]

    def rotate(self, x: Value, angles: tuple[Value, Value]) -> Value:
        """x [1, heads, S, D], of whose first N elements the first half is rotated with the second."""
        cos, sin = angles
        width, rotated = int(x.type.dims[-1]), int(cos.type.dims[-1])
        tail: list[Value] = []
        if rotated < width:
            x, *tail = self.split(x, rotated, width - rotated)
        first, second = self.split(x, rotated // 2, rotated // 2)
        swapped = self.op("cat.default", (self.op("neg.default", second), first), -1)
        x = self.add(self.op("mul.Tensor", x, cos), self.op("mul.Tensor", swapped, sin))
        return self.op("cat.default", (x, *tail), -1) if tail else x

    def attend(
        self,
        layer: int,
        q: Value,
        k: Value | None,
        v: Value | None,
        *,
        window: int = 0,
        scale: float | None = None,
        sinks: Value | None = None,
        softcap: float = 0.0,
    ) -> Value:
        """Attention of queries [1, H, S, D] over the cache of a layer. Returns [1, S, H * D].

        Args:
            k, v: keys and values that are written to the cache; None: what another layer wrote.
            window: tokens that each one sees, see `mask`; 0: all before it.
            scale: of the scores; None: 1 / sqrt(D).
            sinks: scores [1, H, 1, 1] of a key without values that each query sees too.
            softcap: scores become tanh(score / softcap) * softcap; 0: they do not.
        """
        width = q.type.dims[-1]
        in_pages = self.cache == self.dtype.name and head_width_fits(width, width)
        if k is not None and v is not None:
            written = self._stored(f"layers.{layer}.keys", k, in_pages)
            self._caches[layer] = written, self._stored(f"layers.{layer}.values", v, in_pages)
        keys, values = self._caches[layer]
        scale = int(width) ** -0.5 if scale is None else scale
        mask = self.mask(window)
        pages: dict[str, Any] = {}
        if in_pages:
            table = self.op("unsqueeze.default", self.page_table, 0)
            pages = {"length": self.rows, "pages": table, "page": PAGE}
        if pages or softcap or sinks is not None:
            return self.joined(
                self.purevk.attention(
                    *(q, keys, values, mask, scale), sinks=sinks, softcap=softcap, **pages
                )
            )
        return self.joined(
            self.op(
                "scaled_dot_product_attention.default",
                *(q, keys, values, mask, 0.0, False, scale, True),
            )
        )

    def _stored(self, name: str, rows: Value, in_pages: bool) -> Value:
        """Writes rows to a cache of a layer. Returns it as it is if `in_pages`, else its rows in the
        order of positions, as `dtype`."""
        if in_pages:
            return self._written(name, rows)
        if self.cache == self.dtype.name:
            return self._cache(name, rows)
        if self.cache == "float8":
            bits = self._cache(name, self.purevk.to_float8(self.wide(rows), _FLOAT8))
            return self.narrow(self.purevk.from_float8(bits, _FLOAT8))
        if self.cache != "int8":
            stored = self.op("_to_copy.default", rows, DTYPES[self.cache])
            return self.narrow(self._cache(name, stored))
        wide = self.wide(rows)
        largest = self.op("amax.default", self.op("abs.default", wide), (-1,), True)
        scales = self.op("mul.Scalar", self.op("clamp.default", largest, 1e-6, None), 1 / 127)
        numbers = self.op("round.default", self.op("div.Tensor", wide, scales))
        stored = self._cache(name, self.op("_to_copy.default", numbers, DType.int8))
        factors = self._cache(f"{name}.scales", scales)
        wide = self.op("_to_copy.default", stored, DType.float32)
        return self.narrow(self.op("mul.Tensor", wide, factors))

    def _cache(self, name: str, rows: Value) -> Value:
        """Writes rows to a cache, and returns those of all positions in their order."""
        return self.op("index_select.default", self._written(name, rows), 2, self.all_rows)

    def _written(self, name: str, rows: Value) -> Value:
        """Writes rows [1, heads, S, D] to a state [1, heads, pages * PAGE, D], and returns it."""
        _, heads, _, columns = rows.type.dims
        type = TensorType(rows.type.dtype, (1, heads, self._pages * PAGE, columns))
        cache = self.state(type, name=name)
        self.purevk.write_rows.all(cache, rows, 2, self.new_rows)
        return cache
