"""Delegate calls that list other arguments than their graphs. No device, but for real files."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from purevk.errors import FileFormatError, UnsupportedProgramError
from purevk.frontends.executorch.delegate_calls import LISTS_ALL, CallArguments, DelegateCalls
from purevk.pte import types as P
from purevk.pte import vkgraph as vk

FLOAT32 = 5  # VkDataType
FLOAT = 6  # ScalarType


def split(
    takes: list[int],
    gives: list[int],
    args: list[int],
    inputs: int = 1,
    *,
    read_before: tuple[int, ...] = (),
    written_after: tuple[int, ...] = (),
    constants: tuple[int, ...] = (),
    in_place: tuple[int, ...] = (),
    specs: tuple[P.CompileSpec, ...] = (),
) -> CallArguments:
    """The arguments of one call.

    Args:
        takes, gives: the last of two sizes of the graph's inputs and outputs.
        args: of the arguments.
        inputs: how many arguments are inputs of the method.
        read_before, written_after: arguments that a kernel writes before or after the call.
        constants: the last of two sizes of the graph's constants.
        in_place: numbers of outputs that the graph writes twice.
        specs: of the delegate.
    """
    values = tuple(
        vk.VkTensor(FLOAT32, (2, size), constant, -1, 255, 255, 127)
        for size, constant in [
            *((size, -1) for size in (*takes, *gives)),
            *((size, at) for at, size in enumerate(constants)),
        ]
    )
    outputs = tuple(range(len(takes), len(takes) + len(gives)))
    graph = SimpleNamespace(
        values=values,
        input_ids=tuple(range(len(takes))),
        output_ids=outputs,
        chain=[
            vk.OperatorCall(0, "aten.relu.default", (0, outputs[at]))
            for at in (*range(len(gives)), *in_place)
        ],
    )
    tensor = {"dim_order": (0, 1), "dynamism": P.ShapeDynamism.STATIC, "data_index": 0}
    call = P.DelegateCall(0, tuple(range(len(args))))
    plan: Any = SimpleNamespace(
        name="forward",
        values=[P.Tensor(FLOAT, (2, size), **tensor, allocation=None) for size in args],
        inputs=tuple(range(inputs)),
        operators=[P.Operator("aten::relu", "out")],
        delegates=[SimpleNamespace(id=P.VULKAN_BACKEND, compile_specs=specs)],
        chains=[
            SimpleNamespace(
                instructions=[
                    *(P.KernelCall(0, (0, number)) for number in read_before),
                    call,
                    *(P.KernelCall(0, (0, number)) for number in written_after),
                ]
            )
        ],
    )
    program: Any = SimpleNamespace(name="test", vulkan_graph=lambda delegate: graph)
    return DelegateCalls(program, plan).arguments(call)


def test_all_arguments_are_listed() -> None:
    assert split([5, 5], [5, 5], [5] * 4) == CallArguments((0, 1), ((2, 0), (3, 1)))


def test_outputs_of_mutated_buffers_are_not_listed() -> None:
    assert split([5], [3, 5], [5, 5]) == CallArguments((0,), ((1, 1),), 1)
    assert split([5], [3, 5], [5, 5], constants=(3, 5)) == CallArguments((0,), ((1, 1),), 1)


def test_a_buffer_and_an_output_that_is_taken_twice() -> None:
    """As many arguments as inputs and outputs, or fewer. The first output may be the content of a
    buffer, if a constant has its type."""
    assert split([5], [2, 3], [5, 2, 3], constants=(2,)).buffers == 0
    assert split([5], [2, 3], [5, 3, 3], constants=(2,)) == CallArguments((0,), ((1, 1), (2, 1)), 1)
    assert split([5], [2, 2, 3], [5, 3, 3], constants=(2, 2)).outputs == ((1, 2), (2, 2))
    with pytest.raises(FileFormatError, match="do not match"):
        split([5], [2, 3], [5, 3, 2, 3, 3, 4], constants=(2,))
    with pytest.raises(UnsupportedProgramError, match="gives 2 outputs"):
        split([5], [2, 2], [5, 2, 2], constants=(2,))
    with pytest.raises(UnsupportedProgramError, match="gives 3 outputs"):
        split([5], [2, 2, 2], [5, 2, 2], constants=(2, 2))


def test_a_buffer_whose_copy_is_an_output() -> None:
    assert split([5], [2, 3], [5, 3, 2], constants=(2,)) == CallArguments((0,), ((1, 1), (2, 0)), 1)
    with pytest.raises(UnsupportedProgramError):  # 2 may be the copy or the other output again
        split([5], [2, 2, 3], [5, 2, 3, 2], constants=(2,))


def test_a_buffer_and_an_input_that_the_graph_dropped() -> None:
    assert split([5], [3, 4], [5, 7, 4], 2, constants=(3,)) == CallArguments((0,), ((2, 1),), 1)
    assert split([5], [5, 4], [7, 5, 4], 2, constants=(5,)) == CallArguments((1,), ((2, 1),), 1)
    with pytest.raises(UnsupportedProgramError):
        split([5], [3, 4], [5, 5, 4], 2, constants=(3,))


def test_a_sum_with_a_constant_is_no_buffer() -> None:
    assert split([2], [2], [2, 2], constants=(2,)) == CallArguments((0,), ((1, 0),))


def test_the_exporter_says_how_it_lists_arguments() -> None:
    every = (P.CompileSpec(LISTS_ALL, b""),)
    in_order = CallArguments((0,), ((1, 0), (2, 1)))
    assert split([5], [2, 2], [5, 2, 2], constants=(2,), specs=every) == in_order
    assert split([5], [2, 2, 2], [5, 2, 2], constants=(2, 2), specs=every).buffers == 1
    aliased = (P.CompileSpec("alias_buffer_mutations", b"\1"),)
    assert split([5], [2, 2], [5, 2, 2], constants=(2,), specs=aliased) == in_order
    with pytest.raises(UnsupportedProgramError):
        split([5], [2, 2], [5, 2, 2], constants=(2,), specs=aliased, in_place=(0,))
    have = split([5], [2, 3], [5, 3, 2], constants=(2,), specs=aliased, in_place=(0,))
    assert have == CallArguments((0,), ((1, 1), (2, 0)))


def test_inputs_that_the_graph_dropped_are_told_by_their_sizes() -> None:
    assert split([5], [2], [7, 5, 2], 2).inputs == (1,)
    assert split([7], [2], [7, 5, 2], 2).inputs == (0,)
    assert split([5, 7], [2], [5, 3, 7, 2], 3).inputs == (0, 2)
    assert split([5, 5], [2], [5, 3, 5, 2], 3).inputs == (0, 2)


def test_inputs_of_one_type_cannot_be_told_apart() -> None:
    with pytest.raises(UnsupportedProgramError, match="takes 1 inputs"):
        split([5], [2], [5, 5, 2], 2)


def test_no_input_has_the_type() -> None:
    with pytest.raises(FileFormatError, match="do not match"):
        split([5], [2], [7, 3, 2], 2)
    with pytest.raises(FileFormatError, match="do not match"):
        split([5, 7], [2], [3, 7, 5, 2], 3)


def test_an_output_that_is_taken_twice() -> None:
    assert split([5], [2], [5, 2, 2]).outputs == ((1, 0), (2, 0))
    assert split([5], [2, 3], [5, 2, 3, 2]).outputs == ((1, 0), (2, 1), (3, 0))
    assert split([5], [2, 3], [5, 2, 3, 3]).outputs == ((1, 0), (2, 1), (3, 1))
    assert split([5], [5], [5, 5, 5]) == CallArguments((0,), ((1, 0), (2, 0)))
    assert split([5], [2, 3, 4], [5, 2, 2, 3, 4, 3]).outputs == (
        (1, 0),
        (2, 0),
        (3, 1),
        (4, 2),
        (5, 1),
    )


def test_outputs_of_one_type_cannot_be_told_apart() -> None:
    with pytest.raises(UnsupportedProgramError, match="gives 2 outputs"):
        split([5], [2, 2], [5, 2, 2, 2])


def test_a_value_that_was_written_before_is_an_input() -> None:
    assert split([5], [5], [5, 5, 5]).inputs == (0,)
    with pytest.raises(UnsupportedProgramError):  # which of the two?
        split([5], [5], [5, 5, 5], read_before=(1,))
    assert split([7], [5], [7, 5, 5], read_before=(1,)).outputs == ((2, 0),)


def test_a_value_that_another_instruction_writes_later_may_be_an_input() -> None:
    """A buffer without initial bytes: the first call reads it."""
    with pytest.raises(UnsupportedProgramError):
        split([5], [5], [5, 5, 5], written_after=(1,))
    assert split([7], [2], [7, 5, 2], written_after=(1,)).outputs == ((2, 0),)


def test_too_few_arguments() -> None:
    with pytest.raises(FileFormatError, match="takes 2 inputs"):
        split([5, 5], [5], [5])


@pytest.mark.parametrize("args", [200, 20_000])
def test_many_arguments_take_no_time(args: int) -> None:
    begin = time.perf_counter()
    with pytest.raises((FileFormatError, UnsupportedProgramError)):
        split([5] * (args // 4), [5] * (args // 4), [5] * args)
    assert time.perf_counter() - begin < 10


# -- real files ----------------------------------------------------------------------------------
torch = pytest.importorskip("torch")
pytest.importorskip("executorch")


class Several(torch.nn.Module):
    """Results of which two are one tensor for executorch, which drops `clone()`."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: Any, w: Any, unused: Any) -> Any:
        y, z = x + 1, w * 3
        results = {"y": y, "z": z, "u": y.clone(), "q": z * 2}
        return tuple(results[each] for each in self.order)


def results(partitioner: Any, order: str, args: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    import purevk
    from tests.models.export import trace_patterns_once

    trace_patterns_once()
    module = Several(order).eval()
    edge = to_edge_transform_and_lower(
        torch.export.export(module, args),
        partitioner=[partitioner],
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    with purevk.load(edge.to_executorch().buffer) as program:
        return list(program(*args)), list(module(*args))


ORDERS = ["yuz", "yzu", "uzy", "zuyq", "uy"]
TWO_SHAPES = (torch.ones(3, 4), torch.full((5, 6), 2.0), torch.zeros(2))
ONE_SHAPE = (torch.ones(3, 4), torch.full((3, 4), 2.0), torch.zeros(3, 4))


@pytest.mark.device
@pytest.mark.parametrize("order", ORDERS)
def test_one_tensor_that_is_returned_twice(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """executorch's own writer lists such an output once."""
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner
    from executorch.backends.vulkan.serialization.vulkan_graph_builder import VkGraphBuilder

    import purevk.export  # noqa: F401  it changes the writer

    for name in ("process_placeholder_node", "process_output_node"):
        monkeypatch.setattr(VkGraphBuilder, name, getattr(VkGraphBuilder, name).__wrapped__)
    have, want = results(VulkanPartitioner({}), order, TWO_SHAPES)
    torch.testing.assert_close(have, want)


@pytest.mark.device
def test_results_of_the_type_of_a_parameter() -> None:
    """A parameter that is not the last one is no buffer, so its first result is no new content."""
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner
    from executorch.exir import to_edge_transform_and_lower

    import purevk

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = torch.nn.Parameter(torch.randn(1, 5, 8))
            self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = self.first(x) + self.position
            return h, self.second(h).relu()

    torch.manual_seed(0)
    module, x = Hidden().eval().requires_grad_(False), torch.randn(1, 5, 8)
    edge = to_edge_transform_and_lower(
        torch.export.export(module, (x,)), partitioner=[VulkanPartitioner({})]
    )
    with purevk.load(edge.to_executorch().buffer) as program:
        torch.testing.assert_close(tuple(program(x)), module(x))


@pytest.mark.device
def test_large_indices_do_not_wrap() -> None:
    """The partitioner has its graph convert int64 to int32, which the module does not."""
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner
    from executorch.exir import to_edge_transform_and_lower

    import purevk
    from purevk.errors import InputError

    torch.manual_seed(0)
    module, x = torch.nn.Embedding(21, 4).eval().requires_grad_(False), torch.tensor([1, 20, 3])
    edge = to_edge_transform_and_lower(
        torch.export.export(module, (x,)), partitioner=[VulkanPartitioner({})]
    )
    with purevk.load(edge.to_executorch().buffer) as program:
        torch.testing.assert_close(program(x), module(x))
        for wrong in (1 << 32, (1 << 40) + 3, -(1 << 32), 21):
            with pytest.raises(InputError, match=f"has the index {wrong}\n") as error:
                program(torch.tensor([0, wrong, 1]))
            assert "from 0 to 20" in error.value.why
            with pytest.raises(InputError, match=f"has the index {wrong}\n"):
                program(np.array([0, wrong, 1]))


@pytest.mark.device
@pytest.mark.parametrize("order", ORDERS)
def test_purevk_writes_all_arguments(order: str) -> None:
    from purevk.export import PurevkPartitioner

    have, want = results(PurevkPartitioner(), order, ONE_SHAPE)
    torch.testing.assert_close(have, want)


class Counter(torch.nn.Module):
    """A buffer that each call writes, and results of which two are one tensor."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.copies = copies
        self.register_buffer("total", torch.arange(12.0).reshape(3, 4))

    def forward(self, x: Any) -> Any:
        self.total.add_(x)
        y = self.total * 2
        return y, (self.total.clone() if self.copies else y.clone())


@pytest.mark.device
@pytest.mark.parametrize("copies", [False, True])
def test_purevk_writes_all_outputs_of_graphs_with_buffers(copies: bool) -> None:
    from executorch.exir import to_edge_transform_and_lower

    import purevk
    from purevk.export import PurevkPartitioner

    x, module = torch.ones(3, 4), Counter(copies).eval()
    edge = to_edge_transform_and_lower(
        torch.export.export(Counter(copies).eval(), (x,)), partitioner=[PurevkPartitioner()]
    )
    with purevk.load(edge.to_executorch().buffer) as program:
        for _ in range(3):
            torch.testing.assert_close(list(program(x)), list(module(x)))


@pytest.mark.slow
@pytest.mark.device
@pytest.mark.parametrize("lists_buffers", [True, False])
def test_caches_that_are_outputs(lists_buffers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph may list caches that it writes in place, in another order than its constants. That of
    executorch does not, also after `purevk.export` has changed its writer."""
    from executorch.backends.vulkan.serialization.vulkan_graph_builder import VkGraphBuilder

    import purevk
    import purevk.export  # changes the writer
    from tests.models.export import lower
    from tests.models.zoo import CASES

    def all_outputs(self: Any, node: Any) -> None:
        self.output_ids[:] = [self.node_to_value_ids[each] for each in node.args[0]]

    if lists_buffers:
        monkeypatch.setattr(VkGraphBuilder, "process_output_node", all_outputs)
    built = CASES["decoder_plain"].build()
    with purevk.load(lower(built, "fp32", False)) as program, torch.no_grad():
        for sample in built.samples[:4]:
            torch.testing.assert_close(
                program(*sample), built.module(*sample), rtol=1e-4, atol=1e-4
            )
