"""pool.comp against torch."""

from __future__ import annotations

import numpy as np
import pytest

from tests.glsl.harness import GLSL, Out, run, strides_of

pytestmark = pytest.mark.device

torch = pytest.importorskip("torch")
F = torch.nn.functional


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
    """x: [N, C, H, W]. Runs the kernel on it in NHWC order, or in NCHW order, and gives
    [N, C, OH, OW] back."""
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
    macros = {"T_X": GLSL[dtype], "T_OUT": GLSL[dtype], "NHWC": int(last), **macros}
    buffers = [np.concatenate([np.zeros(4, dtype), stored.reshape(-1)]), Out(shape, dtype, 8)]
    if macros.get("INDICES"):
        buffers.append(Out(shape, np.int64 if macros["T_INDEX"] == "int64_t" else np.int32, 12))
    groups = -(-outputs // (4 if macros.get("VEC4") else 1) // 64)
    results = run(
        "image/pool.comp", buffers, params, macros=macros, grid=groups, specialize=not push
    )
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
@pytest.mark.parametrize("unrolled", [0, 1])
def test_max_pool(case, layout, vec4, push, dtype, index, unrolled):
    if unrolled and (push or index == "int"):
        pytest.skip("the parameters of the window are constants; one type of index is enough")
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
    macros = {"VEC4": vec4, "UNROLLED": unrolled}
    macros |= {"INDICES": 1, "T_INDEX": index} if index else {}
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
