"""Delegates whose graphs contradict themselves. No device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from purevk.dtypes import DType
from purevk.errors import FileFormatError, UnsupportedProgramError
from purevk.frontends.executorch.delegates import VulkanDelegate
from purevk.frontends.importer import Importer
from purevk.pte import values as V
from purevk.pte import vkgraph as vk

FLOAT32 = 5  # VkDataType
TENSOR = vk.VkTensor(FLOAT32, (2, 3), -1, -1, 255, 255, 127)


def run(output: Any) -> None:
    """Reads a delegate of one relu, whose output is a given value."""
    graph = vk.VkGraph(
        version="0",
        chain=(vk.OperatorCall(0, "aten.relu.default", (0, 1)),),
        values=(TENSOR, output),
        input_ids=(0,),
        output_ids=(1,),
        constants=(),
        storage_type_override=255,
        memory_layout_override=255,
        region=memoryview(b""),
    )
    importer = Importer("forward", "test")
    x = importer.input(DType.float32, (2, 3), False)
    VulkanDelegate(importer, SimpleNamespace(), graph, "delegate 0", {}).run([x], 1, [(2, 3)])


def test_an_operator_gives_a_tensor() -> None:
    run(TENSOR)


@pytest.mark.parametrize("output", [V.Int(3), V.Null(), V.IntList((1,))])
def test_an_operator_that_gives_a_number_is_refused(output: Any) -> None:
    with pytest.raises(FileFormatError, match="value %1 of delegate 0 is no tensor"):
        run(output)


def matched(taken: tuple[int, ...], *offered: tuple[int, ...]) -> list[int]:
    """Which of the tensors that a caller passes go into a delegate, by their number. Both are given
    by the last of two sizes."""
    values = tuple(vk.VkTensor(FLOAT32, (2, size), -1, -1, 255, 255, 127) for size in taken)
    numbers = tuple(range(len(taken)))
    graph = vk.VkGraph(
        version="0",
        chain=(),
        values=values,
        input_ids=numbers,
        output_ids=numbers,
        constants=(),
        storage_type_override=255,
        memory_layout_override=255,
        region=memoryview(b""),
    )
    importer = Importer("forward", "test")
    passed = [importer.input(DType.float32, (2, size), False) for size in offered]
    sizes = [(2, size) for size in offered]
    delegate = VulkanDelegate(importer, SimpleNamespace(), graph, "delegate 0", {})
    return [passed.index(value) for value in delegate.run(passed, len(taken), sizes)]


def test_inputs_that_the_graph_dropped_are_told_by_their_sizes() -> None:
    assert matched((5,), 7, 5) == [1]
    assert matched((7,), 7, 5) == [0]
    assert matched((5, 7), 5, 3, 7) == [0, 2]
    assert matched((5, 5), 5, 3, 5) == [0, 2]


def test_inputs_of_one_type_cannot_be_told_apart() -> None:
    with pytest.raises(UnsupportedProgramError, match="takes 1 inputs"):
        matched((5,), 5, 5)


def test_no_input_has_the_type() -> None:
    with pytest.raises(FileFormatError, match="do not match"):
        matched((5,), 7, 3)
    with pytest.raises(FileFormatError, match="do not match"):
        matched((5, 7), 3, 7, 5)
