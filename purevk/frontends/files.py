"""Opens the files that programs are loaded from: .pte files of ExecuTorch, and .pvk files that
`Program.save` writes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from purevk import pte
from purevk.errors import InputError
from purevk.frontends import saved
from purevk.frontends.checked import check_results
from purevk.frontends.importer import InputSizes
from purevk.frontends.reading import check_limits, reading
from purevk.ir import Graph


class FileSource:
    """The graphs of a method of a file, for the sizes of calls.

    Args:
        file: an open file.
        method: name of the method.
    """

    def __init__(self, file: ModelFile, method: str) -> None:
        self.file, self.method = file, method

    def __call__(self, sizes: InputSizes | None) -> Graph:
        return self.file.graph(self.method, sizes)

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """The boundary around what is done with the graphs, see `reading`."""
        return reading(f"{self.file.label}, method {self.method}")


class ModelFile:
    """An open file with a program. A context manager.

    Attributes:
        kind: "pte" or "pvk".
        content: what is in the file.
        label: the file's name without its folder, for messages.
    """

    def __init__(self, content: pte.Program | saved.SavedProgram, label: str) -> None:
        self.content, self.label = content, label

    @property
    def kind(self) -> str:
        return "pvk" if isinstance(self.content, saved.SavedProgram) else "pte"

    @property
    def name(self) -> str:
        """The path, or a name for bytes."""
        return self.content.source.name

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(self.content.methods)

    def graph(self, method: str, sizes: InputSizes | None = None) -> Graph:
        """The graph of a method, for the file's bounds or for the sizes of a call.

        Raises:
            UnsupportedProgramError, FileFormatError: as `purevk.load` does.
        """
        where = f"{self.label}, method {method}"
        with reading(where):
            if isinstance(self.content, saved.SavedProgram):
                graph = self.content.graph(method, sizes)
            else:
                from purevk.frontends.executorch.methods import read_method

                graph = read_method(self.content, method, sizes)
            check_limits(graph, where)
            check_results(graph, where)
            return graph

    def close(self) -> None:
        """Closes the file once nobody uses its data."""
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
    """Opens a program. The content of the file tells its kind, not its name.

    Args:
        file: path, or the file's bytes.
        data_files: .ptd files, of a .pte file.
        check: compare the tensors of a saved program with their checksums.

    Raises:
        FileFormatError: the file is no program, or damaged.
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
        with reading(label):
            return ModelFile(pte.read_program(file, data_files), label)
    if data_files:
        raise InputError(
            "data files go with .pte files only",
            where=label,
            why="a saved program holds its own tensors",
            next="leave them out",
        )
    with reading(label):
        return ModelFile(saved.read_program(file, check), label)
