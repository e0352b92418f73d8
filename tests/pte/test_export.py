"""Programs exported anew, read by us and by executorch's own deserializers: the two must agree in
every field."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from purevk import pte
from purevk.pte import types as ours
from purevk.pte import values, vkgraph
from purevk.pte.types import VULKAN_BACKEND, DataLocation, Tensor
from tests.harness import DATA
from tests.pte.harness import NAMES, data_files

pytestmark = pytest.mark.export


def script() -> ModuleType:
    """tests/data/make_pte.py as a module, under its name: torch imports the module of what it
    exports."""
    spec = importlib.util.spec_from_file_location("make_pte", DATA.parent / "make_pte.py")
    module = sys.modules["make_pte"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a program exported in this run, by name. Each is made once."""
    folder = tmp_path_factory.mktemp("exported")
    module = script()

    def build(name: str) -> Path:
        if not (folder / f"{name}.pte").exists():
            module.write(name, folder)
        return folder

    return build


@pytest.fixture(params=["committed", pytest.param("exported", marks=pytest.mark.slow)])
def folder_of(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """The folder of program `name`: beside the tests, or in a temporary folder."""
    if request.param == "committed":
        return lambda name: DATA
    return request.getfixturevalue("exported")


def read(folder: Path, name: str) -> tuple[pte.Program, bytes]:
    path = folder / f"{name}.pte"
    return pte.read_program(path, data_files(name, folder)), path.read_bytes()


def as_executorch(program: pte.Program, segment_base: int) -> Any:
    """Our Program as executorch's dataclasses, with absent lists as they come out of its reader."""
    from executorch.exir import schema

    def tensor(value: Tensor, reference: Any) -> Any:
        allocation = value.allocation and schema.AllocationDetails(
            value.allocation.memory_id,
            value.allocation.offset & 0xFFFFFFFF,
            value.allocation.offset >> 32,
        )
        extra = None
        if reference.extra_tensor_info is not None:
            extra = schema.ExtraTensorInfo(
                mutable_data_segments_idx=value.mutable_segment,
                fully_qualified_name=value.name or None,
                location=schema.TensorDataLocation(int(value.external)),
                device_type=schema.DeviceType(value.device_type),
                device_index=value.device_index,
            )
        return schema.Tensor(
            scalar_type=type(reference.scalar_type)(value.scalar_type),
            storage_offset=0,
            sizes=list(value.sizes),
            dim_order=list(value.dim_order),
            requires_grad=value.requires_grad,
            layout=value.layout,
            data_buffer_idx=value.data_index,
            allocation_info=allocation,
            shape_dynamism=schema.TensorShapeDynamism(value.dynamism),
            extra_tensor_info=extra,
        )

    plain = {
        values.Int: (schema.Int, "value"),
        values.Bool: (schema.Bool, "value"),
        values.Double: (schema.Double, "value"),
        values.String: (schema.String, "value"),
        ours.BoxedIntList: (schema.IntList, "items"),
        values.DoubleList: (schema.DoubleList, "items"),
        values.BoolList: (schema.BoolList, "items"),
        ours.TensorList: (schema.TensorList, "items"),
        ours.OptionalTensorList: (schema.OptionalTensorList, "items"),
    }

    def evalue(value: Any, reference: Any) -> Any:
        if isinstance(value, values.Null):
            return schema.EValue(schema.Null())
        if isinstance(value, Tensor):
            return schema.EValue(tensor(value, reference.val))
        kind, name = plain[type(value)]
        content = getattr(value, name)
        return schema.EValue(kind(list(content) if name == "items" else content))

    def instruction(call: Any) -> Any:
        if isinstance(call, ours.KernelCall):
            return schema.Instruction(schema.KernelCall(call.op_index, list(call.args)))
        if isinstance(call, ours.DelegateCall):
            return schema.Instruction(schema.DelegateCall(call.delegate_index, list(call.args)))
        if isinstance(call, ours.MoveCall):
            return schema.Instruction(schema.MoveCall(call.source, call.target))
        if isinstance(call, ours.JumpFalse):
            return schema.Instruction(schema.JumpFalseCall(call.condition, call.destination))
        return schema.Instruction(schema.FreeCall(call.value))

    def plan(value: ours.ExecutionPlan, reference: Any) -> Any:
        return schema.ExecutionPlan(
            name=value.name,
            container_meta_type=schema.ContainerMetadata(
                value.input_structure, value.output_structure
            ),
            values=[evalue(*pair) for pair in zip(value.values, reference.values, strict=True)],
            inputs=list(value.inputs),
            outputs=list(value.outputs),
            chains=[
                schema.Chain(
                    inputs=list(chain.inputs),
                    outputs=list(chain.outputs),
                    instructions=[instruction(call) for call in chain.instructions],
                    stacktrace=[
                        schema.FrameList(
                            [schema.Frame(f.filename, f.lineno, f.name, f.context) for f in frames]
                        )
                        for frames in chain.stacktrace
                    ],
                )
                for chain in value.chains
            ],
            operators=[
                schema.Operator(operator.name, operator.overload) for operator in value.operators
            ],
            delegates=[
                schema.BackendDelegate(
                    delegate.id,
                    schema.BackendDelegateDataReference(
                        schema.DataLocation(delegate.location), delegate.index
                    ),
                    [schema.CompileSpec(spec.key, spec.value) for spec in delegate.compile_specs],
                )
                for delegate in value.delegates
            ],
            non_const_buffer_sizes=list(value.arena_sizes),
            non_const_buffer_device=[
                schema.NonConstBufferDevice(
                    row.arena, schema.DeviceType(row.device_type), row.device_index
                )
                for row in value.arena_devices
            ],
        )

    def subsegments(value: Any) -> Any:
        return schema.SubsegmentOffsets(value.segment_index, list(value.offsets))

    def build(reference: Any) -> Any:
        return schema.Program(
            version=program.version,
            execution_plan=[
                plan(*pair) for pair in zip(program.plans, reference.execution_plan, strict=True)
            ],
            constant_buffer=[schema.Buffer(bytes(data)) for data in program.inline_constants],
            backend_delegate_data=[
                schema.BackendDelegateInlineData(bytes(data)) for data in program.inline_delegates
            ],
            segments=[
                schema.DataSegment(item.offset - segment_base, item.size)
                for item in program.segments
            ],
            constant_segment=program.constants and subsegments(program.constants),
            mutable_data_segments=[subsegments(item) for item in program.mutable_data],
            named_data=[schema.NamedData(key, index) for key, index in program.named.items()],
        )

    return build


def filled(value: Any) -> Any:
    """executorch's dataclass with None instead of an absent list replaced by an empty list."""
    value.mutable_data_segments = value.mutable_data_segments or []
    value.named_data = value.named_data or []
    value.constant_buffer = value.constant_buffer or []
    value.backend_delegate_data = value.backend_delegate_data or []
    for plan in value.execution_plan:
        plan.non_const_buffer_device = plan.non_const_buffer_device or []
        for chain in plan.chains:
            chain.stacktrace = chain.stacktrace or []
    return value


@pytest.mark.parametrize("name", NAMES)
def test_program(folder_of: Callable[[str], Path], name: str) -> None:
    from executorch.exir._serialize._flatbuffer_program import _flatbuffer_to_program
    from executorch.exir._serialize._program import _get_extended_header

    program, data = read(folder_of(name), name)
    header = _get_extended_header(data)
    reference = filled(_flatbuffer_to_program(data[: header.program_size] if header else data))
    found = as_executorch(program, header.segment_base_offset if header else 0)(reference)
    assert found == reference


@pytest.mark.parametrize("name", NAMES)
def test_data_of_a_program(folder_of: Callable[[str], Path], name: str) -> None:
    from executorch.exir._serialize._program import deserialize_pte_binary

    program, data = read(folder_of(name), name)
    reference = deserialize_pte_binary(data)
    for number, buffer in enumerate(reference.program.constant_buffer[1:], 1):
        assert bytes(program.constant_data(number)) == bytes(buffer.storage)
    named = {} if reference.named_data is None else reference.named_data.pte_data
    assert set(named) == set(program.named)
    for key, entry in named.items():
        assert bytes(program.named_data(key)) == bytes(
            reference.named_data.buffers[entry.buffer_index]
        )
    initial = [
        value
        for plan in program.plans
        for value in plan.values
        if isinstance(value, Tensor) and value.data_index and value.allocation
    ]
    assert bool(initial) == (reference.mutable_data is not None)
    for value in initial:
        stored = bytes(reference.mutable_data[value.data_index].storage)
        assert stored.startswith(bytes(program.tensor_data(value)))
    blobs = [item.data for item in reference.program.backend_delegate_data]
    for plan, other in zip(program.plans, reference.program.execution_plan, strict=True):
        for delegate, reference_delegate in zip(plan.delegates, other.delegates, strict=True):
            assert bytes(program.delegate_data(delegate)) == bytes(
                blobs[reference_delegate.processed.index]
            )
    inline = {d.location for plan in program.plans for d in plan.delegates} == {DataLocation.INLINE}
    assert inline == (name == "linear_relu_inline")


def as_vulkan(graph: pte.VkGraph) -> Any:
    """Our VkGraph as executorch's dataclasses, with doubles as its reader gives them: text of 12
    decimals."""
    from executorch.backends.vulkan.serialization import vulkan_graph_schema as schema

    def value(item: Any) -> Any:
        if isinstance(item, values.Double):
            return schema.Double(float(f"{item.value:.12f}"))
        if isinstance(item, values.DoubleList):
            return schema.DoubleList([float(f"{number:.12f}") for number in item.items])
        if isinstance(item, values.Null):
            return schema.Null()
        if isinstance(item, vkgraph.VkTensor):
            return schema.VkTensor(
                datatype=schema.VkDataType(item.datatype),
                dims=list(item.dims),
                constant_id=item.constant_id,
                mem_obj_id=item.mem_obj_id,
                storage_type=schema.VkStorageType(item.storage_type),
                memory_layout=schema.VkMemoryLayout(item.memory_layout),
                staging_datatype=schema.VkDataType(item.staging_datatype),
            )
        kind = getattr(schema, type(item).__name__)
        return kind(list(item.items) if hasattr(item, "items") else item.value)

    def constant(item: Any) -> Any:
        if item.named_key is None:
            return schema.VkBytes(item.offset, item.length)
        return schema.VkBytes(2**64 - 1, item.length, item.named_key)

    return schema.VkGraph(
        version=graph.version,
        chain=[
            schema.OperatorCall(call.node_id, call.name, list(call.args)) for call in graph.chain
        ],
        values=[schema.VkValue(value(item)) for item in graph.values],
        input_ids=list(graph.input_ids),
        output_ids=list(graph.output_ids),
        constants=[constant(item) for item in graph.constants],
        shaders=[],
        storage_type_override=schema.VkStorageType(graph.storage_type_override),
        memory_layout_override=schema.VkMemoryLayout(graph.memory_layout_override),
    )


@pytest.mark.parametrize(
    "name", [name for name in NAMES if b"VK00" in (DATA / f"{name}.pte").read_bytes()]
)
def test_vulkan_graphs(folder_of: Callable[[str], Path], name: str) -> None:
    from executorch.backends.vulkan.serialization.vulkan_graph_serialize import (
        VulkanDelegateHeader,
        flatbuffer_to_vk_graph,
    )

    program, _ = read(folder_of(name), name)
    delegates = [
        item for plan in program.plans for item in plan.delegates if item.id == VULKAN_BACKEND
    ]
    assert delegates
    for delegate in delegates:
        blob = bytes(program.delegate_data(delegate))
        header = VulkanDelegateHeader.from_bytes(blob[:30])
        table = blob[header.flatbuffer_offset : header.flatbuffer_offset + header.flatbuffer_size]
        assert as_vulkan(program.vulkan_graph(delegate)) == flatbuffer_to_vk_graph(table)


@pytest.mark.parametrize("name", [name for name in NAMES if data_files(name)])
def test_data_files(folder_of: Callable[[str], Path], name: str) -> None:
    from executorch.exir._serialize._cord import Cord
    from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer

    folder = folder_of(name)
    assert data_files(name, folder)
    for path in data_files(name, folder):
        file = pte.read_data_file(path)
        reference = FlatTensorSerializer().deserialize(Cord(path.read_bytes()))
        assert set(file.entries) == set(reference.named_data)
        for key, entry in reference.named_data.items():
            assert bytes(file.data(key)) == bytes(reference.buffers[entry.buffer_index])
            layout = file.entries[key].layout
            assert (layout is None) == (entry.tensor_layout is None)
            if layout is not None:
                other = entry.tensor_layout
                assert layout.scalar_type == int(other.scalar_type)
                assert (list(layout.sizes), list(layout.dim_order)) == (
                    list(other.sizes),
                    list(other.dim_order),
                )


def test_every_member_of_the_vulkan_union(tmp_path: Path) -> None:
    """All kinds of values, written by flatc from executorch's own schema."""
    import torch
    from executorch.backends.vulkan.serialization import vulkan_graph_schema as schema
    from executorch.backends.vulkan.serialization.vulkan_graph_serialize import (
        serialize_vulkan_graph,
    )

    items = [
        schema.Null(),
        schema.Int(-5),
        schema.Double(9.999999974752427e-07),
        schema.Bool(True),
        schema.VkTensor(schema.VkDataType.INT8, [3], 0, -1),
        schema.VkTensor(
            schema.VkDataType.FLOAT16,
            [2, 1],
            -1,
            3,
            schema.VkStorageType.TEXTURE_2D,
            schema.VkMemoryLayout.PACKED_INT8_CONV2D,
            schema.VkDataType.FLOAT32,
        ),
        schema.IntList([1, -(2**40)]),
        schema.DoubleList([0.5, -1e300]),
        schema.BoolList([True, False]),
        schema.ValueList([1, 10]),
        schema.SymInt(9),
        schema.String("tanh"),
        schema.VkTensor(schema.VkDataType.BOOL, [], -1, -1),
    ]
    graph = schema.VkGraph(
        version="0",
        chain=[schema.OperatorCall(2**32 - 1, "aten.gelu.default", [4, 11, 5])],
        values=[schema.VkValue(item) for item in items],
        input_ids=[4],
        output_ids=[5],
        constants=[],
        shaders=[],
        storage_type_override=schema.VkStorageType.BUFFER,
        memory_layout_override=schema.VkMemoryLayout.TENSOR_CHANNELS_PACKED,
    )
    constants = [torch.tensor([1, -2, 3], dtype=torch.int8), ("key", 8), None]
    blob = serialize_vulkan_graph(graph, constants, [])
    found = pte.read_vulkan_graph(memoryview(blob))
    assert found.values[2].value == 9.999999974752427e-07
    items[2] = schema.Double(1e-06)
    graph.values[2] = schema.VkValue(items[2])
    assert as_vulkan(found) == graph
    assert list(found.region[:3]) == [1, 254, 3]


def test_script_makes_every_committed_program() -> None:
    assert sorted(script().BUILDERS) == NAMES
