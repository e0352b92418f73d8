"""What a dispatch need not pass: macros, parameters and modes follow from a tensor and the template's
declaration."""

import pytest

from purevk.dtypes import DType
from purevk.errors import KernelInterfaceError
from purevk.ir import Layout, TensorType, Value
from purevk.lower.declared import AUTO
from purevk.lower.lowering import Lowering, Operand
from purevk.tuning import DEFAULT, SOFTWARE, DeviceTraits

SIZES = {"M": 8, "N": 8, "K": 8, "lda": 8, "ldb": 8, "ldo": 8}
SIZES |= dict.fromkeys(("batch_a", "batch_b", "batch_o", "outer_a", "outer_b", "outer_o"), 0)
SIZES["inner_batches"] = 1


def operand(name: str, dtype: DType = DType.float32, offset: int = 0) -> Operand:
    type = TensorType(dtype, (8, 8))
    return Operand(Value(name, type), Layout(offset, (8, 1)), type)


def dispatch(template: str, tensors, *arguments, profile=SOFTWARE, **options):
    lowering = Lowering(DeviceTraits(frozenset(), profile=profile, max_texels=1000), {}, {})
    lowering.dispatch(template, tensors, *arguments, grid=(1, 1, 1), **options)
    return lowering.dispatches[0]


def product(macros=None, bias=None, **options):
    tensors = {"a": operand("a", offset=4), "b": operand("b"), "out": operand("out", offset=12)}
    return dispatch("matmul/matmul.comp", {**tensors, "bias": bias}, SIZES, macros or {}, **options)


@pytest.mark.parametrize("dtype", [DType.float32, DType.float16])
def test_types_flags_offsets_and_modes_are_filled_in(dtype):
    plain, biased = product(), product(bias=operand("bias", dtype, 3))
    macros = dict(biased.kernel.macros)
    assert (dict(plain.kernel.macros)["BIAS"], macros["BIAS"]) == ("0", "1")
    assert (macros["T_BIAS"], macros["T_A"]) == (dtype.glsl, "float")
    assert plain.push[13:17] == (4, 0, 12, 0) and biased.push[13:17] == (4, 0, 12, 3)
    written = [(binding.storage.name, binding.write) for binding in biased.bindings]
    assert written == [("a", False), ("b", False), ("bias", False), ("out", True)]


def test_what_is_passed_has_precedence():
    made = product({"T_A": "float16_t", "TEXEL_B": 0}, specialize=("K",))
    assert dict(made.kernel.macros)["T_A"] == "float16_t"
    assert [binding.kind for binding in made.bindings] == ["texel:r32f", "storage", "storage"]
    assert made.kernel.constants == ((2, 8),)


def test_texel_buffers_are_as_wide_as_vectors():
    made = product({"VEC4_A": 1}, bias=operand("bias", offset=3))
    kinds = [binding.kind for binding in made.bindings]
    assert kinds == ["texel:rgba32f", "texel:r32f", "texel:r32f", "storage"]
    # A bias that does not start at a multiple of 4 elements is no texel buffer of vectors.
    unaligned = product({"VEC4_OUT": 1}, bias=operand("bias", offset=3))
    assert unaligned.bindings[2].kind == "storage"
    assert product(profile=DEFAULT).bindings[0].kind == "storage"


def test_rows_are_texel_buffers_where_the_caller_asks():
    params = {"rows": 8, "columns": 8, "x_stride_0": 8, "out_stride_0": 8}
    params |= {"x_column": 1, "out_column": 1}
    tensors = {"x": operand("x"), "out": operand("out")}

    def kind(macros):
        return dispatch("reduce/softmax.comp", tensors, params, macros, local=8).bindings[0].kind

    assert kind({}) == "storage" and kind({"TEXEL_X": AUTO}) == "texel:r32f"
    tensors["x"] = operand("x", DType.bfloat16)
    assert kind({"TEXEL_X": AUTO}) == "storage"


def test_parameters_are_constants_by_profile():
    every = set(range(17))
    assert {number for number, _ in product(profile=DEFAULT).kernel.constants} == every
    assert product(never=("M",), profile=DEFAULT).push == (8,)
    assert product(always=("M",)).kernel.constants == ((0, 8),)
    assert {number for number, _ in product(specialize=True).kernel.constants} == every


def test_a_missing_tensor_raises():
    with pytest.raises(KernelInterfaceError, match="missing parameters: offset_b, offset_bias"):
        dispatch("matmul/matmul.comp", {"a": operand("a"), "out": operand("out")}, SIZES)
