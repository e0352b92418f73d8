"""What eager torch makes of a node, from the elements of its inputs."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from purevk import fallback
from purevk.checking.differences import (
    Difference,
    find_difference,
    find_differences,
    largest,
    numbers,
    tolerance,
)
from purevk.checking.kernels import rotated_keys, run_kernel
from purevk.dtypes import DType
from purevk.errors import FallbackError
from purevk.graph.call import evaluated
from purevk.ir import Arg, Graph, GuardLog, Node, Size, Symbol, TensorType, Value
from purevk.ir import dims as _dims
from purevk.ops import registry
from purevk.ops.attention.cache import WRITE_ROWS
from purevk.ops.executors import find_executor
from purevk.ops.reduce.normalization import NAME as NORM
from purevk.passes.placement import name_for_cpu
from purevk.passes.rewrite import Rewriter
from purevk.tuning import DeviceTraits

Arrays = Mapping[Value, np.ndarray]

# Modules that define operators for torch, by namespace. They are imported if a graph needs them.
_LIBRARIES = {
    "quantized_decomposed": "torch.ao.quantization.fx._decomposed",
    "torchao": "torchao.quantization",
}
_UNINITIALIZED = re.compile(r"aten\.(new_)?empty\w*\.|aten\.resize")
# Operators that give indices of elements. Among equal elements any index is right.
_TIES = re.compile(r"aten\.(sort|argsort|topk|kthvalue|median|nanmedian|mode)\.")
# Results that are not unique: vectors with free signs.
_FREE = {"aten._linalg_svd.default": (0, 2), "aten._linalg_eigh.default": (1,)}
# Operators that round to quantized values on the way: another rounding gives the next value.
_QUANTIZES = re.compile(r"quant|q8ta|dq8|_q8")
_TRIALS = 4  # of slightly different inputs
_SENSITIVE = 64  # tolerated, times what a rounding of the inputs changes
_CAP = 1e-3  # of the largest element: no more than that is taken for rounding


class Unchecked(Exception):
    """There is nothing to compare a node with; the text says why."""


class Reference:
    """Runs nodes in eager torch.

    Args:
        graph: the graph of the nodes.
        traits: the device, for operators that others express.

    Raises:
        FallbackError: torch is not installed.
    """

    def __init__(self, graph: Graph, traits: DeviceTraits) -> None:
        try:
            importlib.import_module("torch")
        except ImportError as error:
            raise FallbackError(
                "a check of the device needs torch",
                where=graph.name,
                why="PUREVK_CHECK and purevk bisect compare with eager torch, and torch is not"
                " installed",
                next="pip install torch, or unset PUREVK_CHECK",
            ) from error
        spaces = {node.op.partition(".")[0] for inner in graph.nested() for node in inner.nodes}
        for space in spaces & _LIBRARIES.keys():
            with contextlib.suppress(ImportError):
                importlib.import_module(_LIBRARIES[space])
        self._traits, self._trusted = traits, graph.trusted

    def results(
        self, node: Node, arrays: Arrays, env: Mapping[Symbol, int]
    ) -> tuple[list[np.ndarray], dict[Value, np.ndarray]]:
        """The results of a node, and the new elements of what it writes.

        Args:
            node: one without sub-graphs.
            arrays: the elements of its inputs, before it writes.
            env: values of symbols.

        Raises:
            Unchecked: there is no reference.
        """
        if registry.is_random(node):
            raise Unchecked("its results are random")
        if _UNINITIALIZED.match(node.op):
            raise Unchecked("its results are uninitialized")
        if node.op == "purevk.store":
            state, value = node.tensor("state"), node.tensor("value")
            return [], {state: np.broadcast_to(arrays[value], arrays[state].shape)}
        if node.op == "purevk.write":
            return [], _written(node, arrays, env)
        if node.op == WRITE_ROWS:
            return [], _written_rows(node, arrays, arrays[node.tensor("value")], node.int("dim"))
        if node.op == NORM and node.arg("state") is not None:
            return [], _written_rows(node, arrays, rotated_keys(node, arrays, env), 1)
        known = run_kernel(node, arrays, env)
        if known is not None:
            return known, {}
        types = [TensorType(v.type.dtype, _known(v.type.dims, env)) for v in node.results]
        if not registry.mutated(node):
            name = name_for_cpu(node)
            args = tuple(evaluated(arg, env) for arg in _with_dtypes(node))
            try:
                return fallback.run(name, args, arrays, types, node.source, self._trusted), {}
            except FallbackError as error:
                refused = error
        else:
            refused = FallbackError(f"{node.op} writes its arguments")
        if find_executor(node.op) is None and registry.expansion(node) is not None:
            with contextlib.suppress(Unchecked):
                return self._expanded(node, arrays, env)
        raise Unchecked(f"{refused.what}{f' ({refused.why})' if refused.why else ''}")

    def _expanded(
        self, node: Node, arrays: Arrays, env: Mapping[Symbol, int]
    ) -> tuple[list[np.ndarray], dict[Value, np.ndarray]]:
        """The same through the operators that express the node."""
        expand = registry.expansion(node)
        assert expand is not None  # the caller has asked
        part = Graph(
            node.op, node.inputs, (node,), node.results, outer=frozenset(env), trusted=self._trusted
        )
        rewriter = Rewriter(part, self._traits)
        rewriter.source = node.source
        with GuardLog() as log:
            expansion = expand(rewriter, node)
        if not all(guard.holds(env) for guard in log.guards if guard.symbols <= env.keys()):
            raise Unchecked("operators that express it depend on the sizes of the call")
        if expansion is not None:
            rewriter.replace(node, expansion)
        graph = rewriter.finish()
        arrays_ = dict(arrays)
        arrays_.update({v: data.array(v.type) for v, data in graph.constants.items()})
        written: dict[Value, np.ndarray] = {}
        for inner_node in graph.nodes:
            results, changed = self.results(inner_node, arrays_, env)
            arrays_.update(zip(inner_node.results, results))
            arrays_.update(changed)
            written.update(changed)
        return [arrays_[value] for value in graph.outputs if isinstance(value, Value)], {
            value: array for value, array in written.items() if value in arrays
        }

    # -- comparison ------------------------------------------------------------------------------
    def differences(
        self,
        node: Node,
        arrays: Arrays,
        env: Mapping[Symbol, int],
        got: Sequence[np.ndarray | None],
        expected: Sequence[np.ndarray],
    ) -> list[Difference]:
        """How the results of a node differ from the expected ones, beyond what rounding explains.

        Rounding explains a difference from the result in float64 that is as small as what slightly
        different inputs would change, or as the error of eager torch.
        """
        got = [
            None if number in _FREE.get(node.op, ()) else array for number, array in enumerate(got)
        ]
        types = [value.type for value in node.results]
        found = find_differences(got, expected, types)
        return [
            difference
            for difference in found
            if not self._explained(node, arrays, env, got, expected, difference)
        ]

    def _explained(
        self,
        node: Node,
        arrays: Arrays,
        env: Mapping[Symbol, int],
        got: Sequence[np.ndarray | None],
        expected: Sequence[np.ndarray],
        difference: Difference,
    ) -> bool:
        number = difference.result
        have, want = got[number], expected[number]
        dtype = node.results[number].type.dtype
        assert have is not None  # what is not compared does not differ
        if have.shape != want.shape:
            return False
        if dtype.is_int and _TIES.match(node.op):
            return _same_elements(node, arrays, have, want)
        if _QUANTIZES.search(node.op) and dtype.is_int:
            return find_difference(number, have, want, dtype, 1.0) is None
        if not (dtype.is_float or dtype.is_complex):
            return False
        exact = self._wide(node, arrays, env, number, None)
        if exact is None or exact.shape != want.shape:
            return False
        wide = DType.complex128 if dtype.is_complex else DType.float64
        near = numbers(have, dtype).astype(wide.numpy)
        with np.errstate(all="ignore"):
            error = np.abs(numbers(want, dtype).astype(wide.numpy) - exact)
            error = np.where(np.isfinite(error), error, 0.0)
            moved = np.zeros(exact.shape)
            random = np.random.default_rng(0)
            for _ in range(_TRIALS):
                other = self._wide(node, arrays, env, number, random)
                if other is not None and other.shape == exact.shape:
                    change = np.abs(other - exact)
                    moved = np.maximum(moved, np.where(np.isfinite(change), change, 0.0))
        sizes = [largest(exact), *(largest(numbers(arrays[v], v.type.dtype)) for v in node.inputs)]
        rounding = np.minimum(
            np.maximum(_SENSITIVE * moved, 4 * error.max(initial=0.0)), _CAP * max(sizes)
        )
        limit = tolerance(exact, dtype) + rounding
        return find_difference(number, near, exact, wide, limit) is None

    def _wide(
        self,
        node: Node,
        arrays: Arrays,
        env: Mapping[Symbol, int],
        number: int,
        random: np.random.Generator | None,
    ) -> np.ndarray | None:
        """A result computed in float64; None if the operator cannot be. `random`: changes the inputs
        by the rounding of float32."""
        swapped: dict[Value, Value] = {}
        inputs: dict[Value, np.ndarray] = {}
        for value in node.inputs:
            wide = _widened(value.type.dtype)
            swapped[value] = Value(value.name, value.type.with_dtype(wide))
            array = arrays[value]
            if wide is not value.type.dtype:
                array = numbers(array, value.type.dtype).astype(wide.numpy)
            if random is not None and (wide.is_float or wide.is_complex):
                array = array * (1 + 2**-24 * random.choice((-1.0, 1.0), array.shape))
            inputs[swapped[value]] = np.asarray(array)

        def widen(arg: Any) -> Any:
            if isinstance(arg, Value):
                return swapped[arg]
            if isinstance(arg, tuple):
                return tuple(widen(item) for item in arg)
            return _widened(arg) if isinstance(arg, DType) else arg

        results = tuple(
            Value(value.name, value.type.with_dtype(_widened(value.type.dtype)))
            for value in node.results
        )
        copy = Node(node.op, widen(node.args), results, node.source, node.alias)
        try:
            result: np.ndarray = self.results(copy, inputs, env)[0][number]
        except Exception:  # whatever an operator has against float64
            return None
        return result


def _widened(dtype: DType) -> DType:
    if dtype.is_complex:
        return DType.complex128
    return DType.float64 if dtype.is_float else dtype


def _with_dtypes(node: Node) -> tuple[Arg, ...]:
    """The arguments. Operators that dequantize say the dtype of their input once more, which files
    leave out."""
    if node.op.partition(".")[0] not in _LIBRARIES or not node.inputs:
        return node.args
    names = registry.definition_of(node).parameters
    own = node.inputs[0].type.dtype
    return tuple(
        own if arg is None and name in ("dtype", "input_dtype") else arg
        for name, arg in zip(names, node.args)
    )


def _known(sizes: Sequence[Size], env: Mapping[Symbol, int]) -> tuple[Size, ...]:
    """Sizes, with numbers in place of those that are known."""
    return tuple(
        _dims.evaluate(size, env) if _dims.symbols(size) <= env.keys() else size for size in sizes
    )


def _written(node: Node, arrays: Arrays, env: Mapping[Symbol, int]) -> dict[Value, np.ndarray]:
    state, value = node.tensor("state"), node.tensor("value")
    start, dim = _dims.evaluate(node.size("start"), env), node.int("dim")
    copy = np.array(arrays[state])
    index = [slice(None)] * copy.ndim
    index[dim] = slice(start, start + arrays[value].shape[dim])
    copy[tuple(index)] = arrays[value]
    return {state: copy}


def _written_rows(
    node: Node, arrays: Arrays, value: np.ndarray, dim: int
) -> dict[Value, np.ndarray]:
    """The state with the rows along `dim` of a value at the positions `index`."""
    state = node.tensor("state")
    copy = np.array(arrays[state])
    rows = np.moveaxis(copy, node.int("dim"), 0)  # a view
    rows[arrays[node.tensor("index")]] = np.moveaxis(value, dim, 0)
    return {state: copy}


def _same_elements(node: Node, arrays: Arrays, have: np.ndarray, want: np.ndarray) -> bool:
    """Whether two results are indices of equal elements."""
    x = node.inputs[0]
    arguments = registry.definition_of(node).bind(node.args)
    if arguments.get("stable") or not x.type.rank:
        return False
    array = numbers(arrays[x], x.type.dtype)
    at = arguments.get("dim", -1)
    if not isinstance(at, int) or not array.shape[at]:
        return False
    if not ((have >= 0) & (have < array.shape[at])).all():
        return False
    indices = [
        operand if operand.ndim == array.ndim else np.expand_dims(operand, at)
        for operand in (have, want)
    ]
    gathered = [np.take_along_axis(array, index.astype(np.int64), at) for index in indices]
    return bool(
        (
            (gathered[0] == gathered[1])
            | ((gathered[0] != gathered[0]) & (gathered[1] != gathered[1]))
        ).all()
    )
