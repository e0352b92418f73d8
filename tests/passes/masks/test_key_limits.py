"""Masks built from positions, against eager torch: which become limits of keys, and which stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

import purevk
from purevk.dtypes import DType
from purevk.ir import Arg, Graph, Node, TensorType, Value
from purevk.passes.masks.key_limits import find_key_limits
from tests.passes.harness import TRAITS

pytestmark = pytest.mark.device

QUERIES, KEYS, BATCH = 7, 19, 2
LOW, HIGH = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


class Masks(torch.nn.Module):
    """Attention with each of several masks. A mask is a function of this module, the positions of
    the queries int64 [S], and lengths int64 [B]."""

    def __init__(self, masks: list[Callable[..., torch.Tensor]]) -> None:
        super().__init__()
        self.masks = masks
        torch.manual_seed(0)
        for name, rows in (("q", QUERIES), ("k", KEYS), ("v", KEYS)):
            self.register_buffer(name, torch.randn(BATCH, 2, rows, 8))
        self.register_buffer("rows", torch.arange(KEYS))
        self.register_buffer("from_2", torch.arange(2, KEYS + 2))
        table = torch.ones(KEYS, KEYS, dtype=torch.bool).tril()
        self.register_buffer("table", table)
        self.register_buffer("window", table & ~table.tril(-4))
        self.register_buffer("added", torch.zeros(KEYS, KEYS).masked_fill(~table, -torch.inf))
        self.register_buffer("holes", table & (torch.arange(KEYS) % 3 > 0))
        self.register_buffer("soft", torch.randn(KEYS, KEYS))

    def forward(self, positions: torch.Tensor, lengths: torch.Tensor) -> list[torch.Tensor]:
        return [
            functional.scaled_dot_product_attention(
                self.q, self.k, self.v, attn_mask=mask(self, positions, lengths)
            )
            for mask in self.masks
        ]


def _line(m: Any) -> torch.Tensor:
    return torch.arange(KEYS)


def _row(m: Any) -> torch.Tensor:
    return torch.arange(QUERIES)[:, None]


def packed(positions: torch.Tensor) -> torch.Tensor:
    """Whether a query and a key are in one of several sequences, as transformers finds it out."""
    jumps = torch.diff(positions, prepend=positions[:1] - 1) != 1
    sequence = jumps.cumsum(-1)
    return sequence[torch.arange(QUERIES)][:, None] == sequence[torch.arange(KEYS)]


# Masks that become limits: of the last key alone, or of the first one too.
LAST: dict[str, Callable[..., torch.Tensor]] = {
    "stored positions": lambda m, p, n: m.rows[None, :] <= p[:, None],
    "counted": lambda m, p, n: torch.arange(KEYS) < p[:, None],
    "other side": lambda m, p, n: p[:, None] >= m.from_2,
    "difference": lambda m, p, n: p[:, None] - torch.arange(KEYS) >= 0,
    "turned": lambda m, p, n: 5 - torch.arange(KEYS) > -p[:, None],
    "not after": lambda m, p, n: ~(m.rows > p[:, None]),
    "narrowed": lambda m, p, n: (m.rows + 2**20).int() <= p.int()[:, None] + 2**20,
    "int32": lambda m, p, n: m.rows.int() <= torch.arange(QUERIES).int()[:, None] + 3,
    "tril": lambda m, p, n: torch.ones(QUERIES, KEYS, dtype=torch.bool).tril(2),
    "triu of -inf": lambda m, p, n: torch.full((QUERIES, KEYS), -torch.inf).triu(3),
    "chosen": lambda m, p, n: torch.where(m.rows <= p[:, None], 0.0, -torch.inf),
    "filled": lambda m, p, n: torch.zeros(QUERIES, KEYS).masked_fill(m.rows > p[:, None], -torch.inf),
    "rows of a table": lambda m, p, n: m.table[p.clamp(-KEYS, KEYS - 1)],
    "selected": lambda m, p, n: m.table.index_select(0, p.clamp(0, KEYS - 1))[None, None],
    "narrow": lambda m, p, n: m.table.narrow(0, 4, QUERIES),
    "added table": lambda m, p, n: m.added[5 : 5 + QUERIES],
    "lengths": lambda m, p, n: (m.rows < n[:, None])[:, None, None],
    "both": lambda m, p, n: (m.rows <= p[:, None]) & (m.rows < n[:, None, None, None]),
    "prefix": lambda m, p, n: (m.rows <= _row(m)) | (m.rows < n[:, None, None, None]),
    "valid rows": lambda m, p, n: (m.rows <= _row(m) + 9) & (p[:, None] >= 0),
    "true or": lambda m, p, n: torch.where(p[:, None] > 3, True, m.rows < 4),
    "two added": lambda m, p, n: (
        m.added[:QUERIES] + torch.where(m.rows < n[:, None, None, None], 0.0, -torch.inf)
    ),
    "heads": lambda m, p, n: (m.rows <= torch.tensor([[[3]], [[8]]]) + _row(m)).expand(2, 2, -1, -1),
    "cut": lambda m, p, n: (torch.arange(2 * KEYS) <= p[:, None] + KEYS)[:, KEYS:],
    "packed": lambda m, p, n: packed(torch.arange(KEYS)) & (m.rows <= p[:, None]),
    "compared": lambda m, p, n: torch.where((m.rows <= p[:, None]) == True, 0, -torch.inf),  # noqa: E712
}  # fmt: skip
BOTH: dict[str, Callable[..., torch.Tensor]] = {
    "sliding": lambda m, p, n: (m.rows <= p[:, None]) & (m.rows > p[:, None] - 5),
    "delta": lambda m, p, n: ((d := p[:, None] - m.rows) >= 0) & (d < 4) & (m.rows < n[:, None, None, None]),
    "stored window": lambda m, p, n: m.window[p.clamp(0, KEYS - 1)],
    "equal": lambda m, p, n: m.rows == p[:, None],
    "after": lambda m, p, n: m.rows >= p[:, None],
    "triu": lambda m, p, n: torch.ones(QUERIES, KEYS, dtype=torch.bool).triu(1).tril(6),
    "not tril": lambda m, p, n: ~torch.ones(QUERIES, KEYS, dtype=torch.bool).tril(-2),
    "transposed": lambda m, p, n: (m.rows > p[:, None] - n[:, None, None])[None].transpose(0, 1),
}  # fmt: skip
# Limits, and a mask of what else they say.
REST: dict[str, Callable[..., torch.Tensor]] = {
    "padding": lambda m, p, n: (m.rows <= p[:, None]) & m.holes[n][:, None, None],
    "hidden columns": lambda m, p, n: m.added[3 : 3 + QUERIES].masked_fill(m.holes[n][:, None, None], -torch.inf),
    "moved": lambda m, p, n: ((m.rows < 12) & m.holes)[p.clamp(0, KEYS - 1)],
}  # fmt: skip
STORED: dict[str, Callable[..., torch.Tensor]] = {
    "holes": lambda m, p, n: m.holes[p.clamp(0, KEYS - 1)],
    "soft": lambda m, p, n: m.soft[p.clamp(0, KEYS - 1)],
    "lowest": lambda m, p, n: torch.where(m.rows <= p[:, None], 0.0, -1e30),
    "not equal": lambda m, p, n: m.rows != p[:, None],
    "either side": lambda m, p, n: (m.rows < 3) | (m.rows > p[:, None]),
    "even": lambda m, p, n: m.rows % 2 <= p[:, None],
    "unsorted": lambda m, p, n: m.holes.long().argmax(0) <= p[:, None],
    "cut": lambda m, p, n: (m.rows + (2**32 - 5)).int() <= p.int()[:, None] - 2,
    "doubled": lambda m, p, n: m.rows + m.rows <= p[:, None],
    "packed at a jump": lambda m, p, n: packed(torch.cat([torch.arange(9), torch.arange(KEYS - 9)])),
    "of scores": lambda m, p, n: m.soft[0] < p[:, None],
}  # fmt: skip
POSITIONS = [
    (torch.arange(3, 3 + QUERIES), torch.tensor([9, 4])),
    # Unsorted, before the first key and after the last one, and without any key.
    (torch.tensor([0, -1, 40, 2, -9, 2**40, 18]), torch.tensor([0, 18])),
]


def check(masks: dict[str, Callable[..., torch.Tensor]], calls: Any = POSITIONS) -> dict[str, Node]:
    """Compares the results with eager torch; returns the attention of each mask."""
    module = Masks(list(masks.values()))
    with purevk.compile(module, calls[0]) as program:
        for inputs in calls:
            for name, made, wanted in zip(masks, program.forward(*inputs), module(*inputs)):
                torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5, msg=name)
        graph = program.methods["forward"].executable.plan.graph
    made_by = graph.producers()
    return {name: made_by[output] for name, output in zip(masks, graph.outputs)}


def test_last_keys() -> None:
    for name, node in check(LAST).items():
        limits = node.optional_tensor("limits")
        assert limits is not None and node.arg("mask") is None, name
        assert limits.type.dims[-1] == 1, name


def test_positions_that_are_no_positions() -> None:
    names = ("stored positions", "counted", "other side", "not after", "chosen", "valid rows")
    calls = [(torch.tensor([LOW, HIGH, 2, LOW, HIGH, 5, HIGH]), torch.tensor([LOW, HIGH]))]
    check({"lengths": LAST["lengths"], **{name: LAST[name] for name in names}}, calls)


def test_first_and_last_keys() -> None:
    for name, node in check(BOTH).items():
        limits = node.optional_tensor("limits")
        assert limits is not None and node.arg("mask") is None, name
        assert limits.type.dims[-1] == 2, name


def test_the_rest_stays_a_mask() -> None:
    for name, node in check(REST).items():
        mask = node.optional_tensor("mask")
        assert node.arg("limits") is not None and mask is not None, name
        assert name == "moved" or mask.type.numel == BATCH * KEYS, name


def test_other_masks_stay() -> None:
    for name, node in check(STORED).items():
        assert node.arg("limits") is None and node.arg("mask") is not None, name


def test_long_and_branching_masks() -> None:
    """Masks that read one step twice, over and over, and long ones: no path is followed twice, and
    only so many steps."""

    def twice(m: Any, p: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        rows, mask = m.rows, m.rows <= p[:, None]
        for _ in range(15):
            rows, mask = rows + (rows - rows), ~(mask & mask)
        return ~mask & (rows > 2)

    def long(m: Any, p: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        rows = m.rows
        for _ in range(120):
            rows = 1 - rows
        return rows <= p[:, None]

    found = check({"twice": twice, "long": long})
    assert found["twice"].arg("limits") is not None and found["twice"].arg("mask") is None
    assert found["long"].arg("limits") is None


def test_the_pass_can_be_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUREVK_SKIP_PASSES", "find_key_limits")
    masks = {name: LAST[name] for name in ("stored positions", "triu of -inf")}
    for node in check({**masks, "sliding": BOTH["sliding"]}).values():
        assert node.arg("limits") is None and node.arg("mask") is not None


class Cached(torch.nn.Module):
    """Attention over a cache that grows: its length is a buffer, which each call writes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.register_buffer("keys", torch.randn(1, 2, KEYS, 8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.ones(KEYS, KEYS, dtype=torch.bool).tril())

    def forward(self, q: torch.Tensor, start: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = torch.arange(q.shape[2])
        positions = rows + self.count
        self.count.add_(q.shape[2])
        mask = torch.arange(KEYS) <= positions[:, None]
        first = start.item()
        torch._check(first >= 0)
        torch._check(first + q.shape[2] <= KEYS)
        table = self.table.narrow(0, first, q.shape[2])
        attend = functional.scaled_dot_product_attention
        valid = torch.arange(KEYS) < self.count
        return (
            attend(q, self.keys, self.keys, attn_mask=mask),
            attend(q, self.keys, self.keys, attn_mask=table),
            attend(q, self.keys, self.keys, attn_mask=valid[None]),
            mask,
        )


def test_sizes_and_positions_that_a_call_gives() -> None:
    """The mask is an output too; the length of the cache before and after it grows."""
    module, expected = Cached(), Cached()
    calls = [
        (torch.randn(1, 2, rows, 8), torch.tensor(start))
        for rows, start in ((3, 0), (5, 14), (2, 9))
    ]
    shapes = ({2: torch.export.Dim("rows", min=2, max=KEYS)}, None)
    with purevk.compile(module, calls[0], shapes) as program:
        for inputs in calls:
            for made, wanted in zip(program.forward(*inputs), expected(*inputs), strict=True):
                torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5)
        graph = program.methods["forward"].executable.plan.graph
    found = [node for node in graph.nodes if node.op == "purevk.attention"]
    assert len(found) == 3
    assert all(node.arg("limits") is not None and node.arg("mask") is None for node in found)


def graph_of_a_length(dtype: DType, stored: bool) -> Graph:
    """Attention over as many keys as a state says. If `stored`, it changes between the comparison
    and the mask."""
    count, q = (
        Value("count", TensorType(dtype, ())),
        Value("q", TensorType(DType.float32, (1, 1, 2, 8))),
    )
    nodes: list[Node] = []

    def emit(op: str, dims: tuple[int, ...], dtype: DType, *args: Arg) -> Value:
        made = Value(f"value_{len(nodes)}", TensorType(dtype, dims))
        nodes.append(Node(op, args, (made,), "test"))
        return made

    length = emit("aten.view.default", (1,), dtype, count, (1,))
    line = emit("purevk.iota", (2,), dtype, 2, dtype)
    seen = emit("aten.lt.Tensor", (2,), DType.bool, line, length)
    more = emit("aten.add.Tensor", (), dtype, count, 1, 1)
    store = Node("purevk.store", (count, more), (), "test")
    nodes += [store] * stored
    mask = emit("aten.view.default", (1, 2), DType.bool, seen, (1, 2))
    nodes += [store] * (not stored)
    args = (q, q, q, mask, 1.0, False, 0, None, None, (), (), None)
    result = emit("purevk.attention", q.type.dims, DType.float32, *args)
    return Graph("forward", (q,), tuple(nodes), (result,), {}, {count: None})


def test_a_mask_that_is_a_state_is_not_read_later() -> None:
    """What else a mask says is a view of a state, which changes before attention reads it."""
    flags, q = (
        Value("flags", TensorType(DType.bool, (2,))),
        Value("q", TensorType(DType.float32, (1, 1, 2, 8))),
    )
    line, seen, mask, view, result = (
        Value(name, TensorType(dtype, dims))
        for name, dtype, dims in (
            ("line", DType.int32, (2,)),
            ("seen", DType.bool, (2,)),
            ("mask", DType.bool, (1, 2)),
            ("view", DType.bool, (1, 2)),
            ("result", DType.float32, q.type.dims),
        )
    )
    args = (q, q, q, mask, 1.0, False, 0, None, None, (), (), None)
    nodes = [
        Node("purevk.iota", (2, DType.int32), (line,), "test"),
        Node("aten.lt.Scalar", (line, 1), (seen,), "test"),
        Node("aten.view.default", (flags, (1, 2)), (view,), "test"),
        Node("aten.bitwise_and.Tensor", (seen, view), (mask,), "test"),
        Node("purevk.attention", args, (result,), "test"),
    ]
    for at, limited in ((None, True), (4, False), (0, False)):
        store = [Node("purevk.store", (flags, seen), (), "test")]
        order = nodes if at is None else nodes[: at or 2] + store + nodes[at or 2 :]
        graph = Graph("forward", (q,), tuple(order), (result,), {}, {flags: None})
        assert (find_key_limits(graph, TRAITS).nodes[-1].arg("limits") is not None) == limited


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("dtype", [DType.int32, DType.int64])
def test_what_new_nodes_may_read(dtype: DType, stored: bool) -> None:
    """No state that has changed since, and no int64 on a device without it."""
    for has_int64 in (False, True):
        features = TRAITS.features if has_int64 else TRAITS.features - {"int64"}
        graph = find_key_limits(
            graph_of_a_length(dtype, stored), replace(TRAITS, features=features)
        )
        node = next(node for node in graph.nodes if node.op == "purevk.attention")
        expected = not stored and (has_int64 or dtype is DType.int32)
        assert (node.arg("limits") is not None) == expected
        assert (node.arg("mask") is None) == expected


@pytest.mark.parametrize("compiled", [False, True])
def test_a_table_that_changes(compiled: bool) -> None:
    """The content of a constant mask is taken anew."""

    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(KEYS, KEYS, dtype=torch.bool).tril())

        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return functional.scaled_dot_product_attention(q, q, q, attn_mask=self.table)

    module, q = Table(), torch.randn(1, 2, KEYS, 8)
    torch._dynamo.reset()
    called: Any = (
        torch.compile(module, backend="purevk") if compiled else purevk.compile(module, (q,))
    )
    for change in (None, lambda t: t.logical_not_(), lambda t: t.random_(2)):
        if change is not None:
            change(module.table)
        module.table[:, 0] = True
        torch.testing.assert_close(called(q), module(q), rtol=1e-5, atol=1e-5)
