"""Runs an expression of GLSL for each element of an array."""

from __future__ import annotations

import numpy as np

from tests.glsl.harness import Out, ceil_div, run


def evaluate(expression, *arguments, dtype=np.float32, glsl="float"):
    """The expression (of v, and of w if there are two arguments) for each element."""
    (n,) = arguments[0].shape
    macros = {
        "T_X": glsl,
        "T_OUT": glsl,
        "ACC": glsl,
        "HAS_INT64": 1,
        "HAS_FLOAT64": int(glsl == "double"),
        "ROW_PER_INVOCATION": 1,
        "COMBINE(a, b)": "(b)",
        "LOAD(v)": expression if len(arguments) == 1 else "wrapped(v, buf_w[o])",
    }
    if "fn_" in expression:
        macros["PV_FUNCTIONS"] = 1
    buffers = [arguments[0].astype(dtype), Out((n,), dtype)]
    if len(arguments) == 2:
        macros["EXTRA_BUFFERS"] = (
            f"READONLY_BUFFER(EXTRA_BINDING, w, {glsl})"
            f" {glsl} wrapped({glsl} v, {glsl} w) {{ return {expression}; }}"
        )
        buffers.append(arguments[1].astype(dtype))
    params = {"x_offset": 0, "out_offset": 0, "outputs": n}
    params |= {"size_r1": 1, "stride_r1": 1, "stride_0": 1}
    (out,) = run("reduce/reduce.comp", buffers, params, ceil_div(n, 64), macros, specialize=True)
    return out
