"""Fusion stops where a kernel would take a driver long to compile."""

from __future__ import annotations

import numpy as np
import pytest

from purevk.dtypes import DType
from purevk.frontends.importer import Importer
from purevk.ir import Graph, TensorType
from purevk.lower.expression import Expression
from purevk.passes.fusion import pointwise as fuse
from purevk.passes.pipeline import optimize
from purevk.schedule.constants import split_constant
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


@pytest.mark.parametrize("seed", range(20))
def test_what_depends_on_constants_alone_is_not_computed_in_calls(seed: int) -> None:
    """Random operators on constants of one size, and on an input: a program of a call has those that
    depend on the input, and no others."""
    random = np.random.default_rng(seed)
    size = int(random.integers(1, 40))
    importer = Importer("forward", "test")
    data = memoryview(random.standard_normal(size, np.float32).tobytes())
    constants = [importer.constant(data, TensorType(DType.float32, (size,))) for _ in range(3)]
    given = [importer.input(DType.float32, (3, size), False)]
    of_input: list[str] = []
    for step in range(12):
        is_constant = step < 6 or random.random() < 0.3
        pool = constants if is_constant else given
        left = pool[int(random.integers(len(pool)))]
        everything = constants + (given if not is_constant else [])
        right = everything[int(random.integers(len(everything)))]
        operator = str(random.choice(["add.Tensor", "mul.Tensor", "rsqrt.default", "neg.default"]))
        args = {"add.Tensor": (left, right, 1), "mul.Tensor": (left, right)}.get(operator, (left,))
        (value,) = importer.emit(f"aten.{operator}", args, [], [], operator)
        pool.append(value)
        if not is_constant:
            of_input.append(operator.partition(".")[0])
    graph = optimize(importer.finish(given[1:]), TRAITS, skip=("merge_equal",))
    once = set(split_constant(graph).once)
    names = [
        name
        for node in graph.nodes
        if node.op == "purevk.pointwise" and node not in once
        for name in node.attribute("expression", Expression).names
    ]
    assert len(names) == len(of_input), (names, of_input)
