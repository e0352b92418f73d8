"""The nodes of an exported program, and of the sub-modules of its control flow. Imports torch."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
from purevk.frontends.torch.sizes import Sizes, solved
from purevk.frontends.torch.strides import BAGS, in_memory_order, with_kernel_of_bags
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
from purevk.ir import dims as _dims
from purevk.ir.relations import as_size
from purevk.ops.index.check import ASSERT


def is_dense(tensor: Any) -> bool:
    """Whether the elements of a tensor are one array: it is neither sparse nor nested."""
    import torch

    return tensor.layout is torch.strided and not tensor.is_nested


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
            array = elements(tensor.cpu().contiguous())
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
        name = out_of_place(node, target)
        args = self.schema_args(target, operands, node.kwargs)
        if name == BATCH_NORM and not args[5]:
            name, args = BATCH_NORM_INFERENCE, (*args[:5], *args[6:8])
        if name == "aten.sym_numel.default":
            return _tensor(args[0]).type.numel
        if name == "aten.sym_size.int":
            return _tensor(args[0]).type.dims[operator.index(args[1])]
        if name in ("aten.sym_storage_offset.default", "aten.sym_stride.int"):
            # torch 2.11 asserts that it is not negative, and no more.
            asserted = all(user.target is operator.ge and user.args[1] == 0 for user in node.users)
            return 0 if asserted else self.known(examples)
        if name in ("aten.item.default", "aten._local_scalar_dense.default"):
            expression = getattr(getattr(examples, "node", None), "expr", None)
            bounded = expression is not None and expression.is_Symbol
            lower, upper = self.sizes.range(expression) if bounded else (None, None)
            lower = -_dims.UNBOUNDED if lower is None else lower
            item = numbers.item(self.importer, _tensor(args[0]), node.name, lower, upper)
            self.bind_symbol(examples, item)
            return item
        if name == "aten._assert_scalar.default":
            return self._assert(node, operands[0], str(args[1]))
        if name == "aten._to_copy.default" and isinstance(args[0], (bool, int, float)):
            return self.emit(node, "aten.scalar_tensor.default", args[:2], examples)
        if name == "aten.copy_.default":
            return self._write(node, operands[0], _tensor(args[1]))
        if name in positions.NAMES:
            base = operands[0].meta["val"]
            args = positions.from_start(self.importer, self.known, name, args, base, examples)
        if name.startswith(("aten._assert_tensor", "aten.sym_constrain")):
            return None
        if target._opname.startswith("as_strided"):
            first = in_memory_order(
                self.importer, node, _tensor(args[0]), self._recorded, path_of(node)
            )
            args = (first, *args[1:])
        if name in BAGS:
            args = with_kernel_of_bags(node, args)
        if name in positions.STEPS:
            start, end, step = positions.STEPS[name](args)
            kinds = (Value, float) if positions.counts_real_steps(examples.dtype) else Value
            if any(isinstance(number, kinds) for number in (start, end, step)):
                source, (count,) = path_of(node), examples.shape
                steps = functools.partial(numbers.steps, self.importer, start, end, step, source)
                if not isinstance(count, int):
                    count = self.rounded("ceil", steps, count, source)
                type = TensorType(self.dtype(examples.dtype), (count,))
                return numbers.in_steps(self.importer, start, step, type, source)
        if name in positions.SPLITS and isinstance(args[1], Dim):
            name, args = positions.with_lengths(args, len(examples))
        return self.emit(node, name, args, examples)

    def _assert(self, node: Any, condition: Any, message: str) -> None:
        """Has each call check a condition, also one that the stated bounds settle."""
        # As it is: `arg` settles relations by their bounds.
        condition = self.env.get(condition, condition)
        if isinstance(condition, Dim):
            condition = Relation(condition, "!=", 0)
        if isinstance(condition, Value):
            self.importer.emit(ASSERT, (condition, message), [], [], path_of(node))
        elif isinstance(condition, Relation):
            self.importer.check(*condition.sides, message)
            if condition.op == "==":
                self._use_equal(condition.left, condition.right)

    def _use_equal(self, left: Size, right: Size) -> None:
        """Writes a size that follows from data by others from here on, as the program asserts: the
        parts of a split add up to the whole."""
        solution = solved(left, right, tuple(self.importer.symbols))
        if solution is None:
            return
        both: tuple[dict[Any, Any], ...] = (self.env, self.sizes.symbols)
        for names in both:
            for name, value in names.items():
                if isinstance(value, Dim):
                    names[name] = _dims.substitute(value, solution)
                elif isinstance(value, Relation):
                    names[name] = value.substituted(solution)

    def known(self, number: Any, size: Size | None = None) -> Size:
        """An integer of torch in the graph. `size` is what a new symbol of torch stands for."""
        if isinstance(number, int):
            return number
        expression = number.node.expr
        if size is not None and expression.is_Symbol:
            return self.sizes.symbols.setdefault(str(expression), size)
        return self.sizes.size(expression)

    def _write(self, node: Any, target: Any, new: Value) -> Value:
        """A sub-graph's write into one of its arguments."""
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
                sizes = tuple(self._recorded(size) for size in example.shape)
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

    def _recorded(self, size: Any) -> Size | Bound:
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
