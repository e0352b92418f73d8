"""From the tables of a program's flatbuffer to the data of `program`: one function a table, every
index checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from purevk.pte.flatbuffer import (
    Blob,
    Many,
    One,
    Schema,
    Table,
    Text,
    Union,
    flag,
    i8,
    i32,
    i64,
    numbers,
    u8,
    u32,
    u64,
)
from purevk.pte.types import (
    SCALAR_TYPES,
    Allocation,
    ArenaDevice,
    BoxedIntList,
    Chain,
    CompileSpec,
    DataLocation,
    Delegate,
    DelegateCall,
    EValue,
    ExecutionPlan,
    Frame,
    Free,
    Instruction,
    JumpFalse,
    KernelCall,
    MoveCall,
    Operator,
    OptionalTensorList,
    ShapeDynamism,
    Tensor,
    TensorList,
)
from purevk.pte.values import (
    BOOL,
    BOOL_LIST,
    DOUBLE,
    DOUBLE_LIST,
    INT,
    MAX_RANK,
    NULL,
    STRING,
    Int,
    Null,
)

_ALLOCATION = Schema(
    "AllocationDetails", memory_id=u32(), memory_offset_low=u32(), memory_offset_high=u32()
)
_EXTRA = Schema(
    "ExtraTensorInfo",
    mutable_data_segments_idx=u64(),
    fully_qualified_name=Text(),
    location=i8(),
    device_type=i8(),
    device_index=i8(),
)
_TENSOR = Schema(
    "Tensor",
    scalar_type=i8(),
    storage_offset=i32(),
    sizes=numbers(i32()),
    dim_order=numbers(u8()),
    requires_grad=flag(),
    data_buffer_idx=u32(),
    allocation_info=One(_ALLOCATION),
    layout=i8(),
    shape_dynamism=i8(),
    extra_tensor_info=One(_EXTRA),
)
_INT_LIST = Schema("IntList", BoxedIntList, items=numbers(i64()))
_TENSOR_LIST = Schema("TensorList", TensorList, items=numbers(i32()))
_OPTIONAL_TENSOR_LIST = Schema("OptionalTensorList", OptionalTensorList, items=numbers(i32()))
_EVALUE = Schema(
    "EValue",
    val=Union(
        *(NULL, INT, BOOL, DOUBLE, _TENSOR, STRING),
        *(_INT_LIST, DOUBLE_LIST, BOOL_LIST, _TENSOR_LIST, _OPTIONAL_TENSOR_LIST),
    ),
)
_OPERATOR = Schema("Operator", Operator, name=Text(), overload=Text())
_KERNEL_CALL = Schema("KernelCall", KernelCall, op_index=i32(), args=numbers(i32()))
_DELEGATE_CALL = Schema("DelegateCall", DelegateCall, delegate_index=i32(), args=numbers(i32()))
_MOVE_CALL = Schema("MoveCall", MoveCall, move_from=i32(), move_to=i32())
_JUMP_FALSE_CALL = Schema(
    "JumpFalseCall", JumpFalse, cond_value_index=i32(), destination_instruction=i32()
)
_FREE_CALL = Schema("FreeCall", Free, value_index=i32())
_INSTRUCTION = Schema(
    "Instruction",
    instr_args=Union(_KERNEL_CALL, _DELEGATE_CALL, _MOVE_CALL, _JUMP_FALSE_CALL, _FREE_CALL),
)
_FRAME = Schema("Frame", Frame, filename=Text(), lineno=i32(), name=Text(), context=Text())
_FRAME_LIST = Schema("FrameList", items=Many(_FRAME))
_DATA_REFERENCE = Schema("BackendDelegateDataReference", location=i8(), index=u32())
_COMPILE_SPEC = Schema("CompileSpec", key=Text(), value=Blob())
_DELEGATE = Schema(
    "BackendDelegate", id=Text(), processed=One(_DATA_REFERENCE), compile_specs=Many(_COMPILE_SPEC)
)
_CHAIN = Schema(
    "Chain",
    inputs=numbers(i32()),
    outputs=numbers(i32()),
    instructions=Many(_INSTRUCTION),
    stacktrace=Many(_FRAME_LIST),
)
_CONTAINER = Schema("ContainerMetadata", encoded_inp_str=Text(), encoded_out_str=Text())
_BUFFER_DEVICE = Schema(
    "NonConstBufferDevice", ArenaDevice, buffer_idx=i32(), device_type=i8(), device_index=i8()
)
PLAN = Schema(
    "ExecutionPlan",
    name=Text(),
    container_meta_type=One(_CONTAINER),
    values=Many(_EVALUE),
    inputs=numbers(i32()),
    outputs=numbers(i32()),
    chains=Many(_CHAIN),
    operators=Many(_OPERATOR),
    delegates=Many(_DELEGATE),
    non_const_buffer_sizes=numbers(i64()),
    non_const_buffer_device=Many(_BUFFER_DEVICE),
)


def read_plan(table: Table, segments: int, inline_delegates: int) -> ExecutionPlan:
    """The method that `table` holds.

    Args:
        table: a table of schema `PLAN`.
        segments: number of segments of the program.
        inline_delegates: number of delegate blobs inside the flatbuffer.

    Raises:
        FileFormatError: an index, a size or a tag of the plan is out of range.
    """
    rows = table["values"]
    arenas = table["non_const_buffer_sizes"]
    if any(size < 0 for size in arenas):
        table.fail("an arena has a negative size", f"sizes are {arenas[:16]}")
    unions = [row.union("val") for row in rows]
    values = tuple(_tensor(row) if row.schema is _TENSOR else row.record() for row in unions)
    for row, value in zip(unions, values, strict=True):
        _check_value(row, value, values, arenas)
    operators = tuple(row.record() for row in table["operators"])
    delegates = tuple(_delegate(row, segments, inline_delegates) for row in table["delegates"])
    container = table["container_meta_type"]
    inputs, outputs = table["inputs"], table["outputs"]
    table.check_indices("inputs", inputs, len(values))
    table.check_indices("outputs", outputs, len(values))
    return ExecutionPlan(
        name=table["name"],
        values=values,
        inputs=inputs,
        outputs=outputs,
        chains=tuple(
            _chain(row, len(values), len(operators), len(delegates)) for row in table["chains"]
        ),
        operators=operators,
        delegates=delegates,
        arena_sizes=arenas,
        arena_devices=tuple(row.record() for row in table["non_const_buffer_device"]),
        input_structure=container["encoded_inp_str"] if container is not None else "",
        output_structure=container["encoded_out_str"] if container is not None else "",
    )


def _tensor(row: Table) -> Tensor:
    scalar_type, sizes, dim_order = row["scalar_type"], row["sizes"], row["dim_order"]
    rank = len(sizes)
    if scalar_type not in SCALAR_TYPES:
        row.fail(f"unknown scalar type {scalar_type}", f"{sorted(SCALAR_TYPES)} are accepted")
    if rank > MAX_RANK or any(size < 0 for size in sizes):
        row.fail(
            f"sizes {list(sizes[:MAX_RANK])} of rank {rank}",
            f"up to {MAX_RANK} sizes of at least 0 are accepted",
        )
    if not dim_order:
        dim_order = tuple(range(rank))
    elif sorted(dim_order) != list(range(rank)):
        row.fail(
            f"dim_order {list(dim_order[:MAX_RANK])}",
            f"an order of the dims 0 to {rank - 1} is accepted",
        )
    if row["storage_offset"]:
        row.fail(f"storage_offset {row['storage_offset']}", "0 is accepted")
    dynamism = row["shape_dynamism"]
    if not 0 <= dynamism <= 2:
        row.fail(f"shape_dynamism {dynamism}", "0 to 2 are accepted")
    given, extra = row["allocation_info"], row["extra_tensor_info"]
    allocation = None
    if given is not None:
        allocation = Allocation(
            given["memory_id"], given["memory_offset_high"] << 32 | given["memory_offset_low"]
        )
    more: dict[str, Any] = {}
    if extra is not None:
        location, name = extra["location"], extra["fully_qualified_name"]
        if location not in (0, 1) or (location == 1 and not name):
            extra.fail(
                f"location {location} with name {name!r}",
                "0 (segment) and 1 (external, with a name) are accepted",
            )
        more = {
            "name": name,
            "external": location == 1,
            "mutable_segment": extra["mutable_data_segments_idx"],
            "device_type": extra["device_type"],
            "device_index": extra["device_index"],
        }
    return Tensor(
        scalar_type=scalar_type,
        sizes=sizes,
        dim_order=dim_order,
        dynamism=ShapeDynamism(dynamism),
        data_index=row["data_buffer_idx"],
        allocation=allocation,
        requires_grad=row["requires_grad"],
        layout=row["layout"],
        **more,
    )


# What the items of a list may refer to.
_ITEM_TYPES: dict[type[EValue], tuple[type[EValue], ...]] = {
    BoxedIntList: (Int,),
    TensorList: (Tensor,),
    OptionalTensorList: (Tensor, Null),
}


def _check_value(
    row: Table, value: EValue, values: tuple[EValue, ...], arenas: tuple[int, ...]
) -> None:
    if isinstance(value, Tensor):
        allocation = value.allocation
        if allocation is None:
            return
        if (
            not 0 < allocation.memory_id < len(arenas)
            or allocation.offset + value.nbytes > arenas[allocation.memory_id]
        ):
            row.fail(
                f"{value.nbytes} bytes at offset {allocation.offset} of arena {allocation.memory_id}",
                f"the plan has arenas 1 to {len(arenas) - 1} of {list(arenas[1:17])} bytes",
            )
        return
    if not isinstance(value, (BoxedIntList, TensorList, OptionalTensorList)):
        return
    accepted = _ITEM_TYPES[type(value)]
    optional = isinstance(value, OptionalTensorList)
    for item in value.items:
        if optional and item == -1:
            continue
        if not 0 <= item < len(values) or not isinstance(values[item], accepted):
            found = type(values[item]).__name__ if 0 <= item < len(values) else "nothing"
            row.fail(
                f"item {item} refers to {found}",
                f"{' or '.join(kind.__name__ for kind in accepted)} among {len(values)} values is accepted",
            )


def _instruction(row: Table, counts: Mapping[str, int]) -> Instruction:
    """An instruction. All its fields are indices."""
    call = row.union("instr_args")
    instruction: Instruction = call.record()
    for name, indices in zip(call.schema.fields, instruction):
        indices = indices if isinstance(indices, tuple) else (indices,)
        call.check_indices(name, indices, counts[_COUNTED.get(name, "values")])
    return instruction


# What the fields of instructions refer to, if not to values.
_COUNTED = {
    "op_index": "operators",
    "delegate_index": "delegates",
    "destination_instruction": "destinations",
}


def _chain(row: Table, values: int, operators: int, delegates: int) -> Chain:
    inputs, outputs, instructions = row["inputs"], row["outputs"], row["instructions"]
    row.check_indices("inputs", inputs, values)
    row.check_indices("outputs", outputs, values)
    counts = {"values": values, "operators": operators, "delegates": delegates}
    counts["destinations"] = len(instructions) + 1  # one past the last instruction ends the chain
    return Chain(
        inputs=inputs,
        outputs=outputs,
        instructions=tuple(_instruction(item, counts) for item in instructions),
        stacktrace=tuple(
            tuple(frame.record() for frame in frames["items"]) for frames in row["stacktrace"]
        ),
    )


def _delegate(row: Table, segments: int, inline_delegates: int) -> Delegate:
    processed = row["processed"]
    if processed is None:
        row.fail("no reference to its data")
    location, index = processed["location"], processed["index"]
    if location not in (0, 1):
        processed.fail(f"location {location}", "0 (inline) and 1 (segment) are accepted")
    processed.check_indices("index", (index,), segments if location else inline_delegates)
    specs = row["compile_specs"]
    for spec in specs:
        row.reader.need(spec.pos, len(spec["value"]), "CompileSpec.value")
    return Delegate(
        id=row["id"],
        location=DataLocation(location),
        index=index,
        compile_specs=tuple(CompileSpec(spec["key"], bytes(spec["value"])) for spec in specs),
    )
