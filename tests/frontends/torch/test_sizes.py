"""Sizes of which the program holds only for multiples: views of them need no guard, and a saved
program takes every size that torch's own exported program takes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.export import Dim  # noqa: E402

import purevk  # noqa: E402
from purevk.errors import InputError  # noqa: E402

pytestmark = pytest.mark.device


class Views(nn.Module):
    """Views of x[n, c] for multiples of random numbers, and decisions by the size."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.by, self.of_both, self.at = (
            rng.choice([2, 3, 5]),
            rng.choice([4, 6]),
            rng.randint(2, 9),
        )

    def forward(self, x: Any, y: Any) -> tuple[Any, ...]:
        k, n = self.by, x.shape[0]
        return (
            x.view(k, -1).sum(1),
            x.unflatten(0, (k, -1)).flatten(0, 1) + x,
            x.view(k, n // k, x.shape[1]).transpose(0, 1).reshape(-1),
            x.flatten().view(-1, k * x.shape[1]) * 2,
            y.flatten().view(self.of_both, -1).cumsum(1),
            y.flatten().view(self.of_both, -1).flatten() + y.flatten(),
            torch.cond(n == self.at * k, lambda x: x + 1, lambda x: x * 2, (x,)),
            torch.cond(y.shape[0] % 3 == 0, lambda x: x - 1, lambda x: x * 3, (x,)),
            x * torch.sym_ite(y.shape[1] > self.at, n, y.shape[0]),
        )


class _Multiples(nn.Module):
    def forward(self, x: Any) -> tuple[Any, ...]:
        n = x.shape[0]
        return (
            x.reshape(2, -1, 3) + 1,
            x.view(3, n // 3, 4).flatten(0, 1) + x,
            x.unflatten(0, (3, -1)).sum(0),
        )


@pytest.mark.parametrize("seed", range(3))
def test_views_of_multiples(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    module, columns = Views(rng), rng.randint(2, 4)

    def call(rows: int, a: int, b: int) -> tuple[Any, Any]:
        return torch.randn(rows * module.by, columns), torch.randn(a, b)

    sizes = [(4, 12, 5), (module.at, 6, 2 * module.of_both), (3, module.of_both, 7), (40, 9, 12)]
    dynamic = ({0: Dim.AUTO}, {0: Dim.AUTO, 1: Dim.AUTO})
    exported = torch.export.export(module, call(*sizes[0]), dynamic_shapes=dynamic, strict=False)
    with purevk.compile(exported) as program:
        program.save(tmp_path / "views.pvk")
    with purevk.load(tmp_path / "views.pvk") as program:
        for rows, a, b in sizes:
            x, y = call(rows, a, b)
            try:
                exported.module()(x, y)
            except AssertionError:
                with pytest.raises(InputError):
                    program(x, y)
                continue
            for have, want in zip(program(x, y), module(x, y), strict=True):
                torch.testing.assert_close(have, want)


def test_multiples_of_one_size_need_no_other_lowering() -> None:
    module = _Multiples()
    with purevk.compile(module, (torch.randn(15, 4),), ({0: Dim.AUTO},)) as program:
        for rows in (21, 9, 33, 63):
            x = torch.randn(rows, 4)
            for have, want in zip(program(x), module(x), strict=True):
                torch.testing.assert_close(have, want)
        assert len(program.methods["forward"].variants[0].specializations) == 1


class _Fixed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(3, 2, -1, 2, 2)  # at (6, 4) torch decides that two dims have these sizes


def test_a_view_whose_sizes_torch_fixes() -> None:
    module = _Fixed()
    with purevk.compile(module, (torch.randn(6, 4),), ({0: Dim.AUTO, 1: Dim.AUTO},)) as program:
        for sizes in ((6, 4), (6, 8), (12, 4)):
            x = torch.randn(*sizes)
            torch.testing.assert_close(program(x), module(x))


class _ViewOfProduct(nn.Module):
    """A view of both sizes together, in random factors."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.sizes = rng.choice([[2, 2], [4], [1, 4]])
        self.sizes[:0] = rng.sample([rng.choice([1, 2, 3]), -1], 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(self.sizes) * 2


@pytest.mark.parametrize("seed", range(6))
def test_files_of_views_of_products(seed: int, tmp_path: Path) -> None:
    """Guards fix what the bounds of the sizes do not keep: the file's results are compared at the sizes
    of the trace."""
    module, x = _ViewOfProduct(random.Random(seed)), torch.randn(6, 4)
    with purevk.compile(module, (x,), ({0: Dim.AUTO, 1: Dim.AUTO},)) as program:
        program.save(tmp_path / "m.pvk")
    with purevk.load(tmp_path / "m.pvk") as loaded:
        for rows in (6, 12, 24):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(loaded(x), module(x))


class _Steps(nn.Module):
    """Numbers from a real start, or by a real step, up to a size."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.start, self.step = rng.choice([0.5, -1.25, 3.0]), rng.choice([0.5, 1.0, 0.75, 2.5])

    def forward(self, x: Any) -> tuple[Any, ...]:
        n = x.shape[0]
        return (
            (torch.arange(0.5, n) / n + x),
            torch.arange(self.start, n, self.step) * 2,
            torch.arange(n, self.start, -self.step).cumsum(0),
            torch.arange(self.start, n, 2, dtype=torch.int64),
            torch.arange(0.7, n, self.step + 1, dtype=torch.int64),
            torch.arange(n, self.start, -self.step - 1, dtype=torch.int64),
        )


@pytest.mark.parametrize("seed", range(3))
def test_real_steps_up_to_a_size(seed: int) -> None:
    model = _Steps(random.Random(seed))
    sizes = ({0: Dim.DYNAMIC},)
    with purevk.compile(model, (torch.randn(7),), dynamic_shapes=sizes) as program:
        for count in (7, 12, 4):
            x = torch.randn(count)
            for out, wanted in zip(program.forward(x), model(x)):
                torch.testing.assert_close(out, wanted)


class _Patches(nn.Module):
    """Positions of 4 x 6 patches are added as they are, others are resized."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 2, 4, 6))

    def forward(self, x: Any) -> Any:
        y = nn.functional.avg_pool2d(x, 8)
        rows, columns = y.shape[2:]
        if (rows, columns) == (4, 6):
            return y.flatten(2) + self.positions.flatten(2)
        return y.flatten(2) + nn.functional.interpolate(self.positions, (rows, columns)).flatten(2)


@torch.no_grad()
def test_sizes_that_a_guard_makes_numbers() -> None:
    model, dims = _Patches(), ({2: Dim.AUTO, 3: Dim.AUTO},)
    with purevk.compile(model, (torch.randn(1, 2, 32, 48),), dynamic_shapes=dims) as program:
        for size in ((32, 48), (37, 50), (48, 32), (32, 24)):
            x = torch.randn(1, 2, *size)
            torch.testing.assert_close(program.forward(x), model(x))


class _Quotients(nn.Module):
    """Numbers in steps that floats of sizes give: of one rounding, and of `several`."""

    def __init__(self, rng: random.Random, several: bool) -> None:
        super().__init__()
        self.several = several
        self.by, self.factor = rng.choice([2, 3, 7]), rng.choice([0.1, 0.3, 1.7])
        self.dtype = rng.choice([torch.float64, torch.int64, torch.int32])

    def forward(self, x: Any) -> tuple[Any, ...]:
        n = x.shape[0]
        return (
            torch.arange(n / self.by),
            torch.arange(n / 4, n, 0.5) + 1,
            torch.arange(n / self.by, dtype=self.dtype) * 2,
            torch.arange(n * self.factor, 0, -1) if self.several else x,
            torch.arange(0, n, n / self.by) if self.several else x,
            torch.arange(n**0.5, n, dtype=self.dtype) if self.several else x,
        )


@pytest.mark.parametrize("several", [True, False])
def test_numbers_in_steps_of_quotients(several: bool, tmp_path: Path) -> None:
    model = _Quotients(random.Random(several), several)
    dims = ({0: Dim.DYNAMIC},)
    with purevk.compile(model, (torch.randn(9),), dynamic_shapes=dims) as program:
        program.save(tmp_path / "steps.pvk")
        with purevk.load(tmp_path / "steps.pvk") as saved:
            for count in (9, 7, 30):
                x = torch.randn(count)
                for run in (program,) if several else (program, saved):
                    for out, wanted in zip(run.forward(x), model(x), strict=True):
                        torch.testing.assert_close(out, wanted)


class _FixedPatches(nn.Module):
    """Python asks for numbers of patches, which fixes them, in any order and of either side; the
    sizes of what was made before stay expressions."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.patch, self.heads, self.extra = (
            rng.choice([2, 3]),
            rng.choice([1, 2]),
            rng.randint(0, 2),
        )
        self.asked = rng.sample(["rows", "columns", "product"], rng.randint(1, 3))
        self.mix = nn.Conv2d(3, 4, self.patch, self.patch)

    def forward(self, x: Any) -> tuple[Any, ...]:
        y = self.mix(x)
        rows, columns = y.shape[2:]
        before = y.flatten(2).transpose(1, 2)
        before = torch.cat((before.new_zeros(1, self.extra, 4), before), 1)
        sizes = {"rows": rows, "columns": columns, "product": rows * columns}
        known = [int(str(int(sizes[name]))) for name in self.asked]
        count = int(rows * columns)
        places = torch.arange(count + self.extra, dtype=torch.float32)[:, None] / 7
        z = before + places
        heads = z.view(1, -1, self.heads, 4 // self.heads).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        again = mixed.transpose(1, 2).reshape(*before.shape[:2], -1)
        return again + before, nn.functional.linear(again, z[0, :4, :4]), again * sum(known)


@pytest.mark.parametrize("seed", range(4))
@torch.no_grad()
def test_fixed_sizes_are_numbers_everywhere(seed: int) -> None:
    torch.manual_seed(seed)
    model = _FixedPatches(random.Random(seed))
    dims = ({2: Dim.AUTO, 3: Dim.AUTO},)
    with purevk.compile(model, (torch.randn(1, 3, 9, 14),), dynamic_shapes=dims) as program:
        for size in ((9, 14), (13, 12), (18, 8)):
            x = torch.randn(1, 3, *size)
            for out, wanted in zip(program.forward(x), model(x), strict=True):
                torch.testing.assert_close(out, wanted)


class _Pixels(nn.Module):
    """Attention of pixels, as in the middle of the autoencoder of a diffusion model."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(2, 4, 3, padding=1)

    def forward(self, x: Any) -> Any:
        y = nn.functional.avg_pool2d(self.mix(x), 2)
        pixels = y.view(1, 4, -1).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(pixels, pixels, pixels)
        return mixed.transpose(1, 2).reshape(y.shape) + y


@pytest.mark.parametrize("most", [None, 64])
@torch.no_grad()
def test_images_that_are_not_square_are_lowered_once(most: int | None) -> None:
    model = _Pixels()
    dim = Dim.AUTO if most is None else Dim.AUTO(max=most)
    dims = ({2: dim, 3: dim},)
    with purevk.compile(model, (torch.randn(1, 2, 8, 16),), dynamic_shapes=dims) as program:
        (variant,) = program.methods["forward"].variants
        for size in ((8, 16), (10, 20), (16, 30), (20, 24), (12, 12), (24, 24)):
            x = torch.randn(1, 2, *size)
            torch.testing.assert_close(program.forward(x), model(x))
        assert len(variant.specializations) <= 2 + (most is not None)


class _Columns(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.unfold(x, (2, 3), padding=1, stride=2)


def test_files_of_windows_of_images(tmp_path: Path) -> None:
    x = torch.randn(1, 2, 4, 6)
    shapes = {"x": dict.fromkeys((1, 2, 3), Dim.AUTO)}
    purevk.compile(_Columns(), (x,), dynamic_shapes=shapes).save(tmp_path / "columns.pvk")
    with purevk.load(tmp_path / "columns.pvk") as program:
        for sizes in ((4, 6), (9, 8)):
            x = torch.randn(1, 2, *sizes)
            torch.testing.assert_close(program.forward(x), _Columns()(x), rtol=0, atol=0)
