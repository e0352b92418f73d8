"""The attention templates against torch, in double."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.glsl.harness import GLSL, Out, Texel, bits, ceil_div, close, run, subgroup_size

pytestmark = pytest.mark.device

torch = pytest.importorskip("torch")

# batch, query heads, key heads, queries, keys, head dim
SIZES = [(1, 2, 2, 13, 17, 16), (2, 6, 2, 11, 83, 8), (1, 1, 1, 1, 7, 32), (1, 2, 1, 3, 301, 64)]
PADDED = [(1, 2, 1, 5, 9, 8), (1, 1, 1, 5, 9, 20)]  # heads that are no multiples of 16
TILED = ["tiled", "shuffled", "parts"]
KINDS = ["subgroup", *TILED, "decode", "split", "split_shuffled", "steps"]
VARIANTS = {
    "plain": {}, "added_mask": {"mask": 1}, "boolean_mask": {"mask": 2}, "causal": {"causal": 3},
    "rows_first": {"rows_first": True}, "half": {"dtype": np.float16}, "narrow_values": {"values": 4},
    "wide_values": {"values": 80},
}  # fmt: skip
# A score and a mask: of the keys up to 2 behind a query and up to 5 before it.
SCORE = "slope * score + float(s - t)"
SEEN = "s - t <= 5 && t - s <= 2"
MAY_SEE = "s0 - t1 <= 5 && t0 - s1 <= 2"


def strides(name, heads, rows, size, rows_first=False):
    """The strides of operand `name`, by the names of the parameters."""
    head, row = (size, heads * size) if rows_first else (rows * size, size)
    return {f"{name}_batch": heads * rows * size, f"{name}_head": head, f"{name}_row": row}


def parameters(queries, keys, group, scale, causal=0):
    """The parameters but for the strides of q, k, v and out. The mask has one head."""
    return {
        "S": queries,
        "T": keys,
        "group": group,
        "scale_bits": bits(scale),
        "start": causal,
        "mask_batch": queries * keys,
        "mask_head": 0,
        "mask_row": keys,
        "mask_column": 1,
    }


def function_macros(scored, masked, bounded=True):
    return {
        "SCORED": scored,
        "MASKED": masked,
        "BOUNDED": int(masked and bounded),
        "EXACT_BOUNDS": int(bounded),
        "EXTRA_BUFFERS": "float slope;",
        "BEGIN_STEPS": "slope = float(1 + int(gl_WorkGroupID.y));",
        "SCORE": SCORE,
        "SEEN": SEEN,
        "MAY_SEE": MAY_SEE,
    }


def attend(q, k, v, scale, mask, causal, functions=(0, 0), limits=None, sinks=None):
    q, k, v = (torch.from_numpy(array.astype(np.float64)) for array in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    score = q @ k.transpose(-1, -2) * scale
    behind = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    if functions[0]:
        score = (1 + torch.arange(q.shape[1])[:, None, None]) * score + behind
    if functions[1]:
        score = score.masked_fill((behind > 5) | (behind < -2), -torch.inf)
    if mask is not None:
        mask = torch.from_numpy(mask)
        score = (
            score.masked_fill(mask == 0, -torch.inf) if mask.dtype == torch.uint8 else score + mask
        )
    if causal is not None:
        later = torch.arange(k.shape[2])[None] > torch.arange(q.shape[2])[:, None] + causal
        score = score.masked_fill(later, -torch.inf)
    if limits is not None:
        at, limits = torch.arange(k.shape[2]), torch.from_numpy(limits)
        hidden = at >= limits[..., -1:]
        hidden = hidden | (at < limits[..., :1]) if limits.shape[-1] == 2 else hidden
        score = score.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        sinks = torch.from_numpy(sinks.astype(np.float64)).expand(*score.shape[:3], 1)
        score = torch.cat([score, sinks], -1)
        return (torch.softmax(score, -1)[..., :-1] @ v).numpy()
    return (torch.nan_to_num(torch.softmax(score, -1)) @ v).numpy()


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_attention(size, kind, variant):
    if kind == "steps" and size != SIZES[0]:
        pytest.skip("scalar steps are slow: only the first size")
    check(size, kind, **VARIANTS[variant])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "steps"])
@pytest.mark.slow
def test_smaller_tiles_and_wide_heads(kind):
    check(
        (1, 1, 1, 5, 70, 128),
        kind,
        more={"QUERIES": 8, "KEYS": 16} if kind in TILED else {},
    )


@pytest.mark.parametrize("size", PADDED, ids=str)
@pytest.mark.parametrize("values", [4, 24])
def test_heads_are_padded_to_fragments(size, values):
    check(size, "steps", values=values)


@pytest.mark.parametrize(
    "tile",
    [(1, 3, 48, 8), (1, 6, 48, 16), (2, 2, 32, 8), (2, 2, 32, 16)],
    ids=lambda tile: "x".join(map(str, tile)),
)
def test_tiles_of_fragments(tile):
    more = dict(zip(("FRAGMENTS_M", "SUBS", "KEYS", "FRAGMENT_N"), tile))
    check((1, 1, 1, 19, 53, 16), "steps", more=more)


@pytest.mark.parametrize(
    ("steps", "fragments", "head"),
    [(1, 1, 24), (2, 1, 24), pytest.param(1, 2, 32, marks=pytest.mark.slow)],
)
def test_queries_in_shared_memory(steps, fragments, head):
    """Some or all steps of the columns of a head, which may be padded."""
    more = {"Q_STEPS": steps, "FRAGMENTS_M": fragments, "SUBS": 2, "KEYS": 16}
    check((1, 1, 1, 35, 19, head), "steps", more=more, unread=slice(19, None))


@pytest.mark.parametrize("variant", ["boolean_mask", "causal", "wide_values", "rows_first"])
def test_fragments_of_16_columns(variant):
    check(SIZES[0], "steps", more={"FRAGMENT_N": 16}, **VARIANTS[variant])


@pytest.mark.parametrize(
    ("dtype", "words", "keys", "fragments", "causal"),
    [
        (np.float16, 2, 16, 1, None),
        (np.float16, 4, 32, 2, 3),
        (np.float16, 1, 32, 1, None),
        (np.uint8, 4, 64, 1, None),
        (np.uint8, 1, 32, 1, 0),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_masks_in_words(dtype, words, keys, fragments, causal):
    """Some steps are whole, the last one is not, and the last queries are none."""
    size = (2, 2, 1, 19, 80, 8)
    mask = np.random.default_rng(0).standard_normal((2, 1, 19, 80))
    mask = np.where(mask < -1, -np.inf, mask)
    mask = (mask > -1).astype(dtype) if dtype is np.uint8 else mask.astype(dtype)
    mask[:, :, 4] = mask[:, :, 0]
    more = {"MASK_WORDS": words, "KEYS": keys, "FRAGMENTS_M": fragments}
    check(size, "steps", mask=mask, causal=causal, more=more)


@pytest.mark.parametrize("factor", [-1.0, 0.0])
@pytest.mark.parametrize("kind", KINDS)
def test_scales_that_are_not_positive(kind, factor):
    check(SIZES[0], kind, factor=factor)


@pytest.mark.parametrize("queries", [2, 3])
def test_several_queries_per_invocation(queries):
    check(SIZES[0], "subgroup", more={"RQ": queries, "WY": 2}, causal=1)


@pytest.mark.parametrize("kind", KINDS)
def test_without_any_key(kind):
    """The result of a query that sees no key is zero. A mask that is only low hides no key."""
    mask = np.zeros((1, 1, 13, 17), np.float32)
    mask[..., 2, :], mask[..., 5, :] = -np.inf, np.finfo(np.float32).min
    check(SIZES[0], kind, mask=mask)


def band(queries, first, last):
    """Limits [1, 1, S, 2]: a query sees keys from `first` to `last` behind and before it."""
    at = np.arange(queries, dtype=np.int32)
    return np.stack((at + first, at + last + 1), -1)[None, None]


LIMITS = {
    "length": lambda b, h, s, t: np.full((1, 1, 1, 1), t // 2, np.int32),
    "positions": lambda b, h, s, t: band(s, 0, t // 3)[..., 1:].copy(),
    "window": lambda b, h, s, t: band(s, t // 4, t // 2),
    # Rows without a key: before all, after all, between equal limits, and between crossed ones.
    "nothing": lambda b, h, s, t: np.tile(
        np.array([[-(2**30), 2**30], [-9, -3], [t + 2, t + 9], [2, 2], [5, 1]], np.int32),
        (b, h, -(-s // 5), 1),
    )[:, :, :s].copy(),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LIMITS)
def test_limits_of_keys(kind, name):
    batch, heads, _, queries, keys, _ = SIZES[0]
    limits = LIMITS[name](batch, heads, queries, keys)
    check(SIZES[0], kind, limits=limits, mask=2 if name == "window" else 0)
    if kind.startswith("split"):
        size = SIZES[3]
        check(size, kind, limits=LIMITS[name](size[0], size[1], size[3], size[4]))


@pytest.mark.parametrize("kind", KINDS)
def test_limits_are_in_whole_steps_of_fragments(kind):
    """Keys outside of the limits of all queries are not read: no NaN reaches the result. Steps
    that all queries see need no limits."""
    more = {"QUERIES": 16, "KEYS": 16} if kind in TILED else {}
    if kind == "steps":
        more = {"SUBS": 2, "KEYS": 16, "FRAGMENTS_M": 1}
    size = (1, 2, 1, 19, 83, 16) if kind != "steps" else (1, 1, 1, 19, 83, 16)
    check(size, kind, limits=band(19, 0, 40), unread=slice(64, None), more=more)
    check(size, kind, limits=band(19, 40, 64), unread=slice(0, 16), more=more)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["heads", "queries"])
def test_sinks(kind, shape):
    """Scores of a key without values: far below the others, among them, and far above, so that
    nothing is left of the values. Rows without a key are 0."""
    batch, heads, _, queries, keys, _ = size = SIZES[0]
    sizes = (1, heads, 1, 1) if shape == "heads" else (batch, heads, queries, 1)
    sinks = np.random.default_rng(5).permutation(np.linspace(-8, 8, int(np.prod(sizes))))
    sinks = sinks.reshape(sizes).astype(np.float16 if shape == "heads" else np.float32)
    sinks[0, 0, 0], sinks[0, -1, -1] = -300.0, 300.0
    check(size, kind, sinks=sinks, limits=LIMITS["nothing"](batch, heads, queries, keys))
    check(size, kind, sinks=sinks, mask=1)
    if shape == "heads":
        check(size, kind, sinks=sinks, dtype=np.float16, causal=3)


@pytest.mark.parametrize("kind", KINDS)
def test_pages(kind):
    """Keys and values of all batches in pages of one cache, in any order."""
    check(SIZES[0], kind, pages=8, limits=LIMITS["nothing"](*SIZES[0][:2], *SIZES[0][3:5]))
    check(SIZES[0], kind, pages=16, mask=1, dtype=np.float16, rows_first=True)


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_functions_of_scores_and_masks(kind, bounded):
    check(SIZES[0], kind, functions=(1, 1), bounded=bounded)


@pytest.mark.parametrize("functions", [(0, 1), (1, 0)], ids=["mask", "score"])
@pytest.mark.parametrize("kind", ["subgroup", "tiled"])
def test_one_function(kind, functions):
    check((1, 4, 2, 11, 83, 8), kind, functions=functions)


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("kind", ["subgroup", *TILED, "steps"])
def test_steps_without_a_seen_key_are_skipped(kind, bounded):
    """No NaN of such a step reaches the result."""
    more = {"QUERIES": 16, "KEYS": 16} if kind in TILED else {}
    size = (1, 1, 1, 3, 67, 16)
    check(size, kind, functions=(1, 1), bounded=bounded, unread=slice(32, None), more=more)


def in_pages(array, table, size):
    """Keys or values [B, G, T, D] as rows [1, G, rows, D], of which `table` has the first of each page."""
    batch, heads, keys, width = array.shape
    pool = np.full((1, heads, size * (table.size + 1), width), np.nan, array.dtype)
    for b in range(batch):
        for t in range(keys):
            pool[0, :, table[b, t // size] + t % size] = array[b, :, t]
    return pool


def check(
    size,
    kind,
    *,
    mask=0,
    causal=None,
    rows_first=False,
    dtype=np.float32,
    values=None,
    functions=(0, 0),
    bounded=True,
    unread=slice(0, 0),
    limits=None,
    sinks=None,
    pages=0,
    factor=1.0,
    more=None,
):
    batch, q_heads, k_heads, queries, keys, head = size
    values = values or head
    rng = np.random.default_rng(queries * 1000 + keys)
    q, k, v = (
        rng.standard_normal(shape).astype(dtype)
        for shape in (
            (batch, q_heads, queries, head),
            (batch, k_heads, keys, head),
            (batch, k_heads, keys, values),
        )
    )
    held_mask = mask if isinstance(mask, np.ndarray) else None
    if held_mask is None and mask:
        held_mask = rng.standard_normal((batch, 1, queries, keys)).astype(np.float32)
        held_mask[..., 1] = -np.inf
        held_mask = (rng.random(held_mask.shape) > 0.3).astype(np.uint8) if mask == 2 else held_mask
    scale = float(np.float32(factor / np.sqrt(head)))
    want = attend(q, k, v, scale, held_mask, causal, functions, limits, sinks)
    k[:, :, unread] = v[:, :, unread] = np.nan
    rows = keys
    if pages:
        count = ceil_div(keys, pages)
        table = (pages * rng.permutation(batch * count + 1)).astype(np.int32)
        table = table[: batch * count].reshape(batch, count)
        k, v = (in_pages(array, table, pages) for array in (k, v))
        rows = k.shape[2]

    def held(array):
        return np.ascontiguousarray(array.swapaxes(1, 2)) if rows_first else array

    params = {
        **parameters(queries, keys, q_heads // k_heads, scale, causal or 0),
        **strides("q", q_heads, queries, head, rows_first),
        **strides("k", k_heads, rows, head, rows_first),
        **strides("v", k_heads, rows, values, rows_first),
        **strides("o", q_heads, queries, values, rows_first),
    }
    macros = {f"T_{name}": GLSL[dtype] for name in ("Q", "K", "V", "OUT")}
    macros.update(HEAD_DIM=head, VALUE_DIM=values, CAUSAL=int(causal is not None), **(more or {}))
    if any(functions):
        macros.update(function_macros(*functions, bounded))
    buffers = [held(q), held(k), held(v)]
    if held_mask is not None:
        macros.update(
            MASK=2 if held_mask.dtype == np.uint8 else 1, T_MASK=GLSL[held_mask.dtype.type]
        )
        buffers.append(held_mask)
    if limits is not None:
        macros["LIMITS"] = limits.shape[-1]
        steps = [
            stride // 4 if size > 1 else 0 for size, stride in zip(limits.shape, limits.strides)
        ]
        params.update(zip(("limits_batch", "limits_head", "limits_row"), steps))
        params["offset_limits"] = 0
        buffers.append(limits)
    if sinks is not None:
        params.update(
            (f"sinks_{axis}", stride // sinks.itemsize if size > 1 else 0)
            for axis, size, stride in zip(("batch", "head", "row"), sinks.shape, sinks.strides)
        )
        params["offset_sinks"] = 0
        macros.update(SINKS=1, T_SINKS=GLSL[sinks.dtype.type])
        buffers.append(sinks)
    if pages:
        params.update(k_batch=0, v_batch=0, pages_batch=table.shape[1], offset_pages=0)
        macros["PAGES"] = pages
        buffers.append(table)
    shape = (batch, queries, q_heads, values) if rows_first else (batch, q_heads, queries, values)
    if kind == "subgroup":
        group = macros["SG"] = 8 if subgroup_size() == 8 else 1
        lanes = (group if group > 1 else 8) * macros.get("RQ", 1) * macros.get("WY", 1)
        template = "attention/attention.comp"
        grid = (ceil_div(queries, lanes), q_heads, batch)
    elif kind in TILED:
        if kind == "shuffled":
            if subgroup_size() % 8:
                pytest.skip("the subgroup size is no multiple of the 8 lanes of a group")
            macros.update(SHUFFLE=1, LANES=8, GROUPS=macros.get("QUERIES", 32) // 2)
        if kind == "parts":
            shuffle = int(subgroup_size() % 4 == 0)
            macros.update(PART=16, SHUFFLE=shuffle, LANES=4, GROUPS=macros.get("QUERIES", 32) // 2)
        template = "attention/attention_tiled.comp"
        grid = (ceil_div(queries, macros.get("QUERIES", 32)), q_heads, batch)
    elif kind == "steps":
        if subgroup_size() % 4:
            pytest.skip("the subgroup size is no multiple of 4")
        macros.update({"SUBS": 1, "FRAGMENTS_M": 1, "KEYS": 16, **(more or {})})
        template = "attention/attention_coopmat.comp"
        grid = (ceil_div(queries, 16 * macros["FRAGMENTS_M"] * macros["SUBS"]), q_heads, batch)
    else:
        splits = 1 if kind == "decode" else 3
        if kind == "split_shuffled":
            if subgroup_size() % 8:
                pytest.skip("the subgroup size is no multiple of the 8 lanes of a group")
            macros["SG"] = subgroup_size()
        macros["SPLIT"] = int(splits > 1)
        template = "attention/attention_decode.comp"
        params["splits"] = splits
        grid = (queries * splits, q_heads, batch)
    buffers.append(Out(shape, dtype))
    if kind.startswith("split"):
        buffers.append(Out((batch, q_heads, queries, splits, values + 4), np.float32))
        buffers.append(np.zeros((batch, q_heads, queries), np.int32))  # are 0 in the end, too
    got, *_ = run(template, buffers, params, grid, macros)
    close(got.swapaxes(1, 2) if rows_first else got, want, dtype)


@pytest.mark.parametrize("mask", [0, 1, 2])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_texel_buffers(mask, dtype):
    batch, heads, queries, keys, head = 2, 3, 11, 21, 16
    rng = np.random.default_rng(3)
    q, k, v = (
        rng.standard_normal((batch, heads, rows, head)).astype(dtype)
        for rows in (queries, keys, keys)
    )
    held = rng.standard_normal((batch, 1, queries, keys)).astype(np.float32)
    held = (held > -0.5).astype(np.uint8) if mask == 2 else held
    scale = float(np.float32(0.3))
    params = parameters(queries, keys, 1, scale)
    for name, rows in (("q", queries), ("k", keys), ("v", keys), ("o", queries)):
        params |= strides(name, heads, rows, head)
    macros = {f"T_{name}": GLSL[dtype] for name in ("Q", "K", "V", "OUT")}
    macros.update(HEAD_DIM=head, MASK=mask, TEXEL_MASK=1, TEXEL_Q=1, TEXEL_K=1, TEXEL_V=1)
    group = macros["SG"] = 8 if subgroup_size() == 8 else 1
    inputs = [Texel(array, "rgba16f" if dtype is np.float16 else "rgba32f") for array in (q, k, v)]
    if mask:
        inputs.append(Texel(held, "r8ui" if mask == 2 else "r32f"))
    grid = (ceil_div(queries, group if group > 1 else 8), heads, batch)
    buffers = [*inputs, Out(q.shape, dtype)]
    (got,) = run("attention/attention.comp", buffers, params, grid, macros)
    close(got, attend(q, k, v, scale, held if mask else None, None), dtype)


@pytest.mark.slow
def test_subgroups_of_16():
    """llvmpipe's subgroups of 8 add up no shares by shuffles. It has larger ones if told so."""
    if subgroup_size() != 8:
        pytest.skip("needs llvmpipe with vectors of 8 floats")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", __file__]
    chosen = "test_attention and split_shuffled or limits and split_shuffled"
    done = subprocess.run(
        [*command, "-k", chosen],
        env={**os.environ, "LP_NATIVE_VECTOR_WIDTH": "512"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:]
