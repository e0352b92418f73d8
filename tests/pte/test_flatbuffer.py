"""The checked reader against buffers that the flatbuffers package writes."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from purevk import mapped
from purevk.errors import FileFormatError
from purevk.pte import flatbuffer as fb
from purevk.pte.load import read_program
from tests.harness import DATA
from tests.pte.writer import write

settings.load_profile("pte")

LEAF = fb.Schema("Leaf", number=fb.i64())
EMPTY = fb.Schema("Empty")
ROOT = fb.Schema(
    "Root",
    byte=fb.i8(),
    hint=fb.u8(255),
    on=fb.flag(),
    small=fb.i32(),
    natural=fb.u32(),
    large=fb.u64(),
    real=fb.f64(),
    text=fb.Text(),
    blob=fb.Blob(),
    ints=fb.numbers(fb.i64()),
    flags=fb.numbers(fb.flag()),
    leaf=fb.One(LEAF),
    leaves=fb.Many(LEAF),
    choice=fb.Union(EMPTY, LEAF),
)
SHORT = fb.Schema("Root", byte=fb.i8(), hint=fb.u8(255))  # ROOT as an older release knew it


def read(data: bytes, schema: fb.Schema = ROOT) -> fb.Table:
    return fb.Reader(memoryview(data), "file").root(schema, b"TEST")


@settings(max_examples=150)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "byte": st.integers(-128, 127),
            "hint": st.integers(0, 255),
            "on": st.booleans(),
            "small": st.integers(-(2**31), 2**31 - 1),
            "natural": st.integers(0, 2**32 - 1),
            "large": st.integers(0, 2**64 - 1),
            "real": st.floats(allow_nan=False),
            "text": st.text(max_size=20),
            "ints": st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9).map(tuple),
            "flags": st.lists(st.booleans(), max_size=9).map(tuple),
        },
    )
)
def test_every_value_comes_back(values: dict) -> None:
    table = read(write(ROOT, values, b"TEST"))
    defaults = {
        "byte": 0,
        "hint": 255,
        "on": False,
        "small": 0,
        "natural": 0,
        "large": 0,
        "real": 0.0,
        "text": "",
    }
    for name, default in (defaults | {"ints": (), "flags": ()}).items():
        assert table[name] == values.get(name, default)


def test_tables_blobs_and_unions() -> None:
    leaves = [{"number": 5}, {}, {"number": -7}]
    data = write(
        ROOT,
        {"blob": b"abc", "leaf": {"number": 3}, "leaves": leaves, "choice": (LEAF, {"number": 9})},
        b"TEST",
    )
    table = read(data)
    assert bytes(table["blob"]) == b"abc"
    assert table["leaf"]["number"] == 3
    assert [leaf["number"] for leaf in table["leaves"]] == [5, 0, -7]
    member = table.union("choice")
    assert (member.schema, member["number"]) == (LEAF, 9)


def test_absent_fields() -> None:
    table = read(write(ROOT, {}, b"TEST"))
    assert table["leaf"] is None and table["leaves"] == () and len(table["blob"]) == 0


def test_blob_is_a_slice_of_the_buffer() -> None:
    data = bytearray(write(ROOT, {"blob": b"abc"}, b"TEST"))
    blob = read(data)["blob"]
    data[data.index(b"abc")] = ord("z")
    assert bytes(blob) == b"zbc"


def test_member_without_fields_needs_no_table() -> None:
    assert read(write(ROOT, {"choice": (1, None)}, b"TEST")).union("choice").schema is EMPTY


@pytest.mark.parametrize("tag", [0, 3, 255])
def test_unknown_tag(tag: int) -> None:
    with pytest.raises(
        FileFormatError, match=rf"Root.choice has the unknown tag {tag}\n.*\n  why: tags 1 to 2"
    ):
        read(write(ROOT, {"choice": (tag, None)}, b"TEST")).union("choice")


def test_member_with_fields_needs_a_table() -> None:
    with pytest.raises(FileFormatError, match="says Leaf but holds nothing"):
        read(write(ROOT, {"choice": (2, None)}, b"TEST")).union("choice")


def test_fields_of_a_newer_release_are_ignored() -> None:
    table = read(write(ROOT, {"byte": 4, "hint": 5, "text": "new"}, b"TEST"), SHORT)
    assert (table["byte"], table["hint"]) == (4, 5)


def test_fields_that_an_older_release_did_not_write() -> None:
    table = read(write(SHORT, {"byte": 4}, b"TEST"))
    assert (table["byte"], table["hint"], table["text"], table["leaves"]) == (4, 255, "", ())


def test_wrong_identifier() -> None:
    with pytest.raises(
        FileFormatError, match=r"marked b'OTHR'\n  where: file, byte 4\n  why: b'TEST' is accepted"
    ):
        read(write(ROOT, {}, b"OTHR"))


def test_text_that_is_not_utf8() -> None:
    data = write(ROOT, {"text": "abcd"}, b"TEST").replace(b"abcd", b"ab\xffd")
    with pytest.raises(FileFormatError, match="Root.text is not UTF-8 text"):
        read(data)["text"]


def test_vector_longer_than_the_buffer() -> None:
    data = bytearray(write(ROOT, {"ints": (1, 2, 3)}, b"TEST"))
    at = data.index(struct.pack("<Iq", 3, 1))
    struct.pack_into("<I", data, at, 2**31)
    with pytest.raises(
        FileFormatError, match=rf"Root.ints has {2**31} items, more than the flatbuffer holds"
    ):
        read(data)["ints"]


def test_offset_outside_the_buffer() -> None:
    data = bytearray(write(ROOT, {}, b"TEST"))
    struct.pack_into("<I", data, 0, 2**32 - 1)
    with pytest.raises(
        FileFormatError,
        match=rf"Root lies outside the flatbuffer\n.*\n  why: 4 bytes at {2**32 - 1} of",
    ):
        read(data)


def test_tables_that_are_shared_too_often() -> None:
    """A vector whose offsets all lead to one large table would otherwise cost the square of the
    file's size."""
    inner = fb.Schema("Inner", items=fb.numbers(fb.i64()))
    outer = fb.Schema("Outer", tables=fb.Many(inner))
    data = bytearray(write(outer, {"tables": [{}] * 4000 + [{"items": (1,) * 20000}]}, b"TEST"))
    first, count = 0, 4001
    root = fb.Reader(memoryview(data), "file").root(outer, b"TEST")
    first = data.index(struct.pack("<I", count), root.pos) + 4
    last = first + 4 * (count - 1)
    target = last + struct.unpack_from("<I", data, last)[0]
    for at in range(first, last, 4):
        struct.pack_into("<I", data, at, target - at)
    root = fb.Reader(memoryview(data), "file").root(outer, b"TEST")
    with pytest.raises(FileFormatError, match="overlap too often"):
        [table["items"] for table in root["tables"]]


def test_of_a_large_mapped_file_only_what_is_read_is_copied(tmp_path: Path) -> None:
    blob = os.urandom(5 << 20)
    values = {"text": "some text", "blob": blob, "ints": (1, 2, 3), "leaves": ({"number": 7},)}
    path = tmp_path / "large"
    path.write_bytes(write(ROOT, values, b"TEST"))
    with open(path, "rb") as stream:
        view = memoryview(mapped.map_file(stream.fileno(), "large"))
    root = fb.Reader(view, "large").root(ROOT, b"TEST")
    assert root["text"] == "some text" and root["ints"] == (1, 2, 3)
    assert root["leaves"][0]["number"] == 7
    assert mapped.own(root["blob"]) == blob
    assert len(root.reader._missing) > len(blob) // fb._PAGE - 4
    os.truncate(path, 100)
    if hasattr(os, "preadv"):
        with pytest.raises(FileFormatError, match="cut short"):
            fb.Reader(view, "large").root(ROOT, b"TEST")["text"]


def test_files_are_read_by_pages_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fb, "_COPIED_AT_ONCE", 0)
    for number, path in enumerate(sorted(DATA.glob("*.pte"))):
        monkeypatch.setattr(fb, "_PAGE", (16, 100, 4096)[number % 3])
        paged, whole = read_program(path), read_program(path.read_bytes())
        assert paged.plans == whole.plans and paged.segments == whole.segments
        assert (paged.constants, paged.named) == (whole.constants, whole.named)
        assert list(map(mapped.own, paged.inline_delegates)) == list(whole.inline_delegates)
        assert list(map(mapped.own, paged.inline_constants)) == list(whole.inline_constants)
