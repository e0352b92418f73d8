"""purevk leaves the storages of the user's tensors as they are: they can be resized, as FSDP does it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import purevk  # noqa: E402
import purevk.dynamo  # noqa: E402

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore")]

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Layers(torch.nn.Module):
    """Weights of several kinds: two that are one, one whose columns are apart, a buffer that is
    written, an integer table."""

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__()
        width = int(rng.integers(200, 300))
        dtype = DTYPES[int(rng.integers(len(DTYPES)))]
        self.first = torch.nn.Linear(width, width, dtype=dtype)
        self.second = torch.nn.Linear(width, width, dtype=dtype)
        self.second.weight = self.first.weight
        apart = (torch.randn(2 * width, width) / 8).to(dtype)[::2].t()
        self.apart = torch.nn.Parameter(apart, requires_grad=bool(rng.integers(2)))
        self.register_buffer("count", torch.zeros(width, dtype=dtype))
        self.register_buffer("order", torch.randperm(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(torch.tanh(self.first(x))) @ self.apart
        self.count += y[0]
        return y[:, self.order] + self.count

    def inputs(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, len(self.order)).to(self.count.dtype)


def storages(module: torch.nn.Module, *tensors: torch.Tensor) -> Iterator[Any]:
    for tensor in (*module.parameters(), *module.buffers(), *tensors):
        yield tensor.untyped_storage()


def released(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The elements of all tensors of a module, whose memory is released."""
    values = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    for storage in storages(module):
        storage.resize_(0)
    return values


def restore(module: torch.nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, tensor in module.state_dict().items():
        last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
        tensor.untyped_storage().resize_((last + 1) * tensor.element_size())
        tensor.detach().copy_(values[name])


@pytest.mark.parametrize("seed", range(2))
def test_storages_can_be_resized(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    module = Layers(rng).eval()
    eager, path = copy.deepcopy(module), tmp_path / "model.pvk"
    x, out = module.inputs(3), module.inputs(3)
    shapes = {"x": {0: torch.export.Dim("n", min=2, max=9)}}
    close = {"rtol": 2e-2, "atol": 0.2}

    with purevk.compile(module, (x,), dynamic_shapes=shapes) as program, torch.no_grad():

        def compare(x: torch.Tensor, out: Any = None) -> None:
            program.state["count"] = eager.count
            torch.testing.assert_close(program(x, out=out), eager(x), **close)
            for storage in storages(module, x, *([] if out is None else [out])):
                assert storage.resizable()
                assert storage.nbytes()

        compare(x)
        compare(x, out)
        program.save(path)
        values = released(module)
        for _ in range(2):
            with pytest.raises(purevk.InputError, match="memory of .* was released"):
                program(x)
            with pytest.raises(purevk.InputError, match="memory of .* was released"):
                program.save(tmp_path / "other.pvk")
        for each in (module, eager):
            restore(each, {name: value for name, value in values.items()})
            each.first.weight.mul_(0.5)
        for tensor in (x, out):
            tensor.untyped_storage().resize_(0)
        compare(module.inputs(3))
        compare(module.inputs(7), module.inputs(7))
        program.save(path)
    with purevk.load(path) as saved, torch.no_grad():
        x = module.inputs(5)
        saved.state["count"] = eager.count
        torch.testing.assert_close(saved(x), eager(x), **close)
        assert x.untyped_storage().resizable()


def test_storages_can_be_resized_under_torch_compile() -> None:
    rng = np.random.default_rng(3)
    torch.manual_seed(3)
    module = Layers(rng).eval()
    eager = copy.deepcopy(module)
    compiled = torch.compile(module, backend="purevk", options={"fallback": False})
    with torch.no_grad():
        for _ in range(2):
            x = module.inputs(3)
            torch.testing.assert_close(compiled(x), eager(x), rtol=2e-2, atol=0.2)
            assert all(storage.resizable() for storage in storages(module, x))
            values = released(module)
            restore(module, values)
            x.untyped_storage().resize_(0)


def test_inputs_that_a_call_writes_can_be_resized() -> None:
    class Writes(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x.add_(y)
            return x.sum() + y

    x, y = torch.ones(300, 300), torch.ones(300, 300, dtype=torch.complex64)[0].conj().imag
    with purevk.compile(Writes(), (x.clone(), y)) as program, torch.no_grad():
        torch.testing.assert_close(program(x, y), torch.full((300,), 90000.0) + y)
        for tensor in (x, y):
            assert tensor.untyped_storage().resizable()
        x.untyped_storage().resize_(0)
        program(torch.ones(300, 300), y)


class Moving(torch.nn.Module):
    """Buffers and parameters of one size: two that a call writes, and others that it reads."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        for name in ("total", "last", "scale", "shift"):
            self.register_buffer(name, torch.randn(width).to(dtype))
        self.bias = torch.nn.Parameter(torch.randn(width).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.scale + self.bias + self.last
        self.total += y
        self.last.copy_(x)
        return y - self.shift + self.total

    def other(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.total * self.bias


class Other(torch.nn.Module):
    """A second method, which reads what the first one writes."""

    def __init__(self, module: Moving) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module.other(x)


def exchange(module: torch.nn.Module, draw: np.random.Generator) -> None:
    """Has each tensor have the memory that another one had, with the elements that it had itself."""
    tensors = [*module.buffers(), *module.parameters()]
    values = [tensor.detach().clone() for tensor in tensors]
    memory = [tensor.data for tensor in tensors]
    for at, tensor in zip(draw.permutation(len(tensors)), tensors):
        tensor.data = memory[at]
    for tensor, value in zip(tensors, values):
        tensor.data.copy_(value)


@pytest.mark.parametrize("seed", range(3))
def test_tensors_that_exchange_their_memory(seed: int) -> None:
    """An allocator gives the memory of one tensor to another one. A buffer that a call writes was
    known by its address: its state became that of whatever tensor was there next."""
    draw = np.random.default_rng(seed)
    torch.manual_seed(seed)
    dtype = DTYPES[int(draw.integers(2))]
    width = int(draw.integers(3, 40))
    module = Moving(width, dtype)
    eager = copy.deepcopy(module)
    x = torch.randn(width).to(dtype)
    methods = {"forward": (module, (x,)), "other": (Other(module), (x,))}
    with purevk.compile(methods) as program, torch.no_grad():
        for _ in range(4):
            for name, expected in (("forward", eager), ("other", eager.other)):
                x = torch.randn(width).to(dtype)
                torch.testing.assert_close(
                    program.method(name)(x), expected(x), rtol=2e-2, atol=2e-2
                )
            # A write that torch counts takes over: give the module what the device has.
            for name in ("total", "last"):
                getattr(module, name).copy_(torch.as_tensor(getattr(eager, name)))
            exchange(module, draw)
