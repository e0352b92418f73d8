"""The operators that `bench/operators.py` times, with arguments. The main tensor of each case has a
given number of bytes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from purevk.dtypes import DType
from purevk.ops import registry


@dataclass(frozen=True)
class Tensor:
    """A tensor argument: random contents, integers in [0, high).

    Attributes:
        constant: a weight, known when the operator is lowered.
        sparse: for a tensor that is read at indices: the bytes that are read, divided by the bytes
            of the result. At most the whole tensor is read. 1 if whole rows are read. The elements
            of a memory sector if single elements are read, since memory moves whole sectors.
    """

    dims: tuple[int, ...]
    dtype: DType = DType.float32
    high: int = 2
    constant: bool = False
    sparse: float = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.dims) * self.dtype.itemsize


@dataclass(frozen=True)
class Case:
    """One operator with its arguments, in the order of its schema.

    Attributes:
        family: the heading under which it is listed.
        form: what distinguishes the arguments, such as "last dim".
    """

    family: str
    op: str
    args: tuple[Any, ...]
    form: str = ""


def f32(*dims: int, **kinds: Any) -> Tensor:
    return Tensor(dims, **kinds)


def f16(*dims: int, **kinds: Any) -> Tensor:
    return Tensor(dims, DType.float16, **kinds)


def weight(*dims: int, dtype: DType = DType.float32, high: int = 2) -> Tensor:
    return Tensor(dims, dtype, high, constant=True)


def indices(*dims: int, high: int, dtype: DType = DType.int64) -> Tensor:
    return Tensor(dims, dtype, high)


def operator_cases(nbytes: int) -> Iterator[Case]:
    """All cases. The main tensor of each has about `nbytes` (in float32, unless the case says
    otherwise)."""
    yield from _pointwise(nbytes)
    yield from _movements(nbytes)
    yield from _rows(nbytes)
    yield from _indices(nbytes)
    yield from _images(nbytes)
    yield from _complex(nbytes)
    yield from _fourier(nbytes)
    yield from _matmuls(nbytes)
    yield from _quantized(nbytes)
    yield from _language(nbytes)


def _square(nbytes: int) -> tuple[int, int]:
    """Rows and columns, both powers of two, of a float32 matrix."""
    count = max(nbytes // 4, 1024)
    columns = 1 << min((count.bit_length() - 1) // 2, 12)
    return count // columns, columns


# -- pointwise ---------------------------------------------------------------------------------
_INTEGERS = ("bitwise", "gcd", "lcm", "from_float8")  # operators that have no floats
_EXTRA = {
    "aten._to_copy.default": (DType.float16,),
    "aten.div.Tensor_mode": ("floor",),
    "purevk.from_float8": (DType.float8_e4m3fn,),
    "purevk.to_float8": (DType.float8_e4m3fn,),
}


def _pointwise(nbytes: int) -> Iterator[Case]:
    rows, columns = _square(nbytes)
    for definition in registry.definitions():
        if not isinstance(definition.form, registry.Pointwise):
            continue
        is_integer = any(word in definition.name for word in _INTEGERS)
        dtype = DType.int32 if is_integer else DType.float32
        args: list[Any] = []
        for name, parameter in definition.signature.parameters.items():
            if parameter.default is not inspect.Parameter.empty or name in (
                "dtype",
                "rounding_mode",
            ):
                break
            boolean = name == "cond"
            args.append(
                1
                if name == "n"
                else Tensor((rows, columns), DType.bool if boolean else dtype, 2 if boolean else 30)
            )
        name = definition.name
        yield Case("pointwise", name, (*args, *_EXTRA.get(name, ())))
    for form, other in (("row", (columns,)), ("column", (rows, 1)), ("number", ())):
        yield Case(
            "pointwise",
            "aten.add.Tensor",
            (f32(rows, columns), f32(*other) if other else 2.0),
            f"with a {form}",
        )
    yield Case("pointwise", "aten.add.Tensor", (f16(rows, columns), f16(rows, columns)), "half")


# -- movement ------------------------------------------------------------------------------------
def _movements(nbytes: int) -> Iterator[Case]:
    rows, columns = _square(nbytes)
    x, cube = f32(rows, columns), f32(rows // 32, 32, columns)
    for op, args, form in (
        ("permute.default", (x, (1, 0)), "of two"),
        ("permute.default", (f16(rows, columns), (1, 0)), "of two, half"),
        ("permute.default", (cube, (1, 0, 2)), "rows"),
        ("permute.default", (cube, (2, 1, 0)), "of three"),
        ("cat.default", ((x, x), 0), "first dim"),
        ("cat.default", ((x, x), 1), "last dim"),
        ("stack.default", ((x, x), 2), "last dim"),
        ("slice.Tensor", (x, 1, 1, columns - 1, 1), "last dim"),
        ("slice.Tensor", (x, 1, 0, columns, 2), "every second"),
        ("expand.default", (f32(rows, 1), (rows, columns)), ""),
        ("repeat.default", (f32(rows, columns // 4), (1, 4)), ""),
        ("tile.default", (f32(rows // 4, columns), (4, 1)), ""),
        ("flip.default", (x, (1,)), "last dim"),
        ("roll.default", (x, (3,), (1,)), "last dim"),
        ("rot90.default", (x, 1, (0, 1)), ""),
        ("tril.default", (x, 0), ""),
        ("triu.default", (x, 0), ""),
        ("glu.default", (x, -1), ""),
        ("repeat_interleave.self_int", (f32(rows, columns // 4), 4, 1), ""),
        ("constant_pad_nd.default", (x, (1, 1, 1, 1), 0.0), ""),
        ("pixel_shuffle.default", (f32(*_image(nbytes)), 2), ""),
        ("pixel_unshuffle.default", (f32(*_image(nbytes)), 2), ""),
        ("channel_shuffle.default", (f32(*_image(nbytes)), 4), ""),
        ("reflection_pad2d.default", (f32(*_image(nbytes)), (1, 1, 1, 1)), ""),
        ("replication_pad2d.default", (f32(*_image(nbytes)), (1, 1, 1, 1)), ""),
        ("im2col.default", (f32(*_image(nbytes // 8)), (3, 3), (1, 1), (1, 1), (1, 1)), ""),
        ("full.default", ((rows, columns), 1.0, DType.float32), ""),
        ("arange.default", (rows * columns, DType.float32), ""),
        ("rand.default", ((rows, columns), DType.float32), ""),
        ("randn.default", ((rows, columns), DType.float32), ""),
    ):
        yield Case("movement and creation", f"aten.{op}", args, form)


# -- rows and columns ----------------------------------------------------------------------------
def _rows(nbytes: int) -> Iterator[Case]:
    rows, columns = _square(nbytes)
    x, half = f32(rows, columns), f16(rows, columns)
    for op in (
        "sum.dim_IntList",
        "mean.dim",
        "amax.default",
        "prod.dim_int",
        "argmax.default",
        "var.correction",
        "all.dim",
        "logsumexp.default",
        "linalg_vector_norm.default",
        "max.dim",
    ):
        for dim, form in ((1, "last dim"), (0, "first dim")):
            listed = (
                dim if op in ("prod.dim_int", "argmax.default", "all.dim", "max.dim") else (dim,)
            )
            given = (x, 2.0, listed) if op.startswith("linalg") else (x, listed)
            yield Case("reductions", f"aten.{op}", given, form)
    yield Case("reductions", "aten.sum.dim_IntList", (half, (1,)), "last dim, half")
    yield Case("reductions", "aten.sum.default", (x,), "all")
    yield Case(
        "reductions", "aten.sum.dim_IntList", (f32(*_image(nbytes)), (2, 3)), "channels of images"
    )
    yield Case("reductions", "aten.median.dim", (x, 1), "last dim")
    for op, args in (
        ("_softmax.default", (x, 1, False)),
        ("_softmax.default", (x, 0, False)),
        ("_log_softmax.default", (x, 1, False)),
        ("_softmax.default", (half, 1, False)),
        ("layer_norm.default", (x, (columns,), weight(columns), weight(columns))),
        (
            "layer_norm.default",
            (
                half,
                (columns,),
                weight(columns, dtype=DType.float16),
                weight(columns, dtype=DType.float16),
            ),
        ),
        ("rms_norm.default", (x, (columns,), weight(columns))),
        (
            "group_norm.default",
            (f32(*_image(nbytes)), 8, weight(_image(nbytes)[1]), weight(_image(nbytes)[1])),
        ),
        (
            "instance_norm.default",
            (f32(*_image(nbytes)), None, None, None, None, True, 0.1, 1e-5, False),
        ),
        (
            "_native_batch_norm_legit_no_training.default",
            (f32(*_image(nbytes)), *[weight(_image(nbytes)[1]) for _ in range(4)], 0.1, 1e-5),
        ),
    ):
        form = "half" if args[0] is half else "first dim" if args[1] == 0 else ""
        yield Case("normalization", f"aten.{op}", args, form)
    for op in ("cumsum.default", "cumprod.default", "cummax.default", "logcumsumexp.default"):
        for dim, form in ((1, "last dim"), (0, "first dim")):
            yield Case("scans and sorting", f"aten.{op}", (x, dim), form)
    yield Case("scans and sorting", "aten.sort.default", (x, 1, False), "last dim")
    yield Case("scans and sorting", "aten.topk.default", (x, 8, 1, True, True), "8 of the last dim")


# -- indices -------------------------------------------------------------------------------------
_SECTOR = 32  # bytes, the smallest read from memory


def _indices(nbytes: int) -> Iterator[Case]:
    rows, columns = _square(nbytes)
    table, x = f32(rows, columns, sparse=1), f32(rows, columns)
    alone, picks = f32(rows, columns, sparse=_SECTOR // 4), (rows, columns // 2)
    for op, args, form in (
        ("embedding.default", (table, indices(rows, high=rows)), ""),
        ("index_select.default", (table, 0, indices(rows, high=rows)), "rows"),
        ("index_select.default", (table, 1, indices(columns, high=columns)), "columns"),
        ("gather.default", (table, 1, indices(rows, columns, high=columns)), "last dim"),
        (
            "index.Tensor",
            (table, (indices(rows, 1, high=rows), indices(columns, high=columns))),
            "rows by columns",
        ),
        (
            "index.Tensor",
            (alone, (indices(*picks, high=rows), indices(*picks, high=columns))),
            "elements",
        ),
        ("take.default", (alone, indices(*picks, high=rows * columns)), ""),
        ("scatter.src", (x, 1, indices(rows, columns, high=columns), x), "last dim"),
        ("scatter_add.default", (x, 0, indices(rows, columns, high=rows), x), "first dim"),
        (
            "index_put.default",
            (x, (indices(rows // 2, high=rows),), f32(rows // 2, columns), False),
            "rows",
        ),
        (
            "index_add.default",
            (x, 0, indices(rows // 2, high=rows), f32(rows // 2, columns)),
            "rows",
        ),
        ("bucketize.Tensor", (x, weight(64)), "64 boundaries"),
        ("one_hot.default", (indices(rows, high=columns), columns), ""),
        ("slice_scatter.default", (x, f32(rows // 2, columns), 0, 0, rows // 2, 1), ""),
        ("masked_scatter.default", (x, Tensor((rows, columns), DType.bool), x), ""),
    ):
        yield Case("indices", f"aten.{op}", args, form)


# -- images --------------------------------------------------------------------------------------
def _image(nbytes: int) -> tuple[int, int, int, int]:
    """Batch, channels, height and width of a float32 image."""
    channels, side = (64, 64) if nbytes >= 1 << 20 else (16, 32)
    return max(nbytes // (4 * channels * side * side), 1), channels, side, side


def _images(nbytes: int) -> Iterator[Case]:
    batch, channels, side, _ = _image(nbytes)
    x, small = f32(batch, channels, side, side), f32(batch, channels, side // 2, side // 2)
    double = (side, side)
    grid = f32(batch, side, side, 2)
    for op, args, form in (
        ("max_pool2d.default", (x, (2, 2), (2, 2)), "2x2"),
        ("max_pool2d.default", (x, (3, 3), (1, 1), (1, 1)), "3x3"),
        ("avg_pool2d.default", (x, (3, 3), (2, 2), (1, 1)), "3x3"),
        ("max_pool2d_with_indices.default", (x, (2, 2), (2, 2)), "2x2"),
        ("adaptive_avg_pool2d.default", (x, (7, 7)), "7x7"),
        ("upsample_nearest2d.default", (small, double), ""),
        ("upsample_bilinear2d.default", (small, double, False), ""),
        ("upsample_bicubic2d.default", (small, double, False), ""),
        ("grid_sampler_2d.default", (x, grid, 0, 0, False), "bilinear"),
        (
            "conv2d.default",
            (x, weight(channels, channels, 1, 1), None, (1, 1), (0, 0), (1, 1), 1),
            "1x1",
        ),
        (
            "conv2d.default",
            (x, weight(channels, 1, 3, 3), None, (1, 1), (1, 1), (1, 1), channels),
            "3x3 depthwise",
        ),
        (
            "conv2d.default",
            (x, weight(channels, channels, 3, 3), None, (1, 1), (1, 1), (1, 1), 1),
            "3x3",
        ),
        (
            "conv2d.default",
            (x, weight(channels, channels // 8, 3, 3), None, (1, 1), (1, 1), (1, 1), 8),
            "3x3, 8 groups",
        ),
        ("conv_transpose2d.input", (small, weight(channels, channels, 2, 2), None, (2, 2)), "2x2"),
        (
            "conv1d.default",
            (
                f32(batch, channels, side * side),
                weight(channels, channels, 3),
                None,
                (1,),
                (1,),
                (1,),
                1,
            ),
            "3",
        ),
    ):
        yield Case("images", f"aten.{op}", args, form)


# -- matmul --------------------------------------------------------------------------------------
def _matmuls(nbytes: int) -> Iterator[Case]:
    n, k = _square(nbytes)
    for rows in (1, 4, 16, 512):
        yield Case("matmul", "aten.linear.default", (f32(rows, k), weight(n, k)), f"{rows} rows")
    for rows in (1, 4, 16, 512):
        table = weight(2 * n, k, dtype=DType.float16)
        yield Case("matmul", "aten.linear.default", (f16(rows, k), table), f"{rows} rows, half")
    yield Case("matmul", "aten.mm.default", (f32(n, k), f32(k, k)), "")
    yield Case("matmul", "aten.mm.default", (f16(2 * n, k), f16(k, k)), "half")
    yield Case(
        "matmul",
        "aten.bmm.default",
        (f32(n * k // 4096, 64, 64), f32(n * k // 4096, 64, 64)),
        "of 64x64",
    )
    yield Case("matmul", "aten.mv.default", (f32(n, k), f32(k)), "")
    yield Case("matmul", "aten.outer.default", (f32(n), f32(k)), "")
    yield Case("matmul", "aten.cdist.default", (f32(k, 64), f32(k, 64), 2.0, None), "of 64 numbers")


# -- quantized -----------------------------------------------------------------------------------
def _quantized(nbytes: int) -> Iterator[Case]:
    rows, columns = _square(nbytes)
    n, k, group = 4 * rows, columns, 32
    quantized, packed = (
        weight(n, k, dtype=DType.int8, high=100),
        weight(2 * n, k // 2, dtype=DType.uint8, high=255),
    )
    by_row, by_group = weight(n), weight(k // group, 2 * n)
    sums, group_sums = weight(n, dtype=DType.int32), weight(k // group, 2 * n, dtype=DType.int32)
    for m in (1, 4, 16, 512):
        x, form = f32(m, k), f"{m} rows"
        yield Case("quantized", "et_vk.linear_q4gsw.default", (x, packed, by_group, group), form)
        yield Case("quantized", "aten._weight_int8pack_mm.default", (x, quantized, by_row), form)
        zero = Tensor((m,), DType.int8)
        yield Case(
            "quantized",
            "et_vk.linear_dq8ca_q4gsw.default",
            (x, f32(m), zero, packed, group_sums, by_group, group),
            form,
        )
        yield Case(
            "quantized",
            "et_vk.linear_q8ta_q8csw.default",
            (x, 0.1, 3, quantized, sums, by_row),
            form,
        )
    x, image = f32(rows, columns), _image(nbytes)
    scale, zero_point = weight(rows), weight(rows, dtype=DType.int64)
    table = Tensor((n, k // 2), DType.uint8, 255, constant=True, sparse=1 / 8)
    scales = Tensor((n, k // group), constant=True, sparse=1 / group)
    space = "quantized_decomposed"
    for op, args in (
        (f"{space}.quantize_per_tensor.default", (x, 0.1, 3, -128, 127, DType.int8)),
        (
            f"{space}.dequantize_per_tensor.default",
            (Tensor((4 * rows, columns), DType.int8, 100), 0.1, 3, -128, 127, DType.int8),
        ),
        (f"{space}.quantize_per_channel.default", (x, scale, zero_point, 0, -128, 127, DType.int8)),
        (f"{space}.choose_qparams_per_token_asymmetric.default", (x, DType.int8)),
        ("et_vk.embedding_q4gsw.default", (table, scales, group, indices(n // 4, high=n), False)),
        (
            "et_vk.q8ta_add.default",
            (*[Tensor((4 * rows, columns), DType.int8, 100)] * 2, 0.1, 1, 0.2, 2, 0.3, 3, 1.0),
        ),
        ("et_vk.q8ta_relu.default", (Tensor((4 * rows, columns), DType.int8, 100), 0.1, 1, 0.2, 2)),
        (
            "et_vk.q8ta_pixel_shuffle.default",
            (Tensor((4 * image[0], *image[1:]), DType.int8, 100), 0.1, 1, 5.0, 2, 2),
        ),
    ):
        yield Case("quantized", op, args)


# -- complex numbers -------------------------------------------------------------------------------
def c64(*dims: int) -> Tensor:
    return Tensor(dims, DType.complex64)


def _complex(nbytes: int) -> Iterator[Case]:
    rows, columns = _square(nbytes // 2)
    x, y = c64(rows, columns), c64(rows, columns)
    for op, args in (
        ("aten.mul.Tensor", (x, y)),
        ("aten.div.Tensor", (x, y)),
        ("aten.exp.default", (x,)),
        ("aten.abs.default", (x,)),
        ("aten._conj.default", (x,)),
        ("aten.sum.dim_IntList", (x, (1,), False)),
    ):
        yield Case("complex", op, args, "complex")


def _fourier(nbytes: int) -> Iterator[Case]:
    count = nbytes // 8
    for length in (256, 1000, 1009, 1024, 4096, 65536, 1 << 20):
        if length > count:
            continue
        rows = count // length
        x, half = c64(rows, length), c64(rows, length // 2 + 1)
        form = f"length {length}"
        yield Case("fourier", "aten._fft_c2c.default", (x, (1,), 0, True), form)
        if length in (1024, 65536):
            yield Case("fourier", "aten._fft_c2c.default", (x, (1,), 2, False), f"{form}, inverse")
            real = f32(rows, length)
            yield Case("fourier", "aten._fft_r2c.default", (real, (1,), 0, True), form)
            yield Case("fourier", "aten._fft_c2r.default", (half, (1,), 2, length), form)
    for side in (256, 1024):
        if side * side <= count:
            image = c64(count // side**2, side, side)
            form = f"{side} x {side}"
            yield Case("fourier", "aten._fft_c2c.default", (image, (1, 2), 0, True), form)
            yield Case(
                "fourier", "aten._fft_c2c.default", (image, (1,), 0, True), f"{form}, columns"
            )


# -- language models -----------------------------------------------------------------------------
def _language(nbytes: int) -> Iterator[Case]:
    heads, width, tokens = 16, 64, 512 if nbytes >= 1 << 20 else 128
    batch = max(nbytes // (4 * heads * width * tokens), 1)
    q = f32(batch, heads, tokens, width)
    half = f16(batch, heads, tokens, width)
    yield Case(
        "language", "aten.scaled_dot_product_attention.default", (q, q, q), f"{tokens} tokens"
    )
    yield Case(
        "language",
        "aten.scaled_dot_product_attention.default",
        (half, half, half),
        f"{tokens} tokens, half",
    )
    yield Case(
        "language",
        "aten.scaled_dot_product_attention.default",
        (q, q, q, None, 0.0, True),
        f"{tokens} tokens, causal",
    )
    long = max(nbytes // (4 * heads * width), 16)
    cache, one = f32(1, heads, long, width), f32(1, heads, 1, width)
    yield Case(
        "language",
        "aten.scaled_dot_product_attention.default",
        (one, cache, cache),
        f"1 token of {long}",
    )
    cos = weight(tokens, width // 2)
    x = f32(batch, tokens, heads, width)
    yield Case("language", "et_vk.apply_rotary_emb.default", (x, x, cos, cos), "")
    yield Case(
        "language",
        "et_vk.rms_norm.default",
        (f32(batch * tokens, heads * width), weight(heads * width), 1e-5),
        "",
    )
