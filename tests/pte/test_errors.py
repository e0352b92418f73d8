"""Every refusal is a FileFormatError that says what, where, why (with numbers) and what next."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from purevk import pte
from purevk.errors import FileFormatError
from purevk.pte import load, plan, vkgraph
from purevk.pte.values import INT, NULL
from tests.harness import DATA
from tests.pte.harness import data_files
from tests.pte.writer import data_file, vulkan_blob, with_header, write

TENSOR = {"scalar_type": 6, "sizes": (2, 3), "dim_order": (0, 1)}


def program_with(**plan_fields: Any) -> bytes:
    return write(load._PROGRAM, {"execution_plan": [plan_fields]}, b"ET12")


def program_with_tensor(**changes: Any) -> bytes:
    values = [{"val": (plan._TENSOR, TENSOR | changes)}]
    return program_with(values=values, non_const_buffer_sizes=(0, 24))


def program_with_call(schema: Any, **fields: Any) -> bytes:
    """One value, one operator, no delegate, and one instruction."""
    return program_with(
        values=[{"val": (NULL, {})}],
        operators=[{"name": "aten::relu"}],
        chains=[{"instructions": [{"instr_args": (schema, fields)}]}],
    )


def program_with_list(schema: Any, items: tuple[int, ...]) -> bytes:
    """A list beside an Int (value 0), a Null (1) and a tensor (2)."""
    values = [
        (INT, {"int_val": 3}),
        (NULL, {}),
        (plan._TENSOR, TENSOR),
        (schema, {"items": items}),
    ]
    return program_with(values=[{"val": value} for value in values])


def blob_with(values: tuple = (), **fields: Any) -> bytes:
    return vulkan_blob(
        write(vkgraph._GRAPH, {"values": [{"value": value} for value in values]} | fields, b"VK00")
    )


def header(**changes: int) -> bytes:
    """linear_relu.pte with fields of its header changed."""
    data = bytearray((DATA / "linear_relu.pte").read_bytes())
    fields = {
        "length": ("<I", 12),
        "table_size": ("<Q", 16),
        "base": ("<Q", 24),
        "data_size": ("<Q", 32),
    }
    for name, value in changes.items():
        format, at = fields[name]
        struct.pack_into(format, data, at, value)
    return bytes(data)


PROGRAMS = {
    "too short": (b"ET1", "this is not a .pte file", "bytes 4 to 8 of 3"),
    "other file": (
        b"\x7fELF" + bytes(100),
        "this is not a .pte file",
        r"b'\\x00\\x00\\x00\\x00'; b'ET12' is accepted",
    ),
    "older": (
        b"\0\0\0\0ET11" + bytes(100),
        "this is not a .pte file",
        "b'ET11'; b'ET12' is accepted",
    ),
    "header too short": (header(length=20), "header of the .pte file has 20 bytes", "at least 24"),
    "flatbuffer too long": (
        header(table_size=9999),
        "flatbuffer lies outside the file",
        "bytes 0 to 9999 of 2316",
    ),
    "flatbuffer too short": (header(table_size=12), "lies outside the flatbuffer", "of 12"),
    "data too long": (
        header(data_size=1 << 40),
        "data after the program's flatbuffer lies",
        f"{1 << 40}|10995116",
    ),
    "base outside": (
        header(base=1 << 50),
        "data after the program's flatbuffer lies outside",
        f"bytes {1 << 50} to",
    ),
    "base missing": (
        header(base=0),
        "segment 0 of|segment 1 of",
        "header of the file gives no offset of segments",
    ),
    "segment outside": (
        with_header(
            write(load._PROGRAM, {"segments": [{"size": 4}, {"offset": 2, "size": 9}]}, b"ET12"),
            b"1234",
        ),
        "segment 1 lies outside the file",
        r"bytes \d+ to \d+ of \d+",
    ),
    "named segment": (
        write(load._PROGRAM, {"named_data": [{"key": "k", "segment_index": 7}]}, b"ET12"),
        "segment_index 7",
        "has 0 segments",
    ),
    "constant outside its segment": (
        with_header(
            write(
                load._PROGRAM,
                {"segments": [{"size": 4}], "constant_segment": {"offsets": (0, 5)}},
                b"ET12",
            ),
            b"1234",
        ),
        "item 1 is at offset 5",
        "segment 0 has 4 bytes",
    ),
    "value tag": (
        program_with(values=[{"val": (12, None)}]),
        "EValue.val has the unknown tag 12",
        "1 to 11 are accepted",
    ),
    "no value tag": (
        program_with(values=[{}]),
        "unknown tag 0",
        "Null, Int, Bool, Double, Tensor, String, IntList",
    ),
    "instruction tag": (
        program_with(chains=[{"instructions": [{"instr_args": (6, None)}]}]),
        "unknown tag 6",
        r"KernelCall, DelegateCall, MoveCall, JumpFalseCall, FreeCall",
    ),
    "input": (program_with(inputs=(3,)), "inputs refers to number 3", "there are 0"),
    "output": (program_with(outputs=(-1,)), "outputs refers to number -1", "there are 0"),
    "operator": (
        program_with_call(plan._KERNEL_CALL, op_index=1),
        "op_index refers to number 1",
        "there are 1",
    ),
    "kernel args": (
        program_with_call(plan._KERNEL_CALL, args=(0, 1)),
        "args refers to number 1",
        "there are 1",
    ),
    "delegate": (
        program_with_call(plan._DELEGATE_CALL),
        "delegate_index refers to number 0",
        "there are 0",
    ),
    "move": (
        program_with_call(plan._MOVE_CALL, move_to=4),
        "move_to refers to number 4",
        "there are 1",
    ),
    "jump": (
        program_with_call(plan._JUMP_FALSE_CALL, destination_instruction=2),
        "destination_instruction refers to number 2",
        "there are 2",
    ),
    "free": (
        program_with_call(plan._FREE_CALL, value_index=-2),
        "value_index refers to number -2",
        "there are 1",
    ),
    "scalar type": (program_with_tensor(scalar_type=18), "unknown scalar type 18", "are accepted"),
    "sizes": (program_with_tensor(sizes=(2, -3)), r"sizes \[2, -3\]", "at least 0"),
    "rank": (program_with_tensor(sizes=(1,) * 65), "of rank 65", "up to 64"),
    "dim order": (program_with_tensor(dim_order=(1, 1)), r"dim_order \[1, 1\]", "dims 0 to 1"),
    "storage offset": (program_with_tensor(storage_offset=4), "storage_offset 4", "0 is accepted"),
    "dynamism": (program_with_tensor(shape_dynamism=3), "shape_dynamism 3", "0 to 2"),
    "arena": (
        program_with_tensor(allocation_info={"memory_id": 2}),
        "offset 0 of arena 2",
        "arenas 1 to 1",
    ),
    "arena 0": (
        program_with_tensor(allocation_info={}),
        "24 bytes at offset 0 of arena 0",
        "arenas 1 to 1",
    ),
    "arena size": (
        program_with_tensor(allocation_info={"memory_id": 1, "memory_offset_low": 4}),
        "24 bytes at offset 4 of arena 1",
        r"\[24\] bytes",
    ),
    "arena offset": (
        program_with_tensor(allocation_info={"memory_id": 1, "memory_offset_high": 1}),
        f"at offset {1 << 32}",
        r"\[24\] bytes",
    ),
    "negative arena": (program_with(non_const_buffer_sizes=(0, -8)), "negative size", r"\(0, -8\)"),
    "external without a name": (
        program_with_tensor(extra_tensor_info={"location": 1}),
        "location 1 with name ''",
        "name",
    ),
    "ints of a tensor": (
        program_with_list(plan._INT_LIST, (0, 2)),
        "item 2 refers to Tensor",
        "Int among 4 values",
    ),
    "ints outside": (
        program_with_list(plan._INT_LIST, (1 << 40,)),
        f"item {1 << 40} refers to nothing",
        "4 values",
    ),
    "tensors of None": (
        program_with_list(plan._TENSOR_LIST, (-1,)),
        "item -1 refers to nothing",
        "Tensor among 4",
    ),
    "optional tensors": (
        program_with_list(plan._OPTIONAL_TENSOR_LIST, (-1, 1, 2, 0)),
        "item 0 refers to Int",
        "or Null",
    ),
    "delegate without data": (
        program_with(delegates=[{"id": "B"}]),
        "no reference to its data",
        "",
    ),
    "delegate segment": (
        program_with(delegates=[{"processed": {"location": 1, "index": 2}}]),
        "index refers to number 2",
        "there are 0",
    ),
    "delegate location": (
        program_with(delegates=[{"processed": {"location": 2}}]),
        "location 2",
        "0 .inline. and 1",
    ),
}

BLOBS = {
    "short": (b"\0\0\0\0VH00", "not the blob of a Vulkan delegate", "of 8 are b'VH00'"),
    "magic": (b"\0" * 64, "not the blob of a Vulkan delegate", "of 64 are"),
    "header": (blob_with()[:-10], "header of the Vulkan blob is damaged", "graph in bytes 32 to"),
    "identifier": (blob_with().replace(b"VK00", b"VK01"), "marked b'VK01'", "b'VK00' is accepted"),
    "tag": (blob_with([(12, None)]), "VkValue.value has the unknown tag 12", "1 to 11"),
    "args": (
        blob_with(chain=[{"name": "op", "args": (0,)}]),
        "args refers to number 0",
        "there are 0",
    ),
    "input": (blob_with(input_ids=(9,)), "input_ids refers to number 9", "there are 0"),
    "output": (
        blob_with(output_ids=(2**32 - 1,)),
        f"output_ids refers to number {2**32 - 1}",
        "there are 0",
    ),
    "list": (
        blob_with([(vkgraph._VALUE_LIST, {"items": (4,)})]),
        "items refers to number 4",
        "there are 1",
    ),
    "list of itself": (
        blob_with([(vkgraph._VALUE_LIST, {"items": (0,)})]),
        "list 0 holds list 0",
        "before it",
    ),
    "constant": (
        blob_with([(vkgraph._TENSOR, {"constant_id": 0})]),
        "constant_id refers to number 0",
        "there are 0",
    ),
    "constant size": (
        blob_with(
            [(vkgraph._TENSOR, {"datatype": 5, "dims": (3,)})],
            constants=[{"offset": 0, "length": 0}],
        ),
        "constant 0 is too short",
        "12 bytes are needed, 0 are there",
    ),
    "constant datatype": (
        blob_with([(vkgraph._TENSOR, {"datatype": 99})], constants=[{}]),
        "unknown datatype 99",
        "0 to 7",
    ),
    "constant range": (
        blob_with(constants=[{"offset": 8, "length": 4}]),
        "outside the blob",
        "bytes 8 to 12 of 0",
    ),
    "constant key": (
        blob_with(constants=[{"offset": 2**64 - 1}]),
        "neither an offset nor a key",
        "",
    ),
    "rank": (
        blob_with([(vkgraph._TENSOR, {"constant_id": -1, "dims": (1,) * 65})]),
        "rank 65",
        "up to 64",
    ),
}

GOOD_DATA = data_file([{"key": "k"}], b"1234")
DATA_FILES = {
    "program": ((DATA / "topk.pte").read_bytes(), "not a .ptd file", "b'ET12'; b'FT01'"),
    "short": (GOOD_DATA[:20], "not a .ptd file", "of 20 are b'FT01'"),
    "magic": (
        GOOD_DATA.replace(b"FH01", b"FH99"),
        "header of the .ptd file is damaged",
        "b'FH99' and length 40",
    ),
    "cut": (GOOD_DATA[:-1], "the data lies outside the file", f"of {len(GOOD_DATA) - 1}"),
    "segment": (
        data_file([{"key": "k", "segment_index": 1}], b"1234"),
        "'k' is in segment 1",
        "has 1 segments",
    ),
}


def check(error: FileFormatError, what: str, why: str) -> None:
    import re

    assert re.search(what, error.what), error.what
    assert re.search(why, error.why), error.why
    assert error.where and error.next


@pytest.mark.parametrize("case", PROGRAMS)
def test_program(case: str, tmp_path: Path) -> None:
    data, what, why = PROGRAMS[case]
    path = tmp_path / "some.pte"
    path.write_bytes(data)
    with pytest.raises(FileFormatError) as caught:
        pte.read_program(path)
    check(caught.value, what, why)
    assert "some.pte" in caught.value.where


@pytest.mark.parametrize("case", BLOBS)
def test_vulkan_blob(case: str) -> None:
    data, what, why = BLOBS[case]
    with pytest.raises(FileFormatError) as caught:
        pte.read_vulkan_graph(memoryview(data), "some blob")
    check(caught.value, what, why)
    assert "some blob" in caught.value.where


@pytest.mark.parametrize("case", DATA_FILES)
def test_data_file(case: str, tmp_path: Path) -> None:
    data, what, why = DATA_FILES[case]
    path = tmp_path / "some.ptd"
    path.write_bytes(data)
    with pytest.raises(FileFormatError) as caught:
        pte.read_program(DATA / "linear_relu_external.pte", [path])
    check(caught.value, what, why)
    assert "some.ptd" in caught.value.where


def test_newer_data_file() -> None:
    from purevk.pte import ptd

    table = write(ptd._ROOT, {"version": 1}, b"FT01")
    head = struct.pack("<4sIQQQQ", b"FH01", 40, 48, len(table), 0, 0).ljust(48, b"\0")
    root = struct.unpack_from("<I", table)[0] + 48
    with pytest.raises(
        FileFormatError, match="version 1\n.*\n  why: versions up to 0 are accepted"
    ):
        pte.read_data_file(struct.pack("<I", root) + table[4:8] + head + table[8:])


def test_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "empty.pte"
    path.touch()
    with pytest.raises(
        FileFormatError, match="file is empty\n  where: .*empty.pte\n  why: 0 bytes"
    ):
        pte.read_program(path)


@pytest.mark.parametrize(
    ("head", "advice"),
    [
        (b"\0\0\0\0FT01", "data_files"),
        (b"\0\0\0\0BP08", "bundled"),
        (b"PK\3\4\0\0\0\0", "zip"),
        (b"\0\0\0\0ET99", "0.7"),
    ],
)
def test_advice_for_other_files(head: bytes, advice: str) -> None:
    with pytest.raises(FileFormatError) as caught:
        pte.read_program(head + bytes(100))
    assert advice in caught.value.next


def test_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        pte.read_program(tmp_path / "missing.pte")


def test_missing_data() -> None:
    program = pte.read_program(DATA / "linear_portable.pte")
    with pytest.raises(
        FileFormatError, match="there is no constant 9\n.*\n  why: numbers 1 to 2 exist"
    ):
        program.constant_data(9)
    with pytest.raises(FileFormatError, match="there is no constant 0"):
        program.constant_data(0)
    with pytest.raises(
        FileFormatError, match="constant 1 lies outside its segment\n.*\n  why: bytes 0 to 4096 of"
    ):
        program.constant_data(1, 4096)
    with pytest.raises(FileFormatError, match="there is no segment 5"):
        program.segment(5)
    program = pte.read_program(DATA / "branch.pte")
    with pytest.raises(FileFormatError, match="no data under the key 'k'"):
        program.named_data("k")


def test_named_data_shorter_than_the_graph_says() -> None:
    program = pte.read_program(DATA / "linear_relu.pte")
    (key, *_) = program.named
    graph = vkgraph.VkGraph(
        "0", (), (), (), (), (vkgraph.VkConstant(0, 4000, key),), 255, 255, memoryview(b"")
    )
    with pytest.raises(FileFormatError, match="is too short\n.*\n  why: 4000 bytes are needed"):
        program.vulkan_constant(graph, 0)


def test_good_files_of_this_module_read() -> None:
    """The cases above differ from these in one thing."""
    assert header() == (DATA / "linear_relu.pte").read_bytes()
    pte.read_program(program_with_tensor(allocation_info={"memory_id": 1}))
    pte.read_program(program_with_call(plan._KERNEL_CALL, args=(0,)))
    pte.read_program(program_with_call(plan._JUMP_FALSE_CALL, destination_instruction=1))
    pte.read_program(program_with_list(plan._OPTIONAL_TENSOR_LIST, (-1, 1, 2)))
    pte.read_program(program_with(values=[{"val": (1, None)}]))
    pte.read_vulkan_graph(memoryview(blob_with([(vkgraph._TENSOR, {"constant_id": -1})])))
    pte.read_program(
        DATA / "linear_relu_external.pte", [*data_files("linear_relu_external"), GOOD_DATA]
    )
