"""The nodes of an exported program, and of the sub-modules of its control flow. Imports torch."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from purevk import generators
from purevk.dtypes import DType, elements
from purevk.errors import PurevkError, UnsupportedProgramError, located
from purevk.frontends import numbers
from purevk.frontends.importer import Importer
from purevk.frontends.result_types import OpenType, Recorded
from purevk.frontends.source_lines import line_of, path_of
from purevk.frontends.torch import flex, functionalized, higher_order, positions
from purevk.frontends.torch.decompose import (
    BATCH_NORM,
    BATCH_NORM_INFERENCE,
    PYTHON,
    out_of_place,
)
from purevk.frontends.torch.elements.items import read_assert, read_item
from purevk.frontends.torch.sizes import Sizes
from purevk.frontends.torch.strides import BAGS, STRIDED, read_bags, read_stride, read_strided
from purevk.frontends.torch.watch.samples import refuse_released
from purevk.ir import (
    Arg,
    BorrowedConstant,
    Bound,
    Constant,
    Dim,
    Label,
    Relation,
    Size,
    TensorType,
    Value,
)
from purevk.ir.relations import as_size


def is_dense(tensor: Any) -> bool:
    """Whether the elements of a tensor are one array: it is neither sparse nor nested."""
    import torch

    return tensor.layout is torch.strided and not tensor.is_nested


class Call(NamedTuple):
    """A node that calls an operator: with its name, the arguments in the graph, in the schema's order,
    and as torch has them, and what torch traced as results."""

    reader: NodeReader
    node: Any
    name: str
    args: tuple[Any, ...]
    operands: Sequence[Any]
    examples: Any

    def emit(self, args: Sequence[Any] | None = None, name: str = "") -> Any:
        """Emits the operator, or another one, with these arguments."""
        args = self.args if args is None else args
        return self.reader.emit(self.node, name or self.name, args, self.examples)


class NodeReader:
    """Walks modules of torch.fx and passes their nodes to an importer.

    Args:
        program: the exported program.
        importer: takes the nodes.
        sizes: gives sizes for torch's expressions.
        planned_only: the graph is not run. A weight may be on the meta device.

    Attributes:
        module: the module that is walked.
        env: what each node gives in the graph.
        targets: the buffers that are states, by their values.
        lines: where each node stands in the user's code, by its path.
    """

    def __init__(
        self, program: Any, importer: Importer, sizes: Sizes, planned_only: bool = False
    ) -> None:
        self.program, self.importer, self.sizes = program, importer, sizes
        self.planned_only = planned_only
        self.module = program.graph_module
        self.env: dict[Any, Any] = {}
        self.targets: dict[Value, str] = {}
        self.lines: dict[str, str] = {}

    def node(self, node: Any) -> None:
        if node.op == "get_attr":
            self._attribute(node)
        elif node.op == "call_function":
            line = line_of(node.meta.get("stack_trace") or "")
            if line:
                self.lines[path_of(node)] = line
            try:
                self.env[node] = self._value(node)
            except PurevkError as error:
                if not line:
                    raise
                raise located(error, path_of(node), line) from error.__cause__

    def walk(self, module: Any, args: Sequence[Any], importer: Importer) -> tuple[Any, ...]:
        """Walks a sub-module of control flow, whose nodes `importer` takes. Returns its outputs."""
        saved = self.env, self.importer, self.module
        self.env, self.importer, self.module = {}, importer, module
        values = iter(args)
        try:
            with self.sizes.scope():
                for node in module.graph.nodes:
                    if node.op == "placeholder":
                        self.env[node] = next(values)
                        self.bind_symbol(node.meta.get("val"), self.env[node])
                    elif node.op == "output":
                        result = node.args[0]
                        outputs = result if isinstance(result, (list, tuple)) else (result,)
                        return tuple(self.arg(output) for output in outputs)
                    else:
                        self.node(node)
            return ()
        finally:
            self.env, self.importer, self.module = saved

    def leaf(self, tensor: Any, label: Label | None = None, name: str = "") -> Value:
        """A tensor of the module: a state if it has a label, else a constant; `name` is its path."""
        import torch

        if not is_dense(tensor):
            raise UnsupportedProgramError(
                "a weight is sparse or nested",
                where=self.importer.where,
                why="tensors whose elements are one array are accepted",
                next="tensor.to_dense(), or torch.nested.to_padded_tensor, before exporting it",
            )
        type = TensorType(self.dtype(tensor.dtype), tuple(tensor.shape))
        tensor = tensor.detach()
        if tensor.device.type == "meta" or isinstance(tensor, torch._subclasses.FakeTensor):
            if self.planned_only:
                if label is not None:
                    return self.importer.state(None, type, label)
                memory = (tensor.untyped_storage()._cdata, tensor.storage_offset(), type)
                return self.importer.missing(memory, type, name)
            raise UnsupportedProgramError(
                "a weight has no data",
                where=self.importer.where,
                why="it is on the meta device",
                next="load the model's weights before exporting it, or use purevk.plan, which needs none",
            )
        constant = self._constant(tensor, name or (label.name if label else ""), type)
        if label is None:
            return self.importer.constant(constant, type, name)
        return self.importer.state(constant, type, label)

    def _constant(self, tensor: Any, name: str, type: TensorType) -> Constant:
        """The elements of a tensor, which the user may write, and whose memory he may release."""
        where = self.importer.where

        def read() -> memoryview:
            refuse_released(tensor, name, where)
            array = elements(tensor.cpu().resolve_conj().resolve_neg().contiguous())
            data = array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")
            return data.toreadonly()

        if tensor.is_cpu and tensor.is_contiguous():
            read()  # what cannot be read is refused now
        memory = (
            tensor.untyped_storage()._cdata,
            tensor.storage_offset(),
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )
        return BorrowedConstant(memory, type.nbytes, read)

    def dtype(self, dtype: Any) -> DType:
        converted = DType.from_torch(dtype)
        if converted is None:
            packed = str(dtype).startswith(("torch.qint", "torch.quint"))
            raise UnsupportedProgramError(
                f"dtype {dtype} cannot be run",
                where=self.importer.where,
                why="quantized tensors of torch.ao.quantization run on the CPU alone"
                if packed
                else "",
                next="quantize the module with torchao: quantize_, or prepare_pt2e and convert_pt2e"
                if packed
                else "use float32, or a signed integer",
            )
        return converted

    def _attribute(self, node: Any) -> None:
        import torch

        target = functools.reduce(getattr, node.target.split("."), self.module)
        is_tensor = isinstance(target, torch.Tensor)
        self.env[node] = self.leaf(target, name=node.target) if is_tensor else self.arg(target)

    # -- nodes ------------------------------------------------------------------------------------
    def arg(self, arg: Any) -> Any:
        """An argument of a node, in the graph."""
        import torch

        if isinstance(arg, torch.fx.Node):
            value = self.env[arg]
            return value.settled if isinstance(value, Relation) else value
        if isinstance(arg, (list, tuple)):
            return tuple(self.arg(item) for item in arg)
        if isinstance(arg, torch.dtype):
            return self.dtype(arg)
        if isinstance(arg, (torch.device, torch.layout, torch.memory_format)):
            return None
        if isinstance(arg, torch.Generator):
            return generators.number_of(arg)
        return arg

    def _value(self, node: Any) -> Any:
        """What a node gives in the graph."""
        import torch

        target = node.target
        if target is operator.getitem:
            return self.env[node.args[0]][node.args[1]]
        if target in PYTHON:
            return self.arithmetic(PYTHON[target], node)
        if higher_order.is_control(target) or (node.args and higher_order.is_control(node.args[0])):
            return higher_order.read(self, node)
        if flex.is_flex(target):
            return flex.Flex(self, node).read()
        if isinstance(target, torch._ops.OpOverload):
            return self._operator(node, target, node.args, node.meta.get("val"))
        name = getattr(target, "__name__", str(target))
        read = _FUNCTIONS.get(name) or _FUNCTIONS.get(name.removeprefix("_").removeprefix("sym_"))
        value = None if read is None else read(self, node)
        if value is None:
            raise UnsupportedProgramError(
                f"{name} cannot be run",
                where=f"{self.importer.where}, {node.name}",
                why="it is no operator of torch.ops",
            )
        return value

    def with_effects(self, node: Any) -> tuple[Any, ...] | None:
        """An operator that may raise: (token, operator, arguments...) -> (token, results...)."""
        import torch

        if not isinstance(node.args[1], torch._ops.OpOverload):
            return None
        examples = node.meta["val"][1:]
        example = examples[0] if len(examples) == 1 else examples
        results = self._operator(node, node.args[1], node.args[2:], example)
        return (None, *(results if isinstance(results, tuple) else (results,)))

    # -- numbers ----------------------------------------------------------------------------------
    def arithmetic(self, op: str, node: Any) -> Any:
        """A step of arithmetic on the arguments of a node."""
        return numbers.arithmetic(
            self.importer, op, [self.arg(arg) for arg in node.args], node.name
        )

    def sum(self, node: Any) -> Any:
        add = functools.partial(numbers.arithmetic, self.importer, "+", source=node.name)
        return functools.reduce(lambda *pair: add(pair), map(self.arg, node.args[0]))

    def selected(self, node: Any) -> Any:
        """One of two numbers."""
        condition, if_true, if_false = map(self.arg, node.args)
        return numbers.selected(self.importer, condition, if_true, if_false, node.name)

    def function(self, op: str, node: Any) -> Any:
        """A function of a number, by an operator; "": the number as a float."""
        size = as_size(self.arg(node.args[0]))
        if not op:
            return numbers.as_tensor(self.importer, size, node.name)
        return numbers.function(self.importer, op, size, node.name)

    def whole(self, op: str, node: Any) -> Size | None:
        """A number as a whole number; None: rounded to digits."""
        if len(node.args) > 1 and node.args[1] is not None:
            return None
        size = as_size(self.arg(node.args[0]))
        if not isinstance(size, Value):
            return size if isinstance(size, Dim) else int(size)
        return self.rounded(op, lambda: size, node.meta.get("val"), node.name)

    def rounded(self, op: str, number: Callable[[], Value], example: Any, source: str) -> Size:
        """An integer that an operator makes of a number: of sizes, where they give the same as
        floats, else what the device computes."""
        expression = getattr(getattr(example, "node", None), "expr", None)
        hint = lower = None
        if expression is not None:
            with contextlib.suppress(UnsupportedProgramError):
                return self.sizes.size(expression)
            hint = int(example.node.hint) if example.node.has_hint() else None
            least = example.node.shape_env.bound_sympy(expression).lower
            lower = int(least) if least.is_Integer else None
        integer = numbers.whole(self.importer, f"aten.{op}.default", number(), source, lower, hint)
        if expression is not None:
            self.sizes.symbols[str(expression)] = integer
        return integer

    # -- operators --------------------------------------------------------------------------------
    def _operator(self, node: Any, target: Any, operands: Sequence[Any], examples: Any) -> Any:
        name, args = out_of_place(node, target), self.schema_args(target, operands, node.kwargs)
        call = Call(self, node, name, args, operands, examples)
        read = _OPERATORS.get(name)
        return call.emit() if read is None else read(call)

    def known(self, number: Any, size: Size | None = None) -> Size:
        """An integer of torch in the graph. `size` is what a new symbol of torch stands for."""
        if isinstance(number, int):
            return number
        expression = number.node.expr
        if size is not None and expression.is_Symbol:
            return self.sizes.symbols.setdefault(str(expression), size)
        return self.sizes.size(expression)

    def _write(self, call: Call) -> Value:
        """A sub-graph's write into one of its arguments."""
        node, target, new = call.node, call.operands[0], _tensor(call.args[1])
        state: Value = self.env[target]
        if state not in self.importer.states:
            raise UnsupportedProgramError(
                f"{node.name} writes into {target.name}",
                where=self.importer.where,
                why="it is no buffer of the module",
                next="return the new value instead",
            )
        self.importer.emit("purevk.store", (state, new), [], [], node.name)
        return state

    def emit(
        self, node: Any, name: str, args: Sequence[Any], examples: Any, host: bool = False
    ) -> Any:
        """Emits a node.

        Args:
            examples: what torch traced as its results: tensors, numbers, None, and lists of these.
            host: torch runs it on the CPU.
        """
        types: list[Recorded] = []
        for example in numbers.leaves(examples):
            kind = numbers.kind_of(example)
            if kind is not None:
                types.append(numbers.NUMBERS[kind])
            else:
                sizes = tuple(self.recorded(size) for size in example.shape)
                if name.split(".")[1:2] == ["lstm"] and len(sizes) == 4:
                    sizes = (sizes[0], *sizes[2:])  # torch 2.11 traces a dim too many
                types.append(OpenType(self.dtype(example.dtype), sizes))
        results = iter(
            self.importer.emit(
                name, args, types, [False] * len(types), path_of(node), exact=True, host=host
            )
        )

        def shaped(example: Any) -> Any:
            if isinstance(example, (list, tuple)):
                return tuple(shaped(item) for item in example)
            if example is None:
                return None
            value = next(results)
            kind = numbers.kind_of(example)
            if kind is int:
                element = self.importer.element(value, 0)
                self.bind_symbol(example, element)
                return element
            if kind is not None:
                self.importer.numbers.add(value)
                return value
            for size, computed in zip(example.shape, value.type.dims):
                if not isinstance(size, int) and size.node.expr.is_Symbol:
                    self.sizes.symbols.setdefault(str(size.node.expr), computed)
            return value

        return shaped(examples)

    def bind_symbol(self, example: Any, size: Any) -> None:
        """Notes the number in the graph for a symbol of torch."""
        expression = getattr(getattr(example, "node", None), "expr", None)
        if expression is not None and expression.is_Symbol and not isinstance(size, Value):
            self.sizes.symbols[str(expression)] = size

    def recorded(self, size: Any) -> Size | Bound:
        """A size that the program states, or a `Bound` if it is data-dependent."""
        if isinstance(size, int):
            return size
        try:
            return self.sizes.size(size.node.expr)
        except UnsupportedProgramError:
            return Bound(self.sizes.range(size.node.expr)[1])

    def schema_args(
        self, target: Any, operands: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """The arguments of an operator in the schema's order, with its defaults."""
        full = []
        for position, argument in enumerate(target._schema.arguments):
            if position < len(operands) and not argument.kwarg_only:
                full.append(self.arg(operands[position]))
            else:
                default = argument.default_value if argument.has_default_value() else None
                full.append(self.arg(named.get(argument.name, default)))
        return tuple(full)


# -- operators that are read otherwise than they are written -----------------------------------------
def _batch_norm(call: Call) -> Any:
    args = call.args
    if args[5]:
        return call.emit()
    return call.emit((*args[:5], *args[6:8]), BATCH_NORM_INFERENCE)


def _to_copy(call: Call) -> Any:
    if not isinstance(call.args[0], (bool, int, float)):
        return call.emit()
    return call.emit(call.args[:2], "aten.scalar_tensor.default")


_OPERATORS: dict[str, Callable[[Call], Any]] = {
    BATCH_NORM: _batch_norm,
    "aten.sym_numel.default": lambda call: _tensor(call.args[0]).type.numel,
    "aten.sym_size.int": lambda call: _tensor(call.args[0]).type.dims[operator.index(call.args[1])],
    "aten.sym_storage_offset.default": read_stride,
    "aten.sym_stride.int": read_stride,
    "aten.item.default": read_item,
    "aten._local_scalar_dense.default": read_item,
    "aten._to_copy.default": _to_copy,
    "aten._assert_scalar.default": read_assert,
    "aten.copy_.default": lambda call: call.reader._write(call),
    **dict.fromkeys(positions.STEPS, positions.read_steps),
    **dict.fromkeys(positions.NAMES, positions.read_positions),
    **dict.fromkeys(positions.SPLITS, positions.read_split),
    **dict.fromkeys(STRIDED, read_strided),
    **dict.fromkeys(BAGS, read_bags),
    # What they check holds in the graph.
    "aten._assert_tensor_metadata.default": lambda call: None,
    "aten.sym_constrain_range.default": lambda call: None,
    "aten.sym_constrain_range_for_size.default": lambda call: None,
}


def _by(method: Callable[..., Any], op: str) -> Callable[[NodeReader, Any], Any]:
    return lambda reader, node: method(reader, op, node)


# What reads functions that are no operators, by their names without `sym_`.
_FUNCTIONS: dict[str, Callable[[NodeReader, Any], Any]] = {
    "auto_functionalized": functionalized.read,
    "auto_functionalized_v2": functionalized.read,
    "with_effects": NodeReader.with_effects,
    "sum": NodeReader.sum,
    "ite": NodeReader.selected,
    "float": _by(NodeReader.function, ""),
    **{name: _by(NodeReader.arithmetic, name) for name in ("max", "min", "not")},
    **{
        name: _by(NodeReader.whole, "trunc" if name == "int" else name)
        for name in ("int", "trunc", "ceil", "floor", "round")
    },
    **{
        name: _by(NodeReader.function, f"aten.{name}.default")
        for name in (
            "sqrt", "cos", "cosh", "sin", "sinh", "tan", "tanh", "asin", "acos", "atan", "log2",
        )
    },
}  # fmt: skip


def _tensor(arg: Arg) -> Value:
    if not isinstance(arg, Value):
        raise UnsupportedProgramError(f"{arg!r} is given where a tensor is needed")
    return arg
