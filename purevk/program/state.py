"""What lives on the device between calls, as a mapping from names to arrays: `Program.state`."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from purevk.dtypes import DType
from purevk.errors import FileFormatError, InputError
from purevk.ir import Value
from purevk.paths import open_regular
from purevk.plain_text import printable
from purevk.whole_file import replace_file

if TYPE_CHECKING:
    from zipfile import ZipInfo

    from purevk.program.program import Program


_HEADER_BYTES = 1 << 12  # of an array in a file
# A state of a program: the number of the program, and the value.
_Place: TypeAlias = "tuple[int, Value]"


def array_errors() -> tuple[type[Exception], ...]:
    """What numpy raises for a damaged file of arrays."""
    import struct
    import tokenize
    import zipfile
    import zlib

    return (
        *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, KeyError, ValueError, OSError),
        *(NotImplementedError, RuntimeError, MemoryError, TypeError, SyntaxError),
        tokenize.TokenError,
    )


def check_packing(members: Sequence[ZipInfo]) -> None:
    """Raises ValueError for members of an .npz file that are packed in another way than by numpy."""
    import zipfile

    if any(member.compress_type not in (0, zipfile.ZIP_DEFLATED) for member in members):
        raise ValueError("it is packed in a way that numpy does not write")


class StateOwner(Protocol):
    """What has states: a program, or one that is on several devices."""

    name: str

    def held(self) -> AbstractContextManager[None]:
        """Within, no call runs, and those made before are finished."""


class StateMapping(MutableMapping[str, np.ndarray]):
    """The states of a program by name. Reading gives a copy, assigning writes the whole state.

    A state has the name of the module's buffer where the program knows it, else one that is made up
    and stays the same whenever the program is loaded. Where several methods have states of a name
    that are not one, the method's name is put in front. All access waits for the calls that were
    made before.
    """

    def __init__(self, owner: StateOwner, programs: Sequence[Program]) -> None:
        self._owner, self._programs = owner, programs

    def _places(self) -> dict[str, list[_Place]]:
        """Where each state is: in one program, or, if nothing writes it, in several."""
        named: dict[str, dict[Hashable, list[tuple[str, _Place]]]] = {}
        for number, program in enumerate(self._programs):
            for method in program.methods.values():
                for value, label in method.graph.labels.items():
                    key = label.key or (method.name, label.name), value.type.dtype, value.type.dims
                    places = named.setdefault(label.name, {}).setdefault(key, [])
                    if all(place != (number, value) for _, place in places):
                        places.append((method.name, (number, value)))
        return {
            name if len(states) == 1 else f"{places[0][0]}.{name}": [place for _, place in places]
            for name, states in named.items()
            for places in states.values()
        }

    def _found(self, name: str) -> list[_Place]:
        places = self._places()
        if name not in places:
            listed = f"there are {', '.join(map(repr, places))}" if places else "it has no states"
            raise KeyError(f"there is no state {name!r} in {self._owner.name}; {listed}")
        return places[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places())

    def __len__(self) -> int:
        return len(self._places())

    def __contains__(self, name: object) -> bool:
        return name in self._places()

    def __getitem__(self, name: str) -> np.ndarray:
        place = self._found(name)[0]
        with self._owner.held():
            return self._read(place)

    def _read(self, place: _Place) -> np.ndarray:
        number, value = place
        nbytes = value.type.nbytes
        data = self._programs[number].states.read(value, max(nbytes, 4))[:nbytes]
        array = np.frombuffer(data, value.type.dtype.numpy).reshape(value.type.dims)
        copy: np.ndarray = array.copy()
        return copy

    def __setitem__(self, name: str, array: Any) -> None:
        self.update({name: array})

    def __delitem__(self, name: str) -> None:
        raise InputError(
            f"state {name!r} cannot be removed",
            where=self._owner.name,
            next="Program.reset_state() empties it",
        )

    def update(self, values: Any = (), /, **more: Any) -> None:
        """Writes several states: all of them, or none if one does not fit.

        Raises:
            KeyError: there is no state of a name.
            InputError: an array's dtype or sizes are not the state's.
        """
        updates = {**dict(values), **more}
        items: list[list[tuple[Value, memoryview]]] = [[] for _ in self._programs]
        for name, array in updates.items():
            for number, value in self._found(name):
                data = self._bytes(name, value, array)
                if data.size:
                    items[number].append((value, data.data))
        with self._owner.held():
            for program, theirs in zip(self._programs, items):
                program.states.upload(theirs)

    def _bytes(self, name: str, value: Value, array: Any) -> np.ndarray:
        """The bytes of an array that is to be a state's content."""
        dtype: DType | None
        source: np.ndarray
        if hasattr(array, "detach"):
            from purevk.fallback import to_numpy

            source, dtype = to_numpy(array), DType.from_torch(array.dtype)
        else:
            source = np.asarray(array)
            dtype = DType.from_numpy(source.dtype)
            if not value.type.dtype.has_numpy and source.dtype == value.type.dtype.numpy:
                dtype = value.type.dtype
        if dtype is not value.type.dtype or source.shape != value.type.dims:
            raise InputError(
                f"state {name!r} is {value.type}",
                where=self._owner.name,
                why=f"{source.dtype if dtype is None else dtype.name}{list(source.shape)} was given",
                next="give an array of the state's dtype and sizes",
            )
        return (
            source.reshape(-1).view(np.uint8)
            if source.flags.c_contiguous
            else source.flatten().view(np.uint8)
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes all states into an .npz file."""
        with self._owner.held():
            arrays: dict[str, Any] = {
                name: self._read(places[0]) for name, places in self._places().items()
            }
        with replace_file(path) as stream:
            np.savez(stream, **arrays)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Reads an .npz file that `save` wrote.

        Raises:
            FileFormatError: it is no such file, or damaged.
            InputError: the names, dtypes or sizes in it are not those of the states.
        """
        self.update(self._arrays_of(path))

    def _check_members(self, path: str | os.PathLike[str], sizes: Mapping[str, int]) -> None:
        """Raises InputError for a file with arrays of other names, or of more bytes than the states."""
        places = self._places()
        why = ""
        if set(sizes) != set(places):
            why = f"it has the states {sorted(sizes)}; the program has {sorted(places)}"
        for name, size in sizes.items():
            if not why and size > (most := places[name][0][1].type.nbytes) + _HEADER_BYTES:
                why = f"state {name!r} has {size} bytes there; the program's has {most}"
        if why:
            raise InputError(
                f"{os.fspath(path)} is not of this program",
                where=self._owner.name,
                why=why,
                next="load what save_state of the same program wrote",
            )

    def _arrays_of(self, path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
        """The arrays of an .npz file."""
        import zipfile  # not at every load of a program

        stream = open_regular(path)
        try:
            with stream:
                if stream.read(6) == b"\x93NUMPY":
                    raise ValueError("it holds one array, as numpy.save writes it")
                stream.seek(0)
                with zipfile.ZipFile(stream) as file:
                    members = file.infolist()
                check_packing(members)
                self._check_members(
                    path,
                    {member.filename.removesuffix(".npy"): member.file_size for member in members},
                )
                stream.seek(0)
                with np.load(stream, allow_pickle=False) as opened:
                    arrays = {name: opened[name] for name in opened.files}
            if not all(isinstance(array, np.ndarray) for array in arrays.values()):
                raise ValueError("a member of the file is no .npy file")
            return arrays
        except InputError:
            raise
        except array_errors() as error:
            raise FileFormatError(
                f"{os.fspath(path)} is damaged, or no file of states",
                where=self._owner.name,
                why=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
                next="load what save_state of this program wrote",
            ) from error

    def __repr__(self) -> str:
        places = self._places().items()
        states = ", ".join(f"{name} {members[0][1].type}" for name, members in places)
        return printable(f"<states of {self._owner.name}: {states}>")
