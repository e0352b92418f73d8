"""Convolutions whose weight is in the order of fragments, in scalar arithmetic on any device, and which
convolutions take part."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import purevk
from purevk.dtypes import DType
from purevk.lower.matrix_core_kernels import FragmentConvolution
from purevk.ops.conv import fragments as operator
from purevk.passes.matmul import convolutions as pass_
from purevk.tuning import DeviceTraits

pytestmark = pytest.mark.device
KERNEL = "conv/conv2d_fragments.comp"


@dataclass(frozen=True)
class Stepwise(FragmentConvolution):
    """A small tile, without matrix cores."""

    subgroup = None

    @property
    def threads(self):
        return 32 * self.subs_m * self.subs_n * self.slices

    def macros(self):
        return {**super().macros(), "COOPMAT": 0}


@pytest.fixture(params=[1, 2], ids=["whole", "slices"])
def stepwise(monkeypatch, request):
    """Fragments of halves on a device without matrix cores."""

    def tile_of(traits, dtype, rows, columns, terms, window):
        assert columns % 16 == 0 and terms % 32 == 0
        return Stepwise(1, 2, 2, 1, request.param) if dtype is DType.float16 else None

    for module in (operator, pass_):
        monkeypatch.setattr(module, "tile_of", tile_of)


def compare(module, inputs, expected, **options):
    """Runs a module of halves, compares it with eager torch in float32, and counts the convolutions
    that take part."""
    module = module.half().eval().requires_grad_(False)
    inputs = tuple(each.half() for each in inputs)
    program = purevk.compile(module, inputs, **options)
    check(program, module, inputs)
    plan = program.method("forward").executable.plan
    found = [dispatch.kernel.template for dispatch in plan.dispatches]
    assert found.count(KERNEL) == expected, found
    return program


def check(program, module, inputs):
    made = torch.from_numpy(program.forward(*(each.numpy() for each in inputs)).copy())
    assert made.dtype is module(*inputs).dtype
    exact = copy.deepcopy(module).float()
    made, wanted = made.float(), exact(*(each.float() for each in inputs))
    assert (made - wanted).abs().max() <= 1e-2 * wanted.abs().max()


class Bottleneck(nn.Module):
    """Convolutions of 1, 3 and 1, and a residual, which a convolution of stride 2 makes or none."""

    def __init__(self, channels, inner, out, stride, groups=1):
        super().__init__()
        self.first = nn.Conv2d(channels, inner, 1, bias=False)
        self.second = nn.Conv2d(inner, inner, 3, stride, 1, groups=groups)
        self.third = nn.Conv2d(inner, out, 1)
        self.side = nn.Conv2d(channels, out, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x):
        y = self.third(self.second(self.first(x).relu()).relu())
        return (y + self.side(x)).relu()


def test_bottleneck(stepwise):
    torch.manual_seed(0)
    compare(Bottleneck(32, 32, 32, 1), [torch.randn(2, 32, 7, 5)], 3)


def test_strides(stepwise):
    torch.manual_seed(1)
    compare(Bottleneck(64, 32, 48, 2), [torch.randn(1, 64, 9, 6)], 4)


def test_channels_last(stepwise):
    torch.manual_seed(2)
    x = torch.randn(2, 32, 5, 6).to(memory_format=torch.channels_last)
    compare(Bottleneck(32, 64, 32, 1), [x], 3)


def test_dynamic_sizes(stepwise):
    """Batch, height and width differ from call to call."""
    torch.manual_seed(3)
    module = Bottleneck(32, 32, 32, 1)
    batch, height, width = (torch.export.Dim(name, min=2, max=12) for name in "bhw")
    program = compare(
        module,
        [torch.randn(2, 32, 6, 5)],
        3,
        dynamic_shapes=({0: batch, 2: height, 3: width},),
    )
    for sizes in ((5, 32, 3, 11), (2, 32, 12, 2)):
        check(program, module, (torch.randn(sizes).half(),))


class Window(nn.Module):
    """A window with dilation, other sizes along y and x, and a pointwise operator with a number for
    each pixel and one for each channel."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(32, 48, (3, 5), (1, 2), (2, 1), (2, 1))
        self.scale = nn.Parameter(torch.randn(48, 1, 1))

    def forward(self, x):
        return self.conv(x).sigmoid() * self.scale + x[:1, :1, :7, :4]


def test_windows(stepwise):
    torch.manual_seed(4)
    compare(Window(), [torch.randn(2, 32, 7, 10)], 1)


class Joined(nn.Module):
    """Results that are joined along channels, and a slice of channels that is convolved."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(32, 32, 1), nn.Conv2d(32, 16, 3, padding=1)
        self.third = nn.Conv2d(48, 16, 1)
        self.last = nn.Conv2d(32, 32, 3, padding=1)

    def forward(self, x):
        made = torch.cat([self.first(x), self.second(x)], 1)
        return torch.cat([self.third(made), self.last(made[:, 8:40]), self.last(made[:, :32])], 1)


def test_joined_and_sliced(stepwise):
    """48 channels are no multiple of 32."""
    torch.manual_seed(5)
    compare(Joined(), [torch.randn(2, 32, 6, 6)], 4)


class Narrow(nn.Module):
    """Few output channels, as where images are made, with what follows for each number, and with a
    residual."""

    def __init__(self):
        super().__init__()
        self.first, self.rest = nn.Conv2d(32, 3, 3, padding=1), nn.Conv2d(32, 5, 1, bias=False)
        self.third = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, x, image):
        made = self.first(x).sigmoid()
        return torch.cat([made, self.rest(x), image + self.third(x)], 1)


def test_few_columns(stepwise):
    """Channels of zeros are added to the weight, but not where a residual has none."""
    torch.manual_seed(10)
    compare(Narrow(), [torch.randn(2, 32, 7, 6), torch.randn(2, 3, 7, 6)], 2)


class Wide(nn.Module):
    """A result of float32, and one that is a sum over pixels."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(32, 32, 3)

    def forward(self, x):
        y = self.conv(x).float()
        return torch.cat([y.mean((2, 3)), y[:, :, 0, 0]], 1)


def test_results_of_float32(stepwise):
    torch.manual_seed(6)
    compare(Wide(), [torch.randn(3, 32, 5, 5)], 1)


class OneDim(nn.Module):
    """A convolution of sequences."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(64, 32, 5, padding=2)

    def forward(self, x):
        return F.gelu(self.conv(x))


def test_sequences(stepwise):
    torch.manual_seed(7)
    compare(OneDim(), [torch.randn(2, 64, 19)], 1)


class Others(nn.Module):
    """What does not take part: groups, few channels, a weight that is no constant, a window of 49."""

    def __init__(self):
        super().__init__()
        self.groups = nn.Conv2d(64, 64, 3, padding=1, groups=2)
        self.few, self.columns = nn.Conv2d(8, 32, 1), nn.Conv2d(64, 24, 1)
        self.large = nn.Conv2d(64, 16, 7, padding=3)

    def forward(self, x, weight):
        parts = [self.groups(x), self.few(x[:, :8]), self.columns(x), self.large(x)]
        return torch.cat([*parts, F.conv2d(x, weight)], 1)


def test_others_stay(stepwise):
    torch.manual_seed(8)
    compare(Others(), [torch.randn(1, 64, 6, 6), torch.randn(16, 64, 1, 1)], 0)


def traits(columns=(16,), shared=49152):
    """A GPU with matrix cores whose fragments of 16 columns have the known order."""
    return DeviceTraits(
        frozenset(),
        32,
        132,
        max_shared_memory=shared,
        max_invocations=1024,
        coopmat_shape=(16, 16, 16),
        coopmat_columns=columns,
        fragment_order=lambda dtype, columns: True,
    )


def test_tiles():
    """Few rows share the terms of a result among subgroups, as far as shared memory allows."""

    def tile(rows, terms, dtype=DType.float16, **options):
        return operator.tile_of(traits(**options), dtype, rows, 256, terms, True)

    many, few = tile(32 * 56 * 56, 9 * 256), tile(14 * 14, 9 * 256)
    assert many.slices == 1 and few.slices > 1
    assert few.rows_per_group < many.rows_per_group
    assert few.shared <= 49152 and tile(49, 9 * 512, shared=16384).shared <= 16384
    assert tile(8, 9 * 256) is None  # fewer pixels than it takes
    assert tile(32 * 56 * 56, 9 * 256, columns=(8,)) is None
    assert tile(32 * 56 * 56, 9 * 256, DType.float32) is None
    assert tile(32 * 56 * 56, 9 * 256, DType.bfloat16) is None  # not listed for it


class Residuals(nn.Module):
    """Two residuals, which take more registers than a large tile has."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(32, 64, 3, padding=1)

    def forward(self, x, y, z):
        return (self.conv(x) + y + z).relu()


def test_residuals_by_columns_of_fragments(monkeypatch):
    for module in (operator, pass_):
        monkeypatch.setattr(module, "tile_of", lambda *problem: Stepwise(1, 1, 3, 4, 1))
    torch.manual_seed(9)
    compare(Residuals(), [torch.randn(2, c, 5, 6) for c in (32, 64, 64)], 1)


class Stem(nn.Module):
    """The first layers of a network for images."""

    def __init__(self, channels, kernel, stride, padding, dilation=1):
        super().__init__()
        self.conv = nn.Conv2d(channels, 16, kernel, stride, padding, dilation, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.pool = nn.MaxPool2d(3, 2, 1)

    def forward(self, x):
        return self.pool(self.norm(self.conv(x)).relu())


@pytest.mark.parametrize(
    "channels, kernel, stride, padding, dilation, size, joined",
    [
        (3, 7, 2, 3, 1, (2, 20, 24), 1),
        (3, 7, 2, 3, 1, (1, 17, 13), 1),
        (1, (3, 5), (1, 4), (1, 0), (2, 1), (2, 9, 14), 1),
        (4, (2, 8), (3, 2), 0, 1, (1, 11, 16), 1),
        (2, (1, 6), 2, (0, 5), 1, (1, 4, 8), 1),
        (3, 7, 1, 3, 1, (1, 9, 9), 0),
        (3, 3, 2, 1, 1, (1, 9, 9), 0),
        (3, 7, 2, 6, (1, 2), (1, 16, 16), 0),
    ],
)
def test_few_channels(stepwise, channels, kernel, stride, padding, dilation, size, joined):
    torch.manual_seed(11)
    module = Stem(channels, kernel, stride, padding, dilation)
    batch, *image = size
    compare(module, [torch.randn(batch, channels, *image)], joined)


def test_few_channels_of_images_in_channels_last(stepwise):
    torch.manual_seed(12)
    x = torch.randn(2, 3, 12, 10).to(memory_format=torch.channels_last)
    compare(Stem(3, 7, 2, 3), [x], 1)


def test_few_channels_of_a_dynamic_batch(stepwise):
    torch.manual_seed(13)
    module = Stem(3, 7, 2, 3)
    shapes = {"x": {0: torch.export.Dim("b", min=1, max=4)}}
    program = compare(module, [torch.randn(2, 3, 12, 10)], 1, dynamic_shapes=shapes)
    for batch in (1, 4):
        check(program, module, [torch.randn(batch, 3, 12, 10).half()])


def test_pixels_beside_the_window_do_not_count(stepwise):
    """The eighth pixel that is read with seven others may be infinite."""
    torch.manual_seed(14)
    module = nn.Conv2d(3, 16, 7, 2, 3).half().eval().requires_grad_(False)
    x = torch.randn(1, 3, 12, 16).half()
    x[..., 8] = torch.inf
    x[..., 9] = torch.nan
    program = compare(module, [x.nan_to_num(0, 0)], 1)
    made = torch.from_numpy(program.forward(x.numpy()).copy())
    wanted = module.float()(x.float())
    assert (made.isfinite() == wanted.isfinite()).all() and wanted.isfinite().any()


class Shared(nn.Module):
    """One weight for pixels that are joined, and for some that are not."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 3, 5, 7))

    def forward(self, x):
        return F.conv2d(x, self.weight, None, 2, 3), F.conv2d(x, self.weight, None, 1, 3)


def test_few_channels_of_a_shared_weight(stepwise):
    torch.manual_seed(15)
    module = Shared().half().requires_grad_(False)
    x = torch.randn(1, 3, 8, 10).half()
    program = purevk.compile(module, (x,))
    made, wanted = program.forward(x.numpy()), module.float()(x.float())
    for one, other in zip(made, wanted):
        assert (
            torch.from_numpy(one.copy()).float() - other
        ).abs().max() <= 1e-2 * other.abs().max()
