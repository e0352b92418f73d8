"""The blob of a Vulkan delegate: a small header, the graph as a flatbuffer, and (in old files) the
constants' bytes."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from purevk.dtypes import DType
from purevk.errors import FileFormatError
from purevk.mapped import own
from purevk.pte.flatbuffer import (
    Many,
    Reader,
    Schema,
    Table,
    Text,
    Union,
    i8,
    i32,
    i64,
    numbers,
    u8,
    u32,
    u64,
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
    Bool,
    BoolList,
    Double,
    DoubleList,
    Int,
    IntList,
    Null,
    String,
)

_HEADER = struct.Struct("<4x4sHIIIQ")
_BY_KEY = 2**64 - 1  # offset of a constant that is found by its key
_UNSET = 127
_DEFAULT = 255


class VkTensor(NamedTuple):
    """A tensor of a Vulkan graph.

    `datatype` and `staging_datatype` are VkDataType codes (127: not set); `dims` are upper bounds.
    `constant_id` is the number of its constant, or negative. `mem_obj_id` is a planned slot, or
    negative. `storage_type` and `memory_layout` are the exporter's hints (255:
    none).
    """

    datatype: int
    dims: tuple[int, ...]
    constant_id: int
    mem_obj_id: int
    storage_type: int
    memory_layout: int
    staging_datatype: int

    @property
    def dtype(self) -> DType | None:
        """The element type, or None if it is not set or unknown."""
        return DType.from_vk(self.datatype)

    @property
    def is_constant(self) -> bool:
        """Its first value is a constant of the graph."""
        return self.constant_id >= 0


class ValueList(NamedTuple):
    """Values, each given by its index, which is smaller than this one's if it is a list itself."""

    items: tuple[int, ...]


class SymInt(NamedTuple):
    """An integer that is known at run time; `value` is its first value."""

    value: int


VkValue = (
    Null
    | Int
    | Double
    | Bool
    | VkTensor
    | IntList
    | DoubleList
    | BoolList
    | ValueList
    | String
    | SymInt
)


class OperatorCall(NamedTuple):
    """One operator; `args` are indices of values, the last one is the output. `node_id` is the
    debug handle."""

    node_id: int
    name: str
    args: tuple[int, ...]


class VkConstant(NamedTuple):
    """Where a constant's `length` bytes are: at `offset` of the graph's region, or under
    `named_key` of the program."""

    offset: int
    length: int
    named_key: str | None


@dataclass(frozen=True, slots=True)
class VkGraph:
    """The graph of one Vulkan delegate. All indices are in range; `region` holds the constants that
    have no key."""

    version: str
    chain: tuple[OperatorCall, ...]
    values: tuple[VkValue, ...]
    input_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    constants: tuple[VkConstant, ...]
    storage_type_override: int
    memory_layout_override: int
    region: memoryview = field(repr=False)


_TENSOR = Schema(
    "VkTensor",
    VkTensor,
    datatype=i8(),
    dims=numbers(u32()),
    constant_id=i32(),
    mem_obj_id=i32(),
    storage_type=u8(_DEFAULT),
    memory_layout=u8(_DEFAULT),
    staging_datatype=i8(_UNSET),
)
_INT_LIST = Schema("IntList", IntList, items=numbers(i64()))
_VALUE_LIST = Schema("ValueList", ValueList, items=numbers(i32()))
_SYM_INT = Schema("SymInt", SymInt, value=i32())
_VALUE = Schema(
    "VkValue",
    value=Union(
        *(NULL, INT, DOUBLE, BOOL, _TENSOR, _INT_LIST, DOUBLE_LIST, BOOL_LIST),
        *(_VALUE_LIST, STRING, _SYM_INT),
    ),
)
_CALL = Schema("OperatorCall", OperatorCall, node_id=u32(), name=Text(), args=numbers(i32()))
_BYTES = Schema("VkBytes", offset=u64(), length=u64(), named_key=Text())
_GRAPH = Schema(
    "VkGraph",
    version=Text(),
    chain=Many(_CALL),
    values=Many(_VALUE),
    input_ids=numbers(u32()),
    output_ids=numbers(u32()),
    constants=Many(_BYTES),
    shaders=Many(_BYTES),
    storage_type_override=u8(_DEFAULT),
    memory_layout_override=u8(_DEFAULT),
)


def graph_ranges(blob: memoryview) -> list[tuple[int, int]]:
    """(first byte, bytes) of a blob's header and its graph; of a blob that is no Vulkan graph, or a
    damaged one, all bytes."""
    head = own(blob[: _HEADER.size])
    if len(blob) >= _HEADER.size and bytes(head[4:8]) == b"VH00":
        _, length, start, size, _, _ = _HEADER.unpack_from(head)
        if length >= _HEADER.size and start + size <= len(blob):
            return [(0, _HEADER.size), (start, size)]
    return [(0, len(blob))]


def read_vulkan_graph(blob: memoryview, where: str = "<Vulkan blob>") -> VkGraph:
    """Read the blob of a Vulkan delegate; `where` names it in errors.

    Raises:
        FileFormatError: it is no such blob, is cut short, or an index in it is out of range.
    """
    head = own(blob[: _HEADER.size])
    if len(blob) < _HEADER.size or bytes(head[4:8]) != b"VH00":
        raise FileFormatError(
            "this is not the blob of a Vulkan delegate",
            where=where,
            why=f"bytes 4 to 8 of {len(blob)} are {bytes(head[4:8])!r}; b'VH00' and at least {_HEADER.size} bytes are "
            "accepted",
            next="export the model with ExecuTorch 0.7 or later",
        )
    _, length, start, size, bytes_start, bytes_size = _HEADER.unpack_from(head)
    if length < _HEADER.size or start + size > len(blob) or bytes_start + bytes_size > len(blob):
        raise FileFormatError(
            "the header of the Vulkan blob is damaged",
            where=where,
            why=f"header of {length} bytes, graph in bytes {start} to {start + size}, constants in bytes {bytes_start} "
            f"to {bytes_start + bytes_size} of {len(blob)}",
            next="the file is damaged or was cut short: copy or export it again",
        )
    region = blob[bytes_start : bytes_start + bytes_size] if bytes_size else blob[bytes_start:]
    root = Reader(blob[start : start + size], where).root(_GRAPH, b"VK00")
    unions = [row.union("value") for row in root["values"]]
    values = tuple(row.record() for row in unions)
    constants = tuple(_constant(row, len(region)) for row in root["constants"])
    for number, (row, value) in enumerate(zip(unions, values, strict=True)):
        if isinstance(value, VkTensor):
            _check_tensor(row, value, constants)
        elif isinstance(value, ValueList):
            _check_list(row, number, value, values)
    graph = VkGraph(
        version=root["version"],
        chain=tuple(_call(row, len(values)) for row in root["chain"]),
        values=values,
        input_ids=root["input_ids"],
        output_ids=root["output_ids"],
        constants=constants,
        storage_type_override=root["storage_type_override"],
        memory_layout_override=root["memory_layout_override"],
        region=region,
    )
    for what, ids in (("input_ids", graph.input_ids), ("output_ids", graph.output_ids)):
        root.check_indices(what, ids, len(values))
    return graph


def _call(row: Table, values: int) -> OperatorCall:
    call: OperatorCall = row.record()
    row.check_indices("args", call.args, values)
    return call


def _check_list(row: Table, number: int, value: ValueList, values: tuple[VkValue, ...]) -> None:
    row.check_indices("items", value.items, len(values))
    for item in value.items:
        if isinstance(values[item], ValueList) and item >= number:
            row.fail(
                f"list {number} holds list {item}", "a list may hold only lists that come before it"
            )


def _check_tensor(row: Table, tensor: VkTensor, constants: tuple[VkConstant, ...]) -> None:
    if len(tensor.dims) > MAX_RANK:
        row.fail(f"rank {len(tensor.dims)}", f"up to {MAX_RANK} dims are accepted")
    if not tensor.is_constant:
        return
    row.check_indices("constant_id", (tensor.constant_id,), len(constants))
    if tensor.dtype is None:
        row.fail(f"constant with unknown datatype {tensor.datatype}", "0 to 7 are accepted")
    needed, there = prod(tensor.dims) * tensor.dtype.itemsize, constants[tensor.constant_id].length
    if needed > there:
        row.fail(
            f"constant {tensor.constant_id} is too short",
            f"{needed} bytes are needed, {there} are there",
        )


def _constant(row: Table, region: int) -> VkConstant:
    offset, length, key = row["offset"], row["length"], row["named_key"]
    if offset == _BY_KEY:
        if not key:
            row.fail("a constant has neither an offset nor a key")
        return VkConstant(0, length, key)
    if offset + length > region:
        row.fail(
            "a constant lies outside the blob", f"bytes {offset} to {offset + length} of {region}"
        )
    return VkConstant(offset, length, None)
