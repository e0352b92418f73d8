"""Numbers that follow from buffers: they decide sizes at load, and what `forward` does. Both still
follow the module."""

from __future__ import annotations

import pytest

import purevk
from purevk.ir import Graph

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.device


class Padded(torch.nn.Module):
    """A convolution that keeps its sizes in buffers, as Mimi's and EnCodec's do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv1d(4, 4, 5, stride=2)
        self.register_buffer("kernel", torch.tensor(5), persistent=False)
        self.register_buffer("stride", torch.tensor(2), persistent=False)

    def forward(self, x):
        frames = torch.ceil((x.shape[-1] - self.kernel + 3) / self.stride + 1) - 1
        more = frames.to(torch.int64) * self.stride + self.kernel - 3 - x.shape[-1]
        left = (self.kernel - self.stride).item()
        made = self.conv(torch.nn.functional.pad(x, (left, more.item())))
        return made + x[..., ::2]


class First(torch.nn.Module):
    """The first `count` columns, and the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x):
        count = self.count.item()
        torch._check(count >= 0)
        torch._check(count <= 8)
        return x[:, :count] * 2


class Next(torch.nn.Module):
    """Adds to the buffer of another module."""

    def __init__(self, first: First) -> None:
        super().__init__()
        self.first = first

    def forward(self, x):
        self.first.count.add_(1)
        return x + 1


def is_static(graph: Graph) -> bool:
    return all(value.type.is_static for node in graph.nodes for value in node.results)


@pytest.mark.parametrize("exported", [False, True], ids=["module", "exported"])
def test_sizes_from_buffers_are_known(exported: bool) -> None:
    model, x = Padded().eval(), torch.randn(1, 4, 20)
    given = torch.export.export(model, (x,), strict=False) if exported else model
    program = purevk.compile(given, None if exported else (x,))
    assert is_static(program.method("forward").source(None))
    torch.testing.assert_close(program(x), model(x), rtol=1e-4, atol=1e-5)
    if exported:  # the user's program is as it was
        torch.testing.assert_close(given.module()(x), model(x))


@pytest.mark.parametrize("data", [False, True], ids=["in_place", "memory"])
def test_a_buffer_that_changes(data: bool) -> None:
    """The second value does not follow from the export any more, so further ones cost nothing."""
    model, x = First(), torch.randn(2, 8)
    with purevk.compile(model, (x,)) as program:
        torch.testing.assert_close(program(x), model(x))
        for count in (5, 1, 8):
            if data:
                model.count.data = torch.tensor(count)
            else:
                model.count.fill_(count)
            assert program(x).shape == (2, count)
            torch.testing.assert_close(program(x), model(x))
        model.count = torch.tensor(4)
        torch.testing.assert_close(program(x), model(x))


def test_a_buffer_that_another_method_writes() -> None:
    first, x = First(), torch.randn(2, 8)
    methods = {"first": (first, (x,)), "next": (Next(first), (x,))}
    with purevk.compile(methods) as program:
        assert program.method("first")(x).shape == (2, 3)
        program.method("next")(x)
        assert program.method("first")(x).shape == (2, 4)


def test_a_changed_tensor_of_an_exported_program() -> None:
    x = torch.randn(2, 8)
    exported = torch.export.export(First(), (x,))
    with purevk.compile(exported) as program:
        assert program(x).shape == (2, 3)
        exported.state_dict["count"].fill_(6)
        assert program(x).shape == (2, 6)


class Decides(torch.nn.Module):
    """Asks for elements of a buffer in many ways, before and after it may have written it."""

    def __init__(self, before: bool = False, after: bool = False, by: bool = False) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor([3, 1]))
        self.before, self.after, self.by = before, after, by

    def forward(self, x):
        if self.before:
            self.count[0].add_(x.to(torch.int64).sum() if self.by else 1)
        least = torch.maximum(self.count[0] - 1, self.count[1])
        x = torch.nn.functional.pad(x, (int(least), self.count[1]))
        if x.shape[1] > 4 * least:
            x = x * 2
        if self.count[0] > 2 and not self.count[1] == 0:
            x = x + 1
        if self.after:
            self.count[0] += 1
        return x


def test_decisions_by_buffers_follow_the_module() -> None:
    model, x = Decides(), torch.randn(2, 8)
    with purevk.compile(model, (x,)) as program:
        torch.testing.assert_close(program(x), model(x))
        for first, second in ((5, 1), (2, 0), (3, 1)):
            model.count.copy_(torch.tensor([first, second]))
            torch.testing.assert_close(program(x), model(x))
        model.count = torch.tensor([1, 1])
        torch.testing.assert_close(program(x), model(x))


@pytest.mark.parametrize(
    "options", [{"before": True}, {"before": True, "by": True}, {"after": True}], ids=str
)
def test_decisions_by_buffers_that_forward_writes_are_refused(options: dict[str, bool]) -> None:
    with pytest.raises(Exception, match="data-dependent|which a call writes"):
        purevk.compile(Decides(**options), (torch.randn(2, 8),))


class Raises(torch.nn.Module):
    """Adds to the buffer of another module."""

    def __init__(self, other: Decides) -> None:
        super().__init__()
        self.other = other

    def forward(self, x):
        self.other.count.add_(1)
        return x + 1


@pytest.mark.parametrize("order", [("decides", "raises"), ("raises", "decides")], ids=str)
def test_decisions_by_buffers_that_a_method_writes_are_refused(order: tuple[str, str]) -> None:
    model, x = Decides(), torch.randn(2, 8)
    given = {"decides": (model, (x,)), "raises": (Raises(model), (x,))}
    with pytest.raises(purevk.errors.UnsupportedProgramError, match="which a call writes"):
        purevk.compile({name: given[name] for name in order})


class Copies(torch.nn.Module):
    """Decides by a copy of a buffer that it has written to."""

    def __init__(self, write) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(3))
        self.write = write

    def forward(self, x):
        count = self.count.clone()
        self.write(count)
        return x + 1 if count > 3 else x - 1


WRITES = {
    "method": lambda count: count.add_(1),
    "operator": lambda count: torch.ops.aten.add_.Tensor(count, 1),
    "packet": lambda count: torch.ops.aten.add_(count, 1),
    "out": lambda count: torch.add(count, 1, out=count),
    "data": lambda count: count.data.add_(1),
    "item": lambda count: count.__setitem__((), 4),
    "view": lambda count: count.view(1)[0].fill_(4),
    "list": lambda count: torch._foreach_add_([count], 1),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_into_copies_of_buffers_are_seen(name: str) -> None:
    """The result is that of eager torch, or the decision is refused."""
    model, x = Copies(WRITES[name]), torch.randn(2, 8)
    try:
        program = purevk.compile(model, (x,))
    except Exception as error:
        assert "data-dependent" in str(error)
    else:
        torch.testing.assert_close(program(x), model(x))
