"""Atomic writes of `purevk.map`, for elements that several invocations may write."""

from __future__ import annotations

from purevk.dtypes import DType


def atomics(
    name: str, given: str, dtype: DType, buffer: str, index: str, adds_floats: bool
) -> dict[str, str]:
    """The macros that add to an element of a buffer of 32-bit words (`adds_floats`: of floats), or
    raise it to a number."""
    if adds_floats:
        return {f"{name}_ADD({given}, v)": f"atomicAdd({buffer}[{index}], v)"}
    number, bits = ("uintBitsToFloat", "floatBitsToUint") if dtype.is_float else ("int", "uint")

    def exchange(made: str) -> str:
        return (
            f"{{ LOOPS(loop(subgroup_size)) int at = {index}; uint old = {buffer}[at]; for (;;) {{ uint was ="
            f" atomicCompSwap({buffer}[at], old, {bits}({made}));"
            " if (was == old) break; old = was; } }"
        )

    if dtype is DType.float32:
        add = exchange("uintBitsToFloat(old) + (v)")
    elif dtype is DType.int64:
        # The words one after the other: what the lower one carries is added to the upper one.
        add = (
            f"{{ int at = 2 * ({index}); uvec2 more = uvec2(unpack32(int64_t(v))); uint old ="
            f" atomicAdd({buffer}[at], more.x);"
            f" atomicAdd({buffer}[at + 1], more.y + (old + more.x < old ? 1u : 0u)); }}"
        )
    else:
        add = f"atomicAdd({buffer}[{index}], uint(v))"
    return {
        f"{name}_ADD({given}, v)": add,
        f"{name}_JOIN({given}, v)": exchange(f"COMBINE({number}(old), (v))"),
        # The words start at 0, and only grow.
        f"{name}_MAX({given}, v)": f"atomicMax({buffer}[{index}], uint(v))",
    }
