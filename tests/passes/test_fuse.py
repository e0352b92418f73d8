"""Fusion stops where a kernel would take a driver long to compile."""

from __future__ import annotations

import pytest

from purevk.dtypes import DType
from purevk.frontends.importer import Importer
from purevk.ir import Graph, TensorType
from purevk.lower.expression import Expression
from purevk.passes.fusion import pointwise as fuse
from purevk.passes.pipeline import optimize
from tests.passes.harness import TRAITS

# Before there was a limit, lavapipe took 19 s of CPU time for 8 of `special_bessel_j0` in the epilogue
# of the quantized matmul, and more than 120 s for one program of 30 times `lgamma`.
CHAINS = [("special_bessel_j0", 8), ("lgamma", 30), ("digamma", 8), ("tan", 8), ("gelu", 60)]


def chain(operator: str, count: int, quantized: bool) -> Graph:
    """An operator again and again, on the result of a linear layer with a 4-bit weight or on an
    input."""
    importer = Importer("forward", "test")
    value = importer.input(DType.float32, (8, 32), False)
    if quantized:
        weight = importer.constant(memoryview(bytes(32 * 16)), TensorType(DType.uint8, (32, 16)))
        scales = importer.constant(memoryview(bytes(4 * 32)), TensorType(DType.float32, (1, 32)))
        args = (value, weight, scales, 32)
        (value,) = importer.emit("et_vk.linear_q4gsw.default", args, [], [], "linear")
    for _ in range(count):
        (value,) = importer.emit(f"aten.{operator}.default", (value,), [], [], operator)
    return optimize(importer.finish([value]), TRAITS)


@pytest.mark.parametrize("quantized", [False, True], ids=["input", "linear"])
@pytest.mark.parametrize("operator, count", CHAINS, ids=str)
def test_long_code_is_not_one_kernel(operator: str, count: int, quantized: bool) -> None:
    graph = chain(operator, count, quantized)
    names: list[str] = []
    for node in graph.nodes:
        if node.op == "purevk.quantized_matmul":
            epilogue = node.optional_attribute("epilogue", Expression)
            if epilogue is not None:
                assert epilogue.code_size <= fuse.MAX_EPILOGUE_CODE
                names += epilogue.names
        elif node.op == "purevk.pointwise":
            expression = node.attribute("expression", Expression)
            assert expression.code_size <= fuse.MAX_CODE
            names += expression.names
    assert len(names) == count


@pytest.mark.parametrize("operator", ["gelu", "silu", "mish", "softplus", "hardswish", "tanh"])
def test_activations_are_epilogues(operator: str) -> None:
    (kernel,) = (
        node for node in chain(operator, 1, True).nodes if node.op == "purevk.quantized_matmul"
    )
    epilogue = kernel.attribute("epilogue", Expression)
    assert len(epilogue.names) == 1
