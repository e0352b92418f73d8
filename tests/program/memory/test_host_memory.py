"""Memory of the host that is used again."""

from __future__ import annotations

import numpy as np
import pytest

from purevk.program.host_memory import LEAST, HostMemory

FLOAT = np.dtype(np.float32)
COUNT = LEAST // 4


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_memory_is_used_again_when_nothing_refers_to_it() -> None:
    memory = HostMemory()
    first, second = (memory.empty([2, COUNT], FLOAT) for _ in range(2))
    assert first.shape == (2, COUNT) and first.flags.c_contiguous
    assert not np.shares_memory(first, second)
    part, was = first[1:, ::2], address(first)
    del first
    assert address(memory.empty([2 * COUNT], FLOAT)) != was  # `part` lies there
    del part
    again = memory.empty([COUNT, 2], FLOAT)
    assert address(again) == was and not np.shares_memory(again, second)


def test_memory_of_other_sizes_is_given_back() -> None:
    memory = HostMemory()
    memory.empty([COUNT], FLOAT)
    kept = memory.empty([COUNT], FLOAT)
    larger = memory.empty([3 * COUNT], FLOAT)
    assert sorted(each.nbytes for each in memory._buffers) == [LEAST, 3 * LEAST]
    kept[:], larger[:] = 1, 2
    assert (kept == 1).all()


def test_small_arrays_have_memory_of_their_own() -> None:
    memory = HostMemory()
    memory.empty([COUNT - 1], FLOAT)
    assert not memory._buffers


@pytest.mark.parametrize("shape", [(3, 5), (2 * COUNT,)], ids=["small", "large"])
def test_copies(shape: tuple[int, ...]) -> None:
    memory = HostMemory()
    array = np.random.default_rng(0).standard_normal(shape, np.float32)
    for given in (array, array.T, array[::2], np.broadcast_to(array, (2, *shape))):
        made = memory.copy(given)
        np.testing.assert_array_equal(made, given)
        assert made.flags.writeable and not np.shares_memory(made, given)
    assert memory.copy(np.asfortranarray(array)).strides == np.asfortranarray(array).strides


def test_torch_keeps_memory() -> None:
    torch = pytest.importorskip("torch")
    memory = HostMemory()
    tensor = torch.from_numpy(memory.copy(np.ones(COUNT, np.float32)))
    memory.empty([COUNT], FLOAT)[:] = 0
    assert tensor.min() == 1
