"""Which kernel multiplies by a quantized weight, with which tiles.

- One row of activations: `qdot.comp`, where a workgroup takes 4 rows of the weight and stages nothing;
  with many columns `qmatvec.comp`, where a subgroup takes them and shares activations. Without matrix
  cores, up to 8 rows take the latter.
- Few rows with matrix cores: `qdot_coopmat.comp` for one row of many columns, and for 2 to 4 rows of
  float16 with weights of 4 bits in groups of a multiple of 32 values.
- Other rows with matrix cores: `qmatmul_coopmat.comp`. Quantized values go from memory into fragments
  as exact float16. A float32 activation becomes two float16 values, so the accuracy is that of float32.
- From 256 rows of float16 on, `qdequantize.comp` makes the weight into float16 at each call, and a
  matmul of float16 follows. Weights with minimums have no other kernel on matrix cores, so for them
  it is so from 33 rows on. Software devices do the same in float32, from 16 rows on: they have no
  other kernel for many rows.
- Many rows of int8: `qmatmul_int.comp`, convolutions `qconv2d.comp`. Their sums are integers, so they
  are exact.
"""

from __future__ import annotations

from purevk.dtypes import DType
from purevk.ir import dims as _dims
from purevk.lower.lowering import Operand
from purevk.lower.numbers import gcd4, gcd8
from purevk.ops.quantized.kernels import (
    FEW_ROWS,
    FUSED_ROWS,
    TEMPLATES,
    Form,
    QuantizedMatmul,
    has_few_rows,
)
from purevk.tuning import DeviceTraits
from purevk.tuning.candidates import reasons

HALVES_ROWS = (
    256  # from so many rows on, a matmul of halves is faster by more than it takes to make them
)
DEQUANTIZED_BYTES = 1 << 28  # of a dequantized weight, at most: it is temporary memory
MINIMUM_ROWS = 4 * FEW_ROWS + 1  # as HALVES_ROWS, of weights with minimums
SOFTWARE_ROWS = 2 * FEW_ROWS  # as HALVES_ROWS, of float32 on software devices


def choose(traits: DeviceTraits, matmul: QuantizedMatmul) -> Form:
    """The kernel for a matmul with a quantized weight."""
    has_few_rows(traits, matmul)  # decided in any case: few rows have a lowering of their own
    template = next(each for each in TEMPLATES if each.fits(traits, matmul))
    traits.choices.note(
        "quantized matmul", matmul, template, lambda: reasons(traits, matmul, TEMPLATES)
    )
    return template.form(traits, matmul)


def is_dequantized(traits: DeviceTraits, matmul: QuantizedMatmul) -> bool:
    """Whether the weight is better dequantized at each call, to the dtype of the activations."""
    if not traits.profile.has_fast_shared_memory:
        least = None if matmul.halves else SOFTWARE_ROWS
    elif matmul.halves and traits.coopmat_shape is not None:
        least = MINIMUM_ROWS if matmul.minimums else HALVES_ROWS
    else:
        least = None
    nbytes = (2 if matmul.halves else 4) * matmul.max_n * _dims.upper(matmul.k)
    return (
        least is not None
        and not matmul.integers
        and _dims.range_of(matmul.m)[0] >= least
        and nbytes <= min(DEQUANTIZED_BYTES, traits.max_storage_range)
        and _dims.gcd_of(matmul.k) % 8 == 0
        and matmul.group % 8 == 0
    )


def choose_few_rows(traits: DeviceTraits, matmul: QuantizedMatmul, paired: bool) -> Form | None:
    """How one of the kernels of few rows runs; None if another template is faster, or its form lacks
    these parts.

    Args:
        paired: a team computes pairs of columns.
    """
    if matmul.max_m > FEW_ROWS or _dims.gcd_of(matmul.k) % 4:
        return None
    if paired and matmul.max_n % 8:
        return None
    form = choose(traits, matmul)
    macros = form.macros
    if form.template == "quantized/qdot_coopmat.comp" and macros["ROWS"] > FUSED_ROWS:
        return None
    columns = {"quantized/qdot.comp": 4, "quantized/qdot_coopmat.comp": 16}.get(form.template)
    if columns:
        if paired and macros.get("ROWS") == 1:  # a pair has as many words in flight as two segments
            macros = {**macros, "SEGMENTS": 1}
        grid = (_dims.ceil_div(matmul.n, columns * (1 + paired)), *form.grid[1:])
        return Form(form.template, grid, macros, form.subgroup_size)
    if form.template != "quantized/qmatvec.comp" or not macros["SHARE"] or macros["ANY_GROUP"]:
        return None
    if not paired:
        return form
    columns = 8  # pairs of two vec4s for each invocation
    grid = (_dims.ceil_div(matmul.n, columns * macros["TEAMS"]), *form.grid[1:])
    return Form(form.template, grid, {**macros, "COLS": columns}, form.subgroup_size)


def vectors_of_rows(form: Form, x: Operand) -> dict[str, int]:
    """The macros that say how long vectors a kernel reads of the dense rows of float activations."""
    starts = (x.dims[1], x.strides[0], x.offset)
    wide = form.template == "quantized/qdot.comp" and x.dtype is DType.float16 and gcd8(*starts)
    return {"VEC8_A": 1, "VEC4_A": 0} if wide else {"VEC4_A": int(gcd4(*starts))}
