"""Tensors of 8-bit floats as uint8 tensors of the same bytes."""

from __future__ import annotations

from typing import Any

from purevk.dtypes import DType
from purevk.ir import Arg, Graph, Node, Value, map_values
from purevk.ops import registry
from purevk.ops.elementwise.float8 import decode, encode
from purevk.ops.facts import Moves
from purevk.ops.movement.bits import VIEW_DTYPE
from purevk.passes.rewrite import Rewriter, each_node
from purevk.tuning import DeviceTraits

# Operators that make tensors: those that are filled with a number.
_FILLS = {
    "aten.zeros.default": 0, "aten.zeros_like.default": 0, "aten.new_zeros.default": 0, "aten.ones.default": 1,
    "aten.ones_like.default": 1, "aten.new_ones.default": 1, "aten.empty.memory_format": 0,
    "aten.empty_like.default": 0,
}  # fmt: skip
_FILLS_WITH = {
    "aten.full.default": "fill_value",
    "aten.full_like.default": "fill_value",
    "aten.fill.Scalar": "value",
}
# Operators that torch computes in float32.
_COMPUTES = frozenset(
    """
    aten.abs.default aten.eq.Scalar aten.eq.Tensor aten.isnan.default aten.mul.Scalar
    aten.mul.Tensor aten.ne.Scalar aten.ne.Tensor
    """.split()
)
_CAST = "aten._to_copy.default"


def float8_as_bytes(graph: Graph, traits: DeviceTraits) -> Graph:
    """Has kernels see the bytes of 8-bit floats. Casts become conversions of bytes. Operators that
    torch has for these dtypes compute in float32. What else reads them runs on the CPU."""
    writer = _Writer()
    return each_node(graph, writer.visit)


class _Writer:
    """Writes nodes of bytes in place of nodes of 8-bit floats.

    Attributes:
        seen: the bytes of each tensor. One value for each: passes follow the views of a state that
            changes from the view that is written.
    """

    def __init__(self) -> None:
        self.seen: dict[Value, Value] = {}

    def visit(self, rewriter: Rewriter, node: Node) -> Any:
        if not any(value.type.dtype.is_float8 for value in (*node.inputs, *node.results)):
            return None
        definition = registry.find(node.op)
        if definition is None:
            return None
        name = definition.name
        if name == VIEW_DTYPE:
            return self._viewed(rewriter, node)
        if name == _CAST:
            return self._cast(rewriter, node.tensor("x"), node.result.type.dtype)
        if registry.movement(node) is not Moves.NO or registry.is_view(node):
            return self._moved(rewriter, node) if _only_moves(node) else None
        if name in _FILLS:
            return _filled(rewriter, node, _FILLS[name])
        if name in _FILLS_WITH:
            return _filled(rewriter, node, node.float(_FILLS_WITH[name]))
        if name in ("aten.constant_pad_nd.default", "aten.pad.default"):
            return self._padded(rewriter, node)
        if name in _COMPUTES and _has_one_dtype(node):
            return self._computed(rewriter, node)
        if name == "aten._scaled_mm.default":
            return self._scaled_mm(rewriter, node)
        return None

    def _bytes(self, rewriter: Rewriter, value: Value) -> Value:
        if not value.type.dtype.is_float8:
            return value
        if value not in self.seen:
            self.seen[value] = rewriter.emit(VIEW_DTYPE, value, DType.uint8)
        return self.seen[value]

    def _wide(self, rewriter: Rewriter, value: Value) -> Value:
        """The elements as float32."""
        if not value.type.dtype.is_float8:
            return value
        return rewriter.purevk.from_float8(self._bytes(rewriter, value), value.type.dtype)

    def _cast(self, rewriter: Rewriter, value: Value, dtype: DType) -> Value:
        if dtype is value.type.dtype:
            return value
        value = self._wide(rewriter, value)
        if not dtype.is_float8:
            return value if value.type.dtype is dtype else rewriter.emit(_CAST, value, dtype)
        if value.type.dtype is not DType.float32:
            value = rewriter.emit(_CAST, value, DType.float32)
        return rewriter.emit(VIEW_DTYPE, rewriter.purevk.to_float8(value, dtype), dtype)

    def _viewed(self, rewriter: Rewriter, node: Node) -> Value:
        """A view of bytes as elements of another dtype, or of such elements as bytes."""
        dtype = node.result.type.dtype
        code = DType.uint8 if dtype.is_float8 else dtype
        value = self._bytes(rewriter, node.tensor("x"))
        if value.type.dtype is not code:
            value = rewriter.emit(VIEW_DTYPE, value, code)
        return _as(rewriter, value, dtype)

    def _moved(self, rewriter: Rewriter, node: Node) -> tuple[Value, ...]:
        def seen(arg: Arg) -> Arg:
            return map_values(arg, lambda value: self._bytes(rewriter, value))

        args = tuple(seen(arg) for arg in node.args)
        types = tuple(
            value.type.with_dtype(DType.uint8) if value.type.dtype.is_float8 else value.type
            for value in node.results
        )
        results = rewriter.emit_all(node.op, *args, results=types)
        return tuple(
            _as(rewriter, value, old.type.dtype) for value, old in zip(results, node.results)
        )

    def _padded(self, rewriter: Rewriter, node: Node) -> Value:
        definition = registry.definition_of(node)
        args, dtype = definition.bind(node.args), node.result.type.dtype
        args["x"] = self._bytes(rewriter, node.tensor("x"))
        value = node.optional_float("value")
        args["value"] = encode(0.0 if value is None else value, dtype)
        result = rewriter.emit(node.op, *(args[name] for name in definition.parameters))
        return rewriter.emit(VIEW_DTYPE, result, dtype)

    def _computed(self, rewriter: Rewriter, node: Node) -> Value:
        (dtype,) = {value.type.dtype for value in node.inputs if value.type.dtype.is_float8}

        def given(arg: Arg) -> Arg:
            if isinstance(arg, (int, float)):
                return decode(encode(float(arg), dtype), dtype)  # torch rounds numbers first
            return map_values(arg, lambda value: self._wide(rewriter, value))

        args = [given(arg) for arg in node.args]
        return self._cast(rewriter, rewriter.emit(node.op, *args), node.result.type.dtype)

    def _scaled_mm(self, rewriter: Rewriter, node: Node) -> Value:
        """The product in float32, times the scales, plus the bias."""
        product = rewriter.aten.mm(
            *(self._wide(rewriter, node.tensor(name)) for name in ("x", "y"))
        )
        for name in ("scale_a", "scale_b"):
            product = rewriter.aten.mul.Tensor(product, node.tensor(name))
        bias, scale = node.optional_tensor("bias"), node.optional_tensor("scale_result")
        if bias is not None:
            product = rewriter.aten.add.Tensor(product, bias)
        if scale is not None and node.result.type.dtype.is_float8:
            product = rewriter.aten.mul.Tensor(product, scale)
        return self._cast(rewriter, product, node.result.type.dtype)


def _has_one_dtype(node: Node) -> bool:
    dtypes = {value.type.dtype for value in node.inputs}
    return len(dtypes) == 1


def _only_moves(node: Node) -> bool:
    """Whether all 8-bit floats of a node have one dtype, and no others take their place."""
    dtypes = {value.type.dtype for value in (*node.inputs, *node.results)}
    mixed = any(dtype.is_float for dtype in dtypes) or sum(dtype.is_float8 for dtype in dtypes) > 1
    return not mixed


def _as(rewriter: Rewriter, value: Value, dtype: DType) -> Value:
    return rewriter.emit(VIEW_DTYPE, value, dtype) if dtype.is_float8 else value


def _filled(rewriter: Rewriter, node: Node, number: float) -> Value:
    type = node.result.type
    code = encode(number, type.dtype)
    codes = rewriter.aten.full(type.dims, code, DType.uint8)
    return rewriter.emit(VIEW_DTYPE, codes, type.dtype)
