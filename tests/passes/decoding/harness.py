"""Modules of decoders, and their comparison with eager torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

import purevk
from bench.decode import quantized_linear
from purevk.ir import Node
from purevk.ops.matmul.fused import ToCache, is_fused
from purevk.ops.matmul.matmul import NAME as MATMUL
from purevk.ops.quantized.matmul import NAME as QUANTIZED
from purevk.ops.reduce.normalization import NAME as NORM

# A few of their roundings, which eager torch does after each operator.
TOLERANCES = {
    torch.float16: {"rtol": 5e-3, "atol": 3e-2},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def rotated_by_slices(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return sin * torch.cat((-x[..., half:], x[..., :half]), -1) + cos * x


class Projections(torch.nn.Module):
    """Projects x [1, S, width] to queries of 4 heads, keys and values of 2; caches keys and
    values."""

    def __init__(
        self,
        heads_first: bool,
        rotate: Callable[..., torch.Tensor],
        bias: bool = False,
        norm: bool = False,
        linear: Callable[..., torch.nn.Module] = torch.nn.Linear,
        width: int = 24,
    ) -> None:
        super().__init__()
        self.rotate, self.dim = rotate, 2 if heads_first else 1
        self.norm = torch.nn.RMSNorm(width, eps=1e-3) if norm else torch.nn.Identity()
        self.q, self.k, self.v = (linear(width, n, bias) for n in (32, 16, 16))
        shape = (1, 2, 19, 8) if heads_first else (1, 19, 2, 8)
        self.register_buffer("keys", torch.randn(shape))
        self.register_buffer("values", torch.randn(shape))
        self.register_buffer("rows", torch.arange(19))
        self.register_buffer("cos", torch.randn(19, 8))
        self.register_buffer("sin", torch.randn(19, 8))

    def parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values [1, S, heads, 8]."""
        return [each(x).view(1, x.shape[1], -1, 8) for each in (self.q, self.k, self.v)]

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        x, rows, dim = self.norm(x), x.shape[1], self.dim
        positions = position + self.rows[:rows]
        cos, sin = self.cos[positions], self.sin[positions]
        parts = self.parts(x)
        if dim == 2:
            q, k, v = (each.transpose(1, 2) for each in parts)
        else:
            q, k, v = parts
            cos, sin = cos[:, None], sin[:, None]
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        self.keys.index_copy_(dim, positions, k)
        if dim == 2:
            self.values.index_copy_(dim, positions, v)
            return torch.cat((q @ self.keys[:, :1].mT, q @ self.values[:, 1:].mT), 1)
        self.values[:, positions] = v
        return torch.cat((q.sum(2) @ self.keys[:, :, 0].mT, q.sum(2) @ self.values[:, :, 1].mT), 1)


class NormedProjections(Projections):
    """The same with norms of the heads of queries and keys before they rotate."""

    def __init__(
        self, norm: Callable[..., torch.Tensor], heads_first: bool, of_queries: bool = True
    ) -> None:
        super().__init__(heads_first, rotated)
        self.weights = torch.nn.ParameterList([torch.rand(8) + 0.5 for _ in range(4)])
        self.head_norm, self.of_queries = norm, of_queries

    def parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        q, k, v = super().parts(x)
        first, second, third, fourth = self.weights
        q = self.head_norm(q, first, second) if self.of_queries else q
        return [q, self.head_norm(k, third, fourth), v]


class Int4(torch.nn.Module):
    """A linear layer with weights of 4 bits in groups of 32."""

    def __init__(self, columns: int, rows: int, bias: bool = False) -> None:
        super().__init__()
        packed = torch.randint(256, (rows, columns // 2), dtype=torch.uint8)
        self.register_buffer("weight", packed)
        self.register_buffer("scales", torch.rand(columns // 32, rows) / 50)
        self.bias = torch.nn.Parameter(torch.randn(rows)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return quantized_linear(x, self.weight, self.scales, 32, self.bias)


class Int8(torch.nn.Module):
    """A linear layer with weights of 8 bits and a scale for each row."""

    def __init__(self, columns: int, rows: int, bias: bool = False) -> None:
        super().__init__()
        weight = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
        self.register_buffer("weight", weight)
        self.register_buffer("scales", torch.rand(rows) / 500)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        made = torch._weight_int8pack_mm(flat, self.weight, self.scales)
        return made.view(*x.shape[:-1], -1)


def ops_of(program: Any) -> list[str]:
    """The operators of a program; of matmuls and norms that do more, "NAME fused" or "NAME to cache"."""
    return [_name(node) for node in program.methods["forward"].executable.plan.nodes_of]


def _name(node: Node) -> str:
    if node.op == NORM:
        fused, to_cache = node.arg("cos") is not None, node.arg("state") is not None
    elif node.op in (MATMUL, QUANTIZED):
        fused, to_cache = is_fused(node), isinstance(node.arg("epilogue"), ToCache)
    else:
        return node.op
    return f"{node.op} to cache" if to_cache else f"{node.op} fused" if fused else node.op


def check(
    module: torch.nn.Module,
    calls: list[tuple[torch.Tensor, ...]],
    shapes: Any = None,
    context: Any = None,
    kernels: set[str] | None = None,
) -> list[str]:
    """Calls a module and its compiled copy, compares results and buffers; returns the operators, and
    adds the templates to `kernels`."""
    expected = copy.deepcopy(module)
    with torch.no_grad(), purevk.compile(module, calls[0], shapes, context=context) as program:
        for inputs in calls:
            wanted, made = expected(*inputs), program.forward(*inputs)
            tolerance = TOLERANCES.get(wanted.dtype, {"rtol": 1e-5, "atol": 1e-5})
            torch.testing.assert_close(made, wanted, **tolerance)
            for name, buffer in expected.named_buffers():
                if name in program.state:
                    kept = torch.as_tensor(program.state[name])
                    if buffer.dtype is torch.bfloat16:
                        kept = kept.view(torch.bfloat16)
                    torch.testing.assert_close(kept, buffer, **tolerance)
        if kernels is not None:
            dispatches = program.methods["forward"].executable.plan.dispatches
            kernels.update(dispatch.kernel.template for dispatch in dispatches)
        return ops_of(program)
