"""The passes, in their order."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from purevk import knobs
from purevk.errors import PurevkError
from purevk.ir import Graph
from purevk.ir.verify import verify
from purevk.lower.expression import ROUND
from purevk.passes.attention import find_attention, guard_softmax
from purevk.passes.bfloat16 import widen_bfloat16
from purevk.passes.check_indices import check_first, check_indices
from purevk.passes.complex import split_complex
from purevk.passes.control import optimize_sub_graphs, settle_control
from purevk.passes.decoding.caches import write_in_place
from purevk.passes.decoding.few_rows import fuse_few_rows
from purevk.passes.decoding.heads import share_heads
from purevk.passes.decoding.rms_norm import find_rms_norm
from purevk.passes.decoding.rotary import find_rotary, rotate_to_caches
from purevk.passes.decoding.rotary_norm import rotate_norms
from purevk.passes.expand import expand_rewrites
from purevk.passes.experts import select_matrices
from purevk.passes.flex import compose_flex
from purevk.passes.float8 import float8_as_bytes
from purevk.passes.fusion.pieces import join_pieces
from purevk.passes.fusion.pointwise import fuse_epilogues, fuse_pointwise, to_programs
from purevk.passes.masks.key_limits import find_key_limits
from purevk.passes.matmul.batch_norm import fold_batch_norm
from purevk.passes.matmul.convolutions import pack_convolutions
from purevk.passes.matmul.fragments import order_for_fragments
from purevk.passes.matmul.hidden import pad_hidden
from purevk.passes.matmul.merge_matmuls import merge_matmuls, merge_quantized
from purevk.passes.matmul.panels import pack_panels
from purevk.passes.matmul.selected_rows import compute_selected_rows
from purevk.passes.matmul.winograd import use_winograd
from purevk.passes.packed import join_attention
from purevk.passes.placement import assign_hosts, unbound
from purevk.passes.quantized import keep_weights_quantized
from purevk.passes.reshape import move_views
from purevk.passes.rounding import JOINING, drop_rounding, round_results
from purevk.passes.simplify import (
    drop_empty,
    drop_no_ops,
    drop_unread,
    drop_unused,
    merge_equal,
    share_cats,
)
from purevk.passes.widen import widen_halves, with_room_to_widen
from purevk.tuning import DeviceTraits

Pass = Callable[[Graph, DeviceTraits], Graph]

# The passes without which a graph runs too, by name: they make it faster. `purevk bisect` and
# PUREVK_SKIP_PASSES switch them off.
OPTIONAL = (
    "compute_selected_rows",
    "drop_no_ops",
    "drop_unread",
    "drop_unused",
    "find_attention",
    "find_key_limits",
    "find_rms_norm",
    "find_rotary",
    "fold_batch_norm",
    "fuse_epilogues",
    "fuse_few_rows",
    "fuse_pointwise",
    "guard_softmax",
    "join_attention",
    "join_pieces",
    "keep_weights_quantized",
    "merge_equal",
    "merge_matmuls",
    "merge_quantized",
    "move_views",
    "order_for_fragments",
    "pack_convolutions",
    "pack_panels",
    "pad_hidden",
    "rotate_norms",
    "rotate_to_caches",
    "select_matrices",
    "settle_control",
    "share_cats",
    "share_heads",
    "use_winograd",
    "write_in_place",
)


@dataclass(frozen=True)
class Phase:
    """Passes with one aim, in their order.

    Attributes:
        name: names the phase in dumps of graphs.
    """

    name: str
    passes: tuple[Pass, ...]


def phases(
    traits: DeviceTraits, skip: Collection[str] = (), round: str = "fused"
) -> tuple[Phase, ...]:
    """The phases that a graph goes through before each value gets a storage.

    Sub-graphs go through all but the passes that `skip` names. With `round="eager"`, results are
    rounded before operators are expanded.

    - legalize: checks of indices are added; control flow and float8 are replaced, nodes that the
      device cannot run are wrapped, and complex numbers become real ones.
      Later phases make operators of purevk's own, which always run.
    - canonicalize: what means the same is written the same way.
    - recognize: groups of operators that one kernel runs are found, before their parts are expanded.
    - expand: operators that are expressed by others are, until only kernels, views and pointwise
      programs are left. Half precision becomes float32 where the device cannot store it.
    - fuse: pointwise programs are joined, and attached to the kernels that make their inputs.
    - clean up: what nothing reads goes.
    """

    def sub_graphs(graph: Graph, traits: DeviceTraits) -> Graph:
        def inner(graph: Graph) -> Graph:
            return optimize(replace(graph, shares_weights=True), traits, skip, round=round)

        return optimize_sub_graphs(graph, inner)

    rounding, drop = ((round_results,), (drop_rounding,)) if round == "eager" else ((), ())
    return (
        Phase(
            "legalize",
            (
                check_indices,
                settle_control,
                float8_as_bytes,
                drop_unused,
                drop_unread,
                compose_flex,
                assign_hosts,
                split_complex,
            ),
        ),
        Phase(
            "canonicalize",
            (
                drop_no_ops,
                drop_unused,
                compute_selected_rows,
                merge_equal,
                fold_batch_norm,
                guard_softmax,
                drop_unused,
            ),
        ),
        Phase(
            "recognize",
            (find_attention, find_rms_norm, find_rotary, keep_weights_quantized, select_matrices),
        ),
        Phase(
            "expand",
            (
                *rounding,
                expand_rewrites,
                widen_bfloat16,
                *drop,
                drop_no_ops,
                merge_equal,
                share_cats,
                join_attention,
                drop_unused,
                share_heads,
                find_key_limits,
                write_in_place,
                rotate_to_caches,
                rotate_norms,
                pad_hidden,
                merge_matmuls,
                merge_quantized,
                to_programs,
                widen_halves,
                merge_equal,
                drop_unused,
            ),
        ),
        Phase(
            "fuse",
            (
                move_views,
                drop_no_ops,
                merge_equal,
                drop_unused,
                sub_graphs,
                drop_unused,
                fuse_pointwise,
                fuse_few_rows,
                fuse_epilogues,
                join_pieces,
                drop_unused,
                order_for_fragments,
                pack_convolutions,
                use_winograd,
                pack_panels,
            ),
        ),
        Phase("clean up", (drop_empty, drop_unused, check_first)),
    )


def passes(traits: DeviceTraits) -> tuple[Pass, ...]:
    """All passes, in order."""
    return tuple(pass_ for phase in phases(traits) for pass_ in phase.passes)


def optimize(
    graph: Graph,
    traits: DeviceTraits,
    skip: Collection[str] | None = None,
    dump: bool = True,
    round: str = "fused",
) -> Graph:
    """Runs the passes. With PUREVK_VERIFY each result is verified; with PUREVK_DUMP each is written
    to a file, unless `dump` is False.

    Args:
        skip: names of optional passes not to run; None reads PUREVK_SKIP_PASSES.
        round: "eager" rounds after every operator, see `purevk.load`.

    Raises:
        PurevkError: a name to skip is not that of an optional pass.
    """
    skipped = skipped_passes() if skip is None else frozenset(skip)
    if round == "eager" and _has_narrow(graph):
        skipped |= frozenset(JOINING)
    check, folder = knobs.VERIFY(), knobs.dump_folder() if dump else None
    if check:
        verify(graph, "front end")
    if folder:
        _dump(graph, folder, 0, "front_end")
    number = 0
    traits = with_room_to_widen(graph, traits)
    values = (value for node in graph.nodes for value in (*node.inputs, *node.results))
    large = any(value.type.nbytes > traits.max_storage_range for value in values)
    for phase in phases(traits, skipped, round):
        for pass_ in phase.passes:
            number += 1
            if pass_.__name__ in skipped:
                continue
            before, graph = graph, pass_(graph, traits)
            if (
                large
                and pass_.__name__ in OPTIONAL
                and unbound(graph, traits) > unbound(before, traits)
            ):
                graph = before
            if check:
                verify(graph, f"{phase.name}: {pass_.__name__}")
            if folder:
                _dump(graph, folder, number, f"{phase.name.replace(' ', '_')}.{pass_.__name__}")
    return graph


def _has_narrow(graph: Graph) -> bool:
    """Whether operators compute values of 16 bits."""
    results = (value for node in graph.nodes for value in node.results)
    return any(value.type.dtype in ROUND for value in results)


def skipped_passes() -> frozenset[str]:
    """The passes in PUREVK_SKIP_PASSES.

    Raises:
        PurevkError: one of them is not an optional pass.
    """
    names = frozenset(knobs.SKIP_PASSES())
    unknown = names.difference(OPTIONAL)
    if unknown:
        raise PurevkError(
            f"no optional pass is named {', '.join(sorted(unknown))}",
            where=knobs.SKIP_PASSES.name,
            why=f"the names are {', '.join(OPTIONAL)}",
            next="correct the name, or unset the variable",
        )
    return names


def _dump(graph: Graph, folder: Path, number: int, name: str) -> None:
    from purevk.ir.printer import to_text

    stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", graph.name)  # a file names its methods
    knobs.write_dump(folder / f"{stem}.{number:02}.{name}.txt", to_text(graph).encode())
