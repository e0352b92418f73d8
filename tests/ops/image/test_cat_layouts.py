"""Concatenations of images in NHWC stay in NHWC, unless a reader would have to copy them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import purevk

pytestmark = pytest.mark.device


class _Branches(nn.Module):
    """Two branches, joined in several ways."""

    def __init__(self, form: str, channels: int = 8) -> None:
        super().__init__()
        self.form = form
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.one = nn.Conv2d(channels, channels, 3, padding=1)
        self.two = nn.Conv2d(channels, channels, 1)
        self.after = nn.Conv2d(2 * channels, 6, 3, padding=1)
        self.more = nn.Conv2d(3 * channels, 6, 1)
        self.norm = nn.GroupNorm(2, 2 * channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        a, b = self.one(x), self.two(x).relu()
        joined = torch.cat((a, b), 1)
        return {
            "a convolution": lambda: self.after(joined),
            "norms": lambda: self.after(functional.silu(self.norm(joined))) + self.after(joined),
            "two": lambda: self.more(torch.cat((joined, x), 1)),
            "with the input": lambda: self.more(torch.cat((joined, x * 2), 1)).mean((2, 3)),
            "flat": lambda: joined.flatten(1).softmax(-1),
            "columns": lambda: joined.flatten(2).transpose(1, 2).sum(1),
            "channels apart": lambda: joined.unflatten(1, (2, -1)).amax(2),
            "result": lambda: joined,
            "both": lambda: (self.after(joined), joined.flatten(1)),
            "rows": lambda: self.one(torch.cat((a, b), 2)),
            "images": lambda: self.one(torch.cat((a, b), 0)),
            "a resampled one": lambda: self.after(
                torch.cat(
                    (functional.interpolate(functional.max_pool2d(a, 2), scale_factor=2), b), 1
                )
            ),
            "shuffled": lambda: functional.channel_shuffle(joined, 2) + joined,
            "of another order": lambda: self.after(torch.cat((a, b.mT.contiguous().mT), 1)),
        }[self.form]()


FORMS = [
    "a convolution",
    "norms",
    "two",
    "with the input",
    "flat",
    "columns",
    "channels apart",
    "result",
    "both",
    "rows",
    "images",
    "a resampled one",
    "shuffled",
    "of another order",
]


@pytest.mark.parametrize("channels", [8, 1, 6])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, channels: int) -> None:
    torch.manual_seed(0)
    module, x = _Branches(form, channels).eval(), torch.randn(2, 3, 10, 12)
    with torch.no_grad():
        program = purevk.compile(module, (x,))
        made, wanted = program(x), module(x)
    for one, other in zip(
        made if form == "both" else [made], wanted if form == "both" else [wanted]
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_nothing_is_turned() -> None:
    """From the first convolution to the last one."""

    class Nets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(_Branches("a convolution", 8) for _ in range(2))
            self.between = nn.Conv2d(6, 3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts[1](self.between(self.parts[0](x)))

    x = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        program = purevk.compile(Nets().eval(), (x,))
    dispatches = program.method("forward").executable.plan.dispatches
    turned = [
        each.label for each in dispatches if each.kernel.template == "movement/transpose.comp"
    ]
    copies = [each.label for each in dispatches if each.label.startswith("layout")]
    assert all("first" in label for label in copies)  # which adds a fourth channel
    assert len(turned) <= 4 and not any("cat" in label for label in turned)
