"""An exported program of torch (`torch.export`) as a graph. Imports torch; needs no executorch."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from purevk.dtypes import DType
from purevk.errors import UnsupportedProgramError
from purevk.frontends.importer import NUMBERS, RELATIONS, Importer, settled
from purevk.frontends.torch import higher_order
from purevk.frontends.torch.conditions import conditions, environments, relations
from purevk.frontends.torch.decompose import (
    BATCH_NORM,
    BATCH_NORM_INFERENCE,
    PYTHON,
    name_of,
    out_of_place,
)
from purevk.frontends.torch.functionalized import is_taken_over, refuse_views
from purevk.frontends.torch.ratios import Ratios, is_rounded
from purevk.frontends.torch.signatures import signature_of
from purevk.ir import (
    Arg,
    Bound,
    Dim,
    Graph,
    Guard,
    Label,
    Signature,
    Symbol,
    SymbolSource,
    TensorType,
    Value,
)
from purevk.ir import dims as _dims
from purevk.ops import registry

# Functions of numbers for which torch has one of its own, such as torch._sym_sqrt.
_FUNCTIONS = ("sqrt", "cos", "cosh", "sin", "sinh", "tan", "tanh", "asin", "acos", "atan", "log2")


def mutated_buffers(program: Any) -> frozenset[str]:
    """The buffers that an exported program writes, by their addresses."""
    names = program.graph_signature.buffers_to_mutate.values()
    tensors = (
        program.state_dict[name] if name in program.state_dict else program.constants[name]
        for name in names
    )
    return frozenset(map(_address, tensors)) - {""}


def _address(tensor: Any) -> str:
    import torch

    real = tensor.device.type == "cpu" and not isinstance(tensor, torch._subclasses.FakeTensor)
    return f"{tensor.data_ptr():x}" if real and tensor.numel() else ""


def read_exported(
    program: Any,
    sizes: Sequence[tuple[int, ...] | None] | None = None,
    name: str = "forward",
    mutable: frozenset[str] = frozenset(),
    planned_only: bool = False,
    signature: Signature | None = None,
    dim_names: Mapping[tuple[int, int], str] | None = None,
    exact: bool = False,
) -> Graph:
    """The graph of an exported program.

    Args:
        program: a `torch.export.ExportedProgram`, decomposed by `decompose`.
        sizes: the sizes of the tensors of a call, by position, to specialize on; None: the
            program's own.
        mutable: buffers that other methods write, see `mutated_buffers`.
        planned_only: the graph will not be run, and weights on the meta device are taken as they
            are.
        signature: how the method is called; None: as the program says.
        dim_names: the user's names of dynamic dims, by input and dim.
        exact: the graph is for the sizes alone that torch traced for: not for 0 and 1, which it
            treats as constants.

    Raises:
        UnsupportedProgramError: an input that is no tensor and no number, or control flow beyond
            docs/control_flow.md.
    """
    signature = signature or signature_of(program)

    def read() -> Graph:
        reader = Reader(program, sizes, name, mutable, planned_only, dim_names, exact)
        reader.importer.signature = signature
        return reader.run()

    return settled(read)


def read_inputs(program: Any) -> Graph:
    """The inputs of an exported program alone: symbols, ranges, constraints and the signature.

    Raises:
        UnsupportedProgramError: an input that is no tensor and no number.
    """
    reader = Reader(program, None, "forward")
    reader.importer.signature = signature_of(program)
    reader.inputs()
    return reader.importer.finish(())


class Reader:
    """Walks an exported program, and the sub-modules of its control flow.

    Attributes:
        bounded: whether the program says for which sizes it holds.
    """

    bounded = True

    def __init__(
        self,
        program: Any,
        sizes: Any,
        name: str,
        mutable: frozenset[str] = frozenset(),
        planned_only: bool = False,
        dim_names: Mapping[tuple[int, int], str] | None = None,
        exact: bool = False,
    ) -> None:
        self.program, self.sizes, self.mutable, self.planned_only = (
            program,
            sizes,
            mutable,
            planned_only,
        )
        self.dim_names, self.exact = dim_names or {}, exact
        self.module = program.graph_module  # the one that is walked
        self.importer = Importer(name, f"exported program {name}", sizes)
        self.importer.traced_elsewhere = planned_only
        self.env: dict[Any, Any] = {}
        self.symbols: dict[str, Dim | int] = {}
        self.targets: dict[Value, str] = {}  # states, and the buffers that they are
        self.kept: list[Any] = []  # tensors whose bytes the graph's constants are views of
        self.sources: dict[tuple[int, int], Symbol] = {}  # by input and dim
        self.derived: dict[tuple[int, int], Any] = {}  # sizes that equal an expression over others

    def run(self) -> Graph:
        signature = self.program.graph_signature
        mutated = set(signature.buffers_to_mutate.values())
        states: dict[str, Value] = {}
        specs = {spec.arg.name: spec for spec in signature.input_specs}
        self.inputs()
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                spec = specs[node.name]
                if spec.kind.name == "USER_INPUT":
                    continue
                if spec.kind.name == "TOKEN":
                    self.env[node] = None
                else:
                    data = self._tensor(spec)
                    state = spec.target in mutated or _address(data) in self.mutable
                    value = self._leaf(data, Label(spec.target, _address(data)) if state else None)
                    states[spec.target] = value
                    if state:
                        self.targets[value] = spec.target
                    self.env[node] = value
            elif node.op == "output":
                return self._finish(node, signature, states)
            else:
                self._node(node)
        raise UnsupportedProgramError("the exported program has no output")

    def _node(self, node: Any) -> None:
        if node.op == "get_attr":
            self._attribute(node)
        elif node.op == "call_function":
            self._call(node)

    def walk(self, module: Any, args: Sequence[Any], importer: Importer) -> tuple[Any, ...]:
        """Walks a sub-module of control flow; `importer` takes its nodes. Returns its outputs."""
        kept = self.env, self.importer, self.module, self.symbols
        self.env, self.importer, self.module, self.symbols = (
            {},
            importer,
            module,
            dict(self.symbols),
        )
        values = iter(args)
        try:
            for node in module.graph.nodes:
                if node.op == "placeholder":
                    self.env[node] = next(values)
                    self.bind_symbol(node.meta.get("val"), self.env[node])
                elif node.op == "output":
                    found = node.args[0]
                    return tuple(
                        self.arg(each)
                        for each in (found if isinstance(found, (list, tuple)) else (found,))
                    )
                else:
                    self._node(node)
            return ()
        finally:
            self.env, self.importer, self.module, self.symbols = kept

    # -- inputs ----------------------------------------------------------------------------------
    def inputs(self) -> None:
        """Reads the user's inputs."""
        specs = {spec.arg.name: spec for spec in self.program.graph_signature.input_specs}
        nodes = self.program.graph.find_nodes(op="placeholder")
        users = [node for node in nodes if specs[node.name].kind.name == "USER_INPUT"]
        self._find_symbols(users)
        for guard in self._decisions(users):
            self.importer.constrain(guard)
        for node in users:
            self.env[node] = self._input(node)

    def _find_symbols(self, users: Sequence[Any]) -> None:
        """Makes the symbols of the inputs' sizes, so that a size can use those of later inputs.

        A symbol of torch belongs to the first dim, or integer input, whose size it is. Every other
        dim with an expression gets a symbol of its own and the constraint that it equals the
        expression.

        Args:
            users: the placeholders that are inputs of the graph, in order; None: one without sizes.
        """
        import torch

        compound: list[tuple[int, int, Any]] = []
        for position, node in enumerate(users):
            example = None if node is None else node.meta.get("val")
            given = self.sizes[position] if self.sizes is not None else None
            for dim, size in enumerate(_symbolic(example)):
                if isinstance(size, int):
                    continue
                expression = size.node.expr
                if not expression.is_Symbol or str(expression) in self.symbols:
                    compound.append((position, dim, expression))
                    continue
                wanted = None if given is None else given[dim]
                if isinstance(wanted, int):
                    self.symbols[str(expression)] = wanted
                    continue
                symbol = self._symbol(
                    expression,
                    None if wanted is None else wanted.upper,
                    self.dim_names.get((position, dim)),
                    isinstance(example, torch.Tensor) or self._sizes_depend_on(expression),
                )
                self.symbols[str(expression)] = Dim.of(symbol)
                self.sources[position, dim] = symbol
        for position, dim, expression in compound:
            given = self.sizes[position] if self.sizes is not None else None
            wanted = None if given is None else given[dim]
            self._derive(position, dim, expression, wanted)

    def _derive(self, position: int, dim: int, expression: Any, wanted: Any) -> None:
        """A size that is an expression over symbols, such as twice another one."""
        unknown = [s for s in expression.free_symbols if str(s) not in self.symbols]
        number: Any = wanted
        if not isinstance(wanted, int):
            if unknown:
                upper = self._bound_of(expression, unknown)
            else:
                upper = _dims.upper(self._size(expression))
            name = self.dim_names.get((position, dim)) or f"size_{position}_{dim}"
            upper = max(upper, 1, 0 if wanted is None else wanted.upper or 0)
            number = Dim.of(Symbol(name, upper))
            self.sources[position, dim] = next(iter(_dims.symbols(number)))
        if unknown:
            self._solve(expression, unknown, number)
        self.derived[position, dim] = number
        self.importer.constrain(Guard(number, "==", self._size(expression), True))
        # Where a size is an expression, torch decides more from what it traces for, without a guard.
        compound = () if expression.is_Symbol else expression.free_symbols
        for symbol in sorted(compound, key=str):
            traced = self._traced_from(symbol)
            if traced > 0:
                self.importer.constrain(Guard(self._size(symbol), ">=", traced, True))

    def _decisions(self, users: Sequence[Any]) -> Iterator[Guard]:
        """What torch decided from sizes of the example inputs, as guards over the symbols."""
        for condition in conditions(self.program, users):
            try:
                yield from relations(condition, self._size)
            except UnsupportedProgramError:
                # A decision that has no form here: the program holds for sizes like those of the
                # example, as far as is known.
                for symbol in sorted(condition.free_symbols, key=str):
                    if str(symbol) in self.symbols:
                        yield Guard(self.symbols[str(symbol)], "==", self._hint(symbol), True)

    def _bound_of(self, expression: Any, unknown: Sequence[Any]) -> int:
        largest = {s: self._range(s)[1] or max(64, self._hint(s)) for s in unknown}
        known = {s: _dims.upper(self._size(s)) for s in expression.free_symbols - set(unknown)}
        return int(expression.subs({**largest, **known}))

    def _solve(self, expression: Any, unknown: Sequence[Any], number: Any) -> None:
        """The symbol of an affine expression, from its value."""
        import sympy

        symbol = unknown[0]
        plain = expression.is_polynomial(symbol) and sympy.degree(expression, symbol) == 1
        if len(unknown) > 1 or not plain:
            raise UnsupportedProgramError(
                f"size {expression} cannot be followed",
                where=self.importer.where,
                why=f"no input has {unknown[0]} as a size of its own",
            )
        factor = self._size(expression.coeff(symbol, 1))
        rest = self._size(expression.coeff(symbol, 0))
        found = self.symbols[str(symbol)] = (number - rest) // factor
        lower, upper = self._range(symbol)
        if lower is not None and lower > 0:
            self.importer.constrain(Guard(found, ">=", lower, True))
        if upper is not None:
            self.importer.constrain(Guard(found, "<=", upper, True))

    def _input(self, node: Any) -> Any:
        import torch

        example = node.meta.get("val")
        position = len(self.importer.inputs)
        if isinstance(example, torch.Tensor):
            return self._tensor_input(example)
        if isinstance(example, torch.SymInt):
            size = self._size(example.node.expr)
            if isinstance(size, int):
                self.importer.fixed_input(size)
                return size
            (symbol,) = _dims.symbols(size) if (position, 0) in self.sources else (None,)
            if symbol is None:
                self.importer.fixed_input(int(example.node.hint))
                return int(example.node.hint)
            self.importer.symbols[symbol] = SymbolSource(None, None, position)
            self.importer.inputs.append(Dim.of(symbol))
            return Dim.of(symbol)
        self.importer.fixed_input(example)
        return example

    def _tensor_input(self, example: Any) -> Value:
        position = len(self.importer.inputs)
        given = self.sizes[position] if self.sizes is not None else None
        sizes: list[Any] = []
        for dim, size in enumerate(example.shape):
            if isinstance(size, int):
                sizes.append(size)
            elif given is not None and isinstance(given[dim], int):
                sizes.append(given[dim])
            else:
                sizes.append(self.derived_size(position, dim, size))
        dtype = self._dtype(example.dtype)
        value = Value(f"input_{position}", TensorType(dtype, tuple(sizes)))
        for dim in range(len(sizes)):
            if (position, dim) in self.sources:
                self.importer.symbols[self.sources[position, dim]] = SymbolSource(value, dim)
        self.importer.inputs.append(value)
        return value

    def derived_size(self, position: int, dim: int, size: Any) -> Any:
        """A size of an input: the expression over the symbols of others where it has one."""
        number = self.derived.get((position, dim))
        expression = self._size(size.node.expr)
        if number is None or _dims.symbols(expression) - _dims.symbols(number):
            return expression
        return number

    def _symbol(
        self, expression: Any, wider: int | None, name: str | None = None, is_size: bool = True
    ) -> Symbol:
        lower, upper = self._range(expression)
        label = name or str(expression)
        if not is_size:
            symbol = Symbol(label, is_size=False)
        else:
            # Where no bound was given, memory is planned for the example's size, rounded up. A
            # larger call is lowered again.
            planned = upper
            if planned is None:
                planned = max(64, 1 << (self._hint(expression) - 1).bit_length())
            # torch traces for sizes of 2 and more. Smaller ones that are in bounds get a lowering
            # of their own.
            traced = max(lower or 0, self._traced_from(expression))
            symbol = Symbol(label, max(planned, wider or 0), min(traced, planned))
            if self.exact and traced > (lower or 0):
                self.importer.constrain(Guard(Dim.of(symbol), ">=", traced, True))
        if self.bounded:
            # Of an integer that is no size torch says 0 where it knows nothing; kernels take 32 bits.
            least = lower or 0 if is_size or lower else -_dims.UNBOUNDED
            most = _dims.UNBOUNDED if upper is None and not is_size else upper
            self.importer.ranges[symbol] = (least, most)
        return symbol

    def _traced_from(self, expression: Any) -> int:
        """The least size that torch reckoned with while it traced."""
        for environment in environments(self.program.graph.find_nodes(op="placeholder")):
            bounds = environment.var_to_range.get(expression)
            if bounds is not None and bounds.lower.is_Integer:
                return int(bounds.lower)
        return 0

    def _sizes_depend_on(self, symbol: Any) -> bool:
        """Whether a tensor of the graph has sizes that follow from a symbol."""
        for node in self.program.graph.nodes:
            examples = node.meta.get("val")
            for example in examples if isinstance(examples, (list, tuple)) else (examples,):
                for size in getattr(example, "shape", ()):
                    if not isinstance(size, int) and symbol in size.node.expr.free_symbols:
                        return True
        return False

    def _hint(self, expression: Any) -> int:
        for node in self.program.graph.nodes:
            value = node.meta.get("val")
            for size in getattr(value, "shape", ()):
                if (
                    not isinstance(size, int)
                    and size.node.expr == expression
                    and size.node.has_hint()
                ):
                    return int(size.node.hint)
        return 64

    def _size(self, expression: Any) -> Any:
        """A sympy expression as a size."""
        if expression.is_Integer:
            return int(expression)
        if expression.is_Symbol:
            if str(expression) not in self.symbols:
                raise UnsupportedProgramError(
                    f"size {expression} is known only from data",
                    where=self.importer.where,
                    why="no input has it as a size of its own",
                )
            return self.symbols[str(expression)]
        if is_rounded(expression):
            ratios = Ratios(self._size)
            found = ratios.rounded(expression)
            for guard in ratios.limits:
                self.importer.constrain(guard)
            return found
        args = [self._size(arg) for arg in expression.args]
        kind = type(expression).__name__
        if kind in ("Add", "Mul"):
            total = args[0]
            for arg in args[1:]:
                total = total + arg if kind == "Add" else total * arg
            return total
        if kind in ("FloorDiv", "CleanDiv"):
            return args[0] // args[1]
        if kind in ("Mod", "PythonMod"):
            return args[0] % args[1]
        if kind in ("Max", "Min"):
            return functools.reduce(_dims.maximum if kind == "Max" else _dims.minimum, args)
        if kind == "Pow" and isinstance(args[1], int):
            return _dims.product([args[0]] * args[1])
        raise UnsupportedProgramError(
            f"size {expression} cannot be followed", where=self.importer.where
        )

    # -- leaves -----------------------------------------------------------------------------------
    def _tensor(self, spec: Any) -> Any:
        program = self.program
        if spec.target in program.state_dict:
            return program.state_dict[spec.target]
        return program.constants[spec.target]

    def _leaf(self, tensor: Any, label: Label | None = None) -> Value:
        import torch

        type = TensorType(self._dtype(tensor.dtype), tuple(tensor.shape))
        tensor = tensor.detach()
        if tensor.device.type == "meta" or isinstance(tensor, torch._subclasses.FakeTensor):
            if self.planned_only:
                memory = (tensor.untyped_storage()._cdata, tensor.storage_offset(), type)
                return (
                    self.importer.missing(memory, type)
                    if label is None
                    else self.importer.state(None, type, label)
                )
            raise UnsupportedProgramError(
                "a weight has no data",
                where=self.importer.where,
                why="it is on the meta device",
                next="load the model's weights before exporting it, or look at it without them: purevk.plan",
            )
        tensor = tensor.cpu().contiguous()
        if tensor.dtype is torch.bfloat16:
            tensor = tensor.view(torch.uint16)
        array = tensor.numpy()
        self.kept.append(array)
        data = (
            memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
            if array.size
            else memoryview(b"")
        )
        if label is None:
            return self.importer.constant(data, type)
        return self.importer.state(data, type, label)

    def _dtype(self, dtype: Any) -> DType:
        found = DType.from_torch(dtype)
        if found is None:
            raise UnsupportedProgramError(f"dtype {dtype} cannot be run", where=self.importer.where)
        return found

    def _attribute(self, node: Any) -> None:
        import torch

        target = self.module
        for part in node.target.split("."):
            target = getattr(target, part)
        self.env[node] = self._leaf(target) if isinstance(target, torch.Tensor) else target

    # -- nodes ------------------------------------------------------------------------------------
    def arg(self, arg: Any) -> Any:
        """What an argument of a node is here."""
        import torch

        if isinstance(arg, torch.fx.Node):
            return self.env[arg]
        if isinstance(arg, (list, tuple)):
            return tuple(self.arg(item) for item in arg)
        if isinstance(arg, torch.dtype):
            return self._dtype(arg)
        if isinstance(arg, (torch.device, torch.layout, torch.memory_format)):
            return None
        return arg

    def _call(self, node: Any) -> None:
        import torch

        target = node.target
        if target is operator.getitem:
            self.env[node] = self.env[node.args[0]][node.args[1]]
            return
        if target in PYTHON:
            args = [self.arg(arg) for arg in node.args]
            if PYTHON[target] in RELATIONS and any(isinstance(arg, Dim) for arg in args):
                if self._is_asserted(node):
                    self.env[node] = (args[0], PYTHON[target], args[1])
                    return
                if higher_order.decides(node):
                    self.env[node] = _dims.indicator(args[0], PYTHON[target], args[1])
                    return
            self.env[node] = self.importer.arithmetic(PYTHON[target], args, node.name)
            return
        if higher_order.is_control(target) or (node.args and higher_order.is_control(node.args[0])):
            self.env[node] = higher_order.read(self, node)
            return
        if not isinstance(target, torch._ops.OpOverload):
            name = getattr(target, "__name__", str(target))
            if name.startswith("sym_") and name[4:] in ("max", "min"):
                join = _dims.maximum if name == "sym_max" else _dims.minimum
                self.env[node] = join(*(self.arg(arg) for arg in node.args))
                return
            if name == "sym_not":
                self.env[node] = _dims.invert(self.arg(node.args[0]))
                return
            if name in ("sym_float", "sym_int", "ceil", "floor", "trunc", "round"):
                self.env[node] = self._converted(node, name)
                return
            if "sym_" in name and name.rpartition("sym_")[2] in _FUNCTIONS:
                function = f"aten.{name.rpartition('sym_')[2]}.default"
                self.env[node] = self.importer.function(function, self.arg(node.args[0]), node.name)
                return
            if name == "with_effects" and isinstance(node.args[1], torch._ops.OpOverload):
                # An operator that may raise: (token, operator, arguments...) -> (token,
                # results...).
                examples = node.meta["val"][1:]
                made = self._operator(
                    node,
                    node.args[1],
                    node.args[2:],
                    examples[0] if len(examples) == 1 else examples,
                )
                self.env[node] = (None, *(made if isinstance(made, tuple) else (made,)))
                return
            if name in ("auto_functionalized", "auto_functionalized_v2"):
                self.env[node] = self._functionalized(node, node.args[0], dict(node.kwargs))
                return
            raise UnsupportedProgramError(
                f"{name} cannot be run",
                where=f"{self.importer.where}, {node.name}",
                why="it is no operator of torch.ops",
            )
        self.env[node] = self._operator(node, target, node.args, node.meta.get("val"))

    def _converted(self, node: Any, name: str) -> Any:
        """A number as a float, or a float as a whole number."""
        given = self.arg(node.args[0])
        if name == "sym_float":
            return self.importer.number(given, node.name) if isinstance(given, Dim) else given
        if isinstance(given, Dim):
            return given
        expression = getattr(getattr(node.meta.get("val"), "node", None), "expr", None)
        if expression is None or node.args[1:] not in ((), (None,)):
            raise UnsupportedProgramError(
                f"{name} cannot be run", where=f"{self.importer.where}, {node.name}"
            )
        return self._size(expression)

    def _operator(self, node: Any, target: Any, given: Sequence[Any], examples: Any) -> Any:
        name = out_of_place(node, target)
        args = self._schema_args(target, given, node.kwargs)
        if name == BATCH_NORM and not args[5]:
            name, args = BATCH_NORM_INFERENCE, (*args[:5], *args[6:8])
        if name in ("aten.sym_size.int", "aten.sym_numel.default"):
            tensor = args[0]
            return tensor.type.numel if "numel" in name else tensor.type.dims[args[1]]
        if name in ("aten.item.default", "aten._local_scalar_dense.default"):
            expression = getattr(getattr(examples, "node", None), "expr", None)
            bounds = (
                self._range(expression)
                if expression is not None and expression.is_Symbol
                else (None, None)
            )
            found = self.importer.item(args[0], node.name, *bounds)
            self.bind_symbol(examples, found)
            return found
        if name == "aten._assert_scalar.default" and isinstance(args[0], tuple):
            self.importer.check(*args[0], str(args[1]))
            return None
        if name == "aten.copy_.default":
            return self._write(node, given[0], args[1])
        if name.startswith(("aten._assert", "aten.sym_constrain")):
            return None
        return self._emit(node, name, args, examples)

    def _write(self, node: Any, target: Any, new: Value) -> Value:
        """A sub-graph's write into one of its arguments."""
        state = self.env[target]
        if state not in self.importer.states:
            raise UnsupportedProgramError(
                f"{node.name} writes into {target.name}",
                where=self.importer.where,
                why="it is no buffer of the module",
                next="return the new value instead",
            )
        self.importer.emit("purevk.store", (state, new), [], [], node.name)
        return state

    def _emit(
        self, node: Any, name: str, args: Sequence[Any], examples: Any, host: bool = False
    ) -> Any:
        """A node whose results are like the examples: tensors, numbers, None, and lists of these;
        `host`: of torch's own."""
        types: list[TensorType] = []
        for example in _leaves(examples):
            kind = number_kind(example)
            recorded = () if kind else tuple(self._recorded(size) for size in example.shape)
            types.append(
                NUMBERS[kind] if kind else TensorType(self._dtype(example.dtype), recorded)
            )
        results = iter(
            self.importer.emit(
                name, args, types, [False] * len(types), f"{node.name}", exact=True, host=host
            )
        )

        def shaped(example: Any) -> Any:
            if isinstance(example, (list, tuple)):
                return tuple(shaped(each) for each in example)
            if example is None:
                return None
            value = next(results)
            kind = number_kind(example)
            if kind is int:
                found = self.importer.element(value, 0)
                self.bind_symbol(example, found)
                return found
            if kind is not None:
                self.importer.numbers.add(value)
                return value
            for size, made in zip(example.shape, value.type.dims):
                if not isinstance(size, int) and size.node.expr.is_Symbol:
                    self.symbols.setdefault(str(size.node.expr), made)
            return value

        return shaped(examples)

    def bind_symbol(self, example: Any, found: Any) -> None:
        """Notes what torch's symbol for a number that a node gives is here."""
        expression = getattr(getattr(example, "node", None), "expr", None)
        if expression is not None and expression.is_Symbol and not isinstance(found, Value):
            self.symbols[str(expression)] = found

    def _functionalized(self, node: Any, target: Any, named: dict[str, Any]) -> tuple[Any, ...]:
        """An operator that writes into arguments, on copies of them: its own results, then the
        copies as it left them."""
        bases = named.pop("_all_bases", None)
        written = [argument.name for argument in target._schema.arguments if argument.is_write]
        if bases is None:
            order = [name for name in written if named.get(name) is not None]
        else:
            indices = {name: named.pop(f"_{name}_base_index", None) for name in written}
            order = [name for name in written if indices[name] is not None]
            if sorted(indices[name] for name in order) != list(range(len(bases))):
                refuse_views(f"{self.importer.where}, {node.name}", name_of(target))
            named.update({name: bases[indices[name]] for name in order})
            order.sort(key=indices.__getitem__)
        if any(name.startswith("_") and value is not True for name, value in named.items()) or any(
            isinstance(named[name], (list, tuple)) for name in order
        ):
            refuse_views(f"{self.importer.where}, {node.name}", name_of(target))
        examples = node.meta["val"]
        own, copies = examples[: len(examples) - len(order)], examples[len(examples) - len(order) :]
        row = registry.find(name_of(target))
        in_place = row is not None and bool(row.mutates)
        states = [
            self.env.get(named[name]) if hasattr(named[name], "users") else None for name in order
        ]
        ends = self.program.graph_signature.buffers_to_mutate
        if in_place and all(
            state in self.targets
            and is_taken_over(node, named[name], len(own) + at, ends, self.targets[state])
            for at, (name, state) in enumerate(zip(order, states))
        ):
            made = self._emit(node, name_of(target), self._schema_args(target, (), named), own)
            return (*made, *states)
        # The operator leaves its arguments in the order of its schema.
        rank = sorted(range(len(order)), key=lambda at: written.index(order[at]))
        made = self._emit(
            node,
            name_of(target),
            self._schema_args(target, (), named),
            (*own, *(copies[at] for at in rank)),
            in_place,
        )
        left = dict(zip(rank, made[len(own) :]))
        return (*made[: len(own)], *(left[at] for at in range(len(order))))

    def _recorded(self, size: Any) -> Any:
        """A size that the program states; a `Bound` where it comes about during the call."""
        if isinstance(size, int):
            return size
        try:
            return self._size(size.node.expr)
        except UnsupportedProgramError:
            return Bound(self._range(size.node.expr)[1])

    def _range(self, expression: Any) -> tuple[int | None, int | None]:
        """What `torch._check` says of a symbol, or follows from how it was made."""
        bounds = self.program.range_constraints.get(expression)
        found: list[int | None] = []
        for name in ("lower", "upper"):
            try:
                number = int(getattr(bounds, name))
            except (TypeError, ValueError, OverflowError, AttributeError):
                number = None
            found.append(None if number is None or abs(number) >= _dims.UNBOUNDED else number)
        return found[0], found[1]

    def _is_asserted(self, node: Any) -> bool:
        """Whether a condition is only checked."""
        return all(
            getattr(user.target, "__name__", "") == "_assert_scalar.default" for user in node.users
        )

    def _schema_args(
        self, target: Any, given: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[Arg, ...]:
        full = []
        for position, argument in enumerate(target._schema.arguments):
            if position < len(given) and not argument.kwarg_only:
                full.append(self.arg(given[position]))
            elif argument.name in named:
                full.append(self.arg(named[argument.name]))
            else:
                full.append(
                    self.arg(argument.default_value) if argument.has_default_value() else None
                )
        return tuple(full)

    # -- outputs ----------------------------------------------------------------------------------
    def _finish(self, node: Any, signature: Any, states: Mapping[str, Value]) -> Graph:
        outputs: list[Arg] = []
        numbers: list[tuple[int, str]] = []
        updates: dict[int, Arg] = {}
        given = [spec.arg.name for spec in signature.input_specs if spec.kind.name == "USER_INPUT"]
        for arg, spec in zip(node.args[0], signature.output_specs):
            value = self.arg(arg)
            if spec.kind.name == "BUFFER_MUTATION":
                state = states[spec.target]
                if value is state:
                    continue  # written in place by control flow
                self.importer.emit(
                    "purevk.store", (state, value), [], [], f"mutation of {spec.target}"
                )
            elif spec.kind.name == "USER_INPUT_MUTATION":
                updates[given.index(spec.target)] = value
            elif spec.kind.name == "USER_OUTPUT":
                kind = number_kind(getattr(arg, "meta", {}).get("val"))
                if kind in (float, bool):
                    numbers.append((len(outputs), kind.__name__))
                outputs.append(value)
            elif spec.kind.name != "TOKEN":
                raise UnsupportedProgramError(
                    f"an output of kind {spec.kind.name} cannot be run",
                    where=self.importer.where,
                    why="user outputs, mutated inputs and mutated buffers are accepted",
                )
        if numbers and self.importer.signature is not None:
            self.importer.signature = replace(self.importer.signature, numbers=tuple(numbers))
        return self.importer.finish([*outputs, *updates.values()], tuple(updates))


def _symbolic(example: Any) -> Sequence[Any]:
    """The sizes of an example input; an integer that only a call knows counts as one."""
    import torch

    if isinstance(example, torch.Tensor):
        return tuple(example.shape)
    return (example,) if isinstance(example, torch.SymInt) else ()


def _leaves(examples: Any) -> Iterator[Any]:
    """The results that are there, in order, also those in lists."""
    if isinstance(examples, (list, tuple)):
        for example in examples:
            yield from _leaves(example)
    elif examples is not None:
        yield examples


def number_kind(example: Any) -> type | None:
    """bool, int or float for a number, also one that a call alone knows; None for a tensor."""
    import torch

    for kind, symbolic in ((bool, torch.SymBool), (int, torch.SymInt), (float, torch.SymFloat)):
        if isinstance(example, (kind, symbolic)):
            return kind
    return None
