"""Damaged files either read or raise FileFormatError; nothing else, and not for long."""

from __future__ import annotations

import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from purevk import pte
from purevk.errors import FileFormatError
from purevk.pte.types import VULKAN_BACKEND, Tensor
from tests.harness import DATA
from tests.pte.harness import NAMES, data_files

settings.load_profile("pte")
ORIGINALS = {name: (DATA / f"{name}.pte").read_bytes() for name in NAMES}
DATA_ORIGINALS = {name: path.read_bytes() for name in NAMES for path in data_files(name)}


def use(data: bytes, data_files: list[bytes]) -> bool:
    """Read a program and everything that it refers to; False if it was refused."""
    try:
        program = pte.read_program(data, data_files)
    except FileFormatError:
        return False
    steps = [lambda: pte.describe(program)]
    steps += [lambda key=key: program.named_data(key) for key in program.named]
    for plan in program.plans:
        for value in plan.values:
            if isinstance(value, Tensor):
                steps += [
                    lambda value=value: (value.strides, value.nbytes, program.tensor_data(value))
                ]
        for delegate in plan.delegates:
            if delegate.id == VULKAN_BACKEND:
                steps += [lambda delegate=delegate: walk(program, delegate)]
    good = True
    for step in steps:
        try:
            step()
        except FileFormatError:
            good = False
    return good


def walk(program: pte.Program, delegate: object) -> None:
    graph = program.vulkan_graph(delegate)
    for index in range(len(graph.constants)):
        program.vulkan_constant(graph, index)


@pytest.mark.parametrize("name", NAMES)
def test_originals_are_good(name: str) -> None:
    files = [DATA_ORIGINALS[name]] if name in DATA_ORIGINALS else []
    assert use(ORIGINALS[name], files)


@pytest.mark.parametrize("name", ["topk", "gather", "linear_relu_inline", "counter_portable"])
def test_every_truncation(name: str) -> None:
    """A file that lacks its last bytes is refused, save that the padding at its end may go."""
    data = ORIGINALS[name]
    good = [size for size in range(len(data)) if use(data[:size], [])]
    assert not good or good[0] > len(data) - 64


@pytest.mark.parametrize("name", sorted(DATA_ORIGINALS))
def test_every_truncation_of_a_data_file(name: str) -> None:
    data = DATA_ORIGINALS[name]
    for size in range(len(data)):
        assert not use(ORIGINALS[name], [data[:size]])


@settings(max_examples=600)
@given(
    st.sampled_from(NAMES),
    st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=6
    ),
)
def test_changed_bytes(name: str, changes: list[tuple[float, int]]) -> None:
    data = bytearray(ORIGINALS[name])
    for position, value in changes:
        data[int(position * len(data))] = value
    use(bytes(data), [DATA_ORIGINALS[name]] if name in DATA_ORIGINALS else [])


@settings(max_examples=200)
@given(
    st.sampled_from(sorted(DATA_ORIGINALS)),
    st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4
    ),
)
def test_changed_bytes_of_a_data_file(name: str, changes: list[tuple[float, int]]) -> None:
    data = bytearray(DATA_ORIGINALS[name])
    for position, value in changes:
        data[int(position * len(data))] = value
    use(ORIGINALS[name], [bytes(data)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["topk", "dynamic_views", "gather", "linear_portable_external"])
@pytest.mark.parametrize("word", [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
def test_every_word_replaced(name: str, word: int) -> None:
    """Each aligned 4 bytes in turn: offsets, lengths and indices all meet the values that are
    likeliest to break."""
    files = [DATA_ORIGINALS[name]] if name in DATA_ORIGINALS else []
    original = ORIGINALS[name]
    start = time.monotonic()
    for at in range(0, len(original) - 3, 4):
        data = bytearray(original)
        struct.pack_into("<I", data, at, word)
        use(bytes(data), files)
    assert time.monotonic() - start < 60


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    use(data, [])
    use(b"\x20\0\0\0ET12" + data, [])
    with pytest.raises(FileFormatError):
        pte.read_data_file(b"\x20\0\0\0FT01" + data)
