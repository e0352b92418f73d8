"""pool.comp and gather.comp against torch."""

from __future__ import annotations

import numpy as np
import pytest

from tests.glsl.harness import Out, run

pytestmark = pytest.mark.device

torch = pytest.importorskip("torch")
F = torch.nn.functional

GLSL = {
    np.float32: "float", np.float16: "float16_t", np.int32: "int", np.int8: "int8_t", np.uint8: "uint8_t",
    np.int64: "int64_t",
}  # fmt: skip


def strides_of(array):
    return [stride // array.itemsize for stride in array.strides]


def pool(
    x,
    size,
    macros,
    *,
    kernel=(1, 1),
    stride=(1, 1),
    padding=(0, 0),
    dilation=(1, 1),
    divisor=0,
    last=True,
    push=False,
):
    """x: [N, C, H, W]. Runs the kernel on it in channels-last order (or not) and gives [N, C, OH,
    OW] back."""
    n, c, h, w = x.shape
    oh, ow = size
    stored = np.ascontiguousarray(x.transpose(0, 2, 3, 1)) if last else x
    shape = (n, oh, ow, c) if last else (n, c, oh, ow)
    order = [0, 1, 2, 3] if last else [0, 2, 3, 1]
    x_strides = strides_of(stored)
    out_strides = strides_of(np.empty(shape, np.uint8))
    outputs = n * c * oh * ow
    params = {"x_offset": 4, "out_offset": 8, "outputs": outputs, "C": c, "H": h, "W": w}
    params |= {"OH": oh, "OW": ow}
    params |= {"divisor": divisor} if macros.get("AVERAGE") else {}
    params |= {"index_offset": 12} if macros.get("INDICES") else {}
    window = {"kernel": kernel, "stride": stride, "pad": padding, "dilation": dilation}
    if not macros.get("ADAPTIVE"):
        params |= {f"{k}_{axis}": v for k, pair in window.items() for axis, v in zip("hw", pair)}
    for i, axis in enumerate("nhwc"):
        params |= {f"x_{axis}": x_strides[order[i]], f"out_{axis}": out_strides[order[i]]}
    dtype = x.dtype.type
    macros = {"T_X": GLSL[dtype], "T_OUT": GLSL[dtype], "CHANNELS_LAST": int(last), **macros}
    buffers = [np.concatenate([np.zeros(4, dtype), stored.reshape(-1)]), Out(shape, dtype, 8)]
    if macros.get("INDICES"):
        buffers.append(Out(shape, np.int64 if macros["T_INDEX"] == "int64_t" else np.int32, 12))
    groups = -(-outputs // (4 if macros.get("VEC4") else 1) // 64)
    results = run("image/pool.comp", buffers, params, macros=macros, groups=groups, push=push)
    return [r.transpose(0, 3, 1, 2) if last else r for r in results]


MAX_CASES = [
    dict(kernel=(2, 2), stride=(2, 2)),
    dict(kernel=(3, 3), stride=(2, 2), padding=(1, 1)),
    dict(kernel=(3, 2), stride=(1, 2), padding=(1, 0), dilation=(2, 3)),
    dict(kernel=(3, 3), stride=(2, 3), padding=(1, 1), ceil_mode=True),
    dict(kernel=(1, 5), stride=(1, 3), padding=(0, 2)),
]


@pytest.mark.parametrize("case", MAX_CASES)
@pytest.mark.parametrize(
    "layout, vec4, push", [("last", 0, 0), ("last", 1, 0), ("last", 1, 1), ("first", 0, 0)]
)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("index", [None, "int", "int64_t"])
def test_max_pool(case, layout, vec4, push, dtype, index):
    rng = np.random.default_rng(1)
    x = rng.integers(-9, 9, (2, 8 if vec4 else 7, 11, 13)).astype(dtype)  # many equals
    x[0, 0, 3, 3] = np.nan
    x[0, 1] = -np.inf
    case = dict(case)
    ceil = case.pop("ceil_mode", False)
    wanted, where = F.max_pool2d(
        torch.from_numpy(x),
        case["kernel"],
        case["stride"],
        case.get("padding", 0),
        case.get("dilation", 1),
        ceil,
        return_indices=True,
    )
    macros = {"VEC4": vec4} | ({"INDICES": 1, "T_INDEX": index} if index else {})
    results = pool(x, wanted.shape[2:], macros, **case, last=layout == "last", push=bool(push))
    np.testing.assert_array_equal(results[0], wanted.numpy())
    if index:
        np.testing.assert_array_equal(results[1], where.numpy())


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32])
def test_max_pool_of_integers(dtype):
    info = np.iinfo(dtype)
    x = np.random.default_rng(2).integers(info.min, info.max, (1, 8, 9, 9)).astype(dtype)
    wanted = F.max_pool2d(torch.from_numpy(x.astype(np.float64)), 3, 2, 1).numpy()
    (out,) = pool(
        x,
        (5, 5),
        {"ACC": "int", "LOWEST": "PV_INT_MIN", "VEC4": 1},
        kernel=(3, 3),
        stride=(2, 2),
        padding=(1, 1),
    )
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("case", MAX_CASES)
@pytest.mark.parametrize("layout, vec4", [("last", 0), ("last", 1), ("first", 0)])
@pytest.mark.parametrize("include, divisor", [(True, 0), (False, 0), (True, 7)])
def test_average_pool(case, layout, vec4, include, divisor):
    x = np.random.default_rng(3).standard_normal((2, 8 if vec4 else 7, 11, 13)).astype(np.float32)
    case = dict(case)
    case.pop("dilation", None)
    ceil = case.pop("ceil_mode", False)
    wanted = F.avg_pool2d(
        torch.from_numpy(x),
        case["kernel"],
        case["stride"],
        case.get("padding", 0),
        ceil,
        include,
        divisor or None,
    )
    macros = {"AVERAGE": 1, "VEC4": vec4, "COUNT_INCLUDE_PAD": int(include)}
    (out,) = pool(x, wanted.shape[2:], macros, **case, divisor=divisor, last=layout == "last")
    np.testing.assert_allclose(out, wanted.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [(1, 1), (7, 7), (5, 17), (3, 4)])
@pytest.mark.parametrize("average", [0, 1])
def test_adaptive_pool(size, average):
    x = np.random.default_rng(4).standard_normal((2, 8, 11, 13)).astype(np.float32)
    function = F.adaptive_avg_pool2d if average else F.adaptive_max_pool2d
    (out,) = pool(x, size, {"AVERAGE": average, "ADAPTIVE": 1, "VEC4": 1})
    np.testing.assert_allclose(
        out, function(torch.from_numpy(x), size).numpy(), rtol=1e-5, atol=1e-6
    )


def test_pool_epilogue():
    x = np.random.default_rng(5).standard_normal((1, 8, 6, 6)).astype(np.float32)
    (out,) = pool(
        x, (3, 3), {"VEC4": 1, "EPILOGUE(v, at)": "(v + float(at))"}, kernel=(2, 2), stride=(2, 2)
    )
    wanted = F.max_pool2d(torch.from_numpy(x), 2).numpy()
    wanted += np.arange(72, dtype=np.float32).reshape(1, 3, 3, 8).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(out, wanted, rtol=1e-6)


def gather(x, indices, sizes, x_strides, limits, macros=None, *, push=False, vec4=0, words=1):
    """sizes, x_strides: outermost first; indices: (array, strides outermost first); limits: (size,
    step) of each."""
    dtype, index_dtype = x.dtype.type, indices[0][0].dtype.type
    outputs = int(np.prod(sizes, dtype=int))
    params = {"x_offset": 8, "out_offset": 4, "outputs": outputs}
    params |= {f"x_stride_{d}": stride for d, stride in enumerate(reversed(x_strides))}
    params |= {f"size_{d}": size for d, size in enumerate(reversed(sizes[1:]))}
    for k, ((_, strides), (limit, step)) in enumerate(zip(indices, limits)):
        params |= {f"offset_i{k}": 3, f"limit_i{k}": limit, f"step_i{k}": step}
        params |= {f"stride_i{k}_{d}": stride for d, stride in enumerate(reversed(strides))}
    macros = {
        "T_X": GLSL[dtype],
        "T_INDEX": "int" if words == 2 else GLSL[index_dtype],
        "INDEX_WORDS": words,
        "DIMS": len(sizes),
        "INDICES": len(indices),
        "VEC4": vec4,
        **(macros or {}),
    }
    buffers = [np.concatenate([np.zeros(8, dtype), x.reshape(-1)])]
    buffers += [
        np.concatenate([np.full(3, 99, index_dtype), index.reshape(-1)]) for index, _ in indices
    ]
    buffers.append(Out(tuple(sizes), dtype, 4))
    groups = -(-outputs // (4 if vec4 else 1) // 64)
    return run("index/gather.comp", buffers, params, macros=macros, groups=groups, push=push)[0]


def values(rng, shape, dtype):
    return rng.integers(-100, 100, shape).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8, np.int64])
@pytest.mark.parametrize("index_dtype, words", [(np.int32, 1), (np.int64, 1), (np.int64, 2)])
@pytest.mark.parametrize("width, vec4", [(19, 0), (20, 0), (20, 1)])
def test_embedding(dtype, index_dtype, words, width, vec4):
    rng = np.random.default_rng(6)
    table = values(rng, (31, width), dtype)
    index = rng.integers(-31, 31, (3, 7)).astype(index_dtype)
    out = gather(
        table, [(index, (1, 0))], (21, width), (0, 1), [(31, width)], vec4=vec4, words=words
    )
    np.testing.assert_array_equal(out, table[index].reshape(21, width))


@pytest.mark.parametrize("words", [1, 2])
def test_indices_out_of_range_read_nothing_outside(words):
    table = np.arange(40, dtype=np.float32).reshape(5, 8)
    index = np.array([5, 1000, 2**31 - 1, -6, -1000, -(2**31), 4, -5], np.int64)
    out = gather(table, [(index, (1, 0))], (8, 8), (0, 1), [(5, 8)], words=words)
    np.testing.assert_array_equal(out, table[[4, 4, 4, 0, 0, 0, 4, 0]])


@pytest.mark.parametrize("push", [False, True])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_index_select(dim, push):
    rng = np.random.default_rng(7)
    x = values(rng, (5, 7, 11), np.float32)
    index = rng.integers(0, x.shape[dim], 6).astype(np.int64)
    sizes, x_strides = list(x.shape), strides_of(x)
    step, sizes[dim], x_strides[dim] = x_strides[dim], 6, 0
    out = gather(
        x,
        [(index, [int(d == dim) for d in range(3)])],
        sizes,
        x_strides,
        [(x.shape[dim], step)],
        push=push,
    )
    wanted = torch.index_select(torch.from_numpy(x), dim, torch.from_numpy(index)).numpy()
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_gather(dim):
    rng = np.random.default_rng(8)
    x = values(rng, (3, 5, 7, 4), np.float32)
    index = rng.integers(0, x.shape[dim], (2, 4, 6, 3)).astype(np.int64)
    x_strides = strides_of(x)
    step, x_strides[dim] = x_strides[dim], 0
    out = gather(x, [(index, strides_of(index))], index.shape, x_strides, [(x.shape[dim], step)])
    np.testing.assert_array_equal(
        out, torch.gather(torch.from_numpy(x), dim, torch.from_numpy(index)).numpy()
    )


@pytest.mark.parametrize("vec4", [0, 1])
def test_two_broadcast_indices_among_other_dims(vec4):
    rng = np.random.default_rng(9)
    x = values(rng, (3, 5, 7, 8), np.float32)
    a, b = rng.integers(-5, 5, (4, 1)), rng.integers(-7, 7, (1, 6))
    out = gather(
        x,
        [(a, (0, 1, 0, 0)), (b, (0, 0, 1, 0))],
        (3, 4, 6, 8),
        (280, 0, 0, 1),
        [(5, 56), (7, 8)],
        vec4=vec4,
    )
    np.testing.assert_array_equal(
        out, torch.from_numpy(x)[:, torch.from_numpy(a), torch.from_numpy(b)].numpy()
    )


def test_four_indices():
    rng = np.random.default_rng(10)
    x = values(rng, (3, 5, 7, 8), np.float32)
    indices = [rng.integers(-size, size, 29).astype(np.int32) for size in x.shape]
    out = gather(x, [(i, (1,)) for i in indices], (29,), (0,), list(zip(x.shape, strides_of(x))))
    np.testing.assert_array_equal(out, x[tuple(indices)])


@pytest.mark.parametrize("vec4", [0, 1])
def test_gather_epilogue(vec4):
    table = np.arange(40, dtype=np.float16).reshape(5, 8)
    index = np.array([3, 1, 4], np.int32)
    macros = {"ACC": "float", "EPILOGUE(v, o)": "(v * 2.0 + float(o))"}
    out = gather(table, [(index, (1, 0))], (3, 8), (0, 1), [(5, 8)], macros, vec4=vec4)
    np.testing.assert_array_equal(out, table[index] * 2 + np.arange(24).reshape(3, 8))
