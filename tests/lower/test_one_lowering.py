"""One lowering serves all sizes within the bounds. Passes and kernels that decide about a dynamic
size leave a guard, and a call that breaks it is lowered and compiled again: right, but slow, and
nobody notices. No device."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from purevk.dtypes import DType
from purevk.errors import PurevkError, UnsupportedOperatorError
from purevk.graph.context import typical_traits
from purevk.ir import Graph, Guard, GuardLog, Symbol, Value, dims
from purevk.ops.registry import ShapeError
from purevk.passes.pipeline import optimize
from purevk.schedule.planning import make_plan
from purevk.tuning import DEFAULT
from purevk.tuning.families.software import SOFTWARE
from tests.ops.harness import Recorder
from tests.ops.sample_cases import spread
from tests.ops.samples import Call, calls, sampled

FACTORS = (2**14, 2**10, 2**6)  # from the sizes of samples to bounds: the first that fits
ELEMENTS = 2**24  # of a tensor at its bounds, at most
TENSORS = 64  # as many results as a size says are many nodes
PROFILES = {"gpu": DEFAULT, "software": SOFTWARE}
VALUES = (2, 3, 4, 5, 6, 7, 8, 13, 16, 31, 64)

# Operators with a lowering for some sizes, and why.
SEVERAL = {
    "aten._fft_c2c.default": "the factors of the length are the steps of the kernel",
    "aten._fft_c2r.default": "the same as c2c",
    "aten._fft_r2c.default": "the same as c2c",
    "aten.convolution.default": "the sizes of the weight are numbers of the kernel",
    "aten.diagonal_scatter.default": "torch takes no sizes that break the guard, its meta kernel does",
    "aten.fractional_max_pool2d.default": "steps between windows are rounded by the host, as torch does",
    "aten.fractional_max_pool3d.default": "the same as in 2 dims",
    "aten.select_scatter.default": "the same as diagonal_scatter",
}


def graphs(call: Call) -> Iterator[tuple[Graph, set[Guard]]]:
    """Graphs of a call in which equal sizes are one dynamic size: one of them, with a large bound, or
    all of them. And what the shape function decided."""
    tensors = [each for each in pytree.tree_leaves((call.args, call.kwargs)) if is_tensor(each)]
    sizes = sorted({size for tensor in tensors for size in tensor.shape if size > 1})
    for factors in (*(((size, n) for n in FACTORS) for size in sizes[:2]), ((None, 1),)):
        found = (graph_of(call, size, factor) for size, factor in factors)
        largest = next((each for each in found if each is not None), None)
        if largest is not None:
            yield largest


def graph_of(call: Call, size: int | None, factor: int) -> tuple[Graph, set[Guard]] | None:
    """The graph with one dynamic size, or all dynamic; None if a tensor is too large or the sizes do
    not go together."""
    recorder, values = Recorder(), {}

    def value(leaf: Any) -> Any:
        if not is_tensor(leaf):
            return leaf
        if id(leaf) not in values:
            moves = [n > 1 and size in (n, None) for n in leaf.shape]
            bounds = [n * factor if each else n for n, each in zip(leaf.shape, moves)]
            dtype = DType.from_torch(leaf.dtype)
            values[id(leaf)] = recorder.importer.input(dtype, bounds, moves)
        return values[id(leaf)]

    args, kwargs = pytree.tree_map(value, (call.args, call.kwargs))
    try:
        with GuardLog() as log:
            results = pytree.tree_leaves(recorder.call(call.overload, args, kwargs))
            graph = recorder.importer.finish([each for each in results if each is not None])
    except PurevkError:
        return None
    made = [each for each in (*graph.inputs, *graph.outputs) if isinstance(each, Value)]
    if len(made) > TENSORS or any(dims.upper(each.type.numel) > ELEMENTS for each in made):
        return None
    return (graph, set(log.guards)) if is_valid(call, graph, log.guards, bounds_of(graph)) else None


def is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def bounds_of(graph: Graph) -> dict[Symbol, int]:
    """The largest sizes."""
    symbols = (
        symbol
        for value in graph.inputs
        if isinstance(value, Value)
        for size in value.type.dims
        for symbol in dims.symbols(size)
    )
    return {symbol: symbol.upper for symbol in symbols}


def is_valid(call: Call, graph: Graph, decided: Iterable[Guard], env: Mapping[Symbol, int]) -> bool:
    """Whether the graph and torch take the call with these sizes."""
    return all(guard.holds(env) for guard in decided) and takes(call, graph, env)


def takes(call: Call, graph: Graph, env: Mapping[Symbol, int]) -> bool:
    """Whether torch takes the call with these sizes."""
    inputs = iter([value for value in graph.inputs if isinstance(value, Value)])
    seen: dict[int, torch.Tensor] = {}

    def smaller(leaf: Any) -> Any:
        if not is_tensor(leaf):
            return leaf
        if id(leaf) not in seen:
            sizes = [dims.evaluate(size, env) for size in next(inputs).type.dims]
            seen[id(leaf)] = torch.empty(sizes, dtype=leaf.dtype, device="meta")
        return seen[id(leaf)]

    try:
        args, kwargs = pytree.tree_map(smaller, (call.args, call.kwargs))
        call.overload(*args, **kwargs)
    except NotImplementedError:
        pass  # torch has no meta kernel
    except Exception:
        return False
    return True


def broken(call: Call, graph: Graph, decided: set[Guard], guard: Guard) -> dict[Symbol, int] | None:
    """Sizes above 1 that the operator takes and that break a guard."""
    if guard in decided or (guard.op in ("==", "!=") and 1 in (guard.left, guard.right)):
        return None  # broadcasting decides about sizes of 1
    symbols = sorted({*guard.symbols, *(s for each in decided for s in each.symbols)}, key=str)
    choices = [
        sorted({n for n in (*VALUES, s.upper // 2, s.upper - 1, s.upper) if 2 <= n <= s.upper})
        for s in symbols
    ]
    for values in itertools.islice(itertools.product(*choices), 2000):
        env = bounds_of(graph) | dict(zip(symbols, values))
        if not guard.holds(env) and is_valid(call, graph, decided, env):
            return dict(zip(symbols, values))
    return None


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("most", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sampled())
def test_one_lowering(name: str, most: int, profile: str) -> None:
    found, traits = [], dataclasses.replace(typical_traits(), profile=PROFILES[profile])
    for call in spread(calls().get(name, []), most):
        for graph, decided in graphs(call):
            try:
                with GuardLog() as log:
                    make_plan(optimize(graph, traits), traits)
            except (ShapeError, UnsupportedOperatorError):
                continue  # torch's meta kernel has not noticed, or a temporary is too large
            for guard in log.guards:
                if (env := broken(call, graph, decided, guard)) is not None:
                    found.append(f"{guard}, broken by {env}: {call.key}")
    assert not found or name in SEVERAL, "\n".join(found[:8])
