"""Some elements of tensors tell that the tensors were written."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from purevk.frontends.torch.watch.samples import Samples  # noqa: E402

TENSORS = {
    "matrix": lambda: torch.randn(37, 53),
    "strided": lambda: torch.randn(6, 7, 8).permute(2, 0, 1)[1:, ::2],
    "part of a row": lambda: torch.zeros(64)[3:5],
    "number": lambda: torch.tensor(1.5),
    "float16": lambda: torch.randn(11).half(),
    "bytes": lambda: torch.zeros(3, dtype=torch.uint8),
    "bool": lambda: torch.zeros(5, dtype=torch.bool),
    "float64": lambda: torch.randn(5, 5).double(),
    "complex": lambda: torch.randn(5, 5, dtype=torch.complex64),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_write_into_all_elements_is_seen(name: str) -> None:
    torch.manual_seed(0)
    tensors = [torch.ones(8), TENSORS[name](), torch.ones(8)]
    samples = Samples(tensors)
    assert not samples.changed() and not samples.owners()
    tensors[1].data.copy_(~tensors[1] if tensors[1].dtype == torch.bool else tensors[1] + 1)
    assert samples.changed() and samples.owners() == {1}


def test_a_write_beside_a_tensor_is_not() -> None:
    memory = torch.zeros(40, 4)
    samples = Samples([memory[:, 1], memory.view(-1)[:0], torch.empty(3, device="meta")])
    memory[:, ::2] = 1
    assert not samples.changed()
    memory[:, 1] = 1
    assert samples.owners() == {0}


RELEASES = {
    "emptied": lambda tensor: tensor.untyped_storage().resize_(0),
    "made smaller": lambda tensor: tensor.untyped_storage().resize_(tensor.element_size()),
    "emptied and given memory again": lambda tensor: (
        tensor.untyped_storage().resize_(0),
        tensor.untyped_storage().resize_(tensor.nbytes),
    ),
    "replaced by data": lambda tensor: setattr(tensor, "data", tensor.new_zeros(3)),
}


@pytest.mark.parametrize("name", RELEASES)
def test_memory_that_was_released_is_not_read(name: str) -> None:
    """The system takes the memory of a large tensor back at once, so that reading it would end the
    process."""
    tensors = [torch.ones(8), torch.ones(20_000_000), torch.ones(8)]
    samples = Samples(tensors)
    RELEASES[name](tensors[1])
    assert samples.changed() and samples.owners() == {1}
    later = Samples(tensors)
    assert not later.changed()
    tensors[2].data.add_(1)
    assert samples.owners() == {1, 2} and later.owners() == {2}


def test_chance_shapes_and_strides() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        shape = [int(n) for n in rng.integers(1, 7, rng.integers(0, 5))]
        memory = torch.from_numpy(rng.standard_normal([2 * n for n in shape]))
        tensor = memory[tuple(slice(None, None, int(rng.integers(1, 3))) for _ in shape)]
        tensor = tensor.permute(rng.permutation(len(shape)).tolist())
        samples, before = Samples([tensor]), memory.clone()
        tensor.data.add_(1)
        assert samples.changed()
        outside = memory == before
        memory.data.copy_(before)
        assert not samples.changed()
        memory.data[outside] += 1
        assert not samples.changed()
