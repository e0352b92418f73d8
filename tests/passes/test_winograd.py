"""Convolutions by Winograd's algorithm against torch, and which convolutions take part."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import purevk
from purevk.dtypes import DType
from purevk.graph.context import default_context
from purevk.ir import Node, TensorType, Value
from purevk.ops.conv import winograd
from purevk.ops.conv.arguments import Conv2d
from purevk.ops.registry import ShapeError, find
from tests.ops.harness import dispatches
from tests.passes.harness import TRAITS

KERNEL = "conv/conv2d_winograd.comp"
# The sums have another order than torch's, and their terms are differences.
TOLERANCE = 1e-5


@pytest.fixture
def always(monkeypatch):
    """All convolutions that can take part do."""
    if default_context().traits.profile.has_fast_shared_memory:
        pytest.skip("devices with shared memory have other kernels")
    monkeypatch.setattr(winograd, "_is_faster", lambda *_: True)


def compare(module, inputs, expected, **options):
    """Runs a module, compares it with eager torch in float64, and counts the convolutions that take
    part."""
    module = module.eval().requires_grad_(False)
    program = purevk.compile(module, inputs, **options)
    check(program, module, inputs)
    assert dispatches(program).count(KERNEL) == expected
    return program


def check(program, module, inputs):
    made = torch.from_numpy(program.forward(*(each.numpy() for each in inputs)).copy()).double()
    exact = module.double()(*(each.double() for each in inputs))
    module.float()
    assert made.shape == exact.shape
    assert (made - exact).abs().max() <= TOLERANCE * exact.abs().max()


SHAPES = [  # batch, channels, height, width, channels out, padding
    (1, 8, 6, 6, 8, 1),
    (2, 12, 7, 5, 20, 1),
    (1, 16, 9, 4, 64, 0),
    (3, 8, 3, 3, 36, 2),
    (1, 32, 1, 13, 32, 1),
    (1, 8, 4, 6, 100, (2, 1)),
]


@pytest.mark.device
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_shapes(always, shape, bias):
    torch.manual_seed(0)
    batch, channels, height, width, columns, padding = shape
    module = nn.Conv2d(channels, columns, 3, padding=padding, bias=bias)
    compare(module, [torch.randn(batch, channels, height, width)], 1)


class Block(nn.Module):
    """A residual block with batch norms, and a scale for each channel."""

    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.scale = nn.Parameter(torch.randn(channels, 1, 1))

    def forward(self, x):
        y = self.norm(self.first(x)).relu()
        return (self.second(y) * self.scale + x).relu()


@pytest.mark.device
def test_epilogues(always):
    torch.manual_seed(1)
    compare(Block(16), [torch.randn(2, 16, 7, 9)], 2)


@pytest.mark.device
def test_channels_last(always):
    torch.manual_seed(2)
    x = torch.randn(2, 16, 8, 5).to(memory_format=torch.channels_last)
    compare(Block(16), [x], 2)


@pytest.mark.device
def test_dynamic_sizes(always):
    """Batch, height and width differ from call to call."""
    torch.manual_seed(3)
    module = Block(8)
    batch, height, width = (torch.export.Dim(name, min=2, max=12) for name in "bhw")
    program = compare(
        module, [torch.randn(2, 8, 6, 5)], 2, dynamic_shapes=({0: batch, 2: height, 3: width},)
    )
    for sizes in ((5, 8, 3, 11), (2, 8, 12, 2)):
        check(program, module, (torch.randn(sizes),))


class Sliced(nn.Module):
    """One weight for two slices of channels, of which one starts at no multiple of 4."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return self.conv(x[:, 4:12]) + self.conv(x[:, 3:11, 1:, :].contiguous()).sum()


@pytest.mark.device
def test_slices_share_a_weight(always):
    torch.manual_seed(4)
    compare(Sliced(), [torch.randn(2, 12, 6, 7)], 2)


class Others(nn.Module):
    """What does not take part: strides, dilation, groups, other windows, channels that are no multiple
    of 4, a weight that is no constant."""

    def __init__(self):
        super().__init__()
        self.stride = nn.Conv2d(8, 8, 3, 2, padding=1)
        self.dilation = nn.Conv2d(8, 8, 3, padding=2, dilation=2)
        self.groups = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.window = nn.Conv2d(8, 8, (3, 5), padding=(1, 2))
        self.odd = nn.Conv2d(8, 7, 3, padding=1)

    def forward(self, x, weight):
        parts = [self.dilation(x), self.groups(x), self.window(x), self.odd(x)]
        return torch.cat([*parts, F.conv2d(x, weight, padding=1)], 1) + self.stride(x).mean()


@pytest.mark.device
def test_others_stay(always):
    torch.manual_seed(5)
    compare(Others(), [torch.randn(1, 8, 6, 7), torch.randn(8, 8, 3, 3)], 0)


@pytest.mark.device
def test_the_pass_is_optional(always, monkeypatch):
    monkeypatch.setenv("PUREVK_SKIP_PASSES", "use_winograd")
    compare(nn.Conv2d(8, 8, 3), [torch.randn(1, 8, 6, 6)], 0)


def convolution(channels, columns, side, batch=1, dtype=DType.float32):
    x = Value("x", TensorType(dtype, (batch, channels, side, side)))
    weight = Value("w", TensorType(dtype, (3, 3, channels, columns)))
    result = TensorType(dtype, (batch, columns, side, side))
    args = (x, weight, None, (1, 1), (1, 1), (1, 1), 1)
    return Conv2d.of(Node("purevk.conv2d", args, (Value("y", result),))), result


@pytest.mark.parametrize(
    ("sizes", "takes"),
    [
        ((64, 64, 56), True),
        ((512, 512, 7), True),
        ((256, 256, 14, 8), True),
        ((16, 16, 112), False),  # transforms take too long
        ((256, 256, 1), False),  # a block of 4 pixels makes one
        ((64, 64, 3), False),
        ((64, 64, 2048, 8), False),  # too much memory
        ((64, 64, 224, 2), True),
        ((64, 64, 224, 4), False),  # more than a binding
        ((1024, 1024, 14), True),
        ((1536, 1536, 14), False),  # a weight of more than a binding
        ((64, 64, 56, 1, DType.float16), False),
    ],
    ids=str,
)
def test_choice(sizes, takes):
    conv, result = convolution(*sizes)
    assert winograd.takes(conv, result, TRAITS) is takes


def test_weights_have_whole_panels():
    operator = find(winograd.WEIGHT)
    weight = TensorType(DType.float32, (3, 3, 12, 40))
    assert operator.shape(weight).dims == (16, 2, 12, 32)
    with pytest.raises(ShapeError):
        operator.shape(TensorType(DType.float32, (3, 3, 12, 42)))
