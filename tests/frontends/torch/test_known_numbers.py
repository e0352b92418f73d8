"""Numbers that follow from buffers: they decide sizes at load, and what `forward` does. Both still
follow the module."""

from __future__ import annotations

import pytest

import purevk
from purevk.ir import Graph

torch = pytest.importorskip("torch")
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # noqa: E402

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
    given = model
    if exported:
        try:
            given = torch.export.export(model, (x,), strict=False)
        except GuardOnDataDependentSymNode:  # torch 2.11
            pytest.skip("this torch does not export a convolution of an unbacked size")
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


class Windows(torch.nn.Module):
    """Attention within windows of an image, as that of vision-language models: their sizes follow
    from a grid, through masks, counts and lists of Python."""

    def __init__(self, constant: bool) -> None:
        super().__init__()
        self.register_buffer("grid", torch.tensor([[5, 7]]))
        self.constant = constant

    def forward(self, x):
        grid = torch.tensor([[5, 7]]) if self.constant else self.grid
        order, ends = [], [0]
        for height, width in grid.tolist():
            at = torch.arange(height * width).reshape(height, width)
            at = torch.nn.functional.pad(at, (0, -width % 4, 0, -height % 4), value=-1)
            at = at.reshape(at.shape[0] // 4, 4, at.shape[1] // 4, 4).transpose(1, 2)
            counts = (at != -1).sum((2, 3)).reshape(-1)
            order.append(at.reshape(-1)[at.reshape(-1) != -1])
            ends.extend((counts.cumsum(0) + ends[-1]).tolist())
        order = torch.cat(order)
        ends = torch.unique_consecutive(torch.tensor(ends, dtype=torch.int32))
        parts = x[order].split((ends[1:] - ends[:-1]).tolist())
        return torch.cat([each.softmax(0) for each in parts])[order.argsort()]


@pytest.mark.parametrize("constant", [False, True])
def test_sizes_of_windows_follow_from_a_grid(constant: bool) -> None:
    model, x = Windows(constant), torch.randn(35, 3)
    with purevk.compile(model, (x,)) as program:
        torch.testing.assert_close(program(x), model(x))
        if not constant:
            model.grid.copy_(torch.tensor([[7, 5]]))
            torch.testing.assert_close(program(x), model(x))


class Made(torch.nn.Module):
    """Decides by a tensor that it makes of numbers and writes to."""

    def __init__(self, write) -> None:
        super().__init__()
        self.write = write

    def forward(self, x):
        made = torch.zeros(4, dtype=torch.int64)
        view = made[1:3]
        self.write(made, x)
        count = int(view.sum())
        return x[:, : count + 1] + 1 if count > 3 else x - count


MAKES = {
    "nothing": lambda made, x: None,
    "item": lambda made, x: made.__setitem__(2, 5),
    "mask": lambda made, x: made.__setitem__(made == 0, 2),
    "method": lambda made, x: made.add_(1).mul_(2),
    "view": lambda made, x: made.view(2, 2)[1].fill_(3),
    "other view": lambda made, x: made.as_strided((2,), (1,), 1).fill_(3),
    "operator": lambda made, x: torch.ops.aten.fill_.Scalar(made, 2),
    "out": lambda made, x: torch.add(made, 1, out=made),
    "data": lambda made, x: made.data.fill_(4),
    "input": lambda made, x: made.copy_(x[0, :4].to(torch.int64)),
    "part of an input": lambda made, x: made.__setitem__(1, x[0, 0].to(torch.int64)),
    "list": lambda made, x: torch._foreach_add_([made], 3),
    "size": lambda made, x: made.fill_(x.shape[1]),
    "each row": lambda made, x: torch.vmap(lambda row: row.add_(3))(made),
    "random": lambda made, x: made.random_(7, 9),
    "scatter": lambda made, x: made.scatter_(0, torch.tensor([1, 2]), 2),
}


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_writes_into_constants_are_seen(name: str, dynamic: bool) -> None:
    """The result is that of eager torch, or the decision is refused."""
    model, x = Made(MAKES[name]), torch.rand(2, 9)
    shapes = ({1: torch.export.Dim("width", min=8, max=32)},) if dynamic else None
    try:
        program = purevk.compile(model, (x,), dynamic_shapes=shapes)
    except Exception as error:
        assert "data-dependent" in str(error)
        assert name not in ("nothing", "item", "mask", "method", "view")
    else:
        torch.testing.assert_close(program(x), model(x))
        if dynamic:
            x = torch.rand(2, 11)
            torch.testing.assert_close(program(x), model(x))


class Averages(torch.nn.Module):
    """Decides by what functions write that are not named so."""

    def __init__(self, write) -> None:
        super().__init__()
        self.write = write

    def forward(self, x):
        made = torch.zeros(4)
        self.write(made, x)
        return x + 1 if made[1].item() > 0.001 else x - 1


def _lookup(made, x):
    torch.nn.functional.embedding(torch.tensor([1]), made.view(2, 2).add_(5), max_norm=1.0)
    made.sub_(0.75)


AVERAGES = {
    "batch norm": lambda made, x: torch.nn.functional.batch_norm(
        x + 9, made, made + 1, training=True
    ),
    "instance norm": lambda made, x: torch.nn.functional.instance_norm(
        x.T[None] + 9, made, made + 1
    ),
    "embedding": _lookup,
    "uniform": lambda made, x: torch.nn.init.uniform_(made, 0.5, 1.0),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_writes_of_functions_are_seen(name: str) -> None:
    """The result is that of eager torch, or the decision is refused."""
    model, x = Averages(AVERAGES[name]), torch.rand(3, 4)
    wanted = Averages(AVERAGES[name])(x)
    try:
        program = purevk.compile(model, (x,))
    except Exception as error:
        assert "data-dependent" in str(error)
    else:
        torch.testing.assert_close(program(x), wanted)


class Renormed(torch.nn.Module):
    """A write that is not named so, before one into another tensor."""

    def forward(self, x):
        made, other = torch.full((2, 2), 5.0), torch.zeros(2)
        torch.nn.functional.embedding(torch.tensor([1]), made, max_norm=1.0)
        other.add_(1)
        return x + 1 if made[1, 0].item() > 3 else x - 1


def test_a_write_is_not_hidden_by_another() -> None:
    x = torch.rand(3)
    try:
        program = purevk.compile(Renormed(), (x,))
    except Exception as error:
        assert "data-dependent" in str(error)
    else:
        torch.testing.assert_close(program(x), Renormed()(x))


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8)
        self.register_buffer("counts", torch.tensor([3, 1]))

    def forward(self, x):
        x = self.norm(x)
        return x[:, : self.counts.tolist()[0]] + 1


def test_batch_norm_in_eval_mode_hides_no_numbers() -> None:
    model, x = Normed().eval(), torch.rand(4, 8)
    with purevk.compile(model, (x,)) as program:
        torch.testing.assert_close(program(x), model(x))
