"""Passes keep the meaning of a graph: its nodes, interpreted by torch, give the same before and
after. No device."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

import purevk.ops  # noqa: F401
from purevk.dtypes import DType
from purevk.ir import Dim, Graph, GuardLog, Node, TensorType, Value
from purevk.ir.host import HOST
from purevk.ir.verify import verify
from purevk.passes.fusion.pointwise import fuse_pointwise, to_programs
from purevk.passes.matmul.batch_norm import fold_batch_norm
from purevk.passes.pipeline import passes
from purevk.passes.placement import assign_hosts
from purevk.passes.simplify import drop_empty, drop_no_ops, drop_unused, merge_equal
from purevk.schedule.constants import split_constant
from purevk.schedule.segments import segments
from purevk.schedule.storage import assign_storage
from tests.ops.harness import Recorder, tensor
from tests.passes.harness import TRAITS, interpret, random_graph

aten = torch.ops.aten


def assert_same(before: list[torch.Tensor], after: list[torch.Tensor], **tolerance: float) -> None:
    assert len(before) == len(after)
    for a, b in zip(before, after):
        assert a.dtype is b.dtype and a.shape == b.shape
        torch.testing.assert_close(a, b, equal_nan=True, **tolerance or {"rtol": 0, "atol": 0})


@pytest.mark.parametrize(
    "each",
    [
        drop_unused,
        drop_no_ops,
        merge_equal,
        drop_empty,
        fold_batch_norm,
        assign_hosts,
    ],
    ids=[
        "drop_unused",
        "drop_no_ops",
        "merge_equal",
        "drop_empty",
        "fold_batch_norm",
        "assign_hosts",
    ],
)
def test_random_graphs(each: Any) -> None:
    for seed in range(60):
        graph, inputs = random_graph(seed)
        verify(graph)
        changed = each(graph, TRAITS)
        verify(changed)
        assert [value.type for value in changed.outputs] == [
            value.type for value in graph.outputs
        ], seed
        assert_same(interpret(graph, inputs), interpret(changed, inputs))


def test_all_together_shrink() -> None:
    """The cleaning passes, repeated, come to an end and leave less."""
    fewer = 0
    for seed in range(60):
        graph, inputs = random_graph(seed)
        wanted, now, sizes = interpret(graph, inputs), graph, []
        for _ in range(6):
            now = drop_unused(merge_equal(drop_no_ops(now, TRAITS), TRAITS), TRAITS)
            verify(now)
            sizes.append(len(now.nodes))
        assert sizes == sorted(sizes, reverse=True) and sizes[-1] == sizes[-2]
        assert_same(wanted, interpret(now, inputs))
        fewer += sizes[-1] < len(graph.nodes)
    assert fewer > 50


def test_the_whole_order_keeps_the_grammar() -> None:
    """Each pass leaves a graph that verifies, with outputs of the same types; then every value
    gets a storage."""
    for seed in range(40):
        graph, _ = random_graph(seed)
        types = [value.type for value in graph.outputs]
        for each in passes(TRAITS):
            graph = each(graph, TRAITS)
            verify(graph, each.__name__)
            assert [value.type for value in graph.outputs] == types, (seed, each.__name__)
        assignment = assign_storage(graph)
        defined = set(assignment.graph.constants) | set(assignment.graph.inputs)
        for node in assignment.graph.nodes:
            assert all(assignment.storages.get(value, value) in defined for value in node.inputs)
            defined |= set(node.results)
        made = (
            {value for node in assignment.graph.nodes for value in node.results}
            | set(assignment.graph.constants)
            | set(assignment.graph.inputs)
        )
        for value, storage in assignment.storages.items():
            assert storage in made and storage not in assignment.storages, (
                "a storage is no view itself"
            )
            span = (
                1
                + assignment.layouts[value].offset
                + sum(
                    (n - 1) * s for n, s in zip(value.type.dims, assignment.layouts[value].strides)
                )
            )
            assert 0 in value.type.dims or span * value.type.dtype.itemsize <= storage.type.nbytes


# -- single rules --------------------------------------------------------------------------------
def graph_of(build: Any, *inputs: torch.Tensor, dynamic: bool = False) -> Graph:
    recorder = Recorder()
    made = build(recorder, *[recorder.input(x, dynamic) for x in inputs])
    return recorder.importer.finish(list(made) if isinstance(made, (list, tuple)) else [made])


def cast(recorder: Recorder, x: Value, *dtypes: torch.dtype) -> Value:
    for dtype in dtypes:
        x = recorder.call(aten._to_copy.default, (x,), {"dtype": dtype})
    return x


@pytest.mark.parametrize(
    "source, way, left",
    [
        (torch.int32, [torch.int64, torch.int32], 0),
        (torch.float16, [torch.float32, torch.float16], 0),
        (torch.float32, [torch.float16, torch.float32], 2),
        (torch.int64, [torch.int32, torch.int64], 2),
        (torch.int32, [torch.float32, torch.int32], 2),
        (torch.bool, [torch.float16, torch.bool], 0),
        (torch.uint8, [torch.int8, torch.uint8], 2),
        (torch.uint8, [torch.int16, torch.int64], 1),
        (torch.int8, [torch.int32, torch.float32], 1),
        (torch.int64, [torch.float32, torch.float16], 2),
        (torch.int8, [torch.uint8, torch.int32], 2),
    ],
)
def test_casts_there_and_back(source: torch.dtype, way: list[torch.dtype], left: int) -> None:
    """Dropped only where every value of the source survives."""
    graph = drop_unused(
        drop_no_ops(graph_of(lambda r, x: cast(r, x, *way), tensor(4, dtype=source)), TRAITS),
        TRAITS,
    )
    assert len(graph.nodes) == left


def test_chains_of_permutes() -> None:
    """Permutes, transposes and views of one another, of sizes that all differ."""
    rng, shorter = random.Random(4), 0
    for _ in range(60):
        x = tensor(*rng.sample((1, 2, 3, 4, 5), rng.randint(2, 5)))
        recorder = Recorder()
        value = recorder.input(x)
        for _ in range(rng.randint(2, 6)):
            order = list(range(value.type.rank))
            a, b = rng.sample(order, 2)
            rng.shuffle(order)
            overload, *args = rng.choice(
                [
                    (aten.permute.default, order),
                    (aten.permute.default, [d - len(order) for d in order]),
                    (aten.transpose.int, a, b - len(order)),
                    (aten.view.default, value.type.dims[::-1]),
                ]
            )
            value = recorder.call(overload, (value, *args), {})
        graph = recorder.importer.finish([value])
        changed = drop_unused(drop_no_ops(graph, TRAITS), TRAITS)
        shorter += len(changed.nodes) < len(graph.nodes)
        assert_same(interpret(graph, [x]), interpret(changed, [x]))
    assert shorter > 20


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32),
]


def test_casts_of_all_dtypes() -> None:
    """Three casts in a row give the same bits with and without the pass."""
    changes = 0
    for source, *way in itertools.product(DTYPES, repeat=3):
        if source.is_floating_point:
            bits = torch.arange(-(2**15), 2**15, 37).to(torch.int16)
            x = (
                bits.view(source)
                if source.itemsize == 2
                else bits.view(torch.float16).float() * 3.3
            )
            x = x.clamp(
                -100, 100
            ).nan_to_num()  # torch leaves open what other floats are as integers
        else:
            edges = {} if source is torch.bool else torch.iinfo(source)
            x = torch.tensor([0, 1, *([edges.min, edges.max, 77] if edges else [])], dtype=source)
        graph = graph_of(lambda r, x: cast(r, x, *way), x)
        changed = drop_unused(drop_no_ops(graph, TRAITS), TRAITS)
        if len(changed.nodes) < len(graph.nodes):
            changes += 1
            (before,), (after,) = interpret(graph, [x]), interpret(changed, [x])
            assert before.dtype is after.dtype and before.equal(after), (source, way)
    assert changes > 150


NUMBERS = (0, False, 0.0, -0.0, 1, True, 1.0, 2, 2.0, float("inf"), float("nan"))


def test_equal_nodes_of_different_numbers_stay() -> None:
    """1, 1.0 and True are equal in Python and not in a graph; 0.0 and -0.0 neither."""
    for a, b in itertools.product(NUMBERS, repeat=2):
        build = lambda r, x: [r.call(aten.add.Tensor, (x, number), {}) for number in (a, b)]  # noqa: E731
        nodes = merge_equal(graph_of(build, tensor(4)), TRAITS).nodes
        assert (len(nodes) == 1) == (type(a) is type(b) and repr(a) == repr(b)), (a, b)


def test_equal_nodes_of_different_symbols_stay() -> None:
    """Sizes that are equal at their bounds by chance are not merged, and the question leaves no
    guard."""
    with GuardLog() as log:
        graph = graph_of(
            lambda r, x: [r.call(aten.add.Tensor, (x, size), {}) for size in x.type.dims],
            tensor(4, 6),
            dynamic=True,
        )
        before = len(log.guards)
        assert len(merge_equal(graph, TRAITS).nodes) == 2
        assert len(log.guards) == before


def state_graph(build: Any) -> Graph:
    recorder = Recorder()
    x = recorder.input(tensor(3))
    state = recorder.importer.state(None, TensorType(DType.float32, (3,)))
    return recorder.importer.finish(build(recorder, x, state))


def store(recorder: Recorder, state: Value, value: Value) -> None:
    recorder.importer.emit("purevk.store", (state, value), [], [], "store")


def test_reads_of_a_state_before_and_after_a_write_differ() -> None:
    def build(r: Recorder, x: Value, state: Value) -> list[Value]:
        before = r.call(aten.add.Tensor, (state, 1), {})
        store(r, state, r.call(aten.mul.Tensor, (x, 2), {}))
        return [before, r.call(aten.add.Tensor, (state, 1), {})]

    graph = state_graph(build)
    wanted = interpret(graph, [tensor(3)])
    for each in (merge_equal, drop_no_ops, drop_unused, to_programs, fuse_pointwise):
        changed = each(graph, TRAITS)
        assert len([node for node in changed.nodes if len(node.results)]) == len(
            [n for n in graph.nodes if n.results]
        ), each.__name__
        graph = changed
    assert not torch.equal(wanted[0], wanted[1])


def test_fusion_does_not_carry_a_read_over_a_write() -> None:
    """state + 1 is read before the write and used after it: it must not be computed after it."""

    def build(r: Recorder, x: Value, state: Value) -> list[Value]:
        before = r.call(aten.add.Tensor, (state, 1), {})
        store(r, state, x)
        return [r.call(aten.mul.Tensor, (before, 3), {})]

    graph = fuse_pointwise(to_programs(state_graph(build), TRAITS), TRAITS)
    order = [node.op for node in graph.nodes]
    reads = [
        n
        for n, node in enumerate(graph.nodes)
        if any(value in graph.states for value in node.inputs) and node.op != "purevk.store"
    ]
    assert max(reads) < order.index("purevk.store")


def test_segments_keep_the_order_of_reads_and_writes_of_a_state() -> None:
    def build(r: Recorder, x: Value, state: Value) -> list[Value]:
        old = r.call(aten.mul.Tensor, (state, 1.5), {})
        store(r, state, x)
        new = r.call(aten.mul.Tensor, (state, 2.5), {})
        store(r, state, new)
        return [old, new, r.call(aten.mul.Tensor, (state, 3.5), {})]

    graph = state_graph(build)
    nodes = [node for step in segments(graph) for node in step.nodes]
    assert sorted(map(id, nodes)) == sorted(map(id, graph.nodes))
    assert_same(interpret(graph, [tensor(3)]), interpret(graph.with_nodes(nodes), [tensor(3)]))


def test_segments_follow_the_dependencies() -> None:
    """Whatever runs on the CPU, each node comes after those that make its inputs; segments on the
    device are few."""
    for seed in range(30):
        graph, inputs = random_graph(seed)
        rng = random.Random(seed)
        nodes = [
            Node(HOST, (n.op, "a test", n.args), n.results, n.source) if rng.random() < 0.3 else n
            for n in graph.nodes
        ]
        graph = graph.with_nodes(nodes)
        steps = segments(graph)
        flat = [node for step in steps for node in step.nodes]
        assert sorted(map(id, flat)) == sorted(map(id, nodes))
        verify(graph.with_nodes(flat))
        assert_same(interpret(graph, inputs), interpret(graph.with_nodes(flat), inputs))
        assert not any(a.on_device and b.on_device for a, b in itertools.pairwise(steps))


def test_constants_are_computed_once() -> None:
    """What depends on constants alone is split off, and nothing else."""
    recorder = Recorder()
    x, c = recorder.input(tensor(4, 4)), recorder.constant(tensor(4, 4))
    scaled = recorder.call(aten.mul.Tensor, (c, 2.0), {})
    turned = recorder.call(aten.permute.default, (scaled, [1, 0]), {})
    graph = recorder.importer.finish(
        [recorder.call(aten.add.Tensor, (x, recorder.call(aten.neg.default, (turned,), {})), {})]
    )
    split = split_constant(to_programs(graph, TRAITS))
    assert len(split.once) == 3 and len(split.graph.nodes) == 1 and len(split.kept) == 1
    assert split.kept[0] in split.graph.nodes[0].inputs


def test_batch_norm_is_folded_only_into_its_own_convolution() -> None:
    """Not if the convolution's result is read elsewhere, nor if its weight is no constant."""

    def build(shared: bool, fixed: bool) -> tuple[Graph, list[torch.Tensor]]:
        recorder = Recorder()
        inputs = [tensor(1, 4, 5, 5), tensor(3, 4, 3, 3)]
        x = recorder.input(inputs[0])
        w = recorder.constant(inputs[1]) if fixed else recorder.input(inputs[1])
        stats = [recorder.constant(tensor(3, seed=n, low=0.5, high=2)) for n in range(4)]
        y = recorder.call(
            aten.convolution.default, (x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1), {}
        )
        z = recorder.call(
            aten._native_batch_norm_legit_no_training.default, (y, *stats, 0.1, 1e-5), {}
        )[0]
        return recorder.importer.finish([z, y] if shared else [z]), inputs[: 1 if fixed else 2]

    for shared, fixed, folded in ((False, True, True), (True, True, False), (False, False, False)):
        graph, inputs = build(shared, fixed)
        changed = drop_unused(fold_batch_norm(graph, TRAITS), TRAITS)
        verify(changed)
        assert any("batch_norm" in node.op for node in changed.nodes) != folded
        assert_same(interpret(graph, inputs), interpret(changed, inputs), rtol=1e-5, atol=1e-5)


def test_batch_norm_after_convolutions_of_all_kinds() -> None:
    """Transposed, in groups, with a bias, without a batch: as many channels in as out, so that a
    wrong scale has a shape that fits."""
    rng, folded = random.Random(6), 0
    without_batch = {1: aten.conv1d.default, 2: aten.conv2d.default, 3: aten.conv3d.default}
    for transposed, bias, groups, batch in itertools.product((False, True), (0, 1), (1, 2), (0, 1)):
        rank = rng.randint(1, 3)
        recorder = Recorder()
        inputs = [tensor(*[2] * (batch or transposed), 4, *[4] * rank)]
        x = recorder.input(inputs[0])
        w = recorder.constant(tensor(4, 4 // groups, *[3] * rank, seed=1))
        b = recorder.constant(tensor(4, seed=2)) if bias else None
        stats = [recorder.constant(tensor(4, seed=n, low=0.5, high=2)) for n in range(4)]
        ones = [1] * rank
        if transposed or batch:
            call = (x, w, b, ones, ones, ones, transposed, [0] * rank, groups)
            y = recorder.call(aten.convolution.default, call, {})
        else:
            y = recorder.call(without_batch[rank], (x, w, b, ones, ones, ones, groups), {})
        overload = aten._native_batch_norm_legit_no_training.default
        graph = recorder.importer.finish([recorder.call(overload, (y, *stats, 0.1, 1e-5), {})[0]])
        changed = drop_unused(fold_batch_norm(graph, TRAITS), TRAITS)
        folded += not any("batch_norm" in node.op for node in changed.nodes)
        assert_same(interpret(graph, inputs), interpret(changed, inputs), rtol=1e-5, atol=1e-5)
    assert folded >= 4


def test_symbols_survive() -> None:
    """With symbolic sizes, results of the passes have the types that they had."""
    from tests.ops.harness import play, trace

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(
            (x.reshape(-1, 12) * x.shape[0]).view(x.shape[0], x.shape[1], 12).transpose(0, 1) + 1,
            -1,
        ).sum(0)

    recorder = Recorder()
    x = tensor(7, 5, 12)
    graph = recorder.importer.finish(
        [play(recorder, trace(fn, (x,), True), [recorder.input(x, True)])]
    )
    types = [value.type for value in graph.outputs]
    with GuardLog():
        for each in passes(TRAITS):
            graph = each(graph, TRAITS)
            verify(graph, each.__name__)
            assert [value.type for value in graph.outputs] == types
    assert isinstance(types[0].dims[0], Dim)
