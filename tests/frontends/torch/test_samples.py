"""Some elements of tensors tell that the tensors were written."""

from __future__ import annotations

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
