"""Reshapes that move past pointwise programs."""

from __future__ import annotations

from purevk.dtypes import DType
from purevk.frontends.importer import Importer
from purevk.ir import TensorType
from purevk.ir.verify import verify
from purevk.passes.expand import expand_rewrites
from purevk.passes.fusion.pointwise import to_programs
from purevk.passes.reshape import move_views
from purevk.passes.simplify import drop_no_ops, drop_unused
from tests.passes.harness import TRAITS


def test_a_conversion_behind_a_reshape_keeps_its_dtype() -> None:
    """A linear layer in half precision, reshaped and then returned as float32. The conversion has no
    step, only a type."""
    importer = Importer("forward", "test")
    x = importer.input(DType.float16, (16, 8), False)
    weight = importer.constant(memoryview(bytes(2 * 4 * 8)), TensorType(DType.float16, (4, 8)))
    (linear,) = importer.emit("aten.linear.default", (x, weight, None), [], [], "linear")
    (shaped,) = importer.emit("aten.view.default", (linear, (2, 8, 4)), [], [], "view")
    graph = importer.finish([importer.cast(shaped, DType.float32, "cast")])
    moved = move_views(
        to_programs(
            drop_unused(drop_no_ops(expand_rewrites(graph, TRAITS), TRAITS), TRAITS), TRAITS
        ),
        TRAITS,
    )
    verify(moved, "move_views")
    assert [node.op for node in moved.nodes][-2:] == ["purevk.pointwise", "aten.view.default"]
    assert moved.outputs[0].type == TensorType(DType.float32, (2, 8, 4))
