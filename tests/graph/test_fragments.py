"""Which trial goes with a kernel that uses elements of fragments one by one. The trial itself is
tested with the templates."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional

import purevk
from purevk.dtypes import DType
from purevk.graph.context import default_context
from purevk.graph.fragments import spec_of, trial_of
from purevk.lower.lowering import KernelSpec
from purevk.tuning import DEFAULT


def spec(template: str, **macros: int) -> KernelSpec:
    return KernelSpec(template, tuple((name, str(macros[name])) for name in macros), (), ())


def test_the_trial_of_a_kernel() -> None:
    attention, integers = "attention/attention_coopmat.comp", "quantized/qmatmul_int.comp"
    assert trial_of(spec(attention, BFLOAT16=0, FRAGMENT_N=8)) == spec_of(DType.float16, 8)
    assert trial_of(spec(attention, BFLOAT16=1, FRAGMENT_N=16)) == spec_of(DType.bfloat16, 16)
    assert trial_of(spec("quantized/qmatmul_coopmat.comp")) == spec_of(DType.float16, 8)
    for template in ("matmul/matmul_fragments.comp", "conv/conv2d_fragments.comp"):
        assert trial_of(spec(template, BFLOAT16=0)) == spec_of(DType.float16, 16)
        assert trial_of(spec(template, BFLOAT16=1)) == spec_of(DType.bfloat16, 16)
    few = "matmul/matmul_dot_blocks.comp"
    assert trial_of(KernelSpec(few, (("T_B", "float16_t"),), (), ())) == spec_of(DType.float16, 16)
    assert trial_of(KernelSpec(few, (("T_B", "uint16_t"),), (), ())) == spec_of(DType.bfloat16, 16)
    assert trial_of(spec(integers, FRAGMENTS=1, FRAGMENT_N=16)) == spec_of(DType.int8, 16)
    for none in (spec(integers), spec("quantized/qconv2d.comp"), spec("matmul/matmul_tiled.comp")):
        assert trial_of(none) is None


@pytest.mark.device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [64, 128])
def test_what_lowering_asks_is_what_is_tried(
    dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trials of the kernels that are chosen are those that the choice has asked for."""
    asked: set[tuple[DType, int]] = set()

    def order(given: DType, columns: int) -> bool:
        asked.add((given, columns))
        return True

    context = default_context()
    traits = dataclasses.replace(
        context.traits,
        features=context.traits.features | {"subgroup_shuffle"},
        profile=DEFAULT,
        cores=64,
        max_shared_memory=49152,
        max_invocations=1024,
        coopmat_columns=(8, 16),
        bfloat16_columns=(16,),
        fragment_order=order,
    )
    monkeypatch.setattr(context, "traits", traits)

    class Attend(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return functional.scaled_dot_product_attention(q, k, v)

    given = tuple(torch.zeros(1, 8, 256, width, dtype=dtype) for _ in range(3))
    plan = purevk.plan(Attend(), given, device=context)
    trials = {trial_of(each.kernel) for each in plan.plan.dispatches} - {None}
    assert trials and trials <= {spec_of(*each) for each in asked}
