"""Committed programs against what their models are (tests/data/make_pte.py), and older forms of the
file."""

from __future__ import annotations

import gc
import math
import mmap
import pickle
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

from purevk import pte
from purevk.dtypes import DType
from purevk.errors import FileFormatError, PurevkError, UnsupportedProgramError
from purevk.pte import load, plan, vkgraph
from purevk.pte.types import (
    Allocation,
    BoxedIntList,
    DelegateCall,
    JumpFalse,
    KernelCall,
    MoveCall,
    OptionalTensorList,
    ShapeDynamism,
    Tensor,
    TensorList,
)
from purevk.pte.values import BOOL, DOUBLE, INT, NULL, Bool, Double, Int, IntList, Null
from purevk.pte.vkgraph import SymInt, ValueList, VkTensor
from tests.harness import DATA
from tests.pte.harness import NAMES, data_files
from tests.pte.writer import data_file, vulkan_blob, with_header, write


def read(name: str) -> pte.Program:
    return pte.read_program(DATA / f"{name}.pte", data_files(name))


def graph_of(program: pte.Program, index: int = 0, method: str = "forward") -> pte.VkGraph:
    return program.vulkan_graph(program.method(method).delegates[index])


def weights(program: pte.Program) -> dict[tuple[int, ...], np.ndarray]:
    """Constants of the first Vulkan graph, by their dims."""
    graph = graph_of(program)
    return {
        value.dims: np.frombuffer(
            program.vulkan_constant(graph, value.constant_id), value.dtype.numpy
        ).reshape(value.dims)
        for value in graph.values
        if isinstance(value, VkTensor) and value.is_constant
    }


@pytest.mark.parametrize("name", NAMES)
def test_every_program_reads_from_path_and_bytes(name: str) -> None:
    mapped = read(name)
    held = pte.read_program((DATA / f"{name}.pte").read_bytes(), data_files(name))
    assert (
        held.plans == mapped.plans
        and held.segments == mapped.segments
        and held.named == mapped.named
    )
    assert held.methods == (("forward", "step") if name == "two_methods" else ("forward",))


def test_linear_relu() -> None:
    program = read("linear_relu")
    method = program.method()
    (chain,) = method.chains
    (call,) = chain.instructions
    assert isinstance(call, DelegateCall) and call.args == (*method.inputs, *method.outputs)
    x, y = (method.values[index] for index in call.args)
    assert (x.dtype, x.sizes, x.strides, x.dynamism, x.nbytes) == (
        DType.float32,
        (2, 5),
        (5, 1),
        ShapeDynamism.STATIC,
        40,
    )
    assert y.sizes == (2, 3) and y.allocation is not None
    graph = graph_of(program)
    assert [op.name for op in graph.chain] == ["aten.linear.default", "aten.relu.default"]
    x_id, weight, bias, hidden = graph.chain[0].args
    assert (x_id,) == graph.input_ids and (graph.chain[1].args[1],) == graph.output_ids
    assert graph.values[weight].dims == (3, 5) and graph.values[bias].dims == (3,)
    assert graph.values[hidden].constant_id == -1
    assert method.input_structure.startswith("[1, {")


def test_weights_are_the_same_wherever_they_are_stored() -> None:
    """In the program, as halves, in a data file, as constants of a program without a delegate, or
    external to it."""
    expected = weights(read("linear_relu"))
    assert set(expected) == {(3, 5), (3,)} and all(
        np.abs(array).max() <= 5**-0.5 for array in expected.values()
    )
    half = weights(read("linear_relu_half"))
    for name in ("linear_relu_inline", "linear_relu_external"):
        found = weights(read(name))
        assert all(np.array_equal(found[dims], array) for dims, array in expected.items())
    for name in ("linear_portable", "linear_portable_external"):
        program = read(name)
        constants = [
            value
            for value in program.method().values
            if isinstance(value, Tensor) and value.is_constant
        ]
        found = {
            v.sizes: np.frombuffer(program.tensor_data(v), v.dtype.numpy).reshape(v.sizes)
            for v in constants
        }
        assert all(np.array_equal(found[dims], array) for dims, array in expected.items())
    for dims, array in expected.items():
        assert half[dims].dtype == np.float16 and np.array_equal(
            half[dims], array.astype(np.float16)
        )


def test_half_graph_keeps_float_staging() -> None:
    graph = graph_of(read("linear_relu_half"))
    x = graph.values[graph.input_ids[0]]
    assert (x.dtype, DType.from_vk(x.staging_datatype)) == (DType.float16, DType.float32)


def test_operator_between_two_delegates() -> None:
    program = read("topk")
    method = program.method()
    first, kernel, second = method.chains[0].instructions
    assert (
        isinstance(first, DelegateCall)
        and isinstance(second, DelegateCall)
        and isinstance(kernel, KernelCall)
    )
    assert str(method.operators[kernel.op_index]) == "aten::topk.values"
    x, k, dim, largest, is_sorted, values, indices, outs = (
        method.values[index] for index in kernel.args
    )
    known = (Int(2), Int(-1), Bool(True), Bool(True))
    assert repr((k, dim, largest, is_sorted)) == repr(known)  # with their types
    assert (x.sizes, values.sizes, indices.dtype) == ((2, 7), (2, 2), DType.int64)
    assert outs == TensorList((kernel.args[5], kernel.args[6]))
    assert [op.name for op in graph_of(program, 1).chain] == ["aten.sigmoid.default"]
    assert {op.name for op in graph_of(program, 0).chain} >= {"aten.mul.Tensor", "aten.add.Tensor"}


def test_dynamic_shape() -> None:
    program = read("dynamic_views")
    x = program.method().values[program.method().inputs[0]]
    assert (x.sizes, x.dynamism) == ((1, 16, 8), ShapeDynamism.BOUNDED)
    graph = graph_of(program)
    view = next(op for op in graph.chain if op.name == "aten.view_copy.default")
    shape = graph.values[view.args[1]]
    assert isinstance(shape, ValueList)
    items = [graph.values[index] for index in shape.items]
    assert [type(item) for item in items] == [Int, SymInt, Int, Int] and items[2:] == [
        Int(2),
        Int(4),
    ]
    assert any(op.name == "sym_size.int" for op in graph.chain)


def test_mutable_buffer_of_a_delegate() -> None:
    program = read("counter")
    graph = graph_of(program)
    assert len(graph.output_ids) == 2 and len(program.method().outputs) == 1
    assert np.array_equal(weights(program)[2, 4], np.arange(8, dtype=np.float32).reshape(2, 4))


def test_mutable_buffer_with_a_first_value() -> None:
    program = read("counter_portable")
    (cache,) = (
        v for v in program.method().values if isinstance(v, Tensor) and v.has_data and v.allocation
    )
    assert not cache.is_constant and cache.allocation == Allocation(1, cache.allocation.offset)
    assert np.frombuffer(program.tensor_data(cache), np.float32).tolist() == list(range(8))
    bound = [
        v
        for v in program.method().values
        if isinstance(v, Tensor) and not v.has_data and not v.allocation
    ]
    assert len(bound) == 1 and program.tensor_data(bound[0]) is None


def test_branch() -> None:
    instructions = read("branch").method().chains[0].instructions
    assert [type(item) for item in instructions] == [
        JumpFalse,
        KernelCall,
        MoveCall,
        JumpFalse,
        KernelCall,
        MoveCall,
    ]
    assert [item.destination for item in instructions if isinstance(item, JumpFalse)] == [
        4,
        len(instructions),
    ]


def test_lists_and_channels_last() -> None:
    method = read("gather").method()
    x = method.values[method.inputs[0]]
    assert (x.sizes, x.dim_order, x.strides) == ((1, 5, 3, 2), (0, 2, 3, 1), (30, 1, 10, 5))
    (optional,) = (value for value in method.values if isinstance(value, OptionalTensorList))
    assert optional.items[0] == -1 and method.values[optional.items[1]].dtype is DType.int64
    (dims,) = (value for value in method.values if isinstance(value, BoxedIntList))
    assert [method.values[index] for index in dims.items] == [Int(2), Int(3)]


def test_two_methods_share_weights() -> None:
    program = read("two_methods")
    graphs = [graph_of(program, method=name) for name in program.methods]
    keys = [sorted(constant.named_key for constant in graph.constants) for graph in graphs]
    assert keys[0] == keys[1] == sorted(program.named)
    with pytest.raises(KeyError, match="no method 'other'; it has 'forward', 'step'"):
        program.method("other")


def test_data_file() -> None:
    (path,) = data_files("linear_portable_external")
    file = pte.read_data_file(path)
    layout = file.entries["linear.weight"].layout
    assert (layout.scalar_type, layout.sizes, layout.dim_order) == (6, (3, 5), (0, 1))
    assert len(file.data("linear.weight")) == 60
    (path,) = data_files("linear_relu_external")
    assert {entry.layout for entry in pte.read_data_file(path.read_bytes()).entries.values()} == {
        None
    }


def test_missing_data_file() -> None:
    program = pte.read_program(DATA / "linear_relu_external.pte")
    with pytest.raises(
        FileFormatError,
        match="no data under the key .*\n  where: .*pte\n  why: .* no data file was given",
    ):
        program.vulkan_constant(graph_of(program), 0)
    program = pte.read_program(
        DATA / "linear_portable_external.pte", data_files("linear_relu_external")
    )
    with pytest.raises(FileFormatError, match="'linear.weight'.*\n.*\n  why: .*vulkan_constants_"):
        list(
            map(program.tensor_data, (v for v in program.method().values if isinstance(v, Tensor)))
        )


def test_data_file_of_another_model() -> None:
    program = read("linear_portable_external")
    (weight,) = (
        v for v in program.method().values if isinstance(v, Tensor) and v.name == "linear.weight"
    )
    with pytest.raises(
        FileFormatError,
        match=r"another tensor than the program does\n.*\n  why: .*\(6, \(3, 5\), \(0, 1\)\)",
    ):
        program.tensor_data(weight._replace(sizes=(5, 3)))


def test_data_is_mapped_not_copied() -> None:
    program = read("linear_relu")
    data = program.vulkan_constant(graph_of(program), 0)
    assert data.readonly and isinstance(data.obj, mmap.mmap)


def test_close_keeps_slices_and_frees_the_map() -> None:
    program = read("linear_relu_external")
    data = program.named_data(graph_of(program).constants[0].named_key)
    before = bytes(data)
    mapped = weakref.ref(data.obj)
    program.close()
    program.close()
    assert bytes(data) == before
    with pytest.raises(PurevkError, match="the file was closed"):
        program.named_data(next(iter(program.data_files[0].entries)))
    del data
    gc.collect()
    assert mapped() is None


def test_with_statement_and_describe() -> None:
    with read("topk") as program:
        text = pte.describe(program)
    assert (
        "method 'forward'" in text
        and "input 0: float32[2, 7]" in text
        and "output 1: int64[2, 2]" in text
    )
    assert "on the CPU: aten::topk.values" in text and "delegate 1: VulkanBackend" in text
    assert "operators: aten.sigmoid.default" in text
    with read("dynamic_views") as program:
        assert "input 0: float32[1, 16, 8] (bounds)" in pte.describe(program)
    with read("linear_relu_external") as program:
        assert "2 keys, 72 bytes" in pte.describe(program)


def small_plan(**changes: object) -> dict:
    """A plan with one planned tensor and one constant."""
    tensor = {
        "scalar_type": 6,
        "sizes": (2, 3),
        "dim_order": (0, 1),
        "allocation_info": {"memory_id": 1},
    }
    constant = {"scalar_type": 3, "sizes": (2,), "dim_order": (0,), "data_buffer_idx": 1}
    return {
        "name": "forward",
        "values": [{"val": (plan._TENSOR, tensor)}, {"val": (plan._TENSOR, constant)}],
        "inputs": (0,),
        "outputs": (0,),
        "non_const_buffer_sizes": (0, 24),
    } | changes


def constant_of(program: pte.Program) -> bytes:
    return bytes(program.tensor_data(program.method().values[1]))


def test_constants_inside_the_flatbuffer() -> None:
    """Files before September 2024: no header, constants as buffers, delegates inline."""
    delegates = [
        {
            "id": "Other",
            "processed": {"index": 1},
            "compile_specs": [{"key": "k", "value": b"\1\2"}],
        }
    ]
    fields = {
        "execution_plan": [small_plan(delegates=delegates)],
        "constant_buffer": [{}, {"storage": b"\1\0\0\0\2\0\0\0"}],
        "backend_delegate_data": [{"data": b"first"}, {"data": b"second"}],
    }
    program = pte.read_program(write(load._PROGRAM, fields, b"ET12"))
    assert constant_of(program) == b"\1\0\0\0\2\0\0\0"
    (delegate,) = program.method().delegates
    assert bytes(program.delegate_data(delegate)) == b"second"
    assert (delegate.compile_specs[0].key, delegate.compile_specs[0].value) == ("k", b"\1\2")
    with pytest.raises(UnsupportedProgramError, match="the delegate is for Other"):
        program.vulkan_graph(delegate)
    assert "delegate 0: Other, 6 bytes" in pte.describe(program)


@pytest.mark.parametrize("length", [24, 32, 40, 64])
def test_header_lengths(length: int) -> None:
    fields = {
        "execution_plan": [small_plan()],
        "segments": [{"offset": 16, "size": 12}],
        "constant_segment": {"segment_index": 0, "offsets": (0, 4)},
    }
    segments = b"-" * 20 + b"\1\0\0\0\2\0\0\0"
    program = pte.read_program(
        with_header(write(load._PROGRAM, fields, b"ET12"), segments, length) + b"trailing"
    )
    assert constant_of(program) == b"\1\0\0\0\2\0\0\0"
    assert bytes(program.constant_data(1)) == b"\1\0\0\0\2\0\0\0"


def test_constant_data_ends_at_the_next_constant() -> None:
    fields = {"segments": [{"size": 12}], "constant_segment": {"offsets": (0, 8, 0, 4)}}
    program = pte.read_program(with_header(write(load._PROGRAM, fields, b"ET12"), b"aaaabbbbcccc"))
    assert [bytes(program.constant_data(index)) for index in (1, 2, 3)] == [
        b"cccc",
        b"aaaa",
        b"bbbb",
    ]
    assert bytes(program.constant_data(2, 6)) == b"aaaabb"


def test_delegate_constants_inside_the_blob() -> None:
    """Vulkan blobs before named data hold their constants behind the graph."""
    region = bytes(range(32))
    tensors = [
        {"datatype": 1, "dims": (4,), "constant_id": index, "mem_obj_id": -1} for index in (0, 1)
    ]
    fields = {
        "version": "0",
        "values": [{"value": (vkgraph._TENSOR, tensor)} for tensor in tensors],
        "constants": [{"offset": 0, "length": 4}, {"offset": 16, "length": 4}],
        "output_ids": (1,),
    }
    for declare in (True, False):
        graph = pte.read_vulkan_graph(
            memoryview(vulkan_blob(write(vkgraph._GRAPH, fields, b"VK00"), region, declare))
        )
        program = read("linear_relu")
        assert [list(program.vulkan_constant(graph, index)) for index in (0, 1)] == [
            [0, 1, 2, 3],
            [16, 17, 18, 19],
        ]
        assert (graph.values[0].storage_type, graph.values[0].memory_layout) == (255, 255)
        assert (
            DType.from_vk(graph.values[0].staging_datatype) is None
            and graph.storage_type_override == 255
        )


def test_values_of_a_vulkan_graph() -> None:
    members = [
        (NULL, {}),
        (INT, {"int_val": -(2**62)}),
        (DOUBLE, {"double_val": -math.inf}),
        (BOOL, {"bool_val": True}),
        (vkgraph._INT_LIST, {}),
        (vkgraph._VALUE_LIST, {"items": (0, 1)}),
        (vkgraph._SYM_INT, {"value": 7}),
        (vkgraph._TENSOR, {"constant_id": -1}),
    ]
    data = write(vkgraph._GRAPH, {"values": [{"value": member} for member in members]}, b"VK00")
    values = pte.read_vulkan_graph(memoryview(vulkan_blob(data))).values
    scalar = VkTensor(0, (), -1, 0, 255, 255, 127)
    assert values == (
        Null(),
        Int(-(2**62)),
        Double(-math.inf),
        Bool(True),
        IntList(()),
        ValueList((0, 1)),
        SymInt(7),
        scalar,
    )


def test_first_of_equal_keys_and_of_several_data_files(tmp_path: Path) -> None:
    fields = {
        "segments": [{"size": 4}, {"offset": 4, "size": 4}],
        "named_data": [{"key": "own"}, {"key": "own", "segment_index": 1}],
    }
    (tmp_path / "second.ptd").write_bytes(data_file([{"key": "k"}], b"bbbb"))
    program = pte.read_program(
        with_header(write(load._PROGRAM, fields, b"ET12"), b"11112222"),
        [data_file([{"key": "k"}], b"aaaa"), tmp_path / "second.ptd"],
    )
    assert bytes(program.named_data("own")) == b"1111"
    assert bytes(program.named_data("k")) == b"aaaa"


def test_methods_pickle() -> None:
    method = read("topk").method()
    assert pickle.loads(pickle.dumps(method)) == method


def test_import_needs_neither_torch_nor_vulkan() -> None:
    code = "import sys, purevk.pte; print([name for name in ('torch', 'executorch', 'vulkan') if name in sys.modules])"
    root = str(DATA.parent.parent.parent)
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    assert found.stdout.strip() == "[]"
