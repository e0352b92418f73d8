"""Modules that decide by sizes and take arguments of many forms, drawn by hypothesis, and the
comparison of a call with eager torch."""

from __future__ import annotations

import collections
import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

import purevk

# -- comparing -----------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What a call gave: a result, or an error."""

    result: Any = None
    error: Exception | None = None


def outcome_of(call: Callable[[], Any]) -> Outcome:
    try:
        with torch.no_grad():
            return Outcome(call())
    except Exception as error:  # compared with what eager torch does
        return Outcome(error=error)


def assert_no_difference(got: Outcome, wanted: Outcome, must_run: bool, what: Any) -> None:
    """A call gives what eager torch gives, or raises a typed error.

    Args:
        must_run: a typed error is a failure too where eager torch has a result.
    """
    if got.error is not None:
        assert isinstance(got.error, purevk.PurevkError), f"{what}: {got.error!r}"
        refused = must_run and wanted.error is None
        assert not refused, f"{what}: refused: {got.error}"
        return
    assert wanted.error is None, f"{what}: eager raises {wanted.error!r}, not purevk: {got.result}"
    theirs, their_nesting = tree_flatten(wanted.result)
    ours, our_nesting = tree_flatten(got.result)
    assert str(our_nesting) == str(their_nesting), what
    for one, two in zip(ours, theirs):
        if isinstance(one, np.ndarray):  # where no input is a tensor
            one = torch.from_numpy(one)
        assert type(one) is type(two), (what, one, two)
        if isinstance(two, torch.Tensor):
            assert one.dtype is two.dtype and one.shape == two.shape, (what, one, two)
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5, msg=lambda m: f"{what}: {m}")
        else:
            assert one == two or one != one, (what, one, two)


def cloned(value: Any) -> Any:
    """A copy, in which tensors share memory as they do in the original."""
    return copy.deepcopy(value)


# -- modules that decide by sizes ----------------------------------------------------------------
CONDITIONS: dict[str, Callable[[int, int, int], bool]] = {
    "n > k": lambda n, m, k: n > k,
    "n <= k": lambda n, m, k: n <= k,
    "n == k": lambda n, m, k: n == k,
    "n != k": lambda n, m, k: n != k,
    "n == 1": lambda n, m, k: n == 1,
    "n == 0": lambda n, m, k: n == 0,
    "n % k == 0": lambda n, m, k: n % k == 0,
    "n % k > 1": lambda n, m, k: n % k > 1,
    "n % m == 0": lambda n, m, k: m > 0 and n % m == 0,
    "n // k > 1": lambda n, m, k: n // k > 1,
    "n == m": lambda n, m, k: n == m,
    "n < m": lambda n, m, k: n < m,
    "n + k == m": lambda n, m, k: n + k == m,
    "2 * n == m": lambda n, m, k: 2 * n == m,
    "n * m > 4 * k": lambda n, m, k: n * m > 4 * k,
    "n * m % k == 0": lambda n, m, k: n * m % k == 0,
    "n ** 2 > 5 * k": lambda n, m, k: n**2 > 5 * k,
    "max(n, m) > k": lambda n, m, k: max(n, m) > k,
    "min(n, m) > k": lambda n, m, k: min(n, m) > k,
    "sym max": lambda n, m, k: torch.sym_max(n, m) > k,
    "or": lambda n, m, k: n > k or m % 2 == 0,
    "and": lambda n, m, k: n > k and m % 2 == 0,
    "not": lambda n, m, k: not (n > k),
    "chain": lambda n, m, k: 2 < n < k + 4,
    "n / 2 > k / 3": lambda n, m, k: n / 2 > k / 3,
    "int(n * 0.5) > k": lambda n, m, k: int(n * 0.5) > k - 1,
    "ceil": lambda n, m, k: math.ceil(n / 2) > k - 1,
    "floor": lambda n, m, k: math.floor(n / 2) == k,
    "sqrt": lambda n, m, k: math.sqrt(n) > 2,
    "n / m": lambda n, m, k: m > 0 and n / m > 1.5,
    "round": lambda n, m, k: round(n / 3) == k,
    "decimal": lambda n, m, k: n * 0.7 > k,
    "quotient": lambda n, m, k: m > 0 and n / m >= 0.3,
    "abs": lambda n, m, k: abs(n - m) > k,
    "shift": lambda n, m, k: (n & 1) == 0,
    "in": lambda n, m, k: n in (k, k + 2),
    "bool": lambda n, m, k: bool(n - k),
    "numel": lambda n, m, k: n * 3 > 4 * k,
}

# On x of size (n, 3) and y of size (m, 3); k is a small number.
STEPS: dict[str, Callable[[Any, Any, int], Any]] = {
    "scale": lambda x, y, k: x * x.shape[0] + k,
    "other": lambda x, y, k: x + y.shape[0] % (k + 1),
    "sum": lambda x, y, k: x + y.sum(0),
    "mean": lambda x, y, k: x + y.sum() / (y.shape[0] + 1),
    "rows": lambda x, y, k: x.reshape(-1, k, 3).sum(1),
    "columns": lambda x, y, k: x.reshape(k, -1).sum(0),
    "half": lambda x, y, k: x[: x.shape[0] // 2],
    "tail": lambda x, y, k: x[-k:],
    "from": lambda x, y, k: x[k:],
    "every": lambda x, y, k: x[::k],
    "cat": lambda x, y, k: torch.cat([x, y]),
    "repeat": lambda x, y, k: x.repeat(k, 1),
    "grid": lambda x, y, k: x[:, None] + y[None],
    "add": lambda x, y, k: x + y,
    "arange": lambda x, y, k: x + torch.arange(x.shape[0])[:, None],
    "full": lambda x, y, k: torch.full((x.shape[0] + k, 3), float(x.shape[0])),
    "zeros": lambda x, y, k: torch.cat([x, torch.zeros(y.shape[0], 3)]),
    "chunk": lambda x, y, k: x.chunk(2)[0],
    "split": lambda x, y, k: x.split(k)[-1],
    "stack": lambda x, y, k: sum(x.unbind(0)) + x,
    "loop": lambda x, y, k: x + sum(range(x.shape[0])),
    "flat": lambda x, y, k: x.flatten()[: 2 * k],
    "expand": lambda x, y, k: x[:1].expand(y.shape[0], 3),
    "view": lambda x, y, k: x.view(-1, 3, 1)[..., 0] + x.numel(),
    "transpose": lambda x, y, k: x.T @ x,
    "product": lambda x, y, k: x @ y.T,
    "pad": lambda x, y, k: torch.nn.functional.pad(x, (0, 0, 0, k * 4 - x.shape[0])),
    "resize": lambda x, y, k: torch.nn.functional.interpolate(
        x.T[None], scale_factor=k / 2, mode="nearest"
    )[0],
    "pool": lambda x, y, k: torch.nn.functional.avg_pool1d(x.T[None], k)[0],
    "max": lambda x, y, k: x + max(x.shape[0], y.shape[0]),
    "min": lambda x, y, k: x[: min(x.shape[0], y.shape[0])],
    "division": lambda x, y, k: x * (x.shape[0] / 2),
    "half of it": lambda x, y, k: x * (x.shape[0] * 0.5) - (y.shape[0] - 0.25),
    "inverse": lambda x, y, k: x * (1 / (x.shape[0] + 1)),
    "power": lambda x, y, k: x * (x.shape[0] + 1) ** 0.5 + x.shape[0] ** 2,
    "round": lambda x, y, k: x[: round(x.shape[0] / 2)],
    "floor": lambda x, y, k: x + math.floor(x.shape[0] / 3),
    "ceil": lambda x, y, k: x[: math.ceil(x.shape[0] / 2)],
    "narrow": lambda x, y, k: x.narrow(0, k, x.shape[0] - k),
    "roll": lambda x, y, k: x.roll(k, 0),
    "mask": lambda x, y, k: x + torch.ones(x.shape[0], x.shape[0]).tril().sum(1)[:, None],
    "unfold": lambda x, y, k: x.unfold(0, k, 1).sum(-1),
}


class Deciding(torch.nn.Module):
    """Takes x and y of 3 columns; each part is a branch on their rows, or an operator.

    Args:
        parts: ("if", name of a condition, k), or (name of a step, k).
    """

    def __init__(self, parts: Sequence[tuple[Any, ...]]) -> None:
        super().__init__()
        self.parts = tuple(parts)

    def forward(self, x: Any, y: Any) -> Any:
        for number, part in enumerate(self.parts):
            if part[0] == "if":
                taken = CONDITIONS[part[1]](x.shape[0], y.shape[0], part[2])
                x = x + (number + 1) * 10 if taken else x * (number + 2)
            else:
                x = STEPS[part[0]](x, y, part[1])
        return x

    def __repr__(self) -> str:
        return f"Deciding({list(self.parts)!r})"


_PART = st.one_of(
    st.tuples(st.just("if"), st.sampled_from(sorted(CONDITIONS)), st.integers(1, 5)),
    st.tuples(st.sampled_from(sorted(STEPS)), st.integers(1, 3)),
)
DECIDING = st.lists(_PART, min_size=1, max_size=3).map(Deciding)


# -- dynamic dims --------------------------------------------------------------------------------
@dataclass
class Shapes:
    """How the rows of x and y are declared, with example sizes that keep it.

    Attributes:
        bounds: least and largest size of each, as declared.
    """

    form: str
    sizes: tuple[int, int]
    spec: Any
    bounds: tuple[tuple[int, int | None], tuple[int, int | None]] = ((0, None), (0, None))

    def __repr__(self) -> str:
        return f"Shapes({self.form}, {self.sizes}, {self.bounds})"


@st.composite
def shapes(draw: Any) -> Shapes:
    auto, dynamic, Dim = torch.export.Dim.AUTO, torch.export.Dim.DYNAMIC, torch.export.Dim
    n, m = draw(st.integers(2, 9)), draw(st.integers(2, 9))
    form = draw(st.sampled_from(FORMS))
    if form == "auto":
        return Shapes(form, (n, m), ({0: auto}, {0: auto}))
    if form == "one auto":
        return Shapes(form, (n, m), ({0: auto}, None))
    if form == "dynamic":
        return Shapes(form, (n, m), ({0: dynamic}, {0: dynamic}))
    if form == "bounded auto":
        low, high = draw(st.integers(1, n)), draw(st.integers(n + 1, 14))
        spec = Dim.AUTO(min=low, max=high)
        return Shapes(form, (n, m), ({0: spec}, {0: auto}), ((low, high), (0, None)))
    if form == "named":
        low, high = draw(st.integers(1, n)), draw(st.integers(n + 1, 14))
        spec = Dim("rows", min=low, max=high)
        return Shapes(form, (n, m), ({0: spec}, {0: Dim("other")}), ((low, high), (0, None)))
    if form == "equal":
        spec = Dim("rows")
        return Shapes(form, (n, n), ({0: spec}, {0: spec}))
    if form == "derived":
        spec = Dim("rows", max=20)
        return Shapes(form, (n, 2 * n), ({0: spec}, {0: 2 * spec}))
    if form == "next":
        spec = Dim("rows", min=2, max=20)
        return Shapes(form, (n + 1, n), ({0: spec + 1}, {0: spec}))
    if form == "bounded dynamic":
        low, high = draw(st.integers(1, n)), draw(st.integers(n + 1, 14))
        spec = Dim.DYNAMIC(min=low, max=high)
        return Shapes(form, (n, m), ({0: spec}, {0: dynamic}), ((low, high), (0, None)))
    if form == "by name":
        return Shapes(form, (n, m), {"y": {0: Dim("other", max=14)}, "x": {0: auto}})
    if form == "static":
        return Shapes(form, (n, m), ({0: Dim.STATIC, 1: Dim.STATIC}, {0: auto}))
    if form == "affine":
        spec = Dim("rows", max=20)
        return Shapes(form, (2 * n + 1, n), ({0: 2 * spec + 1}, {0: spec}))
    return Shapes(form, (n, m), None)


FORMS = [
    "auto", "one auto", "dynamic", "bounded auto", "bounded dynamic", "named", "by name", "equal",
    "derived", "affine", "next", "static", "none",
]  # fmt: skip
SIZES = (
    st.tuples(st.integers(0, 12), st.integers(0, 12))
    | st.sampled_from([(70, 3), (5, 130)])
    | st.integers(0, 12).flatmap(
        lambda n: st.sampled_from([(n, n), (n, 2 * n), (2 * n + 1, n), (n, 1), (1, n)])
    )
)


def tensor(rows: int, seed: int = 0) -> torch.Tensor:
    """Small whole numbers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(rows * 31 + seed)
    return torch.randint(-4, 5, (rows, 3), generator=generator).float()


# -- signatures ----------------------------------------------------------------------------------
class Taking(torch.nn.Module):
    """Takes arguments of any form and returns a number for each leaf, so that a leaf that is taken
    for another one is seen.

    Args:
        writes: whether the first tensor is written in place.
    """

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.writes = writes

    def forward(self, a: Any, b: Any = 2, *, c: Any = None, d: Any = True) -> Any:
        leaves = tree_leaves((a, b, c, d))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if self.writes and tensors:
            tensors[0].add_(1)
        total = torch.zeros(3)
        for number, leaf in enumerate(leaves, 1):
            if isinstance(leaf, str):
                total = total + number * len(leaf)
            elif leaf is True or leaf is False:
                total = total * 2 if leaf else total - number
            elif leaf is not None:
                total = total * 3 + leaf * number
        return {"total": total, "nested": [(total + 1,), total * 2], "count": len(leaves)}

    def __repr__(self) -> str:
        return f"Taking({self.writes})"


@dataclass
class Calls:
    """A module, how it is exported, and other calls of it."""

    model: Taking
    example: tuple[tuple[Any, ...], dict[str, Any]]
    others: list[tuple[tuple[Any, ...], dict[str, Any]]]


Named = collections.namedtuple("Named", "u v")


@dataclasses.dataclass
class Pair:
    """A container that torch.export knows."""

    a: Any
    b: Any = None


torch.export.register_dataclass(Pair, serialized_type_name="tests.drawn.Pair")

_BASE = torch.arange(12.0)
# May be given twice; the last ones are views of one storage.
_POOL = [
    torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, -5.0, 6.0]),
    _BASE[:3], _BASE[2:5], _BASE[1:10:3], _BASE.view(4, 3)[:, 0][:3], _BASE[:1].expand(3),
]  # fmt: skip
_LEAF = st.one_of(
    st.sampled_from(_POOL),
    st.sampled_from([np.float32(2.5), np.int64(3)]),
    st.integers(0, 50).map(lambda seed: tensor(1, seed)[0]),
    st.sampled_from([None, True, False, 0, 1, 2, 5, -3, 0.0, 1.0, 2.5, -0.5, "s", "text"]),
)
_VALUE = st.one_of(
    _LEAF,
    _LEAF,
    st.lists(_LEAF, min_size=1, max_size=2),
    st.lists(_LEAF, min_size=1, max_size=2).map(tuple),
    st.lists(st.tuples(st.sampled_from("xyz"), _LEAF), min_size=1, max_size=2).map(dict),
    st.lists(st.tuples(st.sampled_from("xyz"), _LEAF), min_size=1, max_size=1).map(
        lambda p: [dict(p)]
    ),
    st.builds(Pair, _LEAF, st.none() | _LEAF),
    st.builds(Named, _LEAF, st.lists(_LEAF, min_size=1, max_size=2)),
    st.builds(lambda x, y: collections.OrderedDict(z=x, a=y), _LEAF, _LEAF),
)


@st.composite
def _call(draw: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    positional = draw(st.integers(1, 2))
    args = tuple(draw(_VALUE) for _ in range(positional))
    names = ["b", "c", "d"] if positional == 1 else ["c", "d"]
    chosen = draw(st.permutations(names))[: draw(st.integers(0, len(names)))]
    return args, {name: draw(_VALUE) for name in chosen}


def _changed(draw: Any, value: Any) -> Any:
    """A value that is nested as another one, with other leaves."""
    leaves, nesting = tree_flatten(value)
    made = [draw(_LEAF) if draw(st.booleans()) else leaf for leaf in leaves]
    return tree_unflatten(made, nesting)


@st.composite
def calls(draw: Any) -> Calls:
    example = draw(_call())
    others = [
        _changed(draw, example) if draw(st.integers(0, 3)) else draw(_call()) for _ in range(4)
    ]
    return Calls(Taking(draw(st.booleans())), example, others)


# -- nested inputs of dynamic sizes --------------------------------------------------------------
class Nested(torch.nn.Module):
    """Decides by the rows of each tensor among nested arguments.

    Args:
        parts: a condition and a small number for each tensor; the last one serves the rest.
        writes: whether the first tensor is written in place.
    """

    def __init__(self, parts: Sequence[tuple[str, int]], writes: bool) -> None:
        super().__init__()
        self.parts, self.writes = tuple(parts), writes

    def forward(self, a: Any, b: Any = None, *, c: Any = 1.5) -> Any:
        leaves = tree_leaves((a, b, c))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        total = torch.zeros(3)
        for number, leaf in enumerate(tensors):
            name, k = self.parts[min(number, len(self.parts) - 1)]
            rows, others = leaf.shape[0], tensors[number - 1].shape[0]
            rest = leaf.sum(0) * (number + 1)
            total = total * 2 + (rest if CONDITIONS[name](rows, others, k) else rest - rows)
        for leaf in leaves:
            total = total + leaf if isinstance(leaf, (int, float)) else total
        if self.writes:
            tensors[0].mul_(2)
        return {"total": total, "first": Named(tensors[0] + total, [len(leaves)])}

    def __repr__(self) -> str:
        return f"Nested({self.parts!r}, {self.writes})"


@dataclass
class NestedCalls:
    """A module, its example, how its dims are declared, and other calls, with the rows of each."""

    model: Nested
    form: str
    example: tuple[tuple[Any, ...], dict[str, Any]]
    spec: Any
    others: list[tuple[tuple[Any, ...], dict[str, Any]]]

    def __repr__(self) -> str:
        shapes = [tree_map(lambda x: getattr(x, "shape", x), each) for each in self._calls()]
        return f"NestedCalls({self.model}, {self.form}, {shapes})"

    def _calls(self) -> list[Any]:
        return [self.example, *self.others]


# How tensors are nested: `t` is the next tensor.
_NESTINGS: list[Callable[[Callable[[], Any]], tuple[tuple[Any, ...], dict[str, Any]]]] = [
    lambda t: ((t(),), {}),
    lambda t: ((t(), t()), {}),
    lambda t: (([t(), t()],), {"c": 2}),
    lambda t: (({"u": t(), "a": [t()]}, 3), {}),
    lambda t: ((Pair(t(), t()),), {"c": t()}),
    lambda t: ((Named(t(), [t()]), None), {}),
    lambda t: ((t(),), {"c": (t(), {"k": t()})}),
]
NESTED_FORMS = ["auto", "dynamic", "named", "shared", "partly", "none"]


@st.composite
def nested_calls(draw: Any) -> NestedCalls:
    parts = draw(
        st.lists(
            st.tuples(st.sampled_from(sorted(CONDITIONS)), st.integers(1, 5)),
            min_size=1,
            max_size=3,
        )
    )
    model, form = Nested(parts, draw(st.booleans())), draw(st.sampled_from(NESTED_FORMS))
    nest = draw(st.sampled_from(_NESTINGS))

    def made(sizes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # As drawn, transposed in memory, or a part of a larger tensor.
        kinds = (
            lambda x: x,
            lambda x: x.T.contiguous().T,
            lambda x: torch.cat([x, x], 1)[:, :3],
        )
        tensors = (draw(st.sampled_from(kinds))(tensor(n, at)) for at, n in enumerate(sizes))
        return nest(lambda: next(tensors))

    equal = form == "shared"
    one = draw(st.integers(2, 8))
    example = made([one if equal else draw(st.integers(2, 8)) for _ in range(3)])
    others = []
    for _ in range(3):
        same = draw(st.integers(0, 9))
        others.append(
            made([same if equal or draw(st.booleans()) else draw(st.integers(0, 9)) for _ in "123"])
        )
    return NestedCalls(model, form, example, _declared(form, example), others)


def _declared(form: str, example: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    Dim, numbers = torch.export.Dim, iter(range(9))
    shared = Dim("shared", max=30)

    def spec(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return None
        number = next(numbers)
        return {
            "auto": {0: Dim.AUTO},
            "dynamic": {0: Dim.DYNAMIC},
            "named": {0: Dim(f"rows{number}", max=20 + number)},
            "shared": {0: shared},
            "partly": {0: Dim.AUTO} if number == 0 else None,
        }[form]

    if form == "none":
        return None
    args, kwargs = tree_map(spec, example)
    names = ("a", "b", "c")
    return {**dict(zip(names, args)), **kwargs}
