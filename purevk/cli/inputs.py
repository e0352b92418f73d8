"""The inputs of a call from the command line: files, numbers or random numbers."""

from __future__ import annotations

import argparse
import fnmatch
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from purevk import fallback
from purevk.dtypes import DType
from purevk.errors import InputError, SizeConstraintError
from purevk.ir import Dim, FixedInput, Graph, Symbol, Value
from purevk.ir import dims as _dims
from purevk.paths import open_regular
from purevk.program.arguments import describe_inputs
from purevk.program.state import array_errors, check_packing

_INT_TOP = (
    2  # exclusive, of random integers: fits masks, token types and any table that is looked into
)

_SLACK = 1 << 20  # bytes of headers of files, and of arrays for inputs that are numbers
_MAX_TOP = 2**63 - 1  # of what numpy draws


def make_inputs(graph: Graph, args: argparse.Namespace, where: str) -> list[Any]:
    """The inputs of a method's graph, from --input, --size and --seed.

    Args:
        graph: the method.
        args: with `input`, `size` and `seed`; see `purevk.cli.command.add_inputs`.
        where: file and method, for messages.

    Returns:
        An array for each tensor (a torch tensor for bfloat16), an int for each integer, None for
        what no node reads.

    Raises:
        InputError: too many inputs, a file that cannot be read, a size that is none of the
            method's, a number that an input's dtype does not hold.
        SizeConstraintError: a size is above its bound, or no array is made of so many elements.
    """
    where = f"{where}({describe_inputs(graph)})"
    specs = [item for spec in args.input for item in _expand(spec, _most_bytes(graph))] or [
        "random"
    ]
    if len(specs) > len(graph.inputs):
        raise InputError(
            f"{len(specs)} inputs were given, the method takes {len(graph.inputs)}",
            where=where,
            next="name one for each input, in order; FILE.npz:PATTERN picks arrays of a file",
        )
    default = specs[-1] if isinstance(specs[-1], str) else "random"
    specs += [default] * (len(graph.inputs) - len(specs))
    sizes = _sizes(graph, args.size, where)
    random = np.random.default_rng(args.seed)
    return [
        _make(value, item, sizes, random, f"input {n} of {where}")
        for n, (value, item) in enumerate(zip(graph.inputs, specs))
    ]


def _most_bytes(graph: Graph) -> float:
    """More bytes than arrays for all inputs can have, of any dtype; infinite if a size is not bounded."""
    values = [value for value in graph.inputs if isinstance(value, Value)]
    if any(
        symbol.open
        for value in values
        for size in value.type.dims
        for symbol in _dims.symbols(size)
    ):
        return math.inf
    return _SLACK + 16 * sum(value.type.nbytes for value in values)


def _expand(spec: str, most: float) -> list[Any]:
    """The items of one --input: the arrays of a file, of at most so many bytes, or the word or number
    itself."""
    path, _, pattern = spec.partition(":")
    if not path.lower().endswith((".npy", ".npz")):
        return [spec]
    if path.lower().endswith(".npz") or not pattern:
        return _read(path, pattern or "*", most)
    return _read(spec, "*", most)


def _read(path: str, pattern: str, most: float) -> list[np.ndarray]:
    try:
        with open_regular(path) as stream:
            if stream.read(6) == b"\x93NUMPY":
                _check_bytes(path, os.fstat(stream.fileno()).st_size, most)
            stream.seek(0)
            loaded = np.load(stream, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return [loaded]
            check_packing(loaded.zip.infolist())
            names = [name for name in loaded.files if fnmatch.fnmatchcase(name, pattern)]
            if not names:
                raise InputError(
                    f"no array is named {pattern}",
                    where=path,
                    why=f"the file has {', '.join(loaded.files) or 'none'}",
                )
            sizes = {
                member.filename.removesuffix(".npy"): member.file_size
                for member in loaded.zip.infolist()
            }
            _check_bytes(path, sum(sizes[name.removesuffix(".npy")] for name in names), most)
            arrays = [loaded[name] for name in names]
            if not all(isinstance(array, np.ndarray) for array in arrays):
                raise ValueError("a member of the file is no .npy file")
            return arrays
    except array_errors() as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            "the input cannot be read",
            where=path,
            why=str(error) or type(error).__name__,
            next="write it with numpy.save or numpy.savez",
        ) from None


def _check_bytes(path: str, nbytes: int, most: float) -> None:
    """Raises InputError for arrays that are larger than all inputs, before they take memory."""
    if nbytes > most:
        raise InputError(
            f"the arrays have {nbytes} bytes",
            where=path,
            why=f"the inputs of the method have {int(most - _SLACK) // 16} at most",
            next="`purevk inspect` lists the inputs and the bounds of their sizes",
        )


def size_values(graph: Graph, chosen: Mapping[str, int] | None = None) -> dict[Symbol, int]:
    """A value for each symbol of the inputs' sizes: the chosen one, or the upper bound."""
    sizes: dict[Symbol, int] = {}
    for value in graph.inputs:
        if isinstance(value, Value):
            for symbol in {s for size in value.type.dims for s in _dims.symbols(size)}:
                sizes[symbol] = (chosen or {}).get(symbol.name, symbol.upper)
    return sizes


def _sizes(graph: Graph, chosen: Sequence[tuple[str, int]], where: str) -> dict[Symbol, int]:
    names = {symbol.name: symbol for symbol in size_values(graph)}
    for name, number in chosen:
        if name not in names:
            raise InputError(
                f"no size of the inputs is named {name}",
                where=where,
                why=f"the sizes are {', '.join(names)}" if names else "all sizes are fixed",
                next="`purevk inspect` lists the sizes and their bounds",
            )
        _check_bound(names[name], number, where)
    return size_values(graph, dict(chosen))


def _check_bound(symbol: Symbol, size: int, where: str) -> None:
    """Raises `SizeConstraintError` before arrays of this size are made."""
    bound = _dims.UNBOUNDED if symbol.open else symbol.upper
    if size > bound:
        raise SizeConstraintError(
            f"--size {symbol}={size} is above its bound",
            where=where,
            why=f"the method takes {symbol.lower} to {bound}",
            next="`purevk inspect` lists the sizes and their bounds",
        )


def _make(
    value: Any, item: Any, sizes: Mapping[Symbol, int], random: np.random.Generator, where: str
) -> Any:
    if isinstance(value, FixedInput):
        return value.value
    if value is None:
        return None
    if isinstance(value, Dim):
        if isinstance(item, np.ndarray):
            if item.size != 1:
                raise InputError(
                    "an integer is expected",
                    where=where,
                    why=f"an array of {item.size} elements was given",
                )
            return int(item.reshape(()))
        try:
            return int(_number(item, where, default=0))
        except (OverflowError, ValueError) as error:
            raise InputError(
                f"{item!r} is no input", where=where, why=f"an integer is expected: {error}"
            ) from None
    dtype, shape = value.type.dtype, tuple(_dims.evaluate(size, sizes) for size in value.type.dims)
    if isinstance(item, np.ndarray):
        return item if dtype.has_numpy else _as_torch(item, dtype)
    try:
        array = _fill(item, dtype, shape, random, where)
    except (MemoryError, ValueError, OverflowError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"no {dtype.name}{list(shape)} can be made of {item!r}",
            where=where,
            why=str(error) or "memory of the host is exhausted",
            next="choose a smaller --size, or another number",
        ) from None
    return array if dtype.has_numpy else _as_torch(array, dtype)


def _fill(
    item: str, dtype: DType, shape: tuple[int, ...], random: np.random.Generator, where: str
) -> np.ndarray:
    kind = dtype.numpy if dtype.has_numpy else np.dtype(np.float32)
    word, _, top = item.partition(":")
    if word != "random":
        number = _number(item, where)
        return np.full(shape, int(number) if kind.kind in "iu" else number, kind)
    if (top and not top.isdecimal()) or (top and int(top) < 1):
        raise InputError(
            f"{item!r} is no input", where=where, why="random:N takes an integer N above 0"
        )
    if top and int(top) > _MAX_TOP:
        raise InputError(
            f"{item!r} is no input", where=where, why=f"random:N takes an N of {_MAX_TOP} at most"
        )
    if dtype.is_float and not top:
        return random.standard_normal(shape).astype(kind)
    return random.integers(
        0, int(top) if top and dtype is not DType.bool else _INT_TOP, shape
    ).astype(kind)


def _number(item: str, where: str, default: float | None = None) -> float:
    words = {"zeros": 0, "ones": 1}
    if item in words:
        return words[item]
    if default is not None and item.partition(":")[0] == "random":
        return default
    try:
        return int(item)
    except ValueError:
        pass
    try:
        return float(item)
    except ValueError:
        hint = "it is no number, and none of random, ones, zeros"
        if os.path.isfile(item):
            hint = "only .npy and .npz files are read"
        elif Path(item).suffix or "/" in item:
            hint = "no such file"
        raise InputError(
            f"{item!r} is no input",
            where=where,
            why=hint,
            next="give FILE.npy, FILE.npz, random, ones, zeros or a number",
        ) from None


def _as_torch(array: np.ndarray, dtype: DType) -> Any:
    """numpy lacks the dtype, so such an input needs torch."""
    try:
        import torch
    except ImportError:
        raise InputError(
            f"a {dtype.name} input needs torch",
            why="numpy has no such type",
            next="pip install torch",
        ) from None
    if array.dtype == dtype.numpy:  # the bits
        return torch.from_numpy(array).view(dtype.to_torch())
    return torch.from_numpy(array).to(dtype.to_torch())


def as_elements(value: Any) -> Any:
    """An input of a call as the numpy array whose bytes the device gets (bfloat16 as the bits, in
    uint16); integers and None stay."""
    if isinstance(value, (int, float, bool, np.ndarray)) or value is None:
        return value
    return fallback.to_numpy(value)


def as_array(output: Any) -> Any:
    """An output of a call as a numpy array (bfloat16 as float32); integers and None stay."""
    if isinstance(output, (int, float, bool, np.ndarray)) or output is None:
        return output
    return (
        output.float() if output.dtype.is_floating_point and output.element_size() <= 2 else output
    ).numpy()
