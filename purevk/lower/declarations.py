"""Declarations in the GLSL that is written here."""

from __future__ import annotations

from collections.abc import Collection

from purevk.dtypes import DType

_LOCAL_SIZE_ID = 100  # the specialization constant `local_size_x`


def spec_constant(number: int, name: str) -> str:
    """The declaration of the specialization constant `number`, counted without `local_size_x`."""
    return f"SPEC_CONSTANT({number if number < _LOCAL_SIZE_ID else number + 1}, {name})"


def buffer(number: int | str, name: str, element: str, access: str) -> str:
    """The declaration of the storage buffer `buf_` + `name`.

    Args:
        number: of the binding, or an expression of macros.
        element: GLSL's type of an element.
        access: "r", "w" or "rw".
    """
    kind = {"r": "READONLY_BUFFER", "w": "WRITEONLY_BUFFER", "rw": "BUFFER"}[access]
    return f"{kind}({number}, {name}, {element})"


def byte_features(*dtypes: DType) -> dict[str, str]:
    """Those of `element_features` that elements of one byte need."""
    return {"HAS_8BIT": "1"} if any(dtype.itemsize == 1 for dtype in dtypes) else {}


def element_features(dtypes: Collection[DType]) -> dict[str, str]:
    """The macros that turn on what GLSL needs for elements of these types."""
    needs = {
        "HAS_INT64": DType.int64 in dtypes,
        "HAS_FLOAT64": DType.float64 in dtypes,
        "HAS_16BIT": any(dtype.itemsize == 2 for dtype in dtypes),
    }
    return {name: "1" for name, needed in needs.items() if needed} | byte_features(*dtypes)
