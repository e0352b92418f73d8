"""What lives on the device between calls, as a mapping from names to arrays: `Program.state`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from purevk.dtypes import DType
from purevk.errors import InputError
from purevk.ir import Value
from purevk.whole_file import replace_file

if TYPE_CHECKING:
    from purevk.program.program import Program


class StateMapping(MutableMapping[str, np.ndarray]):
    """The states of a program by name. Reading gives a copy, assigning writes the whole state.

    A state has the name of the module's buffer where the program knows it, else one that is made up
    and stays the same whenever the program is loaded. Where several methods have states of a name
    that are not one, the method's name is put in front. All access waits for the calls that were
    made before.
    """

    def __init__(self, program: Program) -> None:
        self._program = program

    def _values(self) -> dict[str, Value]:
        named: dict[str, dict[Value, str]] = {}
        for method in self._program.methods.values():
            for value, label in method.graph.labels.items():
                named.setdefault(label.name, {}).setdefault(value, method.name)
        return {
            name if len(values) == 1 else f"{method}.{name}": value
            for name, values in named.items()
            for value, method in values.items()
        }

    def _value(self, name: str) -> Value:
        values = self._values()
        if name not in values:
            raise KeyError(
                f"there is no state {name!r} in {self._program.name}; there are {', '.join(map(repr, values))}"
            )
        return values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values())

    def __len__(self) -> int:
        return len(self._values())

    def __contains__(self, name: object) -> bool:
        return name in self._values()

    def __getitem__(self, name: str) -> np.ndarray:
        value = self._value(name)
        with self._program.held():
            return self._read(value)

    def _read(self, value: Value) -> np.ndarray:
        nbytes = value.type.nbytes
        data = self._program.states.read(value, max(nbytes, 4))[:nbytes]
        array = np.frombuffer(data, value.type.dtype.numpy).reshape(value.type.dims)
        copy: np.ndarray = array.copy()
        return copy

    def __setitem__(self, name: str, array: Any) -> None:
        self.update({name: array})

    def __delitem__(self, name: str) -> None:
        raise InputError(
            f"state {name!r} cannot be removed",
            where=self._program.name,
            next="Program.reset_state() empties it",
        )

    def update(self, other: Any = (), /, **more: Any) -> None:
        """Writes several states: all of them, or none if one does not fit.

        Raises:
            KeyError: there is no state of a name.
            InputError: an array's dtype or sizes are not the state's.
        """
        given = {**dict(other), **more}
        items = [
            (self._value(name), self._bytes(name, self._value(name), array))
            for name, array in given.items()
        ]
        with self._program.held():
            self._program.states.upload([(value, data.data) for value, data in items if data.size])

    def _bytes(self, name: str, value: Value, array: Any) -> np.ndarray:
        """The bytes of an array that is to be a state's content."""
        dtype: DType | None
        given: np.ndarray
        if hasattr(array, "detach"):
            from purevk.fallback import to_numpy

            given, dtype = to_numpy(array), DType.from_torch(array.dtype)
        else:
            given = np.asarray(array)
            dtype = DType.from_numpy(given.dtype)
            if not value.type.dtype.has_numpy and given.dtype == value.type.dtype.numpy:
                dtype = value.type.dtype
        if dtype is not value.type.dtype or given.shape != value.type.dims:
            raise InputError(
                f"state {name!r} is {value.type}",
                where=self._program.name,
                why=f"{given.dtype if dtype is None else dtype.name}{list(given.shape)} was given",
                next="give an array of the state's dtype and sizes",
            )
        return (
            given.reshape(-1).view(np.uint8)
            if given.flags.c_contiguous
            else given.flatten().view(np.uint8)
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes all states into an .npz file."""
        with self._program.held():
            arrays: dict[str, Any] = {
                name: self._read(value) for name, value in self._values().items()
            }
        with replace_file(Path(path)) as stream:
            np.savez(stream, **arrays)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Reads an .npz file that `save` wrote.

        Raises:
            InputError: the names, dtypes or sizes in it are not those of the states.
        """
        with np.load(path, allow_pickle=False) as file:
            arrays: Mapping[str, np.ndarray] = {name: file[name] for name in file.files}
        if set(arrays) != set(self):
            raise InputError(
                f"{os.fspath(path)} is not of this program",
                where=self._program.name,
                why=f"it has the states {sorted(arrays)}; the program has {sorted(self)}",
                next="load what save_state of the same program wrote",
            )
        self.update(arrays)

    def __repr__(self) -> str:
        return f"<states of {self._program.name}: {', '.join(f'{name} {value.type}' for name, value in self._values().items())}>"  # noqa: E501
