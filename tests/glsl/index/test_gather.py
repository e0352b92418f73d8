"""gather.comp against torch."""

from __future__ import annotations

import numpy as np
import pytest

from tests.glsl.harness import GLSL, Out, run, strides_of

pytestmark = pytest.mark.device

torch = pytest.importorskip("torch")


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
    return run(
        "index/gather.comp", buffers, params, macros=macros, grid=groups, specialize=not push
    )[0]


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
