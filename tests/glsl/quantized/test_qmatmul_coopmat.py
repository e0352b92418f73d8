"""qmatmul_coopmat.comp: its arithmetic step by step on any device, and on matrix cores where a
device has them; and the trial of which invocation holds which element of a fragment."""

from __future__ import annotations

import gc
import itertools
import weakref
from dataclasses import replace

import numpy as np
import pytest

from purevk.cache import Cache
from purevk.dtypes import DType
from purevk.graph import fragments
from purevk.graph.fragments import TEMPLATE, expected_product, run_fragment
from purevk.graph.kernels import KernelStore
from purevk.tuning import DeviceTraits
from tests.glsl.harness import Out, bits, ceil_div, device, pipeline, run
from tests.glsl.quantized.harness import packed

pytestmark = pytest.mark.device


@pytest.mark.parametrize("coopmat", [False, True], ids=["steps", "coopmat"])
@pytest.mark.parametrize("width, rows, m, n, k, group, kind, blocks, tiles, subs, high_first", [
    pytest.param(4, 1, 2, 37, 160, 32, "float", 1, 1, (1, 2), 0, marks=pytest.mark.slow),
    (4, 4, 4, 16, 256, 64, "int8", 2, 1, (1, 1), 0),
    (8, 2, 2, 21, 300, 0, "int8", 1, 1, (1, 1), 0),
    pytest.param(4, 8, 11, 33, 512, 32, "float", 1, 1, (1, 1), 0, marks=pytest.mark.slow),
    pytest.param(4, 3, 3, 70, 256, 128, "float", 1, 2, (2, 1), 0, marks=pytest.mark.slow),
    pytest.param(4, 5, 5, 33, 150, 0, "float", 1, 1, (1, 1), 1, marks=pytest.mark.slow),
    pytest.param(8, 16, 13, 20, 131, 0, "half", 2, 1, (1, 1), 0, marks=pytest.mark.slow),
    pytest.param(8, 16, 20, 18, 96, 16, "float", 1, 1, (1, 1), 0, marks=pytest.mark.slow),
])  # fmt: skip
def test_agrees(width, rows, m, n, k, group, kind, blocks, tiles, subs, high_first, coopmat):
    rng = np.random.default_rng(n)
    top = 1 << (width - 1)
    values, groups = rng.integers(-top, top, (n, k)), k // group if group else 1
    scales = rng.uniform(0.1, 1, (n, groups)).astype(np.float32)
    weight = values * np.repeat(scales, group or k, 1).astype(np.float64)
    parts = max(512 // width // group, 1) if group else 1
    macros = {
        "BITS": width,
        "HIGH_FIRST": high_first,
        "ROWS": rows,
        "SPLIT": int(kind == "float"),
        "ACT": int(kind == "int8"),
        "GROUPED": int(group > 0),
        "SCALES": parts,
        "SCALES4": int(parts == 4 and groups % parts == 0),
        "BLOCKS": blocks,
        "TILES": tiles,
        "SEGMENTS": 1 + rows % 2 * (blocks % 2),
        "SUBS_N": subs[0],
        "SUBS_K": subs[1],
    }
    if kind == "int8":
        a = rng.integers(-128, 128, (m, k)).astype(np.int8)
        numbers = (a.astype(np.float64) + 5) * 0.5
        extra = [np.add.reduceat(values, range(0, k, group or k), 1).astype(np.int32)]
    else:  # of very different magnitudes
        a = rng.standard_normal((m, k)) * np.exp(3 * rng.standard_normal((m, k)))
        a = a.astype(np.float16 if kind == "half" else np.float32)
        numbers, extra = a.astype(np.float64), []
        macros["T_A"] = "float16_t" if kind == "half" else "float"
    held = packed(values, width, high_first)
    params = {
        "M": m,
        "N": n,
        "K": k,
        "lda": k,
        "ldw": held.nbytes // n // 4,
        "ldo": n,
        "groups": groups,
        "group": group or k,
        "x_scale": bits(0.5),
        "x_zero": -5,
        **dict.fromkeys(("out_inverse", "out_zero", "out_low"), 0),
        **dict.fromkeys(("offset_a", "offset_w", "offset_o"), 0),
    }
    macros["COOPMAT"] = int(coopmat)
    grid = (ceil_div(m, rows), ceil_div(n, 16 * tiles * subs[0]), 1)
    buffers = [a, held, scales, *extra, Out((m, n), np.float32)]
    template = "quantized/qmatmul_coopmat.comp"
    (got,) = run(template, buffers, params, grid, macros, coopmat=coopmat)
    # Two halves hold 22 bits; sums are rounded to float32.
    scale = np.abs(numbers) @ np.abs(weight).T
    assert (np.abs(got - numbers @ weight.T) <= 1e-6 * scale).all()


@pytest.mark.parametrize("columns", [8, 16])
@pytest.mark.parametrize("dtype", [DType.float16, DType.int8], ids=str)
@pytest.mark.parametrize("coopmat", [False, True], ids=["steps", "coopmat"])
def test_fragments_are_tried(coopmat, dtype, columns):
    macros = {**dict(fragments.spec_of(dtype, columns).macros), "COOPMAT": int(coopmat)}
    made = run_fragment(device(), pipeline(TEMPLATE, macros, 1, coopmat=coopmat), columns)
    np.testing.assert_array_equal(made, expected_product(dtype, columns))


def test_the_answer_is_kept(monkeypatch, tmp_path):
    """Asked once of a driver; the question does not hold the kernels."""
    spec_of = fragments.spec_of
    monkeypatch.setattr(
        fragments,
        "spec_of",
        lambda dtype, columns: replace(
            spec_of(dtype, columns),
            macros=tuple(
                (name, "0" if name == "COOPMAT" else value)
                for name, value in spec_of(dtype, columns).macros
            ),
            subgroup_size=None,
        ),
    )
    cache, runs = Cache(tmp_path), []
    dtypes = (DType.float16, DType.bfloat16, DType.int8)
    monkeypatch.setattr(
        fragments, "run_fragment", lambda *args: runs.append(args) or run_fragment(*args)
    )
    for _ in range(2):
        store = KernelStore(device(), cache, DeviceTraits(frozenset()))
        ask = fragments.FragmentOrder(store)
        for dtype, columns in itertools.product(dtypes, (8, 16)):
            assert ask(dtype, columns) and ask(dtype, columns)
    assert len(runs) == 6
    held = weakref.ref(store)
    del store
    gc.collect()
    assert held() is None and ask(DType.int8, 8)
