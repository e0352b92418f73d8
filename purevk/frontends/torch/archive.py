"""Files of `torch.export.save` (.pt2). They are as safe to load as `torch.export.load` is."""

from __future__ import annotations

import io

from purevk.errors import FileFormatError, UnsupportedProgramError
from purevk.frontends.importer import InputSizes
from purevk.ir import Graph
from purevk.pte.source import FileLike, Source


class ExportedFile:
    """An exported program of torch from a file. Its tensors are copies in memory.

    Attributes:
        source: the bytes of the file.
        methods: "forward".

    Raises:
        UnsupportedProgramError: torch is not installed.
        FileFormatError: torch cannot load the file.
        OSError: the path cannot be opened.
    """

    methods = ("forward",)

    def __init__(self, file: FileLike) -> None:
        self.source = Source(file, ".pt2")
        try:
            import torch
        except ImportError as error:
            raise UnsupportedProgramError(
                "torch is not installed",
                where=self.source.name,
                why="torch.export.load reads .pt2 files",
                next='install torch; or save the program where it is: load("m.pt2").save("m.pvk")',
            ) from error
        from purevk.frontends.torch.module import ProgramSource

        try:
            program = torch.export.load(io.BytesIO(self.source.view))
        except Exception as error:  # torch raises errors of many classes
            raise FileFormatError(
                f"torch cannot load the file: {type(error).__name__}",
                where=self.source.name,
                why=str(error).strip().partition("\n")[0],
                next="save it again with torch.export.save, with the torch that is installed here",
            ) from error
        self._graphs = ProgramSource("forward", program, set())

    def graph(self, method: str, sizes: InputSizes | None = None) -> Graph:
        """The graph, for the bounds of the export or for the sizes of a call."""
        return self._graphs(sizes)

    def close(self) -> None:
        """Closes the file."""
        self.source.close()
