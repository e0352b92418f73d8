"""Which operators of torch a model file may run on the CPU: pure functions of tensors and numbers.

A file names operators by text. Some operators of torch open files, change or alias storage, or trust
their arguments so far that wrong ones crash the process. So a file gets only the operators that
these rules accept, by schema and tags. Whatever the rules cannot see is in reviewed lists."""

from __future__ import annotations

import re
from typing import Any

# "namespace.operator.overload", each an identifier. Never a path of attributes.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*){2}", re.ASCII)

_SPACES = ("aten", "prims", "quantized_decomposed", "torchao")

# Kinds of arguments and results that are tensors, numbers, and what describes tensors.
_ARGUMENTS = frozenset(
    "Tensor t int bool number float complex ScalarType Layout Device MemoryFormat Generator str".split()
)
_RESULTS = frozenset(("Tensor", "t", "int", "bool", "number", "float", "complex"))

# Names of arguments that are texts. Each chooses one of several ways to compute.
_CHOICES = frozenset(
    """
    UPLO approximate driver equation indexing interpolation mode norm ord p pad_mode padding
    padding_side reduce rounding_mode side
    """.split()
)

# Public operators of ATen that are refused, as patterns of whole names, with the reason.
_REFUSED: tuple[tuple[str, str], ...] = (
    ("from_file", "it reads or writes a file"),
    ("set_?|set_data|data|resize_?|resize_as_?|lift", "it changes or shares storage"),
    (r"is_set_to|record_stream|storage_offset|sym_storage_offset", "it is about storage"),
    (
        r"requires_grad_?|retains?_grad|detach_|get_gradients|is_leaf|output_nr|is_inference",
        "it is about gradients of the process",
    ),
    ("sym_constrain_range.*", "it is a statement about sizes and computes nothing"),
    (
        "(cudnn|miopen|mkldnn|mps|fbgemm|lstm_mps)_.*|batch_norm_(stats|elemt|update_stats)"
        "|batch_norm_(backward_(elemt|reduce)|gather_stats(_with_counts)?)"
        "|.*_overrideable|(is_)?pin(ned|_memory)|is_vulkan_available|get_device",
        "it belongs to another backend",
    ),
    (
        ".*sparse.*|to_(mkldnn|dense)(_backward)?|to_padded_tensor|nested_.*|(un)?flatten_dense_tensors"
        "|(hsp|ss?pad?d?|s)mm|(coalesce|is_coalesced|dense_dim|indices|values)(_copy)?"
        "|c?c?(row|col)_indices(_copy)?",
        "it is about tensors that are not dense",
    ),
    (
        "quantize_per_.*|quantized_.*|dequantize|q_.*|qscheme|int_repr|empty_quantized"
        "|choose_qparams_optimized|fused_moving_avg_obs_fake_quant",
        "it is about tensors of torch's quantized dtypes",
    ),
    (
        "ctc_loss|segment_reduce|embedding_(dense_)?backward|(adaptive_|fractional_)?max_pool[23]d(_with_indices)?_backward"
        "|native_batch_norm_backward|batch_norm_backward|.*_backward_jvp|matmul_backward"
        "|cummaxmin_backward|value_selecting_reduction_backward",
        "its kernel does not check the positions or tensors that it is given",
    ),
)

# Private operators of ATen that exporters write. Reviewed: pure, and they check their arguments.
_PRIVATE = frozenset(
    """
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d
    _adaptive_avg_pool3d_backward _add_relu _addmm_activation _aminmax _batch_norm_impl_index
    _cast_Byte _cast_Char _cast_Double _cast_Float _cast_Half _cast_Int _cast_Long _cast_Short
    _cdist_backward _cdist_forward _cholesky_solve_helper _conj _conj_copy _conj_physical
    _conv_depthwise2d _convolution _convolution_mode _dim_arange _embedding_bag
    _embedding_bag_forward_only _euclidean_dist _fft_c2c _fft_c2r _fft_r2c _fused_dropout
    _fused_rms_norm _grouped_mm _int_mm _is_all_true _is_any_true _linalg_det _linalg_eigh
    _linalg_eigvals _linalg_slogdet _linalg_solve_ex _linalg_svd _local_scalar_dense _log_softmax
    _log_softmax_backward_data _logcumsumexp _lu_with_info _native_batch_norm_legit
    _native_batch_norm_legit_functional _native_batch_norm_legit_no_training _neg_view_copy
    _pad_circular _pad_enum _pdist_forward _prelu_kernel _prelu_kernel_backward _reshape_alias_copy
    _reshape_copy _reshape_from_tensor _safe_softmax _scaled_dot_product_attention_math
    _scaled_dot_product_flash_attention_for_cpu _shape_as_tensor _softmax _softmax_backward_data
    _stack _standard_gamma _to_copy _trilinear _unique
    _unique2 _unsafe_index _unsafe_index_put _unsafe_masked_index
    _unsafe_masked_index_put_accumulate _unsafe_view _upsample_bicubic2d_aa
    _upsample_bicubic2d_aa_backward _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward
    _upsample_nearest_exact1d _upsample_nearest_exact1d_backward _upsample_nearest_exact2d
    _upsample_nearest_exact2d_backward _upsample_nearest_exact3d _upsample_nearest_exact3d_backward
    _weight_int8pack_mm _weight_norm _weight_norm_interface
    __and__ __iand__ __ilshift__ __ior__ __irshift__ __ixor__ __lshift__ __or__ __rshift__ __xor__
    """.split()
)

# Private operators of the other namespaces, and those of `prims` that are not pure.
_PRIVATE_ELSEWHERE = frozenset(("quantized_decomposed._choose_qparams_per_token_asymmetric_impl",))
_PRIMS_REFUSED = re.compile("device_put|copy_to|copy_strided|resize|as_strided.*|.*view.*|normal")

# Operators without a meta kernel that check their arguments themselves. Reviewed.
_CHECK_THEMSELVES = frozenset(
    """
    bincount binomial conv_depthwise3d equal fake_quantize_per_channel_affine_cachemask
    fake_quantize_per_tensor_affine_cachemask geqrf histogram linalg_lstsq masked_select native_norm
    slow_conv3d_forward slow_conv_dilated2d slow_conv_dilated3d slow_conv_transpose3d
    unique_consecutive unique_dim unique_dim_consecutive adaptive_avg_pool2d adaptive_avg_pool3d
    _adaptive_avg_pool2d _adaptive_avg_pool3d _add_relu _aminmax _conv_depthwise2d
    _local_scalar_dense _logcumsumexp _native_batch_norm_legit _unique _unique2
    """.split()
)


def is_name(name: object) -> bool:
    """Whether a text has the form of an operator's full name."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def overload(torch: Any, name: str) -> tuple[Any, Any]:
    """The overloads of an operator and the one of a full name; None if torch has no such operator."""
    if not is_name(name):
        return None, None
    space, base, overload = name.split(".")
    try:
        packet = getattr(getattr(torch.ops, space), base)
        operator = getattr(packet, overload)
    except (AttributeError, RuntimeError):
        return None, None
    if not isinstance(operator, torch._ops.OpOverload) or (
        operator._schema.name != f"{space}::{base}" or operator._overloadname != overload
    ):
        return None, None
    return packet, operator


def refusal(operator: Any) -> str | None:
    """Why a file may not run an overload of torch; None if it may.

    Args:
        operator: a `torch._ops.OpOverload`.
    """
    import torch

    schema = operator._schema
    space, _, base = schema.name.partition("::")
    if space not in _SPACES:
        return f"only operators of {', '.join(_SPACES)} are known to be pure"
    if base.startswith("_") and not _is_reviewed(space, base):
        return "it is private to torch"
    if space == "aten":
        for pattern, reason in _REFUSED:
            if re.fullmatch(pattern, base):
                return reason
    elif space == "prims" and _PRIMS_REFUSED.fullmatch(base):
        return "it changes or shares storage"
    refused = _refused_argument(schema, _CHOICES)
    if refused is not None:
        return refused
    for argument in schema.arguments:
        if argument.is_write and _plain(argument.real_type) != "Tensor":
            return f"it writes its argument {argument.name}"
    if not schema.returns and not any(argument.is_out for argument in schema.arguments):
        return "it has no result"
    for return_ in schema.returns:
        if _plain(return_.real_type) not in _RESULTS:
            return f"it returns a {_plain(return_.real_type)}"
    if torch.Tag.inplace_view in operator.tags:
        return "it changes the sizes of its argument"
    if space == "aten" and not _has_meta_kernel(operator) and base not in _CHECK_THEMSELVES:
        return "torch cannot check its arguments: it has no meta kernel"
    return None


def untraceable(operator: Any) -> str | None:
    """Why torch may not trace an overload that a file names, with tensors that have no data; None if
    it may. Kernels do not run then, but for operators without tensors.

    Args:
        operator: a `torch._ops.OpOverload`.
    """
    import torch

    schema = operator._schema
    if not torch._C._dispatch_has_kernel(operator.name()):
        return "torch's dispatcher does not know it"  # TorchScript's own, such as aten::save
    if schema.name == "aten::from_file":
        return "it reads or writes a file"
    return _refused_argument(schema, _CHOICES | {"msg", "assert_msg"})


def _refused_argument(schema: Any, texts: frozenset[str]) -> str | None:
    """Why an operator is refused for the kind of an argument.

    Args:
        texts: names of arguments that may be texts.
    """
    for argument in schema.arguments:
        kind = _plain(argument.real_type)
        if kind not in _ARGUMENTS:
            return f"its argument {argument.name} is a {kind}"
        if kind == "str" and argument.name not in texts:
            return f"its argument {argument.name} is a free text"
    return None


def _is_reviewed(space: str, base: str) -> bool:
    return base in _PRIVATE if space == "aten" else f"{space}.{base}" in _PRIVATE_ELSEWHERE


def _plain(type: Any) -> str:
    """The kind of an argument or result, without `Optional` and `List` around it."""
    text = str(type)
    while (match := re.fullmatch(r"(?:Optional|List)\[(.*)\]", text)) is not None:
        text = match[1]
    return text


def _has_meta_kernel(operator: Any) -> bool:
    """Whether sizes of results follow without data: from a kernel of its own, or from those of the
    operators that it is composed of."""
    import torch

    has = torch._C._dispatch_has_kernel_for_dispatch_key
    # A few overloads are for numbers alone ("aten::mul"); the dispatcher does not know them.
    return bool(torch._C._dispatch_has_kernel(operator.name())) and any(
        has(operator.name(), key)
        for key in (
            "Meta",
            "CompositeImplicitAutograd",
            "CompositeExplicitAutograd",
            "CompositeExplicitAutogradNonFunctional",
        )
    )
