"""What `forward` does to Python objects is no part of an exported program: it is refused where the
next call, or the caller, would see it."""

from __future__ import annotations

import array
import collections
import itertools
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import purevk  # noqa: E402
from purevk.errors import UnsupportedProgramError  # noqa: E402
from tests.program.signatures.harness import module, not_before  # noqa: E402

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore")]
X = torch.tensor([1.0, 2.0, 3.0])
sets_attributes = not_before("2.10", "torch.export refuses modules that set attributes")


def counter(self: Any, x: Any) -> Any:
    self.count = getattr(self, "count", 0) + 1
    return x * self.count


def first(self: Any, x: Any) -> Any:
    self.is_first, was = False, self.is_first
    return x * 2 if was else x


def history(self: Any, x: Any) -> Any:
    self.seen.append(x)
    return x * len(self.seen)


def configured(self: Any, x: Any) -> Any:
    self.config.step += 1
    return x * self.config.step


def tensor(self: Any, x: Any) -> Any:
    self.total = self.total + x
    return self.total * 2


def last_input(self: Any, x: Any) -> Any:
    last, self.last = self.last, x * 1
    return x if last is None else x + last


def first_input(self: Any, x: Any) -> Any:
    if "x" not in self.inputs:
        copy = torch.zeros_like(x)
        self.inputs["x"] = copy.view(-1)
        torch.ops.aten.copy_.default(copy[:2], x[:2])
    return x + self.inputs["x"]


REFUSED = {
    "count": (counter, {}),
    "is_first": (first, {"is_first": True}),
    "seen": (history, {"seen": []}),
    "step": (configured, {"config": types.SimpleNamespace(step=0)}),
    "total": (tensor, {"total": torch.zeros(3)}),
    "last": (last_input, {"last": None}),
    "inputs": (first_input, {"inputs": {}}),
}


@sets_attributes
@pytest.mark.parametrize("name", REFUSED)
def test_what_the_next_call_reads_is_refused(name: str) -> None:
    function, attributes = REFUSED[name]
    made = module(function, **attributes)
    before = str(vars(made))
    with pytest.raises(UnsupportedProgramError, match=repr(name)):
        purevk.compile(made, (X,))
    assert str(vars(made)) == before


class Numbers(list):
    pass


class Settings(dict):
    pass


CONTAINERS = {
    "list": lambda: [1],
    "a class of lists": lambda: Numbers([1]),
    "deque": lambda: collections.deque([1]),
    "bytes": lambda: bytearray([1]),
    "array": lambda: array.array("i", [1]),
    "dict": lambda: {0: 1},
    "ordered": lambda: collections.OrderedDict({0: 1}),
    "defaults": lambda: collections.defaultdict(int, {0: 1}),
    "counts": lambda: collections.Counter({0: 1}),
    "a class of dicts": lambda: Settings({0: 1}),
    "nested": lambda: {0: collections.deque([1])},
    "objects": lambda: [types.SimpleNamespace(step=1)],
    "tuple of objects": lambda: (types.SimpleNamespace(step=1),),
    "object in an object": lambda: types.SimpleNamespace(inner=types.SimpleNamespace(step=1)),
}


def owner_of(value: Any) -> tuple[Any, Any]:
    """The innermost container or namespace, and the key of the number in it."""
    if isinstance(value, types.SimpleNamespace):
        return owner_of(value.inner) if hasattr(value, "inner") else (vars(value), "step")
    return (value, 0) if isinstance(value[0], int) else owner_of(value[0])


def counting(self: Any, x: Any) -> Any:
    owner, key = owner_of(self.value)
    owner[key] += 1
    return x * owner[key]


def reading(self: Any, x: Any) -> Any:
    owner, key = owner_of(self.value)
    return x * owner[key]


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_what_containers_hold(make: Any) -> None:
    """A number that forward changes is refused. One that the caller changes later counts."""
    made = module(counting, value=make())
    with pytest.raises(UnsupportedProgramError, match="changes what the next call reads"):
        purevk.compile(made, (X,))
    assert repr(made.value) == repr(make()) and type(made.value) is type(make())
    value = make()
    program = purevk.compile(module(reading, value=value), (X,))
    owner, key = owner_of(value)
    for number in (1, 7):
        owner[key] = number
        assert torch.equal(program(X), X * number)


@sets_attributes
def test_export_leaves_the_containers_of_a_module() -> None:
    """They are the same objects, with the same items, also if forward has changed them."""
    value, shapes = {"a": [1], "b": (2,)}, [1]

    def forward(self: Any, x: Any) -> Any:
        self.shapes.append(x.shape)
        return x * self.value["a"][0]

    made = module(forward, value=value, shapes=shapes)
    purevk.compile(made, (X,))
    assert made.value is value and made.shapes is shapes and shapes == [1]


class Shared:
    """Attributes of a class that `forward` names."""

    step = 1
    steps = [1]  # noqa: RUF012


class Slotted:
    __slots__ = ("step",)

    def __init__(self, step: int) -> None:
        self.step = step

    def next(self) -> int:
        self.step += 1
        return self.step


step, steps, slotted, plain = 1, [1], Slotted(1), types.SimpleNamespace(step=1)
counters = {"a": types.SimpleNamespace(inner=Slotted(1))}


def add_global(self: Any, x: Any) -> Any:
    global step
    step += 1
    return x * step


def add_to_list(self: Any, x: Any) -> Any:
    steps[0] += 1
    return x * steps[0]


def add_to_class(self: Any, x: Any) -> Any:
    Shared.step += 1
    return x * Shared.step


def add_to_list_of_class(self: Any, x: Any) -> Any:
    Shared.steps[0] += 1
    return x * Shared.steps[0]


def add_to_own_class(self: Any, x: Any) -> Any:
    type(self).step = getattr(self, "step", 1) + 1
    return x * self.step


def add_to_object(self: Any, x: Any) -> Any:
    plain.step += 1
    return x * plain.step


def add_to_slot(self: Any, x: Any) -> Any:
    slotted.step += 1
    return x * slotted.step


def add_to_own_slot(self: Any, x: Any) -> Any:
    self.slotted.step += 1
    return x * self.slotted.step


def add_by_method(self: Any, x: Any) -> Any:
    return x * counters["a"].inner.next()


def add_to_default(self: Any, x: Any, steps: Any = [1]) -> Any:  # noqa: B006
    steps[0] += 1
    return x * steps[0]


def add_to_named_default(self: Any, x: Any, *, steps: Any = [1]) -> Any:  # noqa: B006
    steps[0] += 1
    return x * steps[0]


def add_to_function(self: Any, x: Any) -> Any:
    add_to_function.step = getattr(add_to_function, "step", 1) + 1
    return x * add_to_function.step


def in_function(x: Any) -> Any:
    in_function.values[0] += 1
    return x * in_function.values[0]


in_function.values = [1]


def add_in_function(self: Any, x: Any) -> Any:
    return in_function(x)


@torch.no_grad()
def add_under_decorator(self: Any, x: Any, steps: Any = [1]) -> Any:  # noqa: B006
    steps[0] += 1
    return x * steps[0]


def add_in_closure() -> Any:
    step = 1

    def forward(self: Any, x: Any) -> Any:
        nonlocal step
        step += 1
        return x * step

    return forward


def take_from(iterator: Any) -> Any:
    return lambda self, x: x * next(iterator)


VARIABLES = {
    function.__name__: function
    for function in (
        *(add_global, add_to_list, add_to_class, add_to_list_of_class, add_to_own_class),
        *(add_to_object, add_to_slot, add_to_own_slot, add_to_default, add_to_named_default),
        *(add_to_function, add_in_function, add_under_decorator, add_by_method),
    )
} | {
    "closure": add_in_closure(),
    "count": take_from(itertools.count(2)),
    "list": take_from(iter([2, 3, 4, 5])),
    "generator": take_from(number for number in range(2, 9)),
    "map": take_from(map(int, (2, 3, 4, 5))),
}


@sets_attributes
@pytest.mark.parametrize("forward", VARIABLES.values(), ids=VARIABLES)
def test_variables_that_forward_changes(forward: Any) -> None:
    """What they hold stays as it was. Iterators cannot go back."""
    made = module(forward, slotted=Slotted(1))
    with pytest.raises(UnsupportedProgramError, match="changes what the next call reads"):
        purevk.compile(made, (X,))
    if forward not in [VARIABLES[name] for name in ("count", "list", "generator", "map")]:
        assert torch.equal(made(X), X * 2)


@pytest.mark.parametrize("name", ["default", "slot", "decorated"])
def test_variables_that_the_caller_changes(name: str) -> None:
    """Export reads them, so a change asks for another one."""
    values = [1]

    @torch.no_grad()
    def decorated(self: Any, x: Any) -> Any:
        return x * values[0]

    def forward(self: Any, x: Any, values: Any = values) -> Any:
        return x * (self.slotted.step if name == "slot" else values[0])

    made = module(decorated if name == "decorated" else forward, slotted=Slotted(1))
    with purevk.compile(made, (X,)) as program:
        for number in (1, 7):
            values[0] = made.slotted.step = number
            assert torch.equal(program(X), X * number)


def test_what_a_variable_of_the_file_keeps_between_calls() -> None:
    """A flag and tensors that any call computes are no effects; export leaves them as they were."""
    flags, tables, ones = [], dict[int, Any](), [None]

    def forward(self: Any, x: Any) -> Any:
        if not flags:
            flags.append("warned")
        if x.shape[0] not in tables:
            tables[x.shape[0]] = torch.arange(x.shape[0]) + 1.0
        if ones[0] is None:
            ones[0] = torch.ones_like(x)
        return x * tables[x.shape[0]].to(x) * ones[0]

    with purevk.compile(module(forward), (X,)) as program:
        assert not flags and not tables and ones == [None]
        assert torch.equal(program(X), X * X)


def harmless(self: Any, x: Any) -> Any:
    self.calls += 1
    self.last, self.sizes = x * 2, list(x.shape)
    self.outputs = []
    self.outputs.append(x)
    if x.shape[0] not in self.tables:
        self.tables[x.shape[0]] = torch.arange(x.shape[0]) + 1.0
    if self.slopes is None:
        self.slopes = torch.full((3,), 5.0)
    return x * self.tables[x.shape[0]] + self.slopes + len(self.outputs)


@sets_attributes
def test_the_refusal_of_cached_sizes_says_to_call_the_module_first() -> None:
    """As heads of YOLO, which keep their anchors for the sizes of the last input."""

    def head(self: Any, x: Any) -> Any:
        if self.shape != x.shape:
            self.shape, self.anchors = x.shape, torch.arange(x.shape[-1]) + 0.5
        return x * self.anchors

    made = module(head, shape=None, anchors=torch.empty(0))
    with pytest.raises(UnsupportedProgramError, match="call the module once"):
        purevk.compile(made, (X,))
    made(X)
    assert torch.equal(purevk.compile(made, (X,))(X), made(X))


@sets_attributes
def test_what_no_call_reads_is_accepted() -> None:
    made, eager = (module(harmless, calls=0, tables={}, slopes=None, outputs=[]) for _ in range(2))
    names = vars(made).keys()
    with purevk.compile(made, (X,)) as program:
        assert vars(made).keys() == names and made.calls == 0
        for _ in range(2):
            torch.testing.assert_close(program(X), eager(X))


@pytest.mark.parametrize(
    "change", [lambda d: d.append(X), lambda d: d.pop(), lambda d: d.__setitem__(0, X * 2)]
)
def test_containers_of_the_caller(change: Any) -> None:
    def forward(self: Any, x: Any, given: Any) -> Any:
        change(given["list"])
        return x + len(given["list"])

    with pytest.raises(UnsupportedProgramError, match="changes a list that it is given"):
        purevk.compile(module(forward), (X, {"list": [X + 1, X + 2]}))


def test_a_copy_of_a_container_may_change() -> None:
    def forward(self: Any, given: Any) -> Any:
        given = dict(given)
        return given.pop("x") * len(given)

    with purevk.compile(module(forward), ({"x": X, "y": X + 1},)) as program:
        torch.testing.assert_close(program({"x": X + 1, "y": X}), X + 1)
