"""A batch that is split among devices, or contexts on one: see `contexts`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import purevk
from purevk.graph.context import Context
from purevk.program.devices.replicas import part_sizes

pytestmark = pytest.mark.device


class Two(torch.nn.Module):
    """Rows are independent; one result has the batch in its second dim."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.inner(x) * scale
        return {"y": y.softmax(-1), "turned": y.T, "best": y.argmax(-1)}


class Centered(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


class Total(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x + self.calls


def saved(folder: Path, module: torch.nn.Module, *inputs: torch.Tensor, least: int = 1) -> Path:
    path = folder / "model.pvk"
    batch = torch.export.Dim("batch", min=least, max=64)
    shapes = [{0: batch}] + [None] * (len(inputs) - 1)
    with purevk.compile(module.eval(), inputs, dynamic_shapes=shapes) as program:
        program.save(path)
    return path


def alike(made: Any, wanted: Any) -> None:
    torch.testing.assert_close(torch.as_tensor(made), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
def test_a_batch_is_split(rows: int, tmp_path: Path, contexts: list[Context]) -> None:
    model = Two()
    path = saved(tmp_path, model, torch.randn(4, 6), torch.randn(4))
    x, scale = torch.randn(rows, 6), torch.randn(4)
    with purevk.load(path, device=contexts) as replicas, torch.no_grad():
        assert isinstance(replicas, purevk.Replicas)
        for given in ((x, scale), (x.numpy(), scale.numpy())):
            made = replicas(*given)
            assert isinstance(made["y"], type(given[0]))
            for name, wanted in model(x, scale).items():
                alike(made[name], wanted)
        futures = [replicas.submit(x, scale) for _ in range(4)]
        for future in futures:
            alike(future.result()["y"], model(x, scale)["y"])


def test_both_devices_work(tmp_path: Path, contexts: list[Context]) -> None:
    path = saved(tmp_path, Two(), torch.randn(4, 6), torch.randn(4))
    with purevk.load(path, device=contexts) as replicas:
        seen: list[list[int]] = [[] for _ in replicas.programs]
        for rows, program in zip(seen, replicas.programs):
            method = program.method("forward")
            run = method.run_flat
            method.run_flat = lambda inputs, rows=rows, run=run: (  # type: ignore[method-assign]
                rows.append(len(inputs[0])),
                run(inputs),
            )[1]
        replicas(torch.randn(7, 6), torch.randn(4))
        assert [rows[-1] for rows in seen] == [4, 3]


def test_a_model_that_mixes_rows_is_found(tmp_path: Path, contexts: list[Context]) -> None:
    path = saved(tmp_path, Centered(), torch.randn(4, 6))
    with purevk.load(path, device=contexts) as replicas:
        with pytest.raises(purevk.PurevkError, match="differs"):
            replicas(torch.randn(8, 6))


@pytest.mark.parametrize(
    ("module", "why"), [(Total(), "output 0"), (Counter(), "states")], ids=["total", "counter"]
)
def test_what_cannot_be_split_is_refused(
    module: torch.nn.Module, why: str, tmp_path: Path, contexts: list[Context]
) -> None:
    path = saved(tmp_path, module, torch.randn(4, 6))
    with pytest.raises(purevk.InputError, match=why):
        purevk.load(path, device=contexts, split="batch")


def test_a_fixed_batch_is_refused(tmp_path: Path, contexts: list[Context]) -> None:
    with purevk.compile(Centered(), (torch.randn(4, 6),)) as program:
        program.save(tmp_path / "model.pvk")
    with pytest.raises(purevk.InputError, match="dynamic_shapes"):
        purevk.load(tmp_path / "model.pvk", device=contexts, split="batch")


@pytest.mark.parametrize("split", ["batch", "layers"])
def test_devices_by_index(split: str, others: list[int], tmp_path: Path) -> None:
    if not others:
        pytest.skip("needs two devices of one kind, and PUREVK_DEVICE empty")
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    path = saved(tmp_path, model, torch.randn(4, 6))
    (default,) = (each.index for each in purevk.devices() if each.default)
    with purevk.load(path, device=[default, others[0]], split=split) as program, torch.no_grad():
        used = [each.device.physical.index for each in program.programs]
        assert used == [default, others[0]]
        x = torch.randn(9, 6)
        alike(program(x), model(x))


def test_each_device_is_named_once(tmp_path: Path, contexts: list[Context]) -> None:
    path = saved(tmp_path, Two(), torch.randn(4, 6), torch.randn(4))
    with pytest.raises(purevk.InputError, match="twice"):
        purevk.load(path, device=[contexts[0], contexts[0]])
    with pytest.raises(purevk.InputError, match="no device"):
        purevk.load(path, device=[])


def test_the_least_rows_of_a_part(tmp_path: Path, contexts: list[Context]) -> None:
    model = Two()
    path = saved(tmp_path, model, torch.randn(6, 6), torch.randn(4), least=3)
    scale = torch.ones(4)
    with purevk.load(path, device=contexts) as replicas, torch.no_grad():
        for rows in (3, 5, 6, 7):
            x = torch.randn(rows, 6)
            alike(replicas(x, scale)["y"], model(x, scale)["y"])
        with pytest.raises(purevk.SizeConstraintError):
            replicas(torch.randn(2, 6), scale)


def test_part_sizes() -> None:
    assert part_sizes(7, 3, 1) == [3, 2, 2]
    assert part_sizes(2, 3, 1) == [1, 1]
    assert part_sizes(7, 3, 3) == [4, 3]
    assert part_sizes(0, 2, 1) == [0]
    assert np.sum(part_sizes(100, 7, 2)) == 100


# -- without a file ------------------------------------------------------------------------------
@pytest.mark.parametrize("split", ["batch", "layers"])
def test_a_module_is_compiled_on_several_devices(contexts: list[Context], split: str) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    x, batch = torch.randn(9, 6), torch.export.Dim("batch", min=1, max=64)
    with purevk.compile(
        module.eval(), (x,), ({0: batch},), device=contexts, split=split
    ) as program:
        assert len(program.programs) == 2
        torch.testing.assert_close(program.forward(x), module(x))
        torch.testing.assert_close(program.forward(x[:2]), module(x[:2]))


def test_what_does_not_go_together_when_compiling(contexts: list[Context]) -> None:
    module, x = torch.nn.Linear(6, 4), torch.randn(3, 6)
    with pytest.raises(purevk.InputError, match="both device and context"):
        purevk.compile(module, (x,), context=contexts[0], device=contexts)  # type: ignore[call-overload]
    with pytest.raises(purevk.InputError, match="goes with several devices"):
        purevk.compile(module, (x,), device=contexts[0], split="batch")  # type: ignore[call-overload]
