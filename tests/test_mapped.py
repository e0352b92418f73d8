"""Bytes of mapped files: the same as without a map, and an error where the file was cut short."""

from __future__ import annotations

import gc
import os
import random
import zlib
from pathlib import Path

import numpy as np
import pytest

from purevk import mapped
from purevk.errors import FileFormatError
from purevk.frontends.saved import checksum
from purevk.pte.source import Source

SIZE = 3_000_001


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(random.Random(5).randbytes(SIZE))
    return path


def test_any_slice_reads_the_same(file: Path) -> None:
    chance = random.Random(6)
    data = file.read_bytes()
    other = memoryview(bytearray(data))  # in no map
    with open(file, "rb") as stream:
        views = [memoryview(mapped.map_file(stream.fileno(), "file")) for _ in range(3)]
    for number in range(60):
        view = [*views, other][number % 4]
        first = chance.choice([0, 1, 4095, 4096, chance.randrange(SIZE), SIZE])
        size = chance.choice([0, 1, 4096, 1 << 20, chance.randrange(SIZE)])
        part, expected = view[first : first + size], data[first : first + size]
        target = bytearray(len(part))
        mapped.read_into(memoryview(target), part)
        assert target == expected and mapped.own(part) == expected
        assert b"".join(map(bytes, mapped.pieces(part))) == expected
        assert checksum(part) == zlib.crc32(expected)
    assert mapped.own(other) is other


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="the system cuts no file that is mapped")
def test_a_file_that_was_cut_short(file: Path) -> None:
    data = file.read_bytes()
    source = Source(file, ".pvk")
    view = source.view
    os.truncate(file, 1_000_000)
    assert mapped.own(view[:1_000_000]) == data[:1_000_000]
    for first, size in ((0, SIZE), (999_999, 2), (2_000_000, 5)):
        part = view[first : first + size]
        for read in (
            mapped.own,
            checksum,
            lambda part: mapped.read_into(memoryview(bytearray(len(part))), part),
        ):
            with pytest.raises(FileFormatError, match="cut short") as caught:
                read(part)
            assert caught.value.where == str(file) and "byte " in caught.value.why


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux's /proc")
def test_maps_and_descriptors_end_with_their_last_slice(file: Path) -> None:
    gc.collect()
    before, files = len(os.listdir("/proc/self/fd")), len(mapped._files)
    source = Source(file, ".pvk")
    part = source.view[10:20]
    expected = bytes(part)
    source.close()
    assert len(mapped._files) == files + 1 and mapped.own(part) == expected
    del part
    assert len(mapped._files) == files and len(os.listdir("/proc/self/fd")) == before


def test_other_memory_at_the_addresses_of_a_map(tmp_path: Path) -> None:
    """What is mapped later at the same addresses is not taken for the file."""
    size = 1 << 24
    reused = 0
    for number in range(20):
        path = tmp_path / "file"
        path.write_bytes(bytes([number]) * size)
        source = Source(path, ".pvk")
        first = mapped.address_of(source.view)
        source.close()
        arrays = [np.full(size, 200, np.uint8) for _ in range(2)]
        for array in arrays:
            reused += array.ctypes.data <= first < array.ctypes.data + size
            assert bytes(mapped.own(array.data)) == b"\xc8" * size
    assert not mapped._files or reused >= 0
