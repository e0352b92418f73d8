"""Operands read as texel buffers: when they are, and that the results are those of storage
buffers."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F

from purevk import api
from purevk.dtypes import DType
from purevk.graph.context import Context
from purevk.ir import Layout, TensorType, Value
from purevk.lower.lowering import Lowering, Operand
from purevk.program import Program
from purevk.tuning import SOFTWARE, DeviceTraits
from tests.ops.harness import Case, build, expected_of, tensor

TRAITS = DeviceTraits(frozenset(), profile=SOFTWARE, max_texels=10)


def operand(dtype: DType, count: int) -> Operand:
    type = TensorType(dtype, (count,))
    return Operand(Value("x", type), Layout.dense(type.dims), type)


@pytest.mark.parametrize(
    ("traits", "dtype", "count", "vector", "form"),
    [
        (TRAITS, DType.float32, 10, False, ":r32f"),
        (TRAITS, DType.float32, 11, False, ""),
        (TRAITS, DType.float32, 40, True, ":rgba32f"),
        (TRAITS, DType.float32, 41, True, ""),
        (TRAITS, DType.float16, 40, True, ":rgba16f"),
        (TRAITS, DType.float16, 3, False, ":r16f"),
        (TRAITS, DType.bool, 10, False, ":r8ui"),
        (TRAITS, DType.bool, 8, True, ""),
        (TRAITS, DType.int32, 8, False, ""),
        (DeviceTraits(frozenset(), profile=SOFTWARE), DType.float32, 4, False, ""),
        (DeviceTraits(frozenset(), max_texels=10), DType.float32, 4, False, ""),
    ],
)
def test_format(traits: DeviceTraits, dtype: DType, count: int, vector: bool, form: str) -> None:
    assert Lowering(traits, {}, {}).texel(operand(dtype, count), vector) == form


def cases() -> list[Case]:
    """Sizes that fill no texel, strides, biases, masks."""
    q = tensor(2, 3, 13, 16)
    mask = tensor(13, 13, dtype=torch.bool) | torch.eye(13, dtype=torch.bool)
    return [
        Case(lambda a, b: a @ b, (tensor(3, 5), tensor(5, 7)), name="odd"),
        Case(lambda a, b: a[1:] @ b[:, 1:], (tensor(5, 8), tensor(8, 13)), name="offsets"),
        Case(F.linear, (tensor(7, 12), tensor(20, 12), tensor(20)), constants=(1, 2), name="bias"),
        Case(
            lambda x, w, b: F.conv2d(x, w, b, padding=1),
            (tensor(1, 3, 9, 11), tensor(8, 3, 3, 3), tensor(8)),
            name="three channels",
        ),
        Case(
            lambda x, w: F.conv2d(x, w, stride=2),
            (tensor(2, 8, 9, 9), tensor(12, 8, 3, 3)),
            constants=(1,),
            name="window",
        ),
        Case(
            lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=12),
            (tensor(1, 12, 15, 15), tensor(12, 1, 3, 3), tensor(12)),
            name="depthwise",
        ),
        Case(lambda a: F.scaled_dot_product_attention(a, a, a, mask), (q,), name="attention"),
    ]


def run(texels: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[torch.Tensor], set[str]]:
    """The results, and the kinds of the bindings that were used."""
    monkeypatch.setenv("PUREVK_DISABLE", "" if texels == "1" else "texels")
    todo = cases()
    given: list[torch.Tensor] = []
    for case in todo:
        fixed = [case.args[n] for n in case.constants]
        given += [
            arg
            for n, arg in enumerate(case.args)
            if not any(arg is one for one in fixed) and not any(arg is one for one in given)
        ]
    with Context(api.open_device(validation=True)) as context:
        with Program("test", {"forward": lambda sizes: build(todo)}, context) as program:
            made = program.forward(*given)
            plan = program.methods["forward"].executable.plan
            kinds = {binding.kind for dispatch in plan.dispatches for binding in dispatch.bindings}
            views = context.device.live_objects().get("BufferView", 0)
            reads = sum(
                binding.kind != "storage"
                for dispatch in plan.dispatches
                for binding in dispatch.bindings
            )
            assert views <= reads
            assert bool(views) == bool(reads)
        gc.collect()
        assert "BufferView" not in context.device.live_objects()
    return list(made), kinds


@pytest.mark.device
def test_results_do_not_depend_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, kinds = run("0", monkeypatch)
    assert kinds == {"storage"}
    texel, kinds = run("1", monkeypatch)
    with Context(api.open_device()) as context:
        if context.traits.profile.prefers_texel_reads:
            assert {"texel:r32f", "texel:rgba32f"} <= kinds
    wanted = [tensor for case in cases() for tensor in expected_of(case)]
    assert len(plain) == len(texel) == len(wanted)
    for case, a, b, want in zip(cases(), plain, texel, wanted):
        torch.testing.assert_close(
            a, want, rtol=1e-5, atol=1e-4, msg=lambda text, case=case: f"{case}: {text}"
        )
        torch.testing.assert_close(
            b, want, rtol=1e-5, atol=1e-4, msg=lambda text, case=case: f"{case}: {text}"
        )
