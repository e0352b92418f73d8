"""For tests of models and operators on purevk: comparisons with tolerances per dtype.

`purevk.testing.plugin` has the pytest fixtures and the marker. Importing this module loads neither
torch nor Vulkan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from purevk.dtypes import elements

if TYPE_CHECKING:
    from purevk.graph.context import Context

__all__ = ["TOLERANCES", "assert_close", "assert_same_as_eager", "tolerance_of"]

TOLERANCES: dict[str, tuple[float, float]] = {
    "float64": (1e-5, 1e-6),  # most kernels compute it in float32
    "float32": (1e-5, 1e-6),
    "float16": (2e-3, 1e-3),
    "bfloat16": (1.6e-2, 1e-2),
    "complex64": (1e-5, 1e-6),
    "complex128": (1e-10, 1e-12),
}
"""(rtol, atol) of the result of one operator by its dtype; (0, 0) for all others.

float16 and bfloat16: twice the rounding of the dtype, since torch and purevk may round to
different sides of a sum that both have in float32. The errors of a model's operators add up: see
`scale` of `assert_close`.
"""


def tolerance_of(dtype: Any) -> tuple[float, float]:
    """(rtol, atol) for a dtype of torch or numpy, or the name of one."""
    return TOLERANCES.get(_name(dtype), (0.0, 0.0))


def assert_close(
    actual: Any,
    expected: Any,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    scale: float = 1.0,
) -> None:
    """Raises `AssertionError` unless results are those that are expected.

    Elements are close if |actual - expected| <= atol + rtol * |expected|. NaN equals NaN, an infinity
    the same infinity. Integers and booleans have to be equal.

    Args:
        actual, expected: arrays of numpy, tensors of torch, numbers, strings, None, or lists,
            tuples and mappings of these. Both are nested alike; an array may stand for a tensor.
            Sizes and dtypes have to be the same (bfloat16 may be its bits, in uint16).
        rtol, atol: None: those of the dtype of `expected`, see `TOLERANCES`.
        scale: multiplies both. 10 to 100 suits whole models.
    """
    __tracebackhide__ = True
    for path, have, want in _pairs(actual, expected, ""):
        _compare(path, have, want, rtol, atol, scale)


def assert_same_as_eager(
    module: Any,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    further: Sequence[Sequence[Any]] = (),
    dynamic_shapes: Any = None,
    device: Context | int | str | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    scale: float = 1.0,
) -> None:
    """Compiles a module with purevk, calls it, and compares with what eager torch computes.

    Args:
        module: a `torch.nn.Module`. It is copied: its buffers stay as they are.
        inputs, kwargs, dynamic_shapes: as `purevk.compile` takes them.
        further: inputs of calls to compare after the first one, such as other sizes. Buffers that
            the module writes keep their content from call to call, in both.
        device: as `purevk.load` takes it. The fixture `purevk_device` is one.
        rtol, atol, scale: as for `assert_close`.

    Raises:
        AssertionError: a result, or an input that the module writes, differs.
        PurevkError: as `purevk.compile` and calls raise it.
    """
    import copy

    import torch

    import purevk

    eager = copy.deepcopy(module)
    with (
        torch.no_grad(),
        purevk.compile(
            copy.deepcopy(module), tuple(inputs), dynamic_shapes, kwargs=kwargs, device=device
        ) as program,
    ):
        for number, given in enumerate((inputs, *further)):
            mine, theirs = (
                copy.deepcopy((tuple(given), kwargs or {})),
                copy.deepcopy((tuple(given), kwargs or {})),
            )
            made = program(*mine[0], **mine[1])
            wanted = eager(*theirs[0], **theirs[1])
            where = f"call {number}: " if further else ""
            for text, have, want in (
                ("", made, wanted),
                (" (an input after the call)", mine, theirs),
            ):
                try:
                    assert_close(have, want, rtol=rtol, atol=atol, scale=scale)
                except AssertionError as error:
                    raise AssertionError(f"{where}{error}{text}") from None


def _name(dtype: Any) -> str:
    name = getattr(dtype, "name", None)
    return str(name) if name is not None else str(dtype).rpartition(".")[2]


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or hasattr(value, "detach")


def _pairs(have: Any, want: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """The leaves of two nested results, with where they are."""
    if isinstance(want, Mapping):
        if not isinstance(have, Mapping) or list(have) != list(want):
            keys = list(have) if isinstance(have, Mapping) else type(have).__name__
            raise AssertionError(f"result{path} is {keys}, not a mapping of {list(want)}")
        for key in want:
            yield from _pairs(have[key], want[key], f"{path}[{key!r}]")
    elif isinstance(want, (list, tuple)) and not _is_array(want):
        if not isinstance(have, (list, tuple)) or len(have) != len(want):
            count = len(have) if isinstance(have, (list, tuple)) else type(have).__name__
            raise AssertionError(f"result{path} is {count}, not {len(want)} results")
        for at, (one, other) in enumerate(zip(have, want)):
            yield from _pairs(one, other, f"{path}[{at}]")
    else:
        yield path, have, want


def _compare(
    path: str, have: Any, want: Any, rtol: float | None, atol: float | None, scale: float
) -> None:
    __tracebackhide__ = True
    if not _is_array(want) and not isinstance(want, np.generic):
        if isinstance(want, (int, float, complex)) and not isinstance(want, bool):
            have = have.item() if hasattr(have, "item") else have
            if type(have) is type(want):
                _compare(path, np.asarray(have), np.asarray(want), rtol, atol, scale)
                return
        if type(have) is not type(want) or have != want:
            raise AssertionError(f"result{path} is {have!r}, not {want!r}")
        return
    if not _is_array(have) and not isinstance(have, np.generic):
        raise AssertionError(f"result{path} is {have!r}, not an array")
    given, wanted = _dtype_name(have), _dtype_name(want)
    as_bits = wanted not in np.sctypeDict and given == f"uint{8 * want.itemsize}"
    shapes = tuple(have.shape), tuple(want.shape)
    if (given != wanted and not as_bits) or shapes[0] != shapes[1]:
        raise AssertionError(
            f"result{path} is {given}{list(shapes[0])}, not {wanted}{list(shapes[1])}"
        )
    one, other = _numbers(_typed(have, want) if as_bits else have), _numbers(want)
    limits = tolerance_of(wanted)
    relative = scale * (limits[0] if rtol is None else rtol)
    absolute = scale * (limits[1] if atol is None else atol)
    if one.dtype.kind not in "fc":
        wrong = one != other
    else:
        with np.errstate(invalid="ignore", over="ignore"):
            near = np.abs(one - other) <= absolute + relative * np.abs(other)
        finite = np.isfinite(other)
        same = (one == other) | (np.isnan(one) & np.isnan(other))
        wrong = ~np.where(finite, near | same, same)
    if wrong.any():
        raise AssertionError(_difference(path, wanted, one, other, wrong, relative, absolute))


def _difference(
    path: str,
    dtype: str,
    one: np.ndarray,
    other: np.ndarray,
    wrong: np.ndarray,
    rtol: float,
    atol: float,
) -> str:
    """What differs, in a sentence: how many elements, and the worst of them."""
    if one.dtype.kind in "fc":
        with np.errstate(invalid="ignore", over="ignore"):
            far = np.nan_to_num(np.abs(one - other), nan=np.inf, posinf=np.inf)
    else:
        far = np.abs(one.astype(np.float64) - other.astype(np.float64))
    at = np.unravel_index(int(np.argmax(np.where(wrong, far, -1))), one.shape) if one.ndim else ()
    index = f" at {[int(each) for each in at]}" if one.ndim else ""
    return (
        f"result{path}, {dtype}{list(one.shape)}: {int(wrong.sum())} of {one.size} elements differ by"
        f" more than {atol:g} + {rtol:g} * |expected|; most{index}: {one[at]} in place of {other[at]}"
    )


def _dtype_name(value: Any) -> str:
    return _name(value.dtype)


def _typed(have: Any, want: Any) -> Any:
    """The bits of a dtype that numpy lacks, as a tensor of it."""
    import torch

    array = np.ascontiguousarray(have)
    signed = torch.from_numpy(array.view(f"int{8 * array.itemsize}"))
    return signed.view(want.dtype)


def _numbers(value: Any) -> np.ndarray:
    """An array to compare: float64, complex128, or integers and booleans as they are."""
    if hasattr(value, "detach"):
        import torch

        tensor = value.detach().cpu()
        if tensor.dtype.is_complex:
            tensor = tensor.to(torch.complex128).resolve_conj()
        elif tensor.dtype.is_floating_point:
            tensor = tensor.to(torch.float64)
        return elements(tensor.resolve_neg())
    array = np.asarray(value)
    if array.dtype.kind == "c":
        return array.astype(np.complex128)
    if array.dtype.kind in "iub":
        return array
    return array.astype(np.float64)
