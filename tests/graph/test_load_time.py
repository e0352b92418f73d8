"""What runs once when a program is loaded, and the memory that it takes."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

import purevk
from purevk import api
from purevk.dtypes import DType
from purevk.graph import load_time, memory
from purevk.graph.context import default_context
from purevk.graph.load_time import Batch, batches
from purevk.graph.memory import DeviceStore, Staging
from purevk.ir import TensorType, Value
from purevk.lower.lowering import Binding, BufferWindow, Dispatch, KernelSpec

ROOT = Path(__file__).parents[2]
A, B, C, OUT = (Value(name, TensorType(DType.float32, (1,))) for name in ("a", "b", "c", "out"))
SIZES = {A: 10, B: 20, C: 30}


def reading(*storages: Value) -> Dispatch:
    """A dispatch that reads some storages."""
    kernel = KernelSpec("none.comp", (), (), ())
    bindings = (*(Binding(storage, False) for storage in storages), Binding(OUT, True))
    return Dispatch(kernel, bindings, (), (1, 1, 1), "")


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (60, [Batch(0, 3, (A, B, C))]),
        (59, [Batch(0, 2, (A, B)), Batch(2, 3, (C,))]),
        (29, [Batch(0, 1, (A,)), Batch(1, 2, (B,)), Batch(2, 3, (C,))]),
        (1, [Batch(0, 1, (A,)), Batch(1, 2, (B,)), Batch(2, 3, (C,))]),
    ],
)
def test_batches_stay_below_the_limit(limit: int, expected: list[Batch]) -> None:
    assert batches([reading(A), reading(B), reading(C)], SIZES, {}, limit) == expected


def test_constants_of_several_batches_belong_to_none() -> None:
    made = batches([reading(A), reading(B), reading(A, C), reading()], SIZES, {}, 30)
    assert made == [Batch(0, 2, (B,)), Batch(2, 4, (C,))]


def test_a_part_of_a_storage_counts_as_the_storage() -> None:
    part = Value("part", TensorType(DType.float32, (1,)))
    windows = {part: BufferWindow(C, 0, 4)}
    made = batches([reading(A), reading(part)], SIZES, windows, 30)
    assert made == [Batch(0, 1, (A,)), Batch(1, 2, (C,))]


class Chain(torch.nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        layers = [torch.nn.Linear(width, width, bias=False) for _ in range(count)]
        self.layers = torch.nn.ModuleList([*layers, layers[0]])  # one is used twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@pytest.mark.device
def test_constants_share_the_memory_of_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module, x = Chain(64, 6), torch.randn(3, 64)
    raw: list[int] = []
    close = DeviceStore.close

    def closing(store: DeviceStore) -> None:
        if store.label == "constants":
            raw.append(store.nbytes)
        close(store)

    monkeypatch.setattr(DeviceStore, "close", closing)
    monkeypatch.setattr(load_time, "BATCH", 64 * 64 * 4)
    with purevk.compile(module, (x,)) as program:
        torch.testing.assert_close(program.forward(x), module(x), rtol=1e-5, atol=1e-6)
    assert raw == [64 * 64 * 4]


_LOAD = """
import re, sys
from pathlib import Path
import purevk
from purevk.graph import load_time
from purevk.graph.context import default_context

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

load_time.BATCH = 4 << 20
small, large = sys.argv[1:]
purevk.load(small).close()
before = peak()
program = purevk.load(large)
print(peak() - before, program.memory.weights)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.device
def test_the_host_keeps_no_copy_of_the_weights(tmp_path: Path) -> None:
    """A process that loads has the map of the file, and writes into memory of the device, which on a
    software device is the process's own."""
    files = []
    for width in (64, 1024):
        torch.manual_seed(0)
        with purevk.compile(Chain(width, 12), (torch.randn(3, width),)) as program:
            files.append(str(tmp_path / f"{width}.pvk"))
            program.save(files[-1])
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, *files], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    peak, weights = map(int, done.stdout.split())
    assert weights >= 12 * 4 * 1024 * 1024
    assert peak < 2.5 * weights


@pytest.mark.device
def test_few_bytes_need_no_staging_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    reached = property(lambda buffer: buffer.kind is not api.MemoryKind.DEVICE, lambda *_: None)
    monkeypatch.setattr(api.Buffer, "mapped", reached, raising=False)
    done: list[tuple[int, int]] = []
    with contextlib.closing(DeviceStore(default_context().device, "state")) as store:
        store.reserve([(nbytes, nbytes) for nbytes in (4, 7, 1000, 300, 0)])
        with monkeypatch.context() as patch:
            patch.setattr(memory, "Staging", None)
            contents = {
                nbytes: bytes(np.arange(nbytes, dtype=np.uint8)) for nbytes in (4, 7, 1000, 0)
            }
            items = [(key, memoryview(content)) for key, content in contents.items()]
            store.upload([*items, (300, None)], lambda *counts: done.append(counts))
        for nbytes, content in contents.items():
            assert store.read(nbytes, nbytes)[:nbytes] == content
        assert not any(store.read(300, 300))
    assert done[-1][0] == done[-1][1] > 0


@pytest.mark.device
@pytest.mark.parametrize("is_staged", [False, True])
def test_the_host_has_few_tensors_at_a_time(
    is_staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What gives bytes is called when they are copied, also through a buffer that is smaller."""
    if is_staged:
        reached = property(lambda buffer: buffer.kind is not api.MemoryKind.DEVICE, lambda *_: None)
        monkeypatch.setattr(api.Buffer, "mapped", reached, raising=False)
        monkeypatch.setattr(memory, "_CHUNK", 10_000)
    alive: set[int] = set()
    most = 0

    def content(number: int) -> memoryview:
        nonlocal most
        array = np.full(3001 + number, number, np.uint8)
        alive.add(number)
        weakref.finalize(array, alive.discard, number)
        most = max(most, len(alive))
        return array.data

    done: list[tuple[int, int]] = []
    with contextlib.closing(DeviceStore(default_context().device, "weights")) as store:
        items = [(n, 3001 + n, functools.partial(content, n)) for n in range(9)]
        store.add([*items, ("zeros", 999, None)], lambda *counts: done.append(counts))
        for number, nbytes, _ in items:
            assert store.read(number, nbytes) == bytes([number]) * nbytes
        assert not any(store.read("zeros", 999))
    assert most <= 1 + is_staged and not alive
    assert done == sorted(done) and done[-1][0] == done[-1][1]


@pytest.mark.device
@pytest.mark.parametrize("nbytes", [0, 5, (8 << 20) - 1, (8 << 20) + 3, (13 << 20) + 1])
def test_threads_write_all_bytes(nbytes: int) -> None:
    """Of a buffer that grows, at an odd place."""
    data = np.random.default_rng(nbytes).bytes(nbytes)
    with Staging(default_context().device) as staging:
        small = staging.buffer(64)
        assert staging.buffer(32) is small
        buffer = staging.buffer(nbytes + 64)
        buffer.write(0, bytes(nbytes + 64))
        staging.write(7, memoryview(data))
        assert buffer.read(7, nbytes) == data
        assert not any(buffer.read(0, 7)) and not any(buffer.read(nbytes + 7, 57))
