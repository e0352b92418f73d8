"""Names of operators in files, and the operator definitions that they name."""

from __future__ import annotations

from purevk.ops import registry

# Vulkan graphs drop the namespace of operators that were defined with torch.library alone.
_BARE = {
    "sdpa_with_kv_cache": "llama", "custom_sdpa": "llama", "update_cache": "llama", "conv_with_clamp": "et_vk",
}  # fmt: skip

# Out-variants whose functional overload does not follow from the name. Otherwise "X_out" belongs to
# X, and "out" to the default.
_OUT = {
    "aten.any.out": "aten.any.dim",
    "aten.any.all_out": "aten.any.default",
    "aten.any.dims_out": "aten.any.dims",
    "aten.all.out": "aten.all.dim",
    "aten.all.all_out": "aten.all.default",
    "aten.sum.IntList_out": "aten.sum.dim_IntList",
    "aten.mean.out": "aten.mean.dim",
    "aten.mean.dtype_out": "aten.mean.default",
    "aten.prod.int_out": "aten.prod.dim_int",
    "aten.prod.out": "aten.prod.default",
    "aten.max.dim_max": "aten.max.dim",
    "aten.min.dim_min": "aten.min.dim",
    "aten.max.unary_out": "aten.max.default",
    "aten.min.unary_out": "aten.min.default",
    "aten.topk.values": "aten.topk.default",
    "aten.sort.values": "aten.sort.default",
    "aten.sort.values_stable": "aten.sort.stable",
    "aten.arange.start_out": "aten.arange.start_step",
    "aten.arange.out": "aten.arange.default",
    "aten.empty.out": "aten.empty.memory_format",
    "aten.squeeze_copy.dim_out": "aten.squeeze_copy.dim",
    "aten.var.out": "aten.var.dim",
    "aten.var.correction_out": "aten.var.correction",
    "aten.std.correction_out": "aten.std.correction",
    "aten.squeeze.dims_out": "aten.squeeze.dims",
    "aten.std.out": "aten.std.dim",
    "aten.pow.Scalar_out": "aten.pow.Scalar",
    "aten.norm.out": "aten.norm.ScalarOpt_dim",
    "aten.median.dim_values": "aten.median.dim",
    "aten.where.self_out": "aten.where.self",
    "aten.convolution.out": "aten.convolution.default",
    "aten.add.out": "aten.add.Tensor",
    "aten.sub.out": "aten.sub.Tensor",
    "aten.mul.out": "aten.mul.Tensor",
    "aten.div.out": "aten.div.Tensor",
    "aten.div.out_mode": "aten.div.Tensor_mode",
    "aten.max.out": "aten.max.other",
    "aten.min.out": "aten.min.other",
    "aten.copysign.out": "aten.copysign.Tensor",
    "aten.xlogy.OutTensor": "aten.xlogy.Tensor",
    "aten.norm.dtype_out": "aten.norm.ScalarOpt_dim_dtype",
    "aten.linalg_inv_ex.inverse": "aten.linalg_inv_ex.default",
    "aten.max_pool2d_with_indices_backward.grad_input": "aten.max_pool2d_with_indices_backward.default",
    "quantized_decomposed.choose_qparams.Tensor_out": "quantized_decomposed.choose_qparams.tensor",
    "quantized_decomposed.quantize_per_tensor.Tensor_out": "quantized_decomposed.quantize_per_tensor.tensor",
    "quantized_decomposed.dequantize_per_tensor.Tensor_out": "quantized_decomposed.dequantize_per_tensor.tensor",
}

# Arguments of out-variants that are not the first arguments of the functional overload.
OUT_ARGUMENTS = {
    "aten._to_copy.out": ("x", "non_blocking", "memory_format"),
    "dim_order_ops._to_dim_order_copy.out": ("x", "non_blocking", "dim_order"),
    "dim_order_ops._clone_dim_order.out": ("x", "non_blocking", "dim_order"),
    "dim_order_ops._empty_dim_order.out": ("size", "memory_format"),
    "aten.full.out": ("size", "fill_value"),
    "aten.full_like.out": ("x", "fill_value", "memory_format"),
    "aten.zeros_like.out": ("x", "memory_format"),
    "aten.ones_like.out": ("x", "memory_format"),
    "aten.empty_like.out": ("x", "memory_format"),
    "aten.scalar_tensor.out": ("s",),
    "aten.arange.start_out": ("start", "end", "step"),
    "aten.arange.out": ("end",),
    "aten.zeros.out": ("size",),
    "aten.ones.out": ("size",),
    "aten.empty.out": ("size", "memory_format"),
}

# Symbolic arithmetic on sizes, in plans (executorch_prim) and in Vulkan graphs (bare Python
# operators).
INTEGER_OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%", "eq": "==", "ne": "!=", "lt": "<", "le": "<=",
    "gt": ">", "ge": ">=", "neg": "neg", "ceil": "same", "round": "same", "trunc": "same", "sym_max": "max",
    "sym_min": "min", "truediv": "/",
}  # fmt: skip


def vulkan_name(name: str) -> str:
    """The name "namespace.op.overload" of an operator of a Vulkan graph."""
    parts = name.split(".")
    if len(parts) <= 2 and parts[0] in _BARE:
        return ".".join([_BARE[parts[0]], parts[0], parts[1] if len(parts) == 2 else "default"])
    if (
        len(parts) == 2 and registry.find(f"aten.{name}") is not None
    ):  # an ATen overload that is no edge operator
        return f"aten.{name}"
    return name


def plan_name(name: str, overload: str) -> str:
    """The functional name "namespace.op.overload" of a kernel of a plan, such as ("aten::mul",
    "Scalar_out")."""
    space, _, op = name.partition("::")
    full = f"{space}.{op}.{overload or 'default'}"
    if full in _OUT:
        return _OUT[full]
    if overload in ("out", ""):
        return f"{space}.{op}.default"
    return f"{space}.{op}.{overload.removesuffix('_out')}"


def out_names(name: str) -> list[str]:
    """The names "namespace.op.overload" of kernels of plans that compute an operator: the inverse of
    `plan_name`."""
    usual = f"{name.removesuffix('.default')}.out" if name.endswith(".default") else f"{name}_out"
    names = [out for out, functional in _OUT.items() if functional == name]
    return names if usual in _OUT or "." not in name else [*names, usual]


def is_out_variant(name: str, overload: str) -> bool:
    """Whether a kernel of a plan writes to its last arguments."""
    return (
        overload == "out"
        or overload.endswith("_out")
        or f"{name.replace('::', '.')}.{overload}" in _OUT
    )
