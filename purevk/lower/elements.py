"""Macros that name element types, convert them, and give their extremes."""

from __future__ import annotations

from purevk.dtypes import DType

# The dtypes that hold values of computing types.
ACC_TYPES = {t.acc: t for t in (DType.float32, DType.int32, DType.int64, DType.float64)}
_EXTREMES = {
    "float": ("uintBitsToFloat(0xff800000u)", "uintBitsToFloat(0x7f800000u)"),
    "int": ("(-2147483647 - 1)", "2147483647"),
    "int64_t": ("PV_INT64_MIN", "PV_INT64_MAX"),
    "double": ("double(-PV_INF)", "double(PV_INF)"),
}


def extreme(start: str, acc: str) -> str:
    """GLSL of what to begin with, where LOWEST and HIGHEST are the extremes of the computing
    type."""
    lowest, highest = _EXTREMES.get(acc, ("", ""))
    return start.replace("LOWEST", lowest).replace("HIGHEST", highest)


def conversions(source: DType, target: DType, acc: str) -> dict[str, str]:
    """Macros that name element types and convert them to and from the computing type."""
    macros = {"T_X": source.glsl, "T_OUT": target.glsl, "ACC": acc}
    if source is DType.bool and acc != "bool":
        macros["FROM_X(v)"] = f"{acc}(v)"
    if DType.int64 in (source, target) or acc == "int64_t":
        macros["HAS_INT64"] = "1"
    if acc == "double":
        macros["HAS_FLOAT64"] = "1"
    if source is DType.bfloat16:
        macros["FROM_X(v)"] = "uintBitsToFloat(uint(v) << 16)"
    if target is DType.bfloat16:
        macros["TO_OUT(v)"] = "uint16_t(pv_bfloat16_bits(float(v)))"
    return macros


def acc_of(dtype: DType) -> str:
    """The type that statements see for elements of a dtype."""
    return "int" if dtype is DType.bool else dtype.acc
