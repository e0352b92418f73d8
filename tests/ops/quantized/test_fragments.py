"""int8 on matrix cores (qtile_coopmat.glslh): its arithmetic step by step on any device, as lowering
sets it up, against references that other kernels are tested with; and the choice of tiles."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from purevk.dtypes import DType  # noqa: E402
from purevk.ops.quantized import convolution, fragments, kernels  # noqa: E402
from purevk.ops.quantized.choice import choose  # noqa: E402
from purevk.ops.quantized.fragments import Fragments, Products, choose_fragments  # noqa: E402
from purevk.ops.quantized.kernels import QuantizedMatmul  # noqa: E402
from purevk.tuning import DEFAULT, DeviceTraits  # noqa: E402
from purevk.tuning.tiles import IntegerSizes  # noqa: E402
from tests.ops.harness import context  # noqa: E402
from tests.ops.quantized import test_convolution, test_linear  # noqa: E402

GPU = DeviceTraits(
    frozenset({"subgroup_shuffle"}),
    cores=132,
    max_shared_memory=49152,
    max_invocations=1024,
    coopmat_columns=(8, 16),
    int8_columns=(16, 8),
    fragment_order=lambda dtype, columns: columns == 8,
)


@pytest.fixture(params=[8, 16], ids=["columns8", "columns16"])
def made(request, monkeypatch):
    """Kernels are chosen for a GPU whose matrix cores take int8. What the choice gave is listed."""
    shared, found = context(), []
    traits = replace(
        shared.traits,
        features=shared.traits.features | {"subgroup_shuffle"},
        profile=DEFAULT,
        cores=1,
        int8_columns=(request.param,),
        fragment_order=lambda dtype, columns: dtype is DType.int8,
    )
    macros = Fragments.macros

    def spied(*args, **kwargs):
        found.append(choose_fragments(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(shared, "traits", traits)
    monkeypatch.setattr(Fragments, "macros", lambda self: {**macros(self), "COOPMAT": 0})
    monkeypatch.setattr(Fragments, "subgroup", None)
    for module in (kernels, convolution):
        monkeypatch.setattr(module, "choose_fragments", spied)
    yield found
    assert found and all(found)


def small(monkeypatch, *sizes):
    """The only tile is this one."""
    tiles = (IntegerSizes(*sizes),)
    known = replace(
        DEFAULT,
        tiles=DEFAULT.tiles._replace(quantized_integers=tiles),
    )
    monkeypatch.setattr(context(), "traits", replace(context().traits, profile=known))


TILES = [(32, 32, 8, 16, 16), (64, 32, 4, 32, 16), (32, 64, 4, 16, 32)]


@pytest.mark.device
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("rows, n, k", [(70, 67, 96), (49, 36, 160)])
def test_4_bits(rows, n, k, tile, made, monkeypatch):
    """A scale for each row of the weight; the activations have one for each row too."""
    small(monkeypatch, *tile)
    test_linear.test_dynamic_activation_int4_weight(rows, n, k, group=k)


@pytest.mark.device
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("rows, n, k", [(70, 67, 96), (65, 40, 16), (50, 33, 1040)])
def test_8_bits(rows, n, k, tile, made, monkeypatch):
    small(monkeypatch, *tile)
    test_linear.test_static_int8(rows, n, k, "relu")


@pytest.mark.device
def test_8_bits_to_float(made, monkeypatch):
    small(monkeypatch, *TILES[0])
    test_linear.test_static_int8_to_float(70, 67, 96)


CONVOLUTIONS = [  # as in test_convolution.py
    (1, 32, 13, 11, 36, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    (2, 16, 9, 12, 40, (3, 2), (2, 1), (1, 1), (1, 2), 1),
    (1, 32, 8, 9, 68, (3, 3), (1, 1), (1, 1), (1, 1), 2),
]


@pytest.mark.device
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=lambda case: "-".join(map(str, case[:5])))
def test_convolution_of_int8(case, made, monkeypatch):
    small(monkeypatch, *TILES[0])
    test_convolution.test_general(case)


def test_the_choice():
    """Every tile keeps the conditions of the template, and few rows have other kernels."""
    for tile in DEFAULT.tiles.quantized_integers:
        for columns in (8, 16):
            assert Fragments(tile, columns).fits(GPU, Products(1, 1, 1, 1, False)), tile
    assert choose_fragments(GPU, 47, 4096, 4096) is None
    assert choose_fragments(replace(GPU, fragment_order=lambda *_: False), 999, 999, 999) is None
    # The fastest ones on an NVIDIA H200, or some that take at most 4 % longer.
    for problem, wanted in (
        ((2048, 8192, 2048), (128, 128, 8, 64, 64)),
        ((512, 8192, 2048), (128, 128, 8, 64, 64)),
        ((64, 2048, 2048), (32, 32, 8, 16, 16)),
        ((8 * 14 * 14, 256, 9 * 256, 1, True), (32, 64, 8, 16, 32)),
    ):
        found = choose_fragments(GPU, *problem)
        assert found == Fragments(IntegerSizes(*wanted), 8), (problem, found)
    assert found.grid(8 * 14 * 14, 256)[:2] == (4, 49)


@pytest.mark.parametrize("bits, words", [(8, 512), (4, 256)])
def test_rows_that_are_not_aligned_have_another_kernel(bits, words):
    matmul = QuantizedMatmul(512, 2048, 2048, bits, words, 0, 0, True, wide=True)
    assert choose(GPU, matmul).macros.get("FRAGMENTS") == 1
    for changed in (
        {"wide": False},
        {"words": words + 1},
        {"first_word": 1},
        {"integers": False},
        {"group": 32},
    ):
        assert "FRAGMENTS" not in choose(GPU, replace(matmul, **changed)).macros
    assert fragments.DEPTH == 32
