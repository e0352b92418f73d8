"""reduce.comp against numpy and torch."""

from __future__ import annotations

import numpy as np
import pytest

from tests.glsl.harness import GLSL, Out, run, subgroup_size

pytestmark = pytest.mark.device

torch = pytest.importorskip("torch")

INF = "uintBitsToFloat(0x7f800000u)"
OPS = {
    "sum": ({"INIT": "ACC(0)", "COMBINE(a, b)": "(a + b)"}, np.sum),
    "mean": ({"FINISH(a, n)": "(n > 0 ? a / float(n) : PV_NAN)"}, np.mean),
    "amax": ({"INIT": f"-{INF}", "COMBINE(a, b)": "pv_max(a, b)"}, np.max),
    "amin": ({"INIT": INF, "COMBINE(a, b)": "pv_min(a, b)"}, np.min),
    "prod": ({"INIT": "ACC(1)", "COMBINE(a, b)": "(a * b)"}, np.prod),
}
WAYS = {
    "workgroup": {},
    "workgroup_subgroups": {"SUBGROUP": 1},
    "subgroup": {"ROW_PER_SUBGROUP": 1},
    "invocation": {"ROW_PER_INVOCATION": 1},
    "column": {"COLUMN": 1},
    "columns": {"COLUMN": 1, "WIDTH": 4},
    "ahead": {"AHEAD": 4, "SUBGROUP": 1},
}
ROW_WAYS = [way for way in WAYS if not way.startswith("column")]


def groups_of(way: str, rows: int, local: int) -> int:
    rows_each = {
        "subgroup": local // subgroup_size(),
        "invocation": local,
        "column": local,
        "columns": 4,
    }.get(way, 1)
    return -(-rows // rows_each)


def reduce(
    x,
    outer,
    inner,
    macros,
    way,
    *,
    x_offset=0,
    dtype=np.float32,
    out_dtype=None,
    local=64,
    push=False,
    split=0,
):
    """x: an array; outer, inner: lists of (size, stride), outermost first. Returns the dense
    output, flat."""
    out_dtype = out_dtype or dtype
    outputs = int(np.prod([size for size, _ in outer], dtype=int)) * max(split, 1)
    (r0, s0), (r1, s1) = ([(1, 0), *list(inner)])[-2:]
    macros = {
        "T_X": GLSL[dtype],
        "T_OUT": GLSL[out_dtype],
        "OUTER_DIMS": len(outer),
        "REDUCE_DIMS": len(inner),
        **macros,
        **WAYS[way],
    }
    params = {"x_offset": x_offset, "out_offset": 8, "outputs": outputs, "size_r1": r1}
    params |= {f"stride_{d}": stride for d, (_, stride) in enumerate(reversed(outer))}
    params |= {f"size_{d}": size for d, (size, _) in enumerate(reversed(outer[1:]))}
    if len(inner) > 1:
        params |= {"size_r0": r0, "stride_r0": s0}
    if macros.get("COLUMN") or not macros.get("VEC4"):
        params["stride_r1"] = s1
    if split:
        macros["SPLIT"] = split
        params["part"] = -(-r1 // split // 4) * 4
    columns = 4 if macros.get("VEC4") and macros.get("COLUMN") else 1
    (out,) = run(
        "reduce/reduce.comp",
        [x, Out((outputs,), out_dtype, 8)],
        params,
        macros=macros,
        grid=groups_of(way, outputs // columns, local),
        local=local,
        specialize=not push,
    )
    return out


def rows_of(rows, columns, out_offset=0):
    """The parameters for the rows of a dense matrix."""
    return {
        "x_offset": 0,
        "out_offset": out_offset,
        "outputs": rows,
        "size_r1": columns,
        "stride_r1": 1,
        "stride_0": columns,
    }


def tolerance(dtype):
    # float32: sums in another order; float16: half a unit in the last place of the stored result,
    # and that again.
    return {"rtol": 1e-5, "atol": 1e-5} if dtype is np.float32 else {"rtol": 1e-3, "atol": 1e-3}


@pytest.mark.parametrize("way", ROW_WAYS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("vec4", [0, 1])
def test_rows(way, op, dtype, vec4):
    rng = np.random.default_rng(1)
    rows, n, offset = (13, 212, 8) if vec4 else (13, 211, 3)
    x = rng.uniform(0.97, 1.03, offset + rows * n).astype(dtype)
    macros, reference = OPS[op]
    out = reduce(
        x, [(rows, n)], [(n, 1)], {**macros, "VEC4": vec4}, way, x_offset=offset, dtype=dtype
    )
    wanted = reference(x[offset:].reshape(rows, n).astype(np.float64), axis=1)
    np.testing.assert_allclose(out, wanted, **tolerance(dtype))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("push", [False, True])
def test_four_outer_and_two_reduced_dims(way, push):
    rng = np.random.default_rng(2)
    x = rng.standard_normal((2, 3, 5, 3, 7, 4)).astype(np.float32)
    strides = [stride // 4 for stride in x.strides]
    outer = [(x.shape[d], strides[d]) for d in (4, 0, 2, 5)]
    inner = [(x.shape[d], strides[d]) for d in (1, 3)]
    out = reduce(x, outer, inner, OPS["sum"][0], way, push=push)
    np.testing.assert_allclose(
        out, x.sum((1, 3)).transpose(2, 0, 1, 3).reshape(-1), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("vec4", [0, 1])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("op", ["mean", "amax"])
def test_columns_of_nhwc(vec4, dtype, op):
    rng = np.random.default_rng(3)
    n, h, w, c = 2, 7, 5, 44 if vec4 else 43
    x = rng.standard_normal((n, h, w, c)).astype(dtype)
    macros, reference = OPS[op]
    outer, inner = [(n, h * w * c), (c, 1)], [(h, w * c), (w, c)]
    out = reduce(x, outer, inner, {**macros, "VEC4": vec4}, "column", dtype=dtype)
    np.testing.assert_allclose(
        out.reshape(n, c), reference(x.astype(np.float64), axis=(1, 2)), **tolerance(dtype)
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("op", ["amax", "amin", "sum"])
def test_nan_and_infinity(way, op):
    x = np.ones((5, 37), np.float32)
    x[0, 36] = np.nan
    x[1, 0] = np.nan
    x[2, 5], x[2, 6] = np.inf, 2
    x[3, 5] = -np.inf
    out = reduce(x, [(5, 37)], [(37, 1)], OPS[op][0], way)
    np.testing.assert_array_equal(out, OPS[op][1](x, axis=1))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("local", [8, 24, 256])
def test_any_workgroup_size(way, local):
    if way == "subgroup" and local < subgroup_size():
        pytest.skip("smaller than a subgroup of this device")
    x = np.arange(3 * 1009, dtype=np.int32).reshape(3, 1009)
    out = reduce(x, [(3, 1009)], [(1009, 1)], {"ACC": "int"}, way, dtype=np.int32, local=local)
    np.testing.assert_array_equal(out, x.sum(1))


@pytest.mark.parametrize("way", WAYS)
def test_integers(way):
    rng = np.random.default_rng(4)
    x = rng.integers(-(2**62), 2**62, (7, 101))
    sums = {"ACC": "int64_t", "HAS_INT64": 1}
    np.testing.assert_array_equal(
        reduce(x, [(7, 101)], [(101, 1)], sums, way, dtype=np.int64), x.sum(1)
    )
    most = {**sums, "INIT": "PV_INT64_MIN", "COMBINE(a, b)": "pv_max(a, b)"}
    np.testing.assert_array_equal(
        reduce(x, [(7, 101)], [(101, 1)], most, way, dtype=np.int64), x.max(1)
    )
    flags = (rng.integers(0, 40, (7, 101)) == 0).astype(np.uint8)
    some = {"ACC": "int", "INIT": "0", "COMBINE(a, b)": "(a | b)", "LOAD(v)": "(v != 0 ? 1 : 0)"}
    every = {"ACC": "int", "INIT": "1", "COMBINE(a, b)": "(a & b)", "LOAD(v)": "(v != 0 ? 1 : 0)"}
    np.testing.assert_array_equal(
        reduce(flags, [(7, 101)], [(101, 1)], some, way, dtype=np.uint8), flags.any(1)
    )
    flags = 1 - flags
    np.testing.assert_array_equal(
        reduce(flags, [(7, 101)], [(101, 1)], every, way, dtype=np.uint8), flags.all(1)
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("better, name", [(">", "argmax"), ("<", "argmin")])
@pytest.mark.parametrize("n", [1, 5, 211])
def test_arg(way, better, name, n):
    rng = np.random.default_rng(5)
    x = rng.integers(0, 4, (13, n)).astype(np.float32)  # many equals
    x[3, n // 2] = np.nan
    x[4, n // 3 :] = np.nan
    x[5] = np.inf
    x[6] = -np.inf
    macros = {
        "ARG": 1,
        "ARG_BETTER(a, b)": f"(a {better} b)",
        "INIT": "-PV_INF" if better == ">" else "PV_INF",
    }
    # torch leaves open which of equals it takes; the first one is numpy's rule.
    wanted = getattr(np, name)(x, axis=1)
    assert (getattr(torch, name)(torch.from_numpy(x[3:5]), 1).numpy() == wanted[3:5]).all()
    out = reduce(x, [(13, n)], [(n, 1)], macros, way, out_dtype=np.int32)
    np.testing.assert_array_equal(out, wanted)
    macros = {**macros, "T_OUT": "ivec2", "TO_OUT(v)": "ivec2(v, v >> 31)"}
    params = rows_of(13, n, out_offset=2)
    buffers = [x, Out((13,), np.int64, 2)]
    (pairs,) = run(
        "reduce/reduce.comp",
        buffers,
        params,
        macros={**macros, **WAYS[way]},
        grid=groups_of(way, 13, 64),
        specialize=True,
    )
    np.testing.assert_array_equal(pairs, wanted)


@pytest.mark.parametrize("way", WAYS)
def test_values_and_indices(way):
    rng = np.random.default_rng(6)
    x = rng.standard_normal((11, 53)).astype(np.float16)
    macros = {
        "ARG": 2,
        "INIT": "-PV_INF",
        "T_X": "float16_t",
        "T_OUT": "float16_t",
        "T_INDEX": "int64_t",
        **WAYS[way],
    }
    params = {**rows_of(11, 53, out_offset=4), "index_offset": 3}
    buffers = [x, Out((11,), np.float16, 4), Out((11,), np.int64, 3)]
    values, indices = run(
        "reduce/reduce.comp", buffers, params, groups_of(way, 11, 64), macros, specialize=True
    )
    np.testing.assert_array_equal(values, x.max(1))
    np.testing.assert_array_equal(indices, x.argmax(1))


@pytest.mark.parametrize("way", WAYS)
def test_variance(way):
    rng = np.random.default_rng(7)
    x = (1000 + rng.standard_normal((11, 103))).astype(np.float32)
    macros = {"VARIANCE": 1, "FINISH(a, n)": "(a / float(n - 1))"}
    out = reduce(x, [(11, 103)], [(103, 1)], macros, way)
    np.testing.assert_allclose(out, torch.from_numpy(x).var(1).numpy(), rtol=1e-4)


@pytest.mark.parametrize("way", ROW_WAYS)
@pytest.mark.parametrize("n, vec4", [(10007, 0), (10008, 1), (5, 0)])
def test_parts_of_a_long_row(way, n, vec4):
    rng = np.random.default_rng(8)
    x = rng.random((2, n)).astype(np.float32)
    parts = reduce(x, [(2, n)], [(n, 1)], {"VEC4": vec4}, way, split=5)
    out = reduce(parts, [(2, 5)], [(5, 1)], {"FINISH(a, n)": f"(a / float({n}))"}, way)
    np.testing.assert_allclose(out, x.astype(np.float64).mean(1), rtol=1e-6)


@pytest.mark.parametrize("columns, vec4", [(13, 0), (16, 1)])
def test_parts_of_long_columns(columns, vec4):
    rng = np.random.default_rng(8)
    x = rng.random((2, 1009, columns)).astype(np.float32)
    outer = [(2, 1009 * columns), (columns, 1)]
    parts = reduce(x, outer, [(1009, columns)], {"VEC4": vec4}, "column", split=5)
    out = reduce(parts, [(2 * columns, 1)], [(5, 2 * columns)], {"VEC4": vec4}, "column")
    np.testing.assert_allclose(out, x.astype(np.float64).sum(1).reshape(-1), rtol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_to_reduce(way):
    out = reduce(np.zeros(4, np.float32), [(5, 0)], [(0, 1)], OPS["mean"][0], way)
    assert np.isnan(out).all()
    out = reduce(np.zeros(4, np.float32), [(5, 0)], [(0, 1)], OPS["prod"][0], way)
    assert (out == 1).all()


def test_epilogue_reads_another_buffer():
    rng = np.random.default_rng(9)
    x, scale = rng.random((7, 31)).astype(np.float32), rng.random(7).astype(np.float32)
    macros = {
        "EXTRA_BUFFERS": "READONLY_BUFFER(EXTRA_BINDING, scale, float)",
        "EPILOGUE(v, o)": "(v * buf_scale[o])",
    }
    params = rows_of(7, 31)
    buffers = [x, Out((7,), np.float32), scale]
    (out,) = run("reduce/reduce.comp", buffers, params, 7, macros, specialize=True)
    np.testing.assert_allclose(out, x.sum(1) * scale, rtol=1e-5)


@pytest.mark.parametrize(
    "way, vec4", [*((way, vec4) for way in ROW_WAYS for vec4 in (0, 1)), ("column", 0)]
)
def test_a_long_row_keeps_its_digits(way, vec4):
    # An invocation of llvmpipe leaves its loops after 65535 rounds in all.
    n = 1 << 20 if way.startswith("workgroup") else 60000
    x = np.full((1, n), 0.1, np.float32)
    out = reduce(x, [(1, n)], [(n, 1)], {"VEC4": vec4}, way)
    np.testing.assert_allclose(out, x.astype(np.float64).sum(1), rtol=1e-5)
