"""Any file that programs are loaded from, behind one face: .pte files of ExecuTorch, and what
`Program.save` writes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from purevk import pte
from purevk.errors import InputError
from purevk.frontends import saved
from purevk.ir import Graph


class ModelFile:
    """An open file with a program. A context manager.

    Attributes:
        kind: "pte" or "pvk".
        content: what the reader of the kind gives: a `pte.Program` or a `SavedProgram`.
        label: the file's name without its folder, for messages.
    """

    def __init__(self, kind: str, content: Any, label: str) -> None:
        self.kind, self.content, self.label = kind, content, label

    @property
    def name(self) -> str:
        """The path, or what stands for bytes."""
        return self.content.source.name

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(self.content.methods)

    def graph(self, method: str, sizes: Sequence[Any] | None = None) -> Graph:
        """The graph of a method, for the file's bounds or for the sizes of a call.

        Raises:
            UnsupportedProgramError, FileFormatError: as `purevk.load` does.
        """
        if self.kind == "pvk":
            return self.content.graph(method, sizes)
        from purevk.frontends.executorch.methods import read_method

        return read_method(self.content, method, sizes)

    def close(self) -> None:
        """Lets go of the file, once nobody uses its data."""
        self.content.close()

    def __enter__(self) -> ModelFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_file(
    file: str | os.PathLike[str] | bytes,
    data_files: Iterable[str | os.PathLike[str]] = (),
    check: bool = True,
) -> ModelFile:
    """Opens a program by what the file holds, whatever its name is.

    Args:
        file: path, or the file's bytes.
        data_files: .ptd files, of a .pte file.
        check: compare the tensors of a saved program with their checksums.

    Raises:
        FileFormatError: it is no program, or damaged.
        InputError: data files were given with a saved program, which holds its own tensors.
        OSError: a path cannot be opened.
    """
    data_files = list(data_files)
    label = (
        "<bytes>"
        if isinstance(file, (bytes, bytearray, memoryview))
        else Path(os.fspath(file)).name
    )
    if not saved.is_saved(file):
        return ModelFile("pte", pte.read_program(file, data_files), label)
    if data_files:
        raise InputError(
            "data files go with .pte files only",
            where=label,
            why="a saved program holds its own tensors",
            next="leave them out",
        )
    return ModelFile("pvk", saved.read_program(file, check), label)
