"""Modules with control flow."""

from __future__ import annotations

import torch
from torch._higher_order_ops import scan

TRUE, FALSE = torch.tensor(True), torch.tensor(False)


BATCH = {0: torch.export.Dim("batch", max=16)}


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x, choice):
        return torch.cond(choice, lambda x: self.one(x).relu(), lambda x: self.two(x) + 1, (x,))


class Sizes(torch.nn.Module):
    def forward(self, x):
        return torch.cond(x.shape[0] > 4, lambda x: x.sin(), lambda x: x + x.shape[0], (x,))


class Nested(torch.nn.Module):
    def forward(self, x, first, second):
        def inner(x, second):
            return torch.cond(second, lambda x: x.cumsum(0), lambda x: x.cumsum(1), (x,))

        return torch.cond(first, inner, lambda x, second: x * 3, (x, second))


class Recurrence(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, first, x):
        def step(carry, row):
            new = self.linear(carry + row).tanh()
            return new, new * row

        return scan(step, first, x)


# -- buffers -------------------------------------------------------------------------------------
class Cache(torch.nn.Module):
    """One branch writes a row of the cache."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(8, 4))

    def forward(self, x, at, fresh):
        def write(x, at):
            self.rows.index_copy_(0, at, x)
            return self.rows.sum(0)

        return (
            torch.cond(fresh, write, lambda x, at: self.rows.sum(0) + x[0], (x, at))
            + self.rows.mean()
        )


class Returned(Cache):
    """The branches return the cache, and it is written afterwards."""

    def forward(self, x, at, fresh):
        rows = torch.cond(
            fresh,
            lambda rows, x, at: rows.index_copy(0, at, x),
            lambda rows, x, at: rows.clone(),
            (self.rows, x, at),
        )
        self.rows.copy_(rows)
        return rows.sum(0) + x[0]
