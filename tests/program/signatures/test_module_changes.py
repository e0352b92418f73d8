"""A program made from a module gives what the module gives, also after the module was changed."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import random
import threading
import time
import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import purevk  # noqa: E402
from purevk.api.queue import Submission  # noqa: E402
from purevk.frontends.torch.watch.attributes import Attributes  # noqa: E402
from purevk.frontends.torch.watch.samples import Samples  # noqa: E402
from purevk.frontends.torch.watch.weights import Weights  # noqa: E402
from purevk.graph.compute_graph import ComputeGraph  # noqa: E402

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
    "weight by data": lambda m: m.linear.weight.data.mul_(2),
    "weight by numpy": lambda m: m.linear.weight.detach().numpy().__imul__(2),
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


class Counting(torch.nn.Module):
    """Adds up what the layer gives, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = torch.nn.Linear(4, 4), 2.0
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += self.linear(x).sum(0) * self.scale
        return self.total * 1


UNCOUNTED = {
    "number": lambda m: setattr(m, "scale", 5.0),
    "hook": lambda m: m.linear.register_forward_hook(lambda module, given, out: out + 100),
    "weight by data": lambda m: m.linear.weight.data.mul_(2),
    "weight by numpy": lambda m: m.linear.weight.detach().numpy().__imul__(2),
}


@pytest.mark.parametrize("change", UNCOUNTED)
def test_a_change_that_is_not_counted_before_a_call_that_writes_states(change: str) -> None:
    """The call raises, the next one has the new weights."""
    torch.manual_seed(0)
    module, x = Counting().eval(), torch.randn(3, 4)
    eager = copy.deepcopy(module)  # whose buffer is counted elsewhere
    with purevk.compile(module, (x,)) as program, torch.no_grad():
        torch.testing.assert_close(program(x), eager(x))
        UNCOUNTED[change](module)
        UNCOUNTED[change](eager)
        with pytest.raises(purevk.StaleStateError, match="call program.refresh"):
            program(x)
        program.state["total"] = eager.total
        torch.testing.assert_close(program(x), eager(x))
        UNCOUNTED[change](module)
        UNCOUNTED[change](eager)
        program.refresh()
        torch.testing.assert_close(program(x), eager(x))


def test_a_change_that_is_counted_before_a_call_that_writes_states() -> None:
    torch.manual_seed(0)
    module, x = Counting().eval(), torch.randn(3, 4)
    eager = copy.deepcopy(module)
    changes: dict[str, Callable[[Any], Any]] = {
        "weight": lambda m: m.linear.weight.mul_(2),
        "other": lambda m: setattr(m.linear, "weight", torch.nn.Parameter(torch.ones(4, 4))),
        "elsewhere": lambda m: setattr(m.linear.weight, "data", torch.full((4, 4), 2.0)),
    }
    with purevk.compile(module, (x,)) as program, torch.no_grad():
        for name, change in changes.items():
            torch.testing.assert_close(program(x), eager(x), msg=name)
            change(module)
            change(eager)
        torch.testing.assert_close(program(x), eager(x))


def test_nothing_is_written_to_out_with_weights_that_have_changed() -> None:
    torch.manual_seed(0)
    module, x = torch.nn.Linear(4, 4), torch.randn(3, 4)
    with purevk.compile(module, (x,)) as program, torch.no_grad():
        out = torch.zeros(3, 4)
        module.weight.data.mul_(2)
        torch.testing.assert_close(program(x, out=out), module(x))
        before = out.clone()
        module.weight.data = torch.ones(7, 7)  # with which it cannot be exported
        for _ in range(2):
            with pytest.raises(purevk.InputError, match="cannot be exported"):
                program(x, out=out)
        assert torch.equal(out, before)
        module.weight.data = torch.ones(4, 4)
        torch.testing.assert_close(program(x, out=out), module(x))


def test_a_call_waits_for_little_of_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but what torch counts is compared while the device runs."""
    module, x, order = Counting().eval(), torch.randn(3, 4), []

    def note(owner: type, name: str) -> None:
        function = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            order.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    for owner, name in (
        (Weights, "_written"),
        (Samples, "changed"),
        (Attributes, "changed"),
        (ComputeGraph, "submit"),
        (Submission, "wait"),
    ):
        note(owner, name)
    with purevk.compile(module, (x,)) as program, torch.no_grad():
        order.clear()
        program(x)
    assert order == ["_written", "submit", "changed", "changed", "wait"]


FACTOR, TABLE, VECTOR = 2.0, {"a": [1.0]}, torch.ones(4)


def _offset() -> float:
    return TABLE["a"][0]


@dataclasses.dataclass
class Inner:
    power: int = 1


def _held_in_a_closure() -> tuple[type, Callable[[float], None]]:
    held = 1.5

    class Configured(torch.nn.Module):
        slope = 3.0
        limits: ClassVar = [-50.0, 50.0]

        def __init__(self) -> None:
            super().__init__()
            self.config = types.SimpleNamespace(scale=2.0, inner=Inner())
            self.array = np.ones(4, np.float32)
            self.number = np.float32(2)
            self.function, self.partial = torch.relu, functools.partial(torch.add, other=1.0)
            self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            x = self.partial(self.function(x)) * self.config.scale
            x = x**self.config.inner.power + torch.from_numpy(self.array) * float(self.number)
            x = (x * FACTOR + _offset()) * VECTOR + self.slope * held
            return x.clamp(*self.limits)

    def hold(value: float) -> None:
        nonlocal held
        held = value

    return Configured, hold


def test_a_change_outside_of_the_module_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects and arrays in it, its class, and what its functions name."""
    torch.manual_seed(0)
    made, hold = _held_in_a_closure()
    module, x, here = made().eval(), torch.randn(3, 4), globals()
    monkeypatch.setitem(TABLE, "a", [1.0])
    changes: dict[str, Callable[[], Any]] = {
        "object": lambda: setattr(module.config, "scale", 5.0),
        "object in an object": lambda: setattr(module.config.inner, "power", 2),
        "other object": lambda: setattr(module.config, "inner", Inner(3)),
        "array": lambda: module.array.__setitem__(0, 9.0),
        "number of numpy": lambda: setattr(module, "number", np.float32(3)),
        "function": lambda: setattr(module, "function", torch.tanh),
        "partial": lambda: setattr(module, "partial", functools.partial(torch.add, other=2.0)),
        "longer list of modules": lambda: module.layers.append(torch.nn.Linear(4, 4)),
        "other module": lambda: module.layers.__setitem__(0, torch.nn.Linear(4, 4)),
        "class": lambda: setattr(made, "slope", 4.0),
        "list of the class": lambda: made.limits.__setitem__(0, 0.5),
        "closure": lambda: hold(7.0),
        "global number": lambda: monkeypatch.setitem(here, "FACTOR", 6.0),
        "global of a function that is called": lambda: TABLE["a"].__setitem__(0, 3.0),
        "global tensor": lambda: monkeypatch.setitem(here, "VECTOR", torch.full((4,), 2.0)),
        "forward": lambda: setattr(made, "forward", lambda self, x: x * self.slope),
    }
    with purevk.compile(module, (x,)) as program, torch.no_grad():
        torch.testing.assert_close(program(x), module(x))
        for name, change in changes.items():
            change()
            torch.testing.assert_close(program(x), module(x), msg=name)
        first = program.method("forward").variants[0]
        program(x)
        assert program.method("forward").variants[0] is first


class Defaults:
    width, unused = 2.0, 1.0
    bounds: ClassVar = [0.0, 9.0]


class Options(Defaults):
    def __init__(self) -> None:
        self.shift, self.calls, self.inner = 1.0, 0, Inner()


OPTIONS = Options()


def test_settings_in_global_classes_and_objects_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    here, closed = globals(), types.SimpleNamespace(height=2.0)

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            OPTIONS.calls += 1
            x = (x * OPTIONS.width + OPTIONS.shift) ** OPTIONS.inner.power
            return x.clamp(*Defaults.bounds) * closed.height

    module, x = Model(), torch.randn(3)
    options = Options()
    monkeypatch.setitem(here, "OPTIONS", options)
    changes: dict[str, Callable[[], Any]] = {
        "object": lambda: setattr(options, "shift", 3.0),
        "object in an object": lambda: setattr(options.inner, "power", 2),
        "other object in an object": lambda: setattr(options, "inner", Inner(3)),
        "class": lambda: monkeypatch.setattr(Defaults, "width", 5.0),
        "attribute of a base class": lambda: setattr(Options, "width", 7.0),
        "attribute of the class, hidden": lambda: setattr(options, "width", 4.0),
        "list of a class": lambda: monkeypatch.setattr(Defaults, "bounds", [-1.0, 2.0]),
        "list, in place": lambda: Defaults.bounds.__setitem__(1, 1.0),
        "in a closure": lambda: setattr(closed, "height", 8.0),
        "other object": lambda: monkeypatch.setitem(here, "OPTIONS", Options()),
    }
    with purevk.compile(module, (x,)) as program:
        torch.testing.assert_close(program(x), module(x))
        for name, change in changes.items():
            change()
            torch.testing.assert_close(program(x), module(x), msg=name)
        first = program.method("forward").variants[0]
        Defaults.unused = 2.0
        program(x)
        assert program.method("forward").variants[0] is first
    monkeypatch.undo()
    del Options.width


def test_an_attribute_is_no_global_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may keep the results of its calls under the name of an attribute."""

    class Named(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return types.SimpleNamespace(logits=x * FACTOR).logits

    monkeypatch.setitem(globals(), "logits", torch.ones(2))
    attributes = Attributes([Named()])
    monkeypatch.setitem(globals(), "logits", torch.zeros(2))
    assert not attributes.changed()
    monkeypatch.setitem(globals(), "FACTOR", 6.0)
    assert attributes.changed()


@pytest.mark.slow
def test_settings_of_torch_are_seen() -> None:
    """They decide the dtypes of what forward computes."""

    class Made(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x @ x, torch.ones(1, 4).to(x)]) + torch.tensor([0.5])

    module, x = Made(), torch.ones(4, 4)
    with purevk.compile(module, (x,)) as program, torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(program(x), module(x))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                torch.testing.assert_close(program(x), module(x))
        torch.set_default_dtype(torch.float64)
        try:
            assert module(x).dtype is torch.float64
            torch.testing.assert_close(program(x), module(x))
        finally:
            torch.set_default_dtype(torch.float32)


def test_layers_follow_autocast_around_the_call() -> None:
    layers = (torch.nn.Linear(4, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 3))
    module, x = torch.nn.Sequential(*layers).eval(), torch.randn(5, 4)
    with purevk.compile(module, (x,)) as program, torch.no_grad():
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert module(x).dtype is torch.bfloat16
                torch.testing.assert_close(program(x), module(x))
            torch.testing.assert_close(program(x), module(x))


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
            sizes.append((program.weights.nbytes, len(program.leaves._held)))
        assert max(sizes[12:]) == max(sizes[:12])
        torch.testing.assert_close(program(x, 0.5), module(x, 0.5))


def _fails(*_: Any) -> Any:
    raise NotImplementedError


def _without_end(_: Any) -> Any:
    while True:
        yield 1


_ODD = (
    "__iter__",
    "__len__",
    "__getitem__",
    "__eq__",
    "__repr__",
    "__contains__",
    "values",
    "items",
)


def _odd(base: type, draw: random.Random) -> type:
    """A class of containers or numbers in which some methods raise, or never end."""
    methods = {name: _fails for name in draw.sample(_ODD, 4)}
    if draw.random() < 0.3:
        methods["__iter__"] = _without_end
    return type("Odd", (base,), {**methods, "__hash__": base.__hash__})


def _nested(draw: random.Random, depth: int = 2) -> tuple[Any, list[Any]]:
    """A value as an attribute may be, and the lists and dicts in it."""
    base = draw.choice([list, dict, tuple, set, frozenset, int, float, Mapping, list, dict])
    if base in (int, float, set, frozenset) or not depth:
        kind = base if base in (set, frozenset) else int
        value = [draw.randint(0, 9)] if kind is base and kind is not int else draw.randint(0, 9)
        return _odd(kind, draw)(value), []
    items, inner = zip(*(_nested(draw, depth - 1) for _ in range(draw.randint(1, 3))))
    within = [each for some in inner for each in some]
    if base is dict:
        made = _odd(dict, draw)(zip("abc", items))
        return made, [made, *within]
    if base is Mapping:
        odd = {
            "__len__": _fails,
            "__getitem__": _fails,
            "__iter__": draw.choice([_fails, _without_end]),
        }
        return type("Odd", (Mapping,), odd)(), []
    made = _odd(base, draw)(items)
    return made, [made, *within] if base is list else within


def test_containers_whose_methods_raise() -> None:
    """As irreps of e3nn. Their content is compared all the same."""
    draw = random.Random(0)
    module = torch.nn.Linear(4, 2)
    values = [_nested(draw) for _ in range(60)]
    for value, mutable in values:
        module.odd = value
        attributes = Attributes([module])
        assert not attributes.changed()
        for each in mutable:
            if isinstance(each, dict):
                dict.__setitem__(each, "other", 1)
            else:
                list.append(each, 1)
            assert attributes.changed()
            attributes = Attributes([module])
            assert not attributes.changed()
    module.odd = [value for value, _ in values]
    x = torch.rand(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(purevk.compile(module.eval(), (x,))(x), module(x))


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


def test_a_module_is_exported_while_another_thread_traces_for_torch_compile() -> None:
    """torch has one stack of modes for all threads, and torch.compile empties it meanwhile."""
    compiling, exporting = threading.Event(), threading.Event()

    class Waits(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            exporting.set()
            time.sleep(0.2)
            return super().forward(x) * 2

    def backend(graph: Any, inputs: Any) -> Any:
        compiling.set()
        exporting.wait(1)  # the export waits for the end of this
        with torch.utils._python_dispatch._disable_current_modes():
            time.sleep(0.4)
        return graph.forward

    module, x = Waits(4, 4).eval(), torch.randn(2, 4)
    purevk.compile(module, (x,)).close()  # once, so that it is fast below
    exporting.clear()
    compiled = torch.compile(lambda x: torch.sin(x) + 1, backend=backend)
    thread = threading.Thread(target=compiled, args=(x,))
    thread.start()
    assert compiling.wait(60)
    try:
        with purevk.compile(module, (x,)) as program, torch.no_grad():
            torch.testing.assert_close(program(x), module(x))
    finally:
        thread.join()


def test_a_call_while_another_thread_exports_the_module(caplog: Any) -> None:
    """torch.export replaces the tensors of the module meanwhile. That is no change of it."""
    waits, tracing, called = threading.Event(), threading.Event(), threading.Event()

    class Waits(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if waits.is_set():
                tracing.set()
                called.wait(0.3)  # the call waits for the end of the export
            return super().forward(x)

    module, x = Waits(4, 4).eval(), torch.randn(2, 4)
    expected = module(x).detach()
    with purevk.compile(module, (x,)) as program, caplog.at_level(logging.INFO, logger="purevk"):
        (first,) = program.method("forward").variants
        waits.set()
        thread = threading.Thread(target=lambda: purevk.compile(module, (x,)).close())
        thread.start()
        assert tracing.wait(30)
        torch.testing.assert_close(program(x), expected)
        called.set()
        thread.join()
        waits.clear()
        torch.testing.assert_close(program(x), expected)
        assert program.method("forward").variants == [first]
    assert "were changed" not in caplog.text


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


def test_training_mode_is_told_once(caplog: Any) -> None:
    class Scale(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    def told(module: torch.nn.Module) -> str:
        caplog.clear()
        with purevk.compile(module, (torch.ones(2, 4),)) as program:
            program(torch.ones(2, 4))
        return caplog.text

    norm, dropout = torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5)
    with caplog.at_level(logging.WARNING, logger="purevk"):
        text = told(torch.nn.Sequential(torch.nn.Linear(4, 4), norm, dropout))
        assert text.count("training mode") == 1
        assert "1 (BatchNorm1d), 2 (Dropout)" in text and "module.eval()" in text
        for quiet in (Scale(), torch.nn.Dropout(0.0), torch.nn.Linear(4, 4), dropout.eval()):
            assert told(quiet) == ""
