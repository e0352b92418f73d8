"""A program made from a module gives what the module gives, also after the module was changed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import purevk  # noqa: E402

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore")]


class Settings(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.kind = 2.0, "relu"
        self.steps, self.table = [1, 2], {"a": 1.0}
        self.linear = torch.nn.Linear(4, 4)
        self.tensors = [torch.ones(4)]

    def forward(self, x: torch.Tensor, n: int = 1) -> torch.Tensor:
        y = self.linear(x) * self.scale
        y = torch.relu(y) if self.kind == "relu" else torch.tanh(y)
        for step in self.steps:
            y = y * step
        if hasattr(self, "extra"):
            y = y + self.extra
        if n == 2:
            y = y + self.tensors[0] * 3
        return y * self.table["a"] + self.tensors[0]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "number": lambda m: setattr(m, "scale", 5.0),
    "sign of zero": lambda m: setattr(m, "scale", -0.0),
    "string": lambda m: setattr(m, "kind", "tanh"),
    "list": lambda m: m.steps.append(3),
    "other list": lambda m: setattr(m, "steps", [4]),
    "dict": lambda m: m.table.update(a=7.0),
    "new attribute": lambda m: setattr(m, "extra", 1.5),
    "tensor in a list": lambda m: m.tensors[0].add_(3),
    "other tensor in a list": lambda m: m.tensors.__setitem__(0, torch.zeros(4)),
    "hook": lambda m: m.linear.register_forward_hook(lambda module, given, out: out + 100),
    "weight": lambda m: m.linear.load_state_dict(torch.nn.Linear(4, 4).state_dict()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_module_is_seen(change: str) -> None:
    torch.manual_seed(0)
    module, x = Settings().eval(), torch.randn(3, 4)
    with purevk.compile(module, (x,)) as program, torch.no_grad():
        for calls in (((x,), (x, 2)), ((x, 2), (x,)), ((x,), (x, 2))):
            for call in calls:
                torch.testing.assert_close(program(*call), module(*call))
            CHANGES[change](module)


def test_what_only_a_later_export_reads_is_watched() -> None:
    class Late(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.late = torch.nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor, n: int = 1) -> torch.Tensor:
            return x * n if n == 1 else x * self.late

    module, x = Late(), torch.randn(3)
    with purevk.compile(module, (x,)) as program, torch.no_grad():
        program(x)
        torch.testing.assert_close(program(x, 2), module(x, 2))
        module.late.mul_(4)
        torch.testing.assert_close(program(x, 2), module(x, 2))


def test_constants_of_exports_that_are_gone_are_released() -> None:
    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(300, 300)

        def forward(self, x: torch.Tensor, number: float) -> torch.Tensor:
            return self.linear(x) + torch.tensor([number] * 300)

    module, x = Table(), torch.randn(2, 300)
    with purevk.compile(module, (x, 0.5)) as program, torch.no_grad():
        sizes = []
        for n in range(24):
            torch.testing.assert_close(program(x, n + 0.25), module(x, n + 0.25))
            sizes.append((program.weights.nbytes, len(program._constants)))
        assert max(sizes[12:]) == max(sizes[:12])
        torch.testing.assert_close(program(x, 0.5), module(x, 0.5))


def test_equal_values_are_no_change() -> None:
    module, x = Settings().eval(), torch.randn(3, 4)
    with purevk.compile(module, (x,)) as program:
        first = program.method("forward").variants[0]
        program(x)
        module.scale, module.steps, module.table = float("2.0"), [1, 2], {"a": 1.0}
        program(x)
        assert program.method("forward").variants[0] is first


def test_programs_are_compiled_on_several_threads() -> None:
    """torch.export is not safe on several threads at once."""
    failed: list[BaseException] = []

    def work(n: int) -> None:
        try:
            module, x = Settings().eval(), torch.randn(n + 2, 4)
            module.scale = float(n)
            with purevk.compile(module, (x,)) as program, torch.no_grad():
                torch.testing.assert_close(program(x), module(x))
                torch.testing.assert_close(program(x, 2), module(x, 2))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_one_tensor_as_two_example_inputs_of_an_exported_program(caplog: Any) -> None:
    class Add(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    a = torch.ones(3)
    with caplog.at_level(logging.WARNING, logger="purevk"):
        purevk.compile(torch.export.export(Add(), (a, a.clone())))
        assert not caplog.records
        purevk.compile(torch.export.export(Add(), (a, a)))
    assert "one tensor as two example inputs" in caplog.text
