"""softmax.comp and norm.comp against torch."""

from __future__ import annotations

import numpy as np
import pytest

from tests.glsl.harness import GLSL, Out, bits, run, subgroup_size
from tests.glsl.matmul.harness import rows_of

pytestmark = pytest.mark.device

torch = pytest.importorskip("torch")

TORCH = {np.float32: torch.float32, np.float16: torch.float16}
WAYS = {
    "workgroup": ({}, 64),
    "workgroup_subgroups": ({"SUBGROUP": 1}, 64),
    "subgroup": ({"ROW_PER_SUBGROUP": 1}, None),
    "invocation": ({"ROW_PER_INVOCATION": 1}, 1),
}
# float16 results are rounded once, from float: half a unit in the last place, and torch's own may
# be half a unit off.
TOLERANCE = {np.float32: {"rtol": 1e-5, "atol": 1e-6}, np.float16: {"rtol": 1e-3, "atol": 1e-4}}


def lanes_of(way):
    return WAYS[way][1] or subgroup_size()


def cache_of(way, columns, vec4):
    return -(-columns // (lanes_of(way) * (4 if vec4 else 1)))


def groups_of(way, rows, local=64):
    return {
        "subgroup": -(-rows // (local // subgroup_size())),
        "invocation": -(-rows // local),
    }.get(way, rows)


def softmax(x, dim, way, macros, dtype, *, cached=False, push=False):
    """Softmax of a dense array of up to 4 dims over one of them."""
    dims = [d for d in range(x.ndim) if d != dim]
    strides = [stride // x.itemsize for stride in x.strides]
    columns, rows = x.shape[dim], int(np.prod([x.shape[d] for d in dims], dtype=int))
    params = {"x_offset": 4, "out_offset": 8, "rows": rows, "columns": columns}
    if not macros.get("VEC4"):
        params |= {"x_column": strides[dim], "out_column": strides[dim]}
    for i, d in enumerate(reversed(dims)):
        params |= {f"x_stride_{i}": strides[d], f"out_stride_{i}": strides[d]}
    params |= {f"size_{i}": x.shape[d] for i, d in enumerate(reversed(dims[1:]))}
    macros = {
        "T_X": GLSL[dtype],
        "T_OUT": GLSL[dtype],
        "OUTER_DIMS": len(dims),
        **macros,
        **WAYS[way][0],
        "CACHE": cache_of(way, columns, macros.get("VEC4")) if cached else 0,
    }
    padded = np.concatenate([np.zeros(4, dtype), x.reshape(-1)])
    (out,) = run(
        "reduce/softmax.comp",
        [padded, Out(x.shape, dtype, 8)],
        params,
        macros=macros,
        grid=groups_of(way, rows),
        specialize=not push,
    )
    return out


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("log", [0, 1])
@pytest.mark.parametrize("columns, vec4", [(1, 0), (53, 0), (68, 1)])
def test_softmax(way, cached, dtype, log, columns, vec4):
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((11, columns)) * 4).astype(dtype)
    x[1, 0] = -np.inf
    x[2, :] = 60000
    x[3, :] = np.linspace(-60000, 60000, columns)
    out = softmax(x, 1, way, {"LOG": log, "VEC4": vec4}, dtype, cached=cached)
    function = torch.log_softmax if log else torch.softmax
    wanted = function(torch.from_numpy(x).double(), 1).to(TORCH[dtype]).numpy()
    np.testing.assert_allclose(out, wanted, **TOLERANCE[dtype])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("push", [False, True])
@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_softmax_of_any_dim(way, dim, push):
    x = np.random.default_rng(2).standard_normal((3, 5, 7, 11)).astype(np.float32)
    out = softmax(x, dim, way, {}, np.float32, push=push)
    np.testing.assert_allclose(
        out, torch.softmax(torch.from_numpy(x), dim).numpy(), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("log", [0, 1])
def test_softmax_of_nan_and_infinity(way, cached, log):
    x = np.zeros((5, 37), np.float32)
    x[0, 36] = np.nan
    x[1] = -np.inf
    x[2, 3] = np.inf
    x[3, 1:] = -np.inf
    function = torch.log_softmax if log else torch.softmax
    out = softmax(x, 1, way, {"LOG": log}, np.float32, cached=cached)
    np.testing.assert_allclose(out, function(torch.from_numpy(x), 1).numpy(), rtol=1e-6)
    if not log:
        out = softmax(x, 1, way, {"ZERO_ROWS": 1}, np.float32, cached=cached)
        wanted = torch.softmax(torch.from_numpy(x), 1).numpy()
        wanted[1] = 0
        np.testing.assert_allclose(out, wanted, rtol=1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("vec4", [0, 1])
def test_softmax_load_and_epilogue(way, vec4):
    rng = np.random.default_rng(3)
    x, mask = (
        rng.standard_normal((9, 36)).astype(np.float32),
        rng.standard_normal(36).astype(np.float32),
    )
    macros = {
        "VEC4": vec4,
        "EXTRA_BUFFERS": "READONLY_BUFFER(EXTRA_BINDING, mask, float)",
        "LOAD(v, row, col)": "(v * 0.5 + buf_mask[col])",
        "EPILOGUE(v, row, col)": "(v + float(row))",
        **WAYS[way][0],
    }
    params = {"x_offset": 0, "out_offset": 0, "rows": 9, "columns": 36}
    params |= {"x_stride_0": 36, "out_stride_0": 36}
    params |= {} if vec4 else {"x_column": 1, "out_column": 1}
    (out,) = run(
        "reduce/softmax.comp",
        [x, Out((9, 36), np.float32), mask],
        params,
        macros=macros,
        grid=groups_of(way, 9),
        specialize=True,
    )
    wanted = torch.softmax(torch.from_numpy(x * 0.5 + mask), 1).numpy() + np.arange(9)[:, None]
    np.testing.assert_allclose(out, wanted, rtol=1e-5)


def norm(
    x, way, macros, dtype, *, weight=None, bias=None, groups=0, cached=False, eps=1e-5, push=False
):
    """Runs norm.comp. x: [rows, columns], or for group norm [N, C, HW] or (GROUP 2) [N, HW, C]."""
    group = macros.get("GROUP", 0)
    if group:
        n, channels, area = x.shape if group == 1 else (x.shape[0], x.shape[2], x.shape[1])
        rows, columns = n * groups, channels // groups * area
    else:
        rows, columns = x.shape
    params = {"x_offset": 8, "out_offset": 4, "rows": rows, "columns": columns}
    params["eps_bits"] = bits(eps)
    if group != 2:
        params |= {"x_row": columns, "out_row": columns}
    if weight is not None:
        params["weight_offset"] = 4
    if bias is not None:
        params["bias_offset"] = 8
    if group:
        params |= {"group_channels": channels // groups, "area": area, "groups": groups}
    macros = {
        **{name: GLSL[dtype] for name in ("T_X", "T_W", "T_OUT")},
        **macros,
        **WAYS[way][0],
        "HAS_WEIGHT": int(weight is not None),
        "HAS_BIAS": int(bias is not None),
        "CACHE": cache_of(way, columns, macros.get("VEC4")) if cached else 0,
    }
    buffers = [np.concatenate([np.ones(8, dtype), x.reshape(-1)])]
    buffers += [np.concatenate([np.ones(4, dtype), weight])] if weight is not None else []
    buffers += [np.concatenate([np.ones(8, dtype), bias])] if bias is not None else []
    buffers.append(Out(x.shape, dtype, 4))
    if macros.get("STATS"):
        if not macros.get("RMS"):
            buffers.append(Out((rows,), np.float32, 3))
            params["mean_offset"] = 3
        buffers.append(Out((rows,), np.float32, 5))
        params["rstd_offset"] = 5
    return run(
        "reduce/norm.comp",
        buffers,
        params,
        macros=macros,
        grid=groups_of(way, rows),
        specialize=not push,
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("columns, vec4", [(53, 0), (68, 1)])
@pytest.mark.parametrize("rms", [0, 1])
def test_norm(way, cached, dtype, columns, vec4, rms):
    rng = np.random.default_rng(4)
    x = (3 + rng.standard_normal((11, columns))).astype(dtype)
    weight, bias = rng.standard_normal((2, columns)).astype(dtype)
    macros = {"VEC4": vec4, "RMS": rms, "STATS": 1}
    tensors = [torch.from_numpy(a).float() for a in (x, weight, bias)]
    if rms:
        wanted = torch.nn.functional.rms_norm(tensors[0], (columns,), tensors[1], 1e-5).numpy()
        out, rstd = norm(x, way, macros, dtype, weight=weight, cached=cached)
        np.testing.assert_allclose(
            rstd, (tensors[0].square().mean(1) + 1e-5).rsqrt().numpy(), rtol=1e-5
        )
    else:
        wanted, mean, rstd_wanted = torch.native_layer_norm(
            tensors[0], (columns,), tensors[1], tensors[2], 1e-5
        )
        out, mean_out, rstd = norm(x, way, macros, dtype, weight=weight, bias=bias, cached=cached)
        np.testing.assert_allclose(mean_out, mean.numpy()[:, 0], rtol=1e-5)
        np.testing.assert_allclose(rstd, rstd_wanted.numpy()[:, 0], rtol=1e-5)
    tolerance = {"rtol": 1e-5, "atol": 2e-6} if dtype is np.float32 else TOLERANCE[dtype]
    np.testing.assert_allclose(out, wanted, **tolerance)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("vec4", [0, 1])
def test_norm_of_rows_in_groups(way, cached, vec4):
    """11 rows, 3 in each group; groups are 100 elements apart, and rows in them 28."""
    rows, columns = 11, 24
    x = np.random.default_rng(8).standard_normal(500).astype(np.float32)
    starts = [8 + row // 3 * 100 + row % 3 * 28 for row in range(rows)]
    picked = np.stack([x[start : start + columns] for start in starts])
    params = {"x_offset": 8, "out_offset": 4, "rows": rows, "columns": columns, "x_row": 100}
    params |= {"x_inner": 3, "x_inner_row": 28, "out_row": columns, "eps_bits": bits(1e-5)}
    cache = cache_of(way, columns, vec4) if cached else 0
    macros = {**WAYS[way][0], "NESTED": 1, "VEC4": vec4, "CACHE": cache}
    buffers = [x, Out((rows, columns), np.float32, 4)]
    (out,) = run("reduce/norm.comp", buffers, params, groups_of(way, rows), macros)
    wanted = torch.nn.functional.layer_norm(torch.from_numpy(picked), (columns,)).numpy()
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("way", ["subgroup", "workgroup", "workgroup_subgroups"])
@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("plain", [False, True], ids=["blocks", "both"])
@pytest.mark.parametrize("rows, bfloat16, rms", [(5, False, 0), (28, True, 1), (41, False, 1)])
def test_norm_in_the_order_of_fragments(way, together, plain, rows, bfloat16, rms):
    rng, columns = np.random.default_rng(rows), 80
    x = torch.from_numpy(rng.standard_normal((rows, columns)) + 1)
    weight, bias = torch.from_numpy(rng.uniform(0.5, 2, (2, columns)))
    held = torch.bfloat16 if bfloat16 else torch.float16
    bits_of = lambda each: (  # noqa: E731
        each.to(held).view(torch.int16).numpy().view(np.uint16 if bfloat16 else np.float16)
    )
    dtype = np.uint16 if bfloat16 else np.float16
    lanes = lanes_of(way)
    macros = {
        **dict.fromkeys(("T_X", "T_W", "T_OUT"), "uint16_t" if bfloat16 else "float16_t"),
        **WAYS[way][0],
        **{"VEC4": 1, "HAS_WEIGHT": 1, "HAS_BIAS": 1 - rms, "RMS": rms},
        **{"BLOCKS": 1 if plain else 2, "TOGETHER": together, "CACHE": -(-columns // 4 // lanes)},
    }
    params = {"rows": rows, "columns": columns, "x_row": columns, "out_row": columns}
    params |= {"x_offset": 0, "out_offset": 0, "weight_offset": 0, "blocks_offset": 8}
    params |= {"eps_bits": bits(1e-5)} | ({} if rms else {"bias_offset": 0})
    buffers = [bits_of(x), bits_of(weight), *([] if rms else [bits_of(bias)])]
    buffers += [Out((rows, columns), dtype, 0)] if plain else []
    buffers.append(Out((-(-rows // 16) * 16 * columns,), dtype, 8))
    items = rows if together == 1 else -(-rows // 16) * 8
    grid = groups_of(way, items)
    last = run("reduce/norm.comp", buffers, params, grid, macros)
    found = [rows_of(last[-1], rows, columns)] + (last[:1] if plain else [])
    floats = [each.to(held).double() for each in (x, weight, bias)]
    if rms:
        wanted = torch.nn.functional.rms_norm(floats[0], (columns,), floats[1], 1e-5)
    else:
        wanted = torch.nn.functional.layer_norm(floats[0], (columns,), floats[1], floats[2], 1e-5)
    for each in found:
        got = torch.from_numpy(each.copy().view(np.int16)).view(held).double()
        torch.testing.assert_close(got, wanted, rtol=8e-3 if bfloat16 else 1e-3, atol=1e-3)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cached", [False, True])
def test_norm_far_from_zero(way, cached):
    x = (10000 + np.random.default_rng(5).standard_normal((3, 128))).astype(np.float32)
    (out,) = norm(x, way, {"VEC4": 1}, np.float32, cached=cached)
    exact = x.astype(np.float64)
    wanted = (exact - exact.mean(1, keepdims=True)) / np.sqrt(exact.var(1, keepdims=True) + 1e-5)
    # The mean of numbers near 10000 is rounded to 1e-3 in float.
    np.testing.assert_allclose(out, wanted, atol=2e-3)


# A row of 196 elements does not fit one invocation's registers.
@pytest.mark.parametrize(
    "way, cached",
    [
        (way, cached)
        for way in WAYS
        for cached in (False, True)
        if not cached or way != "invocation"
    ],
)
@pytest.mark.parametrize("push", [False, True])
@pytest.mark.parametrize("vec4", [0, 1])
@pytest.mark.parametrize("layout", [1, 2])
def test_group_norm(way, push, vec4, cached, layout):
    rng = np.random.default_rng(6)
    channels, area = (24, 28) if vec4 else (21, 13)
    x = rng.standard_normal((2, channels, area)).astype(np.float32)
    weight, bias = rng.standard_normal((2, channels)).astype(np.float32)
    tensors = [torch.from_numpy(array) for array in (x, weight, bias)]
    wanted = torch.nn.functional.group_norm(tensors[0], 3, *tensors[1:]).numpy()
    if layout == 2:
        x, wanted = (np.ascontiguousarray(a.transpose(0, 2, 1)) for a in (x, wanted))
    macros = {"GROUP": layout, "VEC4": vec4}
    (out,) = norm(
        x,
        way,
        macros,
        np.float32,
        weight=weight,
        bias=bias,
        groups=3,
        cached=cached,
        push=push,
    )
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=2e-6)


def test_norm_epilogue():
    rng = np.random.default_rng(7)
    x, more = rng.standard_normal((2, 7, 36)).astype(np.float32)
    macros = {
        "EXTRA_BUFFERS": "READONLY_BUFFER(EXTRA_BINDING, more, float)",
        "EPILOGUE(v, row, col)": "max(v + buf_more[row * columns + col], 0.0)",
    }
    for vec4 in (0, 1):
        params = {"x_offset": 0, "out_offset": 0, "rows": 7, "columns": 36}
        params |= {"x_row": 36, "out_row": 36, "eps_bits": bits(1e-5)}
        buffers = [x, Out((7, 36), np.float32), more]
        macros["VEC4"] = vec4
        (out,) = run("reduce/norm.comp", buffers, params, 7, macros, specialize=True)
        wanted = torch.relu(
            torch.nn.functional.layer_norm(torch.from_numpy(x), (36,)) + torch.from_numpy(more)
        ).numpy()
        np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=2e-6)
