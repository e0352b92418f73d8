"""Opens the files that programs are loaded from: .pte and .ptn files of ExecuTorch, .pvk files that
`Program.save` writes, and .pt2 files of `torch.export.save`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from purevk import pte
from purevk.closing import Closing
from purevk.errors import FileFormatError, InputError
from purevk.frontends import saved
from purevk.frontends.foreign import is_exported, is_native, is_pte, members, refuse_foreign
from purevk.frontends.reading import check_limits, reading
from purevk.ir import Graph, polynomials
from purevk.paths import path_text
from purevk.pte.source import Source

if TYPE_CHECKING:
    from purevk.frontends.executorch.native import NativeFile
    from purevk.frontends.importer import InputSizes
    from purevk.frontends.torch.archive.members import ExportedFile


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

    @property
    def label(self) -> str:
        """The name of the file, and the method."""
        return f"{self.file.label}, {self.method}"

    @property
    def parts(self) -> tuple[FilePart, ...] | None:
        """See `ModelFile.parts`."""
        return self.file.parts

    @property
    def digests(self) -> dict[str, str]:
        """See `ModelFile.digests`."""
        return self.file.digests

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """The boundary around what is done with the graphs, see `reading`."""
        with (
            reading(f"{self.file.label}, method {self.method}"),
            self.file.work.counting(("lower", self.method)),
        ):
            yield


class FilePart(NamedTuple):
    """A file that graphs follow from.

    Attributes:
        view: its bytes.
        structure: (first byte, bytes) of what graphs are read from.
        tensors: the same of tensors, as the file states them. A file that lies may state anything.
    """

    view: memoryview
    structure: list[tuple[int, int]]
    tensors: list[tuple[int, int]]


class ModelFile(Closing):
    """An open file with a program. A context manager.

    Attributes:
        kind: "pte", "ptn", "pvk" or "pt2".
        content: what is in the file.
        label: the file's name without its folder, for messages.
        digests: of parts of the file, by a text that says which. Those who need them keep them here.
        work: what its sizes have taken so far.
    """

    def __init__(
        self,
        content: pte.Program | NativeFile | saved.SavedProgram | ExportedFile,
        label: str,
    ) -> None:
        self.content, self.label = content, label
        self.digests: dict[str, str] = {}
        self.work = polynomials.Work()

    @property
    def kind(self) -> str:
        if isinstance(self.content, saved.SavedProgram):
            return "pvk"
        return "pte" if isinstance(self.content, pte.Program) else self.content.kind

    @property
    def name(self) -> str:
        """The path, or a name for bytes."""
        return self.content.source.name

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(self.content.methods)

    @property
    def parts(self) -> tuple[FilePart, ...] | None:
        """The file and its data files; None of a .pt2 file, whose graphs follow from torch too."""
        if isinstance(self.content, pte.Program):
            return (_part(self.content), *map(_part, self.content.data_files))
        if isinstance(self.content, saved.SavedProgram):
            return (_part(self.content),)
        return None if self.content.kind == "pt2" else (_part(self.content),)

    def graph(self, method: str, sizes: InputSizes | None = None) -> Graph:
        """The graph of a method, for the file's bounds or for the sizes of a call.

        Raises:
            UnsupportedProgramError, FileFormatError: as `purevk.load` does.
        """
        # All operators come with these, and a program whose plan is kept needs none of them.
        from purevk.frontends.bounds import with_position_limits
        from purevk.frontends.checked import check_results

        where = f"{self.label}, method {method}"
        with reading(where), self.work.counting(("read", method)):
            if isinstance(self.content, pte.Program):
                from purevk.frontends.executorch.methods import read_method

                graph = read_method(self.content, method, sizes)
            else:
                graph = with_position_limits(self.content.graph(method, sizes))
            check_limits(graph, where)
            traced: Mapping[str, int] = {}
            if sizes is None and isinstance(self.content, saved.SavedProgram):
                traced = self.content.examples(method)
            check_results(graph, where, traced)
            return replace(graph, shares_weights=len(self.methods) > 1)

    def close(self) -> None:
        """Closes the file once nobody uses its data."""
        self.content.close()


def _part(content: Any) -> FilePart:
    return FilePart(content.source.view, content.structure, content.tensor_ranges)


def open_file(
    file: str | os.PathLike[str] | bytes,
    data_files: Iterable[str | os.PathLike[str]] = (),
    check: bool = True,
) -> ModelFile:
    """Opens a program. The content of the file tells its kind. A suffix of another kind is refused.

    Args:
        file: path, or the file's bytes.
        data_files: .ptd files, of a .pte file.
        check: compare the tensors of a saved program and of a .ptn file with their checksums.

    Raises:
        FileFormatError: the file is no program, or damaged; or it is a pipe or a device.
        InputError: data files were given with a program that holds its own tensors; or `file` is
            no path and no bytes.
        UnsupportedProgramError: it is a .pt2 file, and torch is not installed.
        OSError: a path cannot be opened.
    """
    data_files = list(data_files)
    if isinstance(file, (bytes, bytearray, memoryview)):
        label = "<bytes>"
    elif isinstance(file, (str, os.PathLike)):
        label = Path(path_text(file)).name
    else:
        raise InputError(
            f"a program cannot be loaded from {type(file).__name__}",
            where="purevk.load",
            why="the path of a file, or its bytes, are expected",
            next="pass file.read()"
            if hasattr(file, "read")
            else "purevk.compile(module, inputs) takes modules and exported programs",
        )
    source = Source(file)
    try:
        is_saved = saved.is_saved(source)
        archived = [] if is_saved else members(source)
        exported, of_native = is_exported(archived), is_native(archived)
        if not is_saved and not exported and not of_native:
            refuse_foreign(source, label)
        kinds = {".pvk": is_saved, ".pt2": exported, ".ptn": of_native, ".pte": is_pte(source)}
        _check_suffix(label, next((suffix for suffix, holds in kinds.items() if holds), ""))
        if data_files and (is_saved or exported or of_native):
            raise InputError(
                "data files go with .pte files only",
                where=label,
                why="a saved program holds its own tensors",
                next="leave them out",
            )
        if exported:
            from purevk.frontends.torch.archive.members import ExportedFile

            return ModelFile(ExportedFile(source), label)
        with reading(label):
            if is_saved:
                return ModelFile(saved.read_program(source, check), label)
            if of_native:
                from purevk.frontends.executorch.native import NativeFile

                return ModelFile(NativeFile(source, check), label)
            return ModelFile(pte.read_program(source, data_files), label)
    except BaseException:
        source.close()
        raise


def _check_suffix(label: str, kind: str) -> None:
    """Raises `FileFormatError` if a file has the suffix of another kind of program.

    Args:
        kind: by the content; empty if it is not known.
    """
    suffix = Path(label).suffix.lower()
    if kind and suffix in (".pte", ".ptn", ".pvk", ".pt2") and suffix != kind:
        raise FileFormatError(
            f"the file has the suffix {suffix} and the content of a {kind} file",
            where=label,
            why="the suffix and the content have to agree",
            next=f"rename it to {Path(label).stem}{kind}, or take the right file",
        )
