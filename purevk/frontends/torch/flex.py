"""flex_attention: attention whose scores and mask are functions of the user.

torch traces both functions into sub-graphs of scalars. They are traced once more here, for a score in
float32. If they consist of pointwise operators and of elements of captured tensors, they become steps of
`purevk.flex_attention`, which one attention kernel runs. Otherwise the attention is written out. Imports
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from purevk.dtypes import DType
from purevk.errors import PurevkError
from purevk.frontends.operator_arguments import complete
from purevk.frontends.torch.decompose import decompositions, name_of
from purevk.ir import Arg, Dim, Size, TensorType, Value
from purevk.ops import registry
from purevk.ops.attention import flex
from purevk.ops.attention.functions import FULL, GATHER, KEY, SCORE, operand

if TYPE_CHECKING:
    from purevk.frontends.torch.nodes import NodeReader

_SDPA = "aten.scaled_dot_product_attention.default"


def is_flex(target: Any) -> bool:
    """Whether the target of a node is flex_attention."""
    import torch

    return target is torch.ops.higher_order.flex_attention


class Flex:
    """A call of flex_attention.

    Args:
        reader: of the graph of torch.
        node: the call.
    """

    def __init__(self, reader: NodeReader, node: Any) -> None:
        self.node, self.reader = node, reader
        query, key, value, score, block_mask, scale, self.options, shifts, masks = node.args
        self.tensors = (query, key, value)
        self.operands = tuple(reader.arg(tensor) for tensor in self.tensors)
        self.score, self.mask = reader.arg(score), reader.arg(block_mask[-1])
        self.scale = float(scale)
        self.score_buffers, self.mask_buffers = tuple(shifts), tuple(masks)

    def read(self) -> tuple[Any, ...]:
        """The result; the logarithms of the sums and the maxima where they are read, else None."""
        results = {user.args[1] for user in self.node.users if user.users}
        if results - {0} or self.operands[0].type.dtype is DType.float64:
            return self._written_out()
        if self._is_open() and _is_causal(self.mask):
            return self._attention(causal=True)
        try:
            functions = self._functions()
        except _InexpressibleError:
            return self._written_out()
        if functions[2:] == (None, None):
            return self._attention(causal=False)
        return self._emitted(flex.NAME, (*self.operands, *functions, self.scale))

    def _attention(self, causal: bool) -> tuple[Any, ...]:
        q, k, _ = self.operands
        grouped = k.type.dims[1] != q.type.dims[1]
        return self._emitted(_SDPA, (*self.operands, None, 0.0, causal, self.scale, grouped))

    def _emitted(self, op: str, args: Sequence[Any]) -> tuple[Any, ...]:
        q, _, v = self.operands
        types = [q.type.with_dims((*q.type.dims[:3], v.type.dims[3]))]
        results = self.reader.importer.emit(op, args, types, [False], self.node.name, exact=True)
        return (*results, None, None)

    def _is_open(self) -> bool:
        """Whether the function of the scores gives them as they are."""
        result = _result(self.score)
        return result is _placeholders(self.score)[0]

    def _functions(self) -> tuple[Any, ...]:
        """The buffers, the steps, the score and the mask: arguments of `purevk.flex_attention`."""
        import torch

        split = 5 + len(self.score_buffers)
        score, mask = self.score, self.mask

        def both(*args: Any) -> Any:
            return score(*args[:split]), mask(*args[1:5], *args[split:])

        dtypes = (torch.float32, *(torch.int64,) * 4)  # as in eager torch
        scalars = [torch.empty((), dtype=dtype) for dtype in dtypes]
        buffers = (*self.score_buffers, *self.mask_buffers)
        module = self._trace(both, (*scalars, *buffers))
        inputs = [self.reader.arg(buffer) for buffer in buffers]
        return _StepReader(self.reader, module, inputs).read()

    def _written_out(self) -> tuple[Any, ...]:
        """All results as torch computes them: scores, the functions, softmax, matmul."""
        from torch._higher_order_ops.flex_attention import math_attention

        split = 3 + len(self.score_buffers)

        def whole(query: Any, key: Any, value: Any, *buffers: Any) -> Any:
            return math_attention(
                query,
                key,
                value,
                self.score,
                (self.mask,),
                self.scale,
                {},
                buffers[: split - 3],
                buffers[split - 3 :],
            )

        return self._traced(whole, (*self.tensors, *self.score_buffers, *self.mask_buffers))

    def _traced(self, function: Callable[..., Any], inputs: Sequence[Any]) -> tuple[Any, ...]:
        module = self._trace(function, inputs)
        args = [self.reader.arg(operand) for operand in inputs]
        return self.reader.walk(module, args, self.reader.importer)

    def _trace(self, function: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """A function as a module of ATen operators."""
        import torch
        from torch._guards import detect_fake_mode
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx

        examples = [getattr(operand, "meta", {}).get("val", operand) for operand in inputs]
        mode = detect_fake_mode(examples) or FakeTensorMode()
        # What is decided here does not reach the guards of dynamo. These operators decide nothing.
        guards = mode.shape_env.suppress_guards() if mode.shape_env else nullcontext()
        with mode, guards:
            fakes = [
                mode.from_tensor(example) if isinstance(example, torch.Tensor) else example
                for example in examples
            ]
            table = dict(decompositions().items())
            return make_fx(function, decomposition_table=table)(*fakes)


# Of a tensor without dims these operators give the tensor itself.
_SAME = ("alias", "clone", "detach", "lift_fresh_copy", "lift_fresh", "view", "reshape", "_unsafe_view", "expand",
         "squeeze", "contiguous")  # fmt: skip
# The numbers of those that fill a tensor, and the positions of those that are given.
_FILLED = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
_NUMBER_AT = {"scalar_tensor": 0, "full": 1, "full_like": 1, "new_full": 2}


class _InexpressibleError(Exception):
    """A function has more than pointwise operators and elements of tensors."""


@dataclass(frozen=True)
class _Part:
    """A part of a captured tensor: the indices of the dims that it does not have any more.

    Attributes:
        tensor: the captured one.
        indices: one for each dim of the tensor, or None.
    """

    tensor: Value
    indices: tuple[Arg, ...]

    def at(self, dim: int, index: Arg) -> _Part:
        """The part with an index of its own dim `dim`."""
        free = [at for at, index in enumerate(self.indices) if index is None]
        at = free[dim]
        return replace(self, indices=(*self.indices[:at], index, *self.indices[at + 1 :]))


class _StepReader:
    """Reads a traced module of both functions as steps (`ops/attention/functions.py`).

    Args:
        reader: of the graph around.
        module: takes a score, its coordinates and the captured values.
        captured: these values, in the graph.
    """

    def __init__(self, reader: NodeReader, module: Any, captured: Sequence[Any]) -> None:
        self.reader, self.module = reader, module
        self.buffers: list[Value] = []
        self.steps: list[tuple[Arg, ...]] = []
        self.env: dict[Any, Any] = {}
        self._gathers: dict[_Part, str] = {}
        placeholders = _placeholders(module)
        for number, node in enumerate(placeholders[: KEY + 1]):
            self.env[node] = operand(number)
        for node, value in zip(placeholders[KEY + 1 :], captured):
            self.env[node] = self._part(value) if isinstance(value, Value) else value

    def read(self) -> tuple[Any, ...]:
        """Buffers, steps, score and mask.

        Raises:
            _InexpressibleError: there are other operators.
        """
        for node in self.module.graph.nodes:
            if node.op == "call_function":
                self.env[node] = self._call(node)
            elif node.op == "get_attr":
                self.env[node] = self._constant(getattr(self.module, node.target))
        (output,) = self.module.graph.find_nodes(op="output")
        if any(output_node not in self.env for output_node in output.args[0]):
            raise _InexpressibleError("a result is a number")
        score, mask = (self._scalar(self.env[output_node]) for output_node in output.args[0])
        steps = tuple(self.steps)
        result = None if score == operand(SCORE) else score
        seen = None if self._is_true(mask) else mask
        types = tuple(value.type for value in self.buffers)
        try:
            flex.check_functions(steps, result, seen, types)
        except PurevkError as error:
            raise _InexpressibleError(str(error)) from error
        return tuple(self.buffers), steps, result, seen

    def _is_true(self, mask: Arg) -> bool:
        position = int(str(mask)[1:]) - (KEY + 1)
        return (
            position >= 0 and self.steps[position][0] == FULL and self.steps[position][2] == (True,)
        )

    @staticmethod
    def _part(value: Value) -> _Part:
        return _Part(value, (None,) * value.type.rank)

    def _step(self, op: str, dtype: DType, args: Sequence[Any]) -> str:
        self.steps.append((op, dtype, tuple(args)))
        return operand(KEY + len(self.steps))

    def _constant(self, tensor: Any) -> Any:
        import torch

        if isinstance(tensor, torch._subclasses.FakeTensor):
            raise _InexpressibleError("a constant has no data")
        if tensor.dim() == 0:
            return self._step(FULL, self._dtype(tensor), (tensor.item(),))
        return self._part(self.reader.leaf(tensor))

    def _dtype(self, tensor: Any) -> DType:
        dtype = DType.from_torch(tensor.dtype)
        if dtype is None:
            raise _InexpressibleError(f"{tensor.dtype}")
        return dtype

    def _scalar(self, value: Any) -> Any:
        """What a node gave as an operand of a step. An element of a captured tensor is a step."""
        if not isinstance(value, _Part):
            return value
        if None in value.indices:
            raise _InexpressibleError("a whole tensor is read")
        if value not in self._gathers:
            if value.tensor not in self.buffers:
                self.buffers.append(value.tensor)
            number = self.buffers.index(value.tensor)
            dtype = value.tensor.type.dtype
            self._gathers[value] = self._step(GATHER, dtype, (number, *value.indices))
        return self._gathers[value]

    def _given(self, arg: Any) -> Any:
        """An argument of a traced node."""
        import torch

        if isinstance(arg, torch.fx.Node):
            return self.env[arg]
        if isinstance(arg, (list, tuple)):
            return tuple(self._given(item) for item in arg)
        return self.reader.arg(arg)

    def _call(self, node: Any) -> Any:
        import torch

        example = node.meta.get("val")
        if isinstance(example, (int, torch.SymInt)):
            return self.reader.known(example)
        target = node.target
        if not isinstance(example, torch.Tensor) or not isinstance(target, torch._ops.OpOverload):
            raise _InexpressibleError(str(target))
        stem = target._opname
        args = tuple(self._given(operand) for operand in self._in_order(target, node))
        if stem in _SAME and isinstance(args[0], str) and not example.dim():
            return args[0]
        if isinstance(args[0], _Part) and stem in ("index", "select"):
            return self._indexed(stem, args)
        if example.dim():
            raise _InexpressibleError(f"{target} gives a tensor")
        dtype = self._dtype(example)
        if stem in _FILLED:
            return self._step(FULL, dtype, (self._typed(_FILLED[stem], dtype),))
        if stem in _NUMBER_AT:
            return self._number(args[_NUMBER_AT[stem]], dtype)
        definition = registry.find(name_of(target))
        if definition is None:
            raise _InexpressibleError(str(target))
        recorded = [TensorType(dtype, ())]
        operands = args[: len(definition.parameters)]
        full = complete(definition, operands, recorded, self.reader.importer.where)
        return self._step(definition.name, dtype, [self._operand(operand) for operand in full])

    @staticmethod
    def _in_order(target: Any, node: Any) -> list[Any]:
        """The arguments in the order of the schema."""
        operands = []
        for position, argument in enumerate(target._schema.arguments):
            default = argument.default_value if argument.has_default_value() else None
            placed = position < len(node.args) and not argument.kwarg_only
            operands.append(
                node.args[position] if placed else node.kwargs.get(argument.name, default)
            )
        return operands

    def _operand(self, arg: Any) -> Any:
        return self._number(arg, DType.int32) if isinstance(arg, Dim) else self._scalar(arg)

    @staticmethod
    def _typed(number: Any, dtype: DType) -> bool | int | float:
        return (
            bool(number)
            if dtype is DType.bool
            else float(number)
            if dtype.is_float
            else int(number)
        )

    def _number(self, number: Any, dtype: DType) -> str:
        if isinstance(number, Dim):
            filled = self._step(FULL, DType.int32, (number,))
            if dtype is DType.int32:
                return filled
            return self._step(
                "aten._to_copy.default", dtype, (filled, dtype, *(None,) * 3, False, None)
            )
        if not isinstance(number, (bool, int, float)):
            raise _InexpressibleError("a number is computed")
        return self._step(FULL, dtype, (self._typed(number, dtype),))

    def _indexed(self, stem: str, args: Sequence[Any]) -> _Part:
        part: _Part = args[0]
        if stem == "select":
            dim, index = args[1:]
            if not isinstance(index, (int, Dim)):
                raise _InexpressibleError("an index is computed")
            return part.at(dim % part.indices.count(None), index)
        for index in args[1]:
            if index is None:
                raise _InexpressibleError("a dim is kept")
            position: Size | str = self._scalar(index)
            if isinstance(position, str) and self._is_bool(position):
                raise _InexpressibleError("an index is a mask")
            part = part.at(0, position)
        return part

    def _is_bool(self, reference: str) -> bool:
        position = int(reference[1:]) - (KEY + 1)
        return position >= 0 and self.steps[position][1] is DType.bool


def _placeholders(module: Any) -> list[Any]:
    return list(module.graph.find_nodes(op="placeholder"))


def _result(module: Any) -> Any:
    (output,) = module.graph.find_nodes(op="output")
    outputs = output.args[0]
    return outputs[0] if isinstance(outputs, (list, tuple)) else outputs


def _name(node: Any) -> str:
    return str(node.target)


def _is_causal(module: Any) -> bool:
    """Whether a mask is `q_idx >= kv_idx`."""
    _, _, query, key, *_ = _placeholders(module)
    node = _result(module)
    if _name(node) == "aten.ge.Tensor":
        return tuple(node.args) == (query, key)
    return _name(node) == "aten.le.Tensor" and tuple(node.args) == (key, query)
