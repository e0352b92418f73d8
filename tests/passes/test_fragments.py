"""Matmuls and norms in the order of fragments, in scalar arithmetic on any device, and which matmuls
take part."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import purevk
from purevk.dtypes import DType
from purevk.graph.devices import default_context
from purevk.llm.graphs import GraphBuilder
from purevk.ops.attention import attention
from purevk.ops.matmul import fragments as operator
from purevk.passes.matmul import fragments as pass_
from purevk.program.program import Program
from purevk.tuning import DeviceTraits
from purevk.tuning.families.default import DEFAULT
from tests.passes.harness import Stepwise, StepwiseAttention

pytestmark = pytest.mark.device


@pytest.fixture
def stepwise(request, monkeypatch):
    """Fragments of halves on a device without matrix cores, for 20 rows or more; with the parameter True
    even if operands are copied before."""

    def tile_of(
        traits, dtype, rows, columns, terms, paired=False, always=False, copied=0, alone=False
    ):
        fits = (
            dtype is DType.float16
            and (getattr(request, "param", False) or not copied)
            and isinstance(columns, int)
            and isinstance(terms, int)
            and terms % 16 == 0
        )
        if not fits or columns % 16 or not (isinstance(rows, int) and rows >= 20):
            return None
        return Stepwise(1, 2, 2, 2 if paired else 1, 1, 1, 1)

    for module in (operator, pass_):
        monkeypatch.setattr(module, "tile_of", tile_of)
    monkeypatch.setattr(pass_, "writes_blocks", lambda traits, node: False)


@pytest.fixture
def attending(stepwise, monkeypatch):
    """Attention takes part too."""
    monkeypatch.setattr(attention, "choose", lambda *sizes: StepwiseAttention())
    monkeypatch.setattr(pass_, "writes_blocks", attention.writes_blocks)


class Layer(nn.Module):
    """A layer of an encoder, with the norms before or after its halves."""

    def __init__(self, width, before, rms=False):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        norm = nn.RMSNorm if rms else nn.LayerNorm
        self.norms = nn.ModuleList(norm(width) for _ in range(2))
        self.before = before

    def attend(self, x):
        q, k, v = (
            each.unflatten(-1, (-1, 16)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def feed(self, x):
        return self.down(F.gelu(self.up(x)))

    def forward(self, x):
        if self.before:
            x = x + self.attend(self.norms[0](x))
            return x + self.feed(self.norms[1](x))
        x = self.norms[0](x + self.attend(x))
        return self.norms[1](x + self.feed(x))


def compare(module, x, expected):
    """Runs a module of halves, compares it with eager torch in float32, and its operators with those
    that are expected."""
    module = module.half().eval().requires_grad_(False)
    program = purevk.compile(module, (x.half(),))
    plan = program.method("forward").executable.plan
    found = [dispatch.kernel for dispatch in plan.dispatches]
    made = torch.from_numpy(program.forward(x.half().numpy()).copy())
    assert made.dtype is module(x.half()).dtype
    made, wanted = made.float(), module.float()(x.half().float())
    assert (made - wanted).abs().max() <= 1e-2 * wanted.abs().max()
    names = [
        kernel.template.split("/")[1].removesuffix(".comp")
        + "".join(
            f" {name}"
            for name in ("BLOCKS", "BLOCKS_OUT")
            if dict(kernel.macros).get(name) not in (None, "0")
        )
        for kernel in found
    ]
    assert [name for name in names if "fragments" in name or "BLOCKS" in name] == expected


MATMUL = "matmul_fragments"


@pytest.mark.parametrize("rms", [False, True], ids=["layer_norm", "rms_norm"])
def test_norms_before(stepwise, rms):
    """The matmul behind a norm, and the one behind it. Rows fill no block."""
    torch.manual_seed(0)
    expected = ["norm BLOCKS", MATMUL, "norm BLOCKS", f"{MATMUL} BLOCKS_OUT", MATMUL]
    compare(Layer(32, True, rms), torch.randn(2, 11, 32), expected)


def test_norms_behind(stepwise):
    """A residual reads the norm as well."""
    torch.manual_seed(1)
    layers = nn.Sequential(Layer(32, False), Layer(32, False))
    expected = ["norm BLOCKS", f"{MATMUL} BLOCKS_OUT", MATMUL, "norm BLOCKS", MATMUL]
    compare(layers, torch.randn(1, 37, 32), [*expected, *expected[:3]])


def test_heads_side_by_side(attending):
    """Attention writes its result for the matmul behind it."""
    torch.manual_seed(4)
    expected = [*_ATTENDING, "norm BLOCKS", f"{MATMUL} BLOCKS_OUT", MATMUL]
    compare(Layer(48, True), torch.randn(3, 21, 48), expected)


_ATTENDING = ["norm BLOCKS", MATMUL, "attention_coopmat BLOCKS_OUT", MATMUL]


class Turned(nn.Module):
    """Attention whose heads do not lie side by side, or whose result something else reads too."""

    def __init__(self, turned):
        super().__init__()
        self.out, self.turned = nn.Linear(32, 32), turned

    def forward(self, x):
        x = x.unflatten(-1, (-1, 16)).transpose(1, 2)
        made = F.scaled_dot_product_attention(x, x, x)
        if self.turned:
            return self.out(made.transpose(2, 3).reshape(-1, 32))
        rows = made.transpose(1, 2).flatten(2)
        return self.out(rows) + rows


@pytest.mark.parametrize("turned", [False, True])
def test_attention_in_rows(attending, turned):
    torch.manual_seed(5)
    compare(Turned(turned), torch.randn(2, 32, 32), [])


def test_attention_in_pages(attending):
    """What attention reads besides stays the same when it writes blocks."""
    torch.manual_seed(6)
    builder = GraphBuilder("forward")
    keys = torch.randn(1, 2, 32, 16).half()
    weight = torch.randn(32, 32).half()
    k, w = (builder.constant(each.numpy(), DType.float16) for each in (keys, weight))
    pages = builder.constant(np.array([[16, 0]]), DType.int32)
    q = builder.input(DType.float16, (1, 2, 32, 16))
    made = builder.purevk.attention(q, k, k, None, 0.25, length=24, pages=pages, page=16)
    rows = builder.aten.view(builder.aten.permute(made, (0, 2, 1, 3)), (32, 32))
    graph = builder.finish(builder.op("linear.default", rows, w, None))
    graph = replace(graph, shares_weights=False)
    x = torch.randn(1, 2, 32, 16).half()
    with Program("test", {"forward": lambda sizes: graph}, default_context()) as program:
        dispatches = program.method("forward").executable.plan.dispatches
        macros = [dict(each.kernel.macros) for each in dispatches]
        assert any(each.get("BLOCKS_OUT") == "1" for each in macros), macros
        got = program.forward(x.numpy())
    keys = keys.float().roll(16, 2)[:, :, :24]
    expected = F.scaled_dot_product_attention(x.float(), keys, keys)
    expected = expected[0].transpose(0, 1).flatten(1) @ weight.float().T
    np.testing.assert_allclose(got, expected, atol=0.05)


class Twice(nn.Module):
    """A matmul whose result two others read, once with other rows."""

    def __init__(self, alike):
        super().__init__()
        self.norm, self.first = nn.LayerNorm(32), nn.Linear(32, 64)
        self.second, self.third = nn.Linear(64, 48), nn.Linear(64 if alike else 32, 16)
        self.alike = alike

    def forward(self, x):
        made = self.first(self.norm(x))
        other = self.third(torch.relu(made) if self.alike else made.view(-1, 32))
        return self.second(made if not self.alike else torch.relu(made)).sum() + other


@pytest.mark.parametrize("alike", [False, True])
def test_two_readers(stepwise, alike):
    torch.manual_seed(3)
    expected = ["norm BLOCKS", MATMUL]
    if alike:
        expected = ["norm BLOCKS", f"{MATMUL} BLOCKS_OUT", MATMUL]  # the readers are merged
    compare(Twice(alike), torch.randn(40, 32), expected)


class Readers(nn.Module):
    """Two readers of a matmul, the weight of the second of which is packed behind the first."""

    def __init__(self):
        super().__init__()
        self.norm, self.first = nn.LayerNorm(32), nn.Linear(32, 64)
        self.second, self.third = nn.Linear(64, 32), nn.Linear(64, 48, bias=False)

    def forward(self, x):
        made = self.first(self.norm(x)).relu()
        return torch.cat([self.second(made), self.third(made), made @ (self.third.weight.T * 2)], 1)


def test_readers_whose_weights_come_later(stepwise):
    torch.manual_seed(6)
    expected = ["norm BLOCKS", f"{MATMUL} BLOCKS_OUT", MATMUL, MATMUL, MATMUL]
    compare(Readers(), torch.randn(40, 32), expected)


class Wide(nn.Module):
    """A matmul of halves whose result is float32."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(32), nn.Linear(32, 48)

    def forward(self, x):
        return self.linear(self.norm(x)).float().softmax(-1)


@pytest.mark.parametrize("sizes", [(40, 32), (2, 20, 32)])
def test_results_of_float32(stepwise, sizes):
    torch.manual_seed(7)
    compare(Wide(), torch.randn(sizes), ["norm BLOCKS", MATMUL])


class Regrouped(nn.Module):
    """Heads that are regrouped before they come to lie side by side, with and without others that are
    not."""

    def __init__(self, both):
        super().__init__()
        self.out, self.both = nn.Linear(64, 32), both

    def forward(self, x):
        made = F.scaled_dot_product_attention(x, x, x)
        batches, heads, tokens, width = made.shape
        rows = made.reshape(batches, tokens, heads, width).transpose(1, 2).reshape(-1, 64)
        if self.both:
            return self.out(rows) + self.out(made.transpose(1, 2).reshape(-1, 64))
        return self.out(rows)


@pytest.mark.parametrize("both", [False, True])
def test_regrouped_heads(attending, both):
    torch.manual_seed(8)
    compare(Regrouped(both), torch.randn(1, 4, 32, 16), [])


class Odd(nn.Module):
    """What does not take part: few columns, few rows, a matrix that is no constant, an output."""

    def __init__(self):
        super().__init__()
        self.norm, self.odd = nn.LayerNorm(32), nn.Linear(32, 24)
        self.first, self.second = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x):
        made = self.norm(x)
        other = made @ made[:32].T
        few = self.first(self.norm(x[:16]))
        first = self.first(made)
        return torch.cat(
            [
                made,
                self.odd(self.norm(2 * x)),
                other,
                self.second(first),
                first + 1,
                few.repeat(3, 1)[:40],
            ],
            1,
        )


def test_others_stay(stepwise):
    torch.manual_seed(2)
    compare(Odd(), torch.randn(40, 32), ["norm BLOCKS", MATMUL])


def test_without_known_fragments():
    """The order of fragments is asked of the device, which has to list those of 16 columns."""
    listed = DeviceTraits(frozenset(), coopmat_columns=(8, 16), fragment_order=lambda d, c: c == 8)
    assert not operator.has_fragments(listed, DType.float16)
    known = DeviceTraits(frozenset(), coopmat_columns=(16,), fragment_order=lambda d, c: True)
    assert operator.has_fragments(known, DType.float16)
    assert not operator.has_fragments(known, DType.bfloat16)
    assert not operator.has_fragments(known, DType.float32)


copying = pytest.mark.parametrize("stepwise", [True], indirect=True)


class Product(nn.Module):
    """A product of two inputs, that are changed before by functions that make views, or by others."""

    def __init__(self, left=None, right=None, bias=False):
        super().__init__()
        self.left, self.right = left or (lambda x: x), right or (lambda x: x)
        self.bias = nn.Parameter(torch.randn(48)) if bias else None

    def forward(self, a, b):
        made = self.left(a) @ self.right(b)
        return made if self.bias is None else F.gelu(made + self.bias)


@copying
@pytest.mark.parametrize("a, b, left, right, copies", [
    ((37, 32), (32, 48), None, None, 0),
    ((37, 32), (48, 32), None, lambda b: b.mT, 0),
    ((32, 37), (32, 48), lambda a: a.mT, None, 1),
    ((40, 32), (34, 48), lambda a: a[3:], lambda b: b[1:33], 0),
    ((37, 50), (32, 50), lambda a: a[:, 2:34], lambda b: b[:, 1:49], 2),
    ((37, 32), (48, 36), None, lambda b: b[:, 4:].mT, 0),
    ((37, 32), (48, 33), None, lambda b: b[:, 1:].mT, 1),
    ((37, 32), (32, 1), None, lambda b: b.expand(32, 48), 0),
    ((37, 32), (32, 48), torch.relu, torch.relu, 2),
])  # fmt: skip
def test_products_of_inputs(stepwise, a, b, left, right, copies):
    """Both operands are copied into the order of fragments, whatever their strides are. Strides that are
    no multiples of 4 take a copy before (`copies`), as other functions do."""
    torch.manual_seed(8)
    for bias in (False, True):
        found = products(Product(left, right, bias), (torch.randn(a), torch.randn(b)))
        assert {"column_blocks", "row_blocks"} <= set(found) and found[-1] == MATMUL, found
        assert len(found) == 3 + copies


def products(module, inputs):
    """Runs a module of halves, compares it with eager torch in float32, and returns its templates."""
    module = module.half().requires_grad_(False)
    inputs = tuple(each.half() for each in inputs)
    program = purevk.compile(module, inputs)
    plan = program.method("forward").executable.plan
    made = torch.from_numpy(program.forward(*(each.numpy() for each in inputs)).copy())
    wanted = module.float()(*(each.float() for each in inputs))
    assert (made.float() - wanted).abs().max() <= 1e-2 * wanted.abs().max()
    return [
        dispatch.kernel.template.split("/")[1].removesuffix(".comp") for dispatch in plan.dispatches
    ]


@copying
def test_shared_copies(stepwise):
    """Products that read the same rows, or the same columns, share their copies."""

    class Products(nn.Module):
        def forward(self, a, b, c):
            return a @ b, a @ c, (a @ b).relu() @ c.mT

    torch.manual_seed(9)
    a, b, c = torch.randn(37, 32), torch.randn(32, 48), torch.randn(32, 48)
    program = purevk.compile(Products(), (a.half(), b.half(), c.half()))
    plan = program.method("forward").executable.plan
    found = Counter(each.kernel.template.split("/")[1] for each in plan.dispatches)
    assert found["row_blocks.comp"] <= 2 and found["column_blocks.comp"] == 3
    outputs = program.forward(*(each.half().numpy() for each in (a, b, c)))
    for made, wanted in zip(outputs, Products()(a, b, c)):
        assert (
            torch.from_numpy(made.copy()).float() - wanted
        ).abs().max() <= 2e-2 * wanted.abs().max()


@copying
def test_rows_that_are_copied(stepwise):
    """A product of a constant and rows that no norm makes, of as many rows as there may be."""
    torch.manual_seed(10)
    module = nn.Linear(32, 48).half().requires_grad_(False)
    rows = torch.export.Dim("rows", min=20, max=64)
    x = torch.randn(40, 32).half()
    exported = torch.export.export(module, (x,), dynamic_shapes={"input": {0: rows}})
    program = purevk.compile(exported)
    for count in (20, 37, 64):
        x = torch.randn(count, 32)
        made = torch.from_numpy(program.forward(x.half().numpy()).copy()).float()
        wanted = F.linear(x, module.weight.float(), module.bias.float())
        assert (made - wanted).abs().max() <= 1e-2 * wanted.abs().max()


def test_costs_of_copies():
    """Large products are worth copies of their operands, and small ones are not. In a network, where
    other kernels run between, that of the rows alone is worth more."""
    traits = DeviceTraits(
        frozenset(("subgroup_shuffle",)),
        subgroup_size=32,
        cores=132,
        profile=DEFAULT,
        max_shared_memory=49152,
        max_invocations=1024,
        coopmat_columns=(8, 16),
        coopmat_shape=(16, 16, 16),
        fragment_order=lambda dtype, columns: True,
    )

    def takes(rows, columns, terms, both=True, alone=True):
        copied = terms * (rows + columns if both else rows)
        sizes = (rows, columns, terms)
        tile = operator.tile_of(traits, DType.float16, *sizes, copied=copied, alone=alone)
        return tile is not None

    assert takes(4096, 4096, 4096) and takes(512, 4096, 4096)
    assert not takes(128, 1024, 1024) and not takes(128, 4096, 4096)
    assert not takes(1024, 1152, 1152, False) and takes(1024, 1152, 1152, False, False)
    assert not takes(32, 256, 256, False, False)
