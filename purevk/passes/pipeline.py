"""The passes, in their order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from purevk import knobs
from purevk.ir import Graph
from purevk.ir.verify import verify
from purevk.lower.lowering import DeviceTraits
from purevk.passes.attention import find_attention, guard_softmax
from purevk.passes.batch_norm import fold_batch_norm
from purevk.passes.bfloat16 import widen_bfloat16
from purevk.passes.control import optimize_sub_graphs, settle_control
from purevk.passes.expand import expand_rewrites
from purevk.passes.fuse import fuse_epilogues, fuse_pointwise, to_programs
from purevk.passes.merge_products import merge_products
from purevk.passes.placement import assign_hosts
from purevk.passes.quantized import keep_weights_quantized
from purevk.passes.reshape import move_views
from purevk.passes.simplify import (
    drop_empty,
    drop_no_ops,
    drop_unread,
    drop_unused,
    merge_equal,
    share_cats,
)
from purevk.passes.widen import widen_halves

Pass = Callable[[Graph], Graph]


def passes(traits: DeviceTraits) -> tuple[Pass, ...]:
    """All passes up to (but without) the placing of values, in order."""

    def place_on_host(graph: Graph) -> Graph:
        return assign_hosts(graph, traits)

    def expand(graph: Graph) -> Graph:
        return expand_rewrites(graph, traits)

    def sub_graphs(graph: Graph) -> Graph:
        return optimize_sub_graphs(graph, lambda inner: optimize(inner, traits))

    legal = () if traits.has("storage_16bit") else (widen_halves,)
    return (
        settle_control,
        *legal,
        drop_unused,
        drop_unread,
        place_on_host,
        drop_no_ops,
        merge_equal,
        fold_batch_norm,
        guard_softmax,
        drop_unused,
        find_attention,
        keep_weights_quantized,
        expand,
        widen_bfloat16,
        drop_no_ops,
        merge_equal,
        share_cats,
        drop_unused,
        merge_products,
        to_programs,
        merge_equal,
        drop_unused,
        move_views,
        drop_no_ops,
        merge_equal,
        drop_unused,
        sub_graphs,
        drop_unused,
        fuse_pointwise,
        fuse_epilogues,
        drop_empty,
        drop_unused,
    )


def optimize(graph: Graph, traits: DeviceTraits) -> Graph:
    """Runs the passes. With PUREVK_VERIFY each result is verified; with PUREVK_DUMP each is written
    to a file."""
    check, folder = knobs.VERIFY(), knobs.DUMP()
    if check:
        verify(graph, "front end")
    if folder:
        _dump(graph, folder, 0, "front_end")
    for number, each in enumerate(passes(traits), 1):
        graph = each(graph)
        if check:
            verify(graph, each.__name__)
        if folder:
            _dump(graph, folder, number, each.__name__)
    return graph


def _dump(graph: Graph, folder: str, number: int, name: str) -> None:
    from purevk.ir.printer import to_text

    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / f"{graph.name}.{number:02}.{name}.txt").write_text(to_text(graph), encoding="utf-8")
