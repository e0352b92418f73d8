"""What the operators on small matrices share.

One invocation takes a matrix, or a column of the right-hand side. That suits batches of small
matrices (poses, cameras, covariances). Larger matrices have QR factors by other kernels
(`reflections.py`). Their other factors are made on the CPU, where a core is faster than an invocation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.lowering import FOUND
from purevk.ops.builder import Builder
from purevk.ops.index.check import check
from purevk.ops.map import mapped, mapped_over_all
from purevk.ops.registry import Made, ShapeError, Types, definition_of, rewrite
from purevk.tuning import DeviceTraits

# Rows and columns. With these the loops stay within the device's limit, and an invocation is not much
# slower than a core.
LARGEST = 32
INT = DType.int32
_FORMS = ("lu", "reflectors", "reflect", "cholesky", "solve")  # FORM of linalg/small.comp


def refuse_type(type: TensorType) -> str | None:
    """Why no kernel takes a tensor of this dtype, or None."""
    allowed = (DType.float32, DType.float64, DType.int32)
    return None if type.dtype in allowed else f"no kernel for {type.dtype.name}"


def _refuse(node: Node, traits: DeviceTraits) -> str | None:
    for value in node.inputs:
        why = refuse_type(value.type)
        if why:
            return why
        if any(_dims.upper(size) > LARGEST for size in value.type.dims[-2:]):
            return f"no kernel above {LARGEST} rows"
    parameters = definition_of(node).parameters
    if "check_errors" in parameters and node.bool("check_errors"):
        return "no kernel that raises errors"
    if "pivot" in parameters and not node.bool("pivot"):
        return "no kernel without pivots"
    return None


def factorization(
    name: str, shape: Callable[..., Types], expand: Callable[..., Made], *names: str
) -> None:
    """Registers an operator on small matrices."""
    rewrite(f"aten.{name}.default", shape, *names, supports=_refuse)(expand)


def lead(type: TensorType, less: int = 2) -> str:
    """The coordinates of a batch, each with a comma."""
    return "".join(f"i{d}, " for d in range(type.rank - less))


def matrix_kernel(
    builder: Builder,
    form: str,
    inputs: Mapping[str, Value],
    numbers: Mapping[str, Size],
    *results: TensorType,
    **macros: object,
) -> tuple[Value, ...]:
    """Emits a kernel of `linalg/small.comp`.

    Args:
        form: one of `_FORMS`.
        inputs: by name, with the batch dims of the first result.
        results: matrices, vectors and numbers for each matrix of the batch.
    """
    batch = results[0].dims[:-2]
    lead = [f"i{d}" for d in range(len(batch))]
    types = {name: value.type for name, value in inputs.items()}
    outputs = {f"R{n or ''}": type for n, type in enumerate(results)}
    for name, type in (types | outputs).items():
        own = ["i", "j"][: type.rank - len(batch)]
        at = ", ".join([*lead, *own]) or "0"
        if own and name in ("R", *inputs):
            macros[f"{name}_AT({', '.join(own)})"] = f"{name}({at})"
        if name in outputs:
            macros[f"{name}_SET({', '.join([*own, 'v'])})"] = f"{name}_PUT({at}, v)"
    by_column = form in ("reflect", "solve")
    return mapped_over_all(
        builder,
        "",
        inputs,
        (*batch, results[0].dims[-1]) if by_column else batch or (1,),
        *(type if type.rank else type.with_dims((1,)) for type in results),
        numbers=numbers,
        template="linalg/small.comp",
        macros={"FORM": _FORMS.index(form), "COLUMN": f"i{len(batch)}", **macros},
    )


def require_square(x: TensorType) -> None:
    """Raises `ShapeError` for a matrix that is not square."""
    if x.rank < 2 or x.dims[-1] != x.dims[-2]:
        raise ShapeError(f"{x} is no square matrix")


def matrix_transpose(builder: Builder, x: Value) -> Value:
    """The last two dims in the other order."""
    return builder.aten.transpose.int(x, dim0=-1, dim1=-2)


def triangle(builder: Builder, x: Value, upper: bool, unit: bool = False) -> Value:
    """The upper or lower triangle of matrices, with ones on the diagonal if asked for."""
    at = lead(x.type)
    r, c = (f"i{x.type.rank - n}" for n in (2, 1))
    keep = f"{c} > {r}" if upper else f"{c} < {r}"
    diagonal = "1.0" if unit else f"X({at}{r}, {c})"
    return mapped(
        builder, f"r = {r} == {c} ? {diagonal} : {keep} ? X({at}{r}, {c}) : 0.0;", {"X": x}, x.type
    )


def eye(builder: Builder, like: TensorType, rows: Size, columns: Size) -> Value:
    """Identity matrices for a batch of the dims of `like`."""
    made = builder.aten.eye.m(rows, columns, like.dtype)
    return builder.aten.expand(made, (*like.dims[:-2], rows, columns))


def with_info(a: TensorType) -> tuple[TensorType, TensorType]:
    """The types of results of the sizes of square matrices, and of a number for each: where it
    failed."""
    require_square(a)
    return a, TensorType(INT, a.dims[:-2])


# Why an operation fails, as torch says it, by what the name of the operator contains: the first that
# does counts.
_FAILURES = {
    "inv": f"The diagonal element {FOUND} is zero, the inversion could not be completed because the"
    " input matrix is singular.",
    "solve": "The solver failed because the input matrix is singular.",
    "cholesky": "The factorization could not be completed because the input is not positive-definite"
    f" (the leading minor of order {FOUND} is not positive-definite).",
    "lu_factor": f"U[{FOUND},{FOUND}] is zero and using it on lu_solve would result in a division by"
    " zero. If you still want to perform the factorization, consider calling linalg.lu(A, pivot) or"
    " linalg.lu_factor_ex(A, pivot)",
    "": f"The algorithm failed (error code: {FOUND}).",
}


def _check_shape(info: TensorType, api_name: str, is_matrix: bool) -> None:
    """No result: the call raises if a number of `info`, int32, is not 0."""
    if info.dtype != INT:
        raise ShapeError(f"numbers of errors in {info.dtype.name}")


@rewrite("aten._linalg_check_errors.default", _check_shape)
def _check(builder: Builder, node: Node, info: Value, api_name: str, is_matrix: bool) -> None:
    why = next(text for part, text in _FAILURES.items() if part in api_name)
    check(builder, node, info, 0, 1, f"{api_name}: {why}")
