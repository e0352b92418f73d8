"""Delegates whose graphs contradict themselves. No device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from purevk.dtypes import DType
from purevk.errors import FileFormatError
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
    VulkanDelegate(importer, SimpleNamespace(), graph, "delegate 0", {}).run([x], 0)


def test_an_operator_gives_a_tensor() -> None:
    run(TENSOR)


@pytest.mark.parametrize("output", [V.Int(3), V.Null(), V.IntList((1,))])
def test_an_operator_that_gives_a_number_is_refused(output: Any) -> None:
    with pytest.raises(FileFormatError, match="value %1 of delegate 0 is no tensor"):
        run(output)


def test_a_dim_is_the_value_of_a_real_number() -> None:
    """executorch keeps one value for 1 and 1.0."""
    graph = vk.VkGraph(
        version="0",
        chain=(vk.OperatorCall(0, "aten.any.dim", (0, 1, 2, 3)),),
        values=(TENSOR, V.Double(1.0), V.Bool(False), vk.VkTensor(0, (2,), -1, -1, 255, 255, 127)),
        input_ids=(0,),
        output_ids=(3,),
        constants=(),
        storage_type_override=255,
        memory_layout_override=255,
        region=memoryview(b""),
    )
    importer = Importer("forward", "test")
    x = importer.input(DType.float32, (2, 3), False)
    (made,) = VulkanDelegate(importer, SimpleNamespace(), graph, "delegate 0", {}).run([x], 0)
    assert made.type.dims == (2,)
