"""scaled_dot_product_attention at the ranks, broadcasts and widths that torch takes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from purevk import api
from purevk.dtypes import DType
from purevk.graph.context import Context
from purevk.graph.devices import default_context
from purevk.ir import Dim, Layout, Symbol, TensorType, Value
from purevk.lower.lowering import Lowering, Operand
from purevk.ops.attention import attention
from purevk.ops.attention.choice import choose
from purevk.ops.attention.kernels import Attention, Coopmat, Decode, Problem, Tiled
from purevk.tuning import DEFAULT, DeviceTraits
from tests.ops import harness
from tests.ops.harness import Case, aten, check, dispatches, program_of, tensor

pytestmark = pytest.mark.device

sdpa = aten.scaled_dot_product_attention.default


def unit(*shape, seed=0):
    return tensor(*shape, dtype=torch.float32, seed=seed, low=-1, high=1)


def some(*shape):
    """A mask that hides about a third, and no whole row."""
    mask = tensor(*shape, dtype=torch.float32, seed=9, low=0, high=1) > 0.35
    mask[..., 0] = True
    return mask


def _case(q, k, v, mask=None, causal=False, gqa=False, **options):
    """One node of attention."""
    named = {"is_causal": causal, "enable_gqa": gqa}
    if mask is None:
        return Case(lambda q, k, v: sdpa(q, k, v, None, **named), (q, k, v), **options)
    return Case(lambda q, k, v, m: sdpa(q, k, v, m, **named), (q, k, v, mask), **options)


def test_batch_dims_broadcast():
    """Keys of one head, of one batch; queries of one batch; keys with fewer heads where torch is
    told so."""
    q = unit(2, 4, 5, 8)
    seen = some(2, 1, 5, 7)
    check(
        _case(q, unit(2, 1, 7, 8, seed=1), unit(2, 1, 7, 12, seed=2)),
        _case(q, unit(1, 4, 7, 8, seed=1), unit(1, 4, 7, 8, seed=2), seen),
        _case(q, unit(1, 1, 7, 8, seed=1), unit(2, 4, 7, 8, seed=2)),
        _case(q[:1], unit(2, 4, 7, 8, seed=1), unit(2, 4, 7, 8, seed=2)),
        _case(q[:, :1], unit(2, 4, 7, 8, seed=1), unit(2, 4, 7, 8, seed=2), seen),
        _case(q, unit(2, 2, 7, 8, seed=1), unit(2, 2, 7, 8, seed=2), gqa=True),
        _case(q, unit(2, 2, 5, 8, seed=1), unit(2, 2, 5, 8, seed=2), gqa=True, causal=True),
    )


def test_ranks():
    """Matrices, one batch dim, three batch dims with a mask of as many."""
    check(
        _case(unit(5, 8), unit(7, 8, seed=1), unit(7, 8, seed=2)),
        _case(unit(3, 5, 8), unit(1, 7, 8, seed=1), unit(1, 7, 8, seed=2)),
        _case(unit(3, 5, 8), unit(3, 7, 8, seed=1), unit(3, 7, 8, seed=2), unit(3, 5, 7, seed=3)),
        _case(
            unit(2, 3, 2, 5, 8),
            unit(2, 3, 2, 7, 8, seed=1),
            unit(2, 3, 2, 7, 8, seed=2),
            unit(2, 1, 1, 5, 7, seed=3),
        ),
        _case(
            unit(2, 3, 4, 5, 8), unit(2, 3, 2, 7, 8, seed=1), unit(2, 3, 2, 7, 8, seed=2), gqa=True
        ),
    )


def test_widths_without_a_kernel():
    """Widths that are no multiple of 4 are padded; above 256 there are two matmuls, with
    every kind of mask."""
    check(
        _case(unit(1, 2, 5, 6), unit(1, 2, 7, 6, seed=1), unit(1, 2, 7, 9, seed=2)),
        _case(unit(1, 2, 5, 3), unit(1, 2, 5, 3, seed=1), unit(1, 2, 5, 4, seed=2), causal=True),
        *(
            _case(
                unit(1, 2, 5, 260),
                unit(1, heads, 5, 260, seed=1),
                unit(1, heads, 5, 260, seed=2),
                mask,
                causal,
                heads == 1,
            )
            for heads, mask, causal in (
                (2, None, False),
                (2, None, True),
                (1, None, False),
                (2, unit(5, 5, seed=3), False),
                (2, some(1, 1, 5, 5), False),
            )
        ),
    )


def test_wide_heads_on_devices_without_bytes(monkeypatch):
    """The causal mask is of no dtype that the device does not store, as Adreno 6xx stores no bool."""
    physical = default_context().device.physical
    with Context(api.Device(physical, disable=("storage_8bit", "int8"))) as bare:
        monkeypatch.setattr(harness, "context", lambda: bare)
        q, k, v = (unit(1, 2, 5, 260, seed=seed) for seed in range(3))
        check(_case(q, k, v, causal=True))
        # What the device cannot be spared is left to the CPU: bytes that another kernel reads.
        check(Case(aten.count_nonzero.default, (q,), host=True))


def test_operators_that_need_int64_within(monkeypatch):
    """Some devices have no 64-bit integers, as those of Qualcomm's and Arm's drivers."""
    physical = default_context().device.physical
    with Context(api.Device(physical, disable=("int64",))) as bare:
        monkeypatch.setattr(harness, "context", lambda: bare)
        matrices = unit(2, 4, 3)
        check(Case(aten.linalg_inv_ex.default, (unit(2, 3, 3),), rtol=1e-4, atol=1e-4))
        check(Case(aten._linalg_svd.default, (matrices,), host=True))


def test_a_mask_between_the_matmuls():
    """Scores with a cap before the mask (as Gemma 2 has them): the mask of bytes is read by the
    first matmul itself."""
    q, k, v, seen = (
        unit(1, 2, 5, 8),
        unit(1, 2, 5, 8, seed=1),
        unit(1, 2, 5, 8, seed=2),
        some(1, 2, 5, 5),
    )

    def capped(q, k, v, seen):
        scores = torch.tanh(q @ k.transpose(2, 3) / 5.0) * 5.0
        return F.softmax(torch.where(seen, scores, -1e9), -1) @ v

    check(Case(capped, (q, k, v, seen)))


def test_scores_and_weights_of_other_sizes():
    """Written out: one head of keys and values that broadcasts, or that all rows of queries are
    multiplied by as one matrix; masks and values with more batches than the scores."""
    q, heads = unit(2, 4, 5, 8), (unit(2, 4, 7, 8, seed=1), unit(2, 4, 7, 12, seed=2))
    one = (unit(2, 7, 8, seed=3), unit(2, 7, 12, seed=4))
    mask = unit(2, 1, 5, 7, seed=5)

    def plain(q, k, v, m=None):
        scores = q @ k.transpose(-2, -1) * 0.5
        return F.softmax(scores if m is None else scores + m, -1) @ v

    def joined(q, k, v):
        scores = q.reshape(2, 20, 8) @ k.transpose(-2, -1)
        weights = F.softmax(scores.view(2, 4, 5, 7), -1)
        return (weights.view(2, 20, 7) @ v).view(2, 4, 5, 12)

    check(
        Case(plain, (q, *(x[:, None] for x in one))),
        Case(plain, (q, *(x[:, None] for x in one), mask)),
        Case(plain, (q, *(x[:1] for x in heads))),
        Case(plain, (q, heads[0][:1], heads[1][0])),
        Case(plain, (q[:1], *(x[:1] for x in heads), mask)),
        Case(plain, (q[:1, :1], heads[0][:1, :1], heads[1], mask[:1])),
        Case(plain, (q[0], heads[0][0], heads[1])),
        Case(joined, (q, *one)),
    )


def test_sinks():
    """A column of scores that only the softmax knows, as gpt-oss has it: one kernel. Where the weight
    of the sink is read, or another column is left out, it stays several."""
    heads = tensor(4, dtype=torch.float32, seed=4, low=-3, high=3)
    mask = torch.where(some(1, 1, 9, 9), 0.0, torch.finfo(torch.float32).min)
    shapes = {"short": (2, 4, 9, 16), "one query": (2, 4, 1, 16)}

    def weights(q, k, sinks, m, shift):
        scores = q @ k.transpose(2, 3) * 0.25
        scores = scores if m is None else scores + m
        column = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
        joined = torch.cat([scores, column], -1)
        joined = joined - joined.max(-1, keepdim=True).values if shift else joined
        return F.softmax(joined, -1, dtype=joined.dtype)

    def attend(q, k, v, sinks):
        return weights(q, k, sinks, None, True)[..., :-1] @ v

    def unshifted(q, k, v, sinks):
        return weights(q, k, sinks, None, False)[..., :-1] @ v

    def hidden(q, k, v, sinks, m):
        return weights(q, k, sinks, m, True)[..., :-1] @ v

    cases = []
    for dtype in (torch.float32, torch.float16):
        near = {"atol": 2e-3, "rtol": 2e-3} if dtype is torch.float16 else {}
        for shape in shapes.values():
            given = [unit(*shape), *(unit(2, 4, 9, 16, seed=seed) for seed in (1, 2)), heads]
            given = [each.to(dtype) for each in given]
            cases.append(Case(attend, tuple(given), **near))
            cases.append(Case(unshifted, tuple(given), **near))
    masked = (*(unit(2, 4, 9, 16, seed=seed) for seed in range(3)), heads, mask)
    cases.append(Case(hidden, masked))
    for case in cases:
        check(case)
        with program_of(case.fn, case.args) as program:
            found = [
                name for name in dispatches(program) if "attention" in name or "softmax" in name
            ]
            assert len(found) == 1 and "attention" in found[0], found

    def first(q, k, v, sinks):
        return weights(q, k, sinks, None, True)[..., 1:] @ v

    def read(q, k, v, sinks):
        made = weights(q, k, sinks, None, True)
        return made[..., :-1] @ v, made[..., -1]

    def second(q, k, v, sinks):
        return weights(q, k, sinks, None, True)[..., ::2] @ v

    one = (masked[0], masked[1][:, :, :2], masked[2][:, :, :2], heads)
    check(*(Case(each, masked[:4]) for each in (first, read)), Case(second, one))


def test_scales_that_are_no_floats():
    """A tensor of integers or booleans holds another number than it was filled with."""
    q, k, v = unit(1, 2, 5, 8), unit(1, 2, 7, 8, seed=1), unit(1, 2, 7, 8, seed=2)

    def scaled(q, k, v, dtype, sizes, before):
        scale = torch.full(sizes, 2.75, dtype=dtype)
        scores = (q * scale if before else q) @ k.transpose(-2, -1)
        return F.softmax(scores if before else scores * scale, -1) @ v

    check(
        [
            Case(scaled, (q, k, v, dtype, sizes, before))
            for dtype in (torch.float32, torch.int64, torch.bool)
            for sizes in ((), (1, 1), (3, 1, 1, 1))
            for before in (False, True)
        ]
    )


def test_scales_beyond_float32():
    """Of attention, and of the product of two scales."""
    q, k, v = unit(1, 2, 5, 8), unit(1, 2, 7, 8, seed=1), unit(1, 2, 7, 8, seed=2)
    written = lambda q, k, v: F.softmax((q * 1e20) @ (k * 1e20).transpose(2, 3), -1) @ v  # noqa: E731
    check(
        Case(written, (q, k, v)),
        Case(lambda q, k, v: sdpa(q, k, v, scale=1e40), (q, k, v)),
    )


def test_halves():
    """Heads of whole fragments, which matrix cores take where a device has them: rows and keys that
    fill none, masks, causal."""
    q, k, v = (unit(1, 2, rows, 32, seed=n).half() for n, rows in enumerate((19, 35, 35)))
    mask = unit(1, 1, 19, 35, seed=3)
    check(
        _case(q, k, v),
        _case(q, k, v, causal=True),
        _case(q, k[:, :1], v[:, :1], mask.half(), gqa=True),
        _case(q, k, unit(1, 2, 35, 16, seed=4).half(), some(1, 1, 19, 35)),
    )


def test_the_choice_of_matrix_cores():
    """Wherever the kernel is chosen, its tiles fit its workgroup."""
    features = frozenset({"subgroup_shuffle"})
    traits = DeviceTraits(
        features,
        32,
        132,
        max_shared_memory=49152,
        max_invocations=1024,
        coopmat_columns=(8,),
        fragment_order=lambda dtype, columns: True,
    )
    for width in range(4, 300, 12):
        for value_width in range(4, 300, 12):
            for queries in (5, 100, 1000):
                made = choose(traits, Problem(2, 16, queries, queries, width, value_width, True))
                assert isinstance(made, Coopmat) == (max(width, value_width) <= 256)
                if isinstance(made, Coopmat):
                    heads = [-(-each // 16) * 16 for each in (width, value_width)]
                    assert made.keys % 16 == 0
                    assert all(made.keys * each % (128 * made.subgroups) == 0 for each in heads)
                    assert 2 * made.keys * (sum(heads) + 16) <= traits.max_shared_memory
                    assert made.fragments == 1 or sum(heads) <= 128
    assert not isinstance(choose(traits, Problem(2, 16, 100, 100, 64, 64, False)), Coopmat)
    assert not isinstance(
        choose(replace(traits, coopmat_columns=()), Problem(2, 16, 100, 100, 64, 64, True)), Coopmat
    )


def test_fragments_fill_the_multiprocessors():
    """Few heads are split among workgroups; many tokens share what is read of keys."""
    traits = DeviceTraits(
        frozenset({"subgroup_shuffle"}),
        32,
        132,
        max_shared_memory=49152,
        max_invocations=1024,
        coopmat_columns=(8,),
        fragment_order=lambda dtype, columns: True,
    )
    few = choose(traits, Problem(1, 12, 1024, 1024, 64, 64, True))
    many = choose(traits, Problem(8, 32, 4096, 4096, 64, 64, True))
    assert isinstance(few, Coopmat) and isinstance(many, Coopmat)
    rows = 16 * few.fragments * few.subgroups
    assert 12 * -(-1024 // rows) >= 0.9 * 132
    assert many.fragments == 2


@pytest.mark.parametrize("most", [128, 1024])
@pytest.mark.parametrize("held", [2, 4])
def test_queries_of_an_invocation(held, most, monkeypatch):
    """As many as the profile says, but for workgroups that the device does not have."""
    profile = replace(DEFAULT, attention_queries=held)
    traits = DeviceTraits(
        frozenset(), 32, 16, profile, max_shared_memory=49152, max_invocations=most
    )
    made = choose(traits, Problem(8, 16, 65, 65, 24, 24))
    assert isinstance(made, Tiled) and made.groups * made.lanes <= most
    assert made.queries // made.groups == (held if most == 1024 else 4)
    monkeypatch.setattr(attention, "choose", lambda *args, **named: made)
    monkeypatch.setattr(Lowering, "texel", lambda *args, **named: "")  # as on GPUs
    check(_case(*(unit(1, 1, 65, 24, seed=n) for n in range(3))))


@pytest.mark.parametrize("shared", [16384, 32768, 49152])
@pytest.mark.parametrize("held", [2, 4])
def test_tiles_leave_shared_memory_for_the_search_of_steps(held, shared):
    """attention_tiled.comp takes what its head says, and steps.glslh 12 bytes."""
    profile = replace(DEFAULT, attention_queries=held)
    traits = DeviceTraits(
        frozenset(), 32, 16, profile, max_shared_memory=shared, max_invocations=1024
    )
    parts = set()
    for width in range(4, 260, 4):
        for queries in (8, 40, 1000):
            made = choose(traits, Problem(1, 16, queries, queries, width, width))
            if isinstance(made, Tiled):
                line = width + 4
                columns = made.part + 4 if made.part else 2 * line
                tiles = made.queries * line + made.keys * columns + made.queries * (made.keys + 4)
                assert 4 * tiles + 12 <= shared
                assert made.part % (4 * made.lanes) == 0 and made.queries % made.groups == 0
                assert made.keys % made.lanes == 0
                parts.add(made.part)
    assert parts == {0, 64}


@pytest.mark.parametrize("shared", [16384, 32768])
@pytest.mark.parametrize("subgroup", [4, 8, 16, 32, 64])
@pytest.mark.parametrize("controlled", [True, False])
def test_sums_of_decoding_fit_into_shared_memory(controlled, subgroup, shared):
    """attention_decode.comp takes what its head says. It relies on the size of subgroups only where
    that is what was asked for."""
    features = {"subgroup_shuffle", "subgroup_basic"}
    features |= {"subgroup_size_control"} if controlled else set()
    traits = DeviceTraits(
        frozenset(features), subgroup, 16, max_shared_memory=shared, max_invocations=256
    )
    for width in range(4, 260, 4):
        made = choose(traits, Problem(1, 16, 1, 5000, width, width))
        assert isinstance(made, Decode)
        assert made.subgroup == (subgroup if controlled and subgroup >= 8 else None)
        lanes = made.subgroup or 8
        nbytes = (4 * width + 8) * made.local // lanes
        nbytes += 0 if made.subgroup else 16 * made.local
        assert nbytes <= shared and made.local % lanes == 0 and made.local >= lanes


@pytest.mark.parametrize("shared_memory", [16384, 49152])
@pytest.mark.parametrize("subgroup", [8, 16, 32, 64])
@pytest.mark.parametrize("invocations", [256, 1024])
def test_rows_that_share_keys_fit_into_workgroups(invocations, subgroup, shared_memory):
    """attention_decode.comp takes what its head says, for all heads and queries of a workgroup."""
    traits = DeviceTraits(
        frozenset({"subgroup_shuffle", "subgroup_basic", "subgroup_size_control"}),
        subgroup,
        16,
        max_shared_memory=shared_memory,
        max_invocations=invocations,
    )
    found = set()
    for width, shared, queries, batch in itertools.product(
        (8, 64, 80, 128, 256), (1, 2, 3, 4, 5, 7, 8, 12), (1, 2, 4), (1, 16)
    ):
        for keys in (100, 1000, 9000):
            made = choose(
                traits, Problem(batch, 2 * shared, queries, keys, width, width, shared=shared)
            )
            assert isinstance(made, Decode)
            rows, sets = made.heads * made.queries, made.heads * made.queries // made.rows
            assert shared % made.heads == 0 and queries % made.queries == 0
            assert rows % made.rows == 0 and rows <= 8 and made.lanes <= subgroup
            assert made.local % subgroup == 0 and made.local * sets <= invocations
            assert made.local // subgroup * rows * (4 * width + 8) <= shared_memory
            assert 1 <= made.splits <= max(keys // 16, 1)
            found.add((rows > 1, made.rows > 1))
    assert found >= {(False, False), (True, True)}


@pytest.mark.parametrize(
    "form",
    [
        Decode(1, 16, 8, 4, 1, 4, 8, True),
        Decode(3, 32, 8, 2, 2, 4, 8, True),
        Decode(1, 16, 8, 4, 2, 1, 4, True),
        Decode(2, 8, 8, 2, 1, 2, 8),
        Decode(3, 16, 8, 1, 2, 2, 4, True),
        Decode(2, 16, 8, 1, 1, 1, 8, True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_queries_that_share_keys(form, dtype, monkeypatch):
    """Each form of attention_decode.comp: rows in one invocation and in several, parts of the keys,
    pieces of 4 and 8 elements, widths that leave lanes without work, and limits of keys."""
    size = default_context().traits.subgroup_size
    lanes, local = min(form.lanes, size), form.local * max(size // 8, 1)
    form = replace(form, subgroup=size, lanes=lanes, local=local)
    monkeypatch.setattr(attention, "choose", lambda *args, **named: form)
    monkeypatch.setattr(Lowering, "texel", lambda *args, **named: "")  # as on GPUs
    q, k, v = unit(2, 4, 2, 72), unit(2, 1, 61, 72, seed=1), unit(2, 1, 61, 40, seed=2)
    q, k, v = (each.to(dtype) for each in (q, k, v))
    check(
        _case(q, k, v, gqa=True),
        _case(q, k, v, some(2, 1, 2, 61), gqa=True),
        _case(q, k, v, causal=True, gqa=True),
    )


def test_parts_are_joined_at_each_call(monkeypatch):
    """The last workgroup of a query joins the parts that see keys: what counts workgroups is 0 at the
    next call, whose keys are in another number of parts."""
    size = default_context().traits.subgroup_size
    form = Decode(3, 2 * size, size) if size % 8 == 0 else Decode(3, 16)
    monkeypatch.setattr(attention, "choose", lambda *args, **named: form)
    monkeypatch.setattr(Lowering, "texel", lambda *args, **named: "")  # as on GPUs
    q, k, v = unit(1, 2, 1, 16), unit(1, 2, 90, 16, seed=1), unit(1, 2, 90, 16, seed=2)

    def attend(q, k, v, last):
        return sdpa(q, k, v, (torch.arange(90)[None] <= last[:, None])[None, None])

    with program_of(attend, (q, k, v, torch.tensor([89]))) as program:
        (kernel,) = [
            dict(each.kernel.macros)
            for each in program.method("forward").executable.plan.dispatches
            if each.kernel.template == "attention/attention_decode.comp"
        ]
        assert kernel["SPLIT"] == "1" and kernel["LIMITS"] == "1"
        for number, last in enumerate((89, 40, 0, 70, 89)):
            q = unit(1, 2, 1, 16, seed=number)
            found = program.forward(q, k, v, torch.tensor([last]))
            expected = F.scaled_dot_product_attention(q, k[:, :, : last + 1], v[:, :, : last + 1])
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dims", "dtype", "keys", "words"),
    [
        ((1, 1, 64, 64), DType.float16, 64, 4),
        ((1, 1, 64, 64), DType.bfloat16, 16, 2),
        ((1, 1, 64, 64), DType.bool, 64, 4),
        ((1, 1, 64, 64), DType.bool, 32, 2),
        ((2, 1, 64, 60), DType.float16, 64, 2),
        ((2, 1, 64, 62), DType.float16, 64, 1),
        ((2, 1, 1, 61), DType.float16, 64, 0),
        ((1, 1, 64, 64), DType.float32, 64, 0),
        ((2, 1, 64, 4 * Dim.of(Symbol("n", 64))), DType.bool, 64, 1),
        ((2, 1, 64, Dim.of(Symbol("n", 64))), DType.bool, 64, 0),
    ],
    ids=str,
)
def test_words_of_a_mask(dims, dtype, keys, words):
    """As many elements as rows and strides are multiples of, and as an invocation has keys."""
    type = TensorType(dtype, dims)
    mask = Operand(Value("mask", type), Layout.dense(dims), type)
    strides = (0 if size == 1 else step for size, step in zip(dims, mask.strides))
    params = {"T": dims[3], "offset_mask": 0}
    params |= zip((f"mask_{axis}" for axis in ("batch", "head", "row", "column")), strides)
    call = Attention({"mask": (mask, "r")}, {}, params, mask, 1, 1, 64, 64, 0)
    assert Coopmat(keys=keys).mask_words(call) == words
