"""Symbolic sizes: one program, called with many sizes, at the bound, at 1, at 0, and beyond the
bound."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.ops.harness import host_nodes, program_of, tensor

pytestmark = pytest.mark.device

SIZES = [(7, 5), (6, 4), (1, 5), (7, 1), (1, 1), (3, 2), (2, 4), (7, 5)]
BEYOND = [(9, 6), (16, 8), (9, 6), (4, 3)]
W = tensor(12, 12, seed=1, low=-1, high=1)

# Functions of x[a, b, 12], the bounds of a and b being 7 and 5.
FORMS = {
    "pointwise": lambda x: torch.tanh(x) * 2 + 1,
    "broadcast": lambda x: x + x[:1] * x[:, :1],
    "reshape": lambda x: x.reshape(x.shape[0], -1) * 2,
    "flatten": lambda x: x.reshape(-1, 12).relu(),
    "split heads": lambda x: (
        x.view(x.shape[0], x.shape[1], 3, 4).transpose(1, 2).reshape(x.shape[0] * 3, x.shape[1], 4)
        + 1
    ),
    "permute": lambda x: x.permute(2, 0, 1).contiguous() + 1,
    "sum of a dim": lambda x: x.sum(0),
    "sum of inner": lambda x: x.sum(1),
    "mean of all": lambda x: x.mean(),
    "amax": lambda x: x.amax((0, 2)),
    "softmax": lambda x: torch.softmax(x, 1),
    "softmax of first": lambda x: torch.softmax(x, 0),
    "layer norm": lambda x: F.layer_norm(x, (12,)),
    "linear": lambda x: F.linear(x, W.to(x.device)) + x,
    "matmul": lambda x: x @ x.transpose(1, 2),
    "matmul of rows": lambda x: x.reshape(-1, 12) @ x.reshape(-1, 12).t(),
    "attention": lambda x: torch.softmax(x @ x.transpose(1, 2) / 3.46, -1) @ x,
    "cat": lambda x: torch.cat([x, x * 2], 0),
    "cat of inner": lambda x: torch.cat([x, x[:, :1]], 1),
    "slice to the end": lambda x: x[:, 1:] * 2,
    "all but the last": lambda x: x[:-1] + 1,
    "last": lambda x: x[:, -1] + 1,
    "steps": lambda x: x[:, ::2] * 2,
    "steps of reshaped": lambda x: x.reshape(-1)[::3] + 1,
    "expand": lambda x: x[:1].expand(x.shape[0], x.shape[1], 12) - x,
    "arange": lambda x: x + torch.arange(x.shape[1])[:, None],
    "mask": lambda x: torch.where(torch.arange(x.shape[0])[:, None, None] < 2, x, -1.0),
    "full": lambda x: torch.full((x.shape[0], x.shape[1]), 2.0) + x.sum(-1),
    "size as a number": lambda x: x * x.shape[0] + x.shape[1] // 2,
    "gather": lambda x: x[torch.arange(x.shape[0]) // 2],
    "convolution": lambda x: F.conv1d(
        x.transpose(1, 2), W[:, :4, None].expand(12, 4, 1).contiguous(), groups=3
    ),
    "two outputs": lambda x: (x.sum(-1), x.transpose(0, 1) * 2),
}


@pytest.mark.parametrize("name", FORMS)
def test_sizes(name):
    fn = FORMS[name]
    with program_of(fn, (tensor(7, 5, 12),), dynamic=True) as program:
        assert not host_nodes(program)
        for number, (a, b) in enumerate([*SIZES, *BEYOND, (5, 3)]):
            if (name == "all but the last" and a == 1) or (name == "slice to the end" and b == 1):
                continue  # torch.export excludes them too
            x = tensor(a, b, 12, seed=number)
            have, want = program.forward(x), fn(x)
            torch.testing.assert_close(
                have, want, rtol=1e-5, atol=2e-5, msg=lambda text: f"{name} at {a}, {b}: {text}"
            )


def test_no_elements_at_a_call():
    with program_of(
        lambda x: (torch.tanh(x) + 1, x.sum(1)), (tensor(7, 5, 12),), dynamic=True
    ) as program:
        for a, b in ((7, 5), (0, 5), (3, 5)):
            x = tensor(a, b, 12)
            for have, want in zip(program.forward(x), (torch.tanh(x) + 1, x.sum(1))):
                torch.testing.assert_close(have, want, rtol=1e-5, atol=2e-5)


def test_convolutions_and_pools_of_any_size():
    w = tensor(8, 3, 3, 3, low=-1, high=1)

    def fn(x):
        y = F.conv2d(x, w, stride=2, padding=1).relu()
        return F.max_pool2d(y, 3, 2, 1), F.avg_pool2d(y, 2), y.mean((2, 3))

    with program_of(fn, (tensor(2, 3, 32, 24),), dynamic=True) as program:
        for shape in ((2, 3, 32, 24), (2, 3, 17, 23), (1, 3, 8, 8), (2, 3, 31, 9), (2, 3, 40, 30)):
            x = tensor(*shape)
            for have, want in zip(program.forward(x), fn(x)):
                torch.testing.assert_close(have, want, rtol=1e-5, atol=5e-5)


def test_going_back_costs_no_recording():
    """A signature that was seen replays its recording."""
    with program_of(
        lambda x: torch.tanh(x) @ x.transpose(1, 2), (tensor(7, 5, 12),), dynamic=True
    ) as program:
        for a, b in ((7, 5), (3, 4), (7, 5), (3, 4), (2, 2), (7, 5)):
            program.forward(tensor(a, b, 12))
        assert program.methods["forward"].executable.graph.recorded == 3


def test_equal_bounds_are_equal_sizes_until_they_are_not():
    """Two inputs of the same bound are taken for equal sizes; a call where they differ is lowered
    on its own."""
    with program_of(
        lambda x, y: x.sum(0) + y.sum(0), (tensor(6, 4), tensor(6, 4, seed=1)), dynamic=True
    ) as program:
        for a, b in ((6, 6), (3, 3), (3, 5), (5, 3), (3, 3)):
            x, y = tensor(a, 4), tensor(b, 4, seed=2)
            torch.testing.assert_close(
                program.forward(x, y), x.sum(0) + y.sum(0), rtol=1e-5, atol=1e-5
            )
