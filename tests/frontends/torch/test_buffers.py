"""Modules that read and write their buffers in one call, against the modules themselves."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import purevk  # noqa: E402
from purevk.errors import UnsupportedProgramError  # noqa: E402

pytestmark = [pytest.mark.device, pytest.mark.export]


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.zeros(3))
        self.register_buffer("b", torch.ones(3))


class Both(Two):
    def forward(self, x):
        old = self.a.clone()
        self.b.copy_(self.a)
        self.a.copy_(x)
        return old, self.a.view(3, 1) + 0, self.a + self.b, self.b.clone()


class Swap(Two):
    def forward(self, x):
        old = self.a.clone()
        self.a.copy_(self.b)
        self.b.copy_(old + x)
        return self.a * 1, self.b + 0


class PlainSwap(Two):
    def forward(self, x):
        old = self.a.clone()
        self.a.copy_(self.b)
        self.b.copy_(old)
        self.a.add_(x)
        return self.a - self.b


class Part(Two):
    def forward(self, x):
        old = self.a[1:].clone()
        self.b[:2].copy_(old)
        self.a.copy_(x)
        return old, self.b.clone()


class Window(Two):
    def forward(self, x):
        self.a.copy_(torch.cat([self.a[1:], x[:1]]))
        return self.a.sum(), (self.a * self.b).clone()


class Replaced(Two):
    def forward(self, x):
        old = self.a
        self.a = self.a + x
        return old, old[1:], self.a


class Shifted(Two):
    def forward(self, x):
        old = self.a
        self.a = self.a + x
        self.b = old.view(3, 1).view(3)
        return self.b * 1, self.a


class CopiedThenReplaced(Two):
    def forward(self, x):
        old = self.b
        self.b = self.b * 2
        self.a.copy_(old)
        return old, self.a, self.b


class CopiedThenWritten(Two):
    def forward(self, x):
        self.b.copy_(self.a)
        self.a.add_(x)
        return self.b, self.a


@pytest.mark.parametrize(
    "kind",
    [Both, Swap, PlainSwap, Part, Window, Replaced, Shifted, CopiedThenReplaced, CopiedThenWritten],
)
def test_buffers(kind):
    module = kind()
    with purevk.compile(kind(), (torch.ones(3),)) as program:
        for call in range(4):
            x = torch.arange(3.0) + call
            have, want = program.forward(x), module(x)
            torch.testing.assert_close(have, want)


class Copied(torch.nn.Module):
    """Buffers that take elements of another dtype, or of sizes that broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("narrow", torch.zeros(2, 3, dtype=torch.float16))
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))

    def forward(self, x):
        self.narrow.copy_(x)
        self.count.copy_(x[0])
        return self.narrow, self.count * 2, self.narrow.sum(0)


@pytest.mark.parametrize("sizes", [(2, 3), (1, 3), (1, 1)])
def test_a_copy_into_a_buffer_keeps_its_dtype_and_sizes(sizes, tmp_path):
    module = Copied()
    x = torch.arange(1.0, 1.0 + sizes[0] * sizes[1]).view(sizes) * 1.7001
    with purevk.compile(Copied(), (x,)) as program:
        program.save(tmp_path / "model.pvk")
        have, want = program.forward(x), module(x)
        torch.testing.assert_close(have, want)
    with purevk.load(tmp_path / "model.pvk") as program:
        torch.testing.assert_close(program.forward(x), want)


class Returned(Copied):
    def forward(self, x):
        self.narrow.copy_(x)
        return self.narrow


def test_a_copy_that_torch_has_removed_keeps_the_dtype_of_the_buffer():
    x = torch.full((1, 3), 1.7001)
    exported = torch.export.export(Returned(), (x,)).run_decompositions({})
    with purevk.compile(exported) as program:
        torch.testing.assert_close(program.forward(x), Returned()(x))
        assert program.state["narrow"].dtype == "float16"


class Resized(torch.nn.Module):
    """Writes a result into an input or a buffer with `out=`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(3, 4))

    def forward(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.add(x, 1, out=self.rows if out is None else out) * 2


@pytest.mark.parametrize("given", [(), (torch.zeros(3, 4),)], ids=["buffer", "input"])
def test_results_that_resize_what_they_are_written_to(given):
    with pytest.raises(UnsupportedProgramError, match=r"aten\.add\.out changes the sizes of"):
        purevk.compile(Resized(), (torch.ones(1, 4), *given))
    x = torch.ones(3, 4)
    assert (purevk.compile(Resized(), (x, *given))(x, *given) == 4).all()


class Lazy(torch.nn.Module):
    """Reads, and may write, a buffer that torch conjugates or negates lazily."""

    def __init__(self, buffer: torch.Tensor, writes: bool) -> None:
        super().__init__()
        self.register_buffer("buffer", buffer)
        self.writes = writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            self.buffer.mul_(x)
        return self.buffer + x


COMPLEX = torch.tensor([1 + 2j, -3 + 0.5j])
LAZY = {
    "conj": lambda: COMPLEX.clone().conj(),
    "neg": lambda: COMPLEX.clone().conj().imag,
    "dense": lambda: torch._neg_view(torch.ones(2)),
}


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("kind", LAZY)
def test_buffers_that_torch_conjugates_or_negates_lazily(kind, writes, tmp_path):
    buffer, x = LAZY[kind]().clone(), torch.tensor([2.0, -5.0])
    want = (buffer * x if writes else buffer) + x
    with purevk.compile(Lazy(LAZY[kind](), writes), (x,)) as program:
        program.save(tmp_path / "model.pvk")
        torch.testing.assert_close(program.forward(x), want)
    with purevk.load(tmp_path / "model.pvk") as program:
        torch.testing.assert_close(program.forward(x), want)
    options = {"fallback": False}
    compiled = torch.compile(Lazy(LAZY[kind](), writes), backend="purevk", options=options)
    torch.testing.assert_close(compiled(x), want)
