"""Embeddings in quantized tables: every bit of (value - zero) * scale."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from purevk.dtypes import DType  # noqa: E402
from purevk.errors import GraphError  # noqa: E402
from purevk.ir import TensorType  # noqa: E402
from tests.ops.harness import tensor  # noqa: E402
from tests.ops.quantized.harness import kernels_of, pack_high_first, pack_low_first, run  # noqa: E402

pytestmark = pytest.mark.device


def pack_2bit(values: torch.Tensor) -> torch.Tensor:
    """Values in [-2, 1], the first of a byte in its lowest bits."""
    parts = (values + 2).to(torch.uint8).reshape(values.shape[0], -1, 4)
    return parts[..., 0] | parts[..., 1] << 2 | parts[..., 2] << 4 | parts[..., 3] << 6


def table(rows: int, width: int, bits: int) -> torch.Tensor:
    top = 2 ** (bits - 1)
    return tensor(rows, width, dtype=torch.int8, low=-top, high=top - 1)


def rows_of(values, scales, zeros, indices):
    group = values.shape[1] // scales.shape[1]
    numbers = values.float() - (0 if zeros is None else zeros.repeat_interleave(group, 1))
    return (numbers * scales.repeat_interleave(group, 1))[indices.long()]


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("width, group", [(64, 32), (96, 96), (32, 8)])
def test_q4gsw(width, group, index, linear):
    values, scales = table(53, width, 4), tensor(53, width // group)
    indices = tensor(2, 5, dtype=index, low=0, high=52)
    packed = pack_low_first(values) if linear else pack_high_first(values)
    have = run(
        "et_vk.embedding_q4gsw.default", (packed, scales, group, indices, linear), constants=(0, 1)
    )
    torch.testing.assert_close(have, rows_of(values, scales, None, indices), rtol=0, atol=0)


PACK = {8: lambda values: values, 4: pack_high_first, 2: pack_2bit}
NAMES = {8: "embedding_byte", 4: "embedding_4bit", 2: "embedding_2bit"}


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("bits", PACK)
def test_decomposed(bits, zero):
    top = 2 ** (bits - 1)
    for width, groups in ((64, 1), (64, 4), (24, 3), (20, 1)):
        values, scales = table(31, width, bits), tensor(31, groups, seed=1)
        zeros = tensor(31, groups, low=-2, high=2).round() if zero else None
        indices = tensor(7, dtype=torch.int64, low=0, high=30)
        flat = scales[:, 0] if groups == 1 else scales
        args = (
            PACK[bits](values),
            flat,
            zeros if zeros is None or groups > 1 else zeros[:, 0],
            -top,
            top - 1,
            indices,
        )
        name = f"quantized_decomposed.{NAMES[bits]}"
        want = rows_of(values, scales, zeros, indices)
        torch.testing.assert_close(
            run(f"{name}.default", args, constants=(0, 1, 2)), want, rtol=0, atol=0
        )
        half = [TensorType(DType.float16, (7, width))]
        have = run(f"{name}.dtype", (*args, torch.float16), half, constants=(0, 1, 2))
        torch.testing.assert_close(have, want.half(), rtol=0, atol=0)


@pytest.mark.parametrize("bits, width, group", [(4, 64, 32), (8, 64, 16), (8, 18, 9)])
def test_minimums(bits, width, group):
    values = table(31, width, bits)
    scales, minimums = (tensor(31, width // group, seed=seed) for seed in (1, 2))
    indices = tensor(7, dtype=torch.int64, low=0, high=30)
    packed = pack_low_first(values) if bits == 4 else values
    args = (packed, scales, indices, torch.float32, bits, minimums)
    stored = values.double() + 2 ** (bits - 1)
    want = stored * scales.repeat_interleave(group, 1) + minimums.repeat_interleave(group, 1)
    have = run("purevk.quantized_table", args, constants=(0, 1, 5))
    torch.testing.assert_close(have.double(), want[indices], rtol=1e-6, atol=1e-5)


def test_one_index_without_dims_and_odd_width():
    values, scales = table(9, 13, 8), tensor(9)
    args = (values, scales, None, -128, 127, torch.tensor(4))
    have = run("quantized_decomposed.embedding_byte.default", args, constants=(0, 1))
    torch.testing.assert_close(have, values[4].float() * scales[4], rtol=0, atol=0)


@pytest.mark.parametrize("rows, groups, zeros, reason", [
    (8, 1, 9, "8 scales, sums or biases for 9 rows"), (9, 1, 8, "8 scales, sums or biases for 9 rows"),
    (9, 3, 9, "3 groups in rows of 16"),
])  # fmt: skip
def test_parameters_that_do_not_cover_the_table_are_refused(rows, groups, zeros, reason):
    values, indices = table(9, 16, 8), torch.tensor([0, 8])
    args = (values, tensor(rows, groups), tensor(zeros, groups), -128, 127, indices)
    with pytest.raises(GraphError, match=reason):
        run("quantized_decomposed.embedding_byte.default", args)


def test_groups_of_another_size_are_refused():
    packed, scales, indices = pack_low_first(table(9, 64, 4)), tensor(9, 2), torch.tensor([0, 8])
    for group in (-32, 0, 16, 64):
        with pytest.raises(GraphError, match="2 groups of"):
            run("et_vk.embedding_q4gsw.default", (packed, scales, group, indices, True))
    with pytest.raises(GraphError, match="8 scales"):
        run("et_vk.embedding_q4gsw.default", (packed, scales[:8], 32, indices, True))


def test_executorchs_own_functions():
    """Its packing and numbers are those above."""
    patterns = pytest.importorskip("executorch.exir.passes._quant_patterns_and_replacements")
    space = torch.ops.quantized_decomposed
    for bits, width in ((2, 64), (4, 64), (8, 20)):
        top = 2 ** (bits - 1)
        values, scales, indices = (
            table(31, width, bits),
            tensor(31, 1),
            tensor(7, dtype=torch.int64, low=0, high=30),
        )
        packed = patterns._pack_embedding_weight(values, bits) if bits < 8 else values
        assert torch.equal(packed.view(torch.uint8), PACK[bits](values).view(torch.uint8))
        made = getattr(space, NAMES[bits])(packed, scales, None, -top, top - 1, indices)
        torch.testing.assert_close(made, rows_of(values, scales, None, indices), rtol=0, atol=0)


def test_table_larger_than_a_binding():
    values, scales = table(300, 32, 4), tensor(300, 1, seed=1)
    indices = torch.tensor([0, 63, 64, 127, 128, 299], dtype=torch.int32)
    with kernels_of("small"):
        have = run(
            "et_vk.embedding_q4gsw.default",
            (pack_low_first(values), scales, 32, indices, True),
            constants=(0, 1),
        )
    torch.testing.assert_close(have, rows_of(values, scales, None, indices), rtol=0, atol=0)
