"""Prints headings, pairs and tables, as wide as the terminal, and errors."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from purevk.errors import InputError, OutputError, PurevkError
from purevk.plain_text import printable
from purevk.whole_file import output_target, replace_file

if TYPE_CHECKING:
    from purevk.shaders.bundle import WrittenBundle

_PIPE_WIDTH = 120  # columns of text where the output is no terminal and COLUMNS says nothing
_UNLIMITED = 100_000  # columns of tables there: other programs read them
_PATH = 16  # columns that a path keeps at least
STYLES = {
    "ok": "green",
    "gpu": "green",
    "on": "green",
    "cached": "green",
    "cpu": "yellow",
    "warning": "yellow",
    "optional": "dim",
    "off": "dim",
    "missing": "bold red",
    "error": "bold red",
}


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leaves the error to `main`: rich would end the process with 1."""
        raise BrokenPipeError


def _console(stream: Any) -> Console:
    width = None if stream.isatty() else shutil.get_terminal_size((_UNLIMITED, 40)).columns
    return _Console(file=stream, width=width, markup=False, highlight=False, emoji=False)


class Output:
    """Prints to stdout."""

    def __init__(self) -> None:
        self.console = _console(sys.stdout)
        self._any = False

    def heading(self, text: str) -> None:
        """A line that starts a part."""
        if self._any:
            self.console.print()
        self.console.print(_text(text, style="bold"))
        self._any = True

    def line(self, text: str = "", style: str = "") -> None:
        """A line of text, wrapped at the terminal's width."""
        width = _PIPE_WIDTH if self.console.width == _UNLIMITED else self.console.width
        self.console.print(_text(text, style=style), width=width)
        self._any = True

    def raw(self, text: str) -> None:
        """Text as it is: no wrapping, no styles."""
        self.console.print(_text(text), soft_wrap=True)
        self._any = True

    def pairs(self, items: Iterable[tuple[str, Any]], indent: int = 2) -> None:
        """Lines of a name and a value. A value of None is left out."""
        rows = [(name, value) for name, value in items if value is not None]
        if not rows:
            return
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(width=indent)
        grid.add_column(no_wrap=True, style="dim")
        grid.add_column(overflow="fold")
        for name, value in rows:
            grid.add_row("", _text(name), _text(value))
        self.console.print(grid)
        self._any = True

    def table(
        self,
        columns: Sequence[str | tuple[str, str]],
        rows: Iterable[Sequence[Any]],
        styled: int | None = None,
        title: str = "",
        total: Sequence[Any] | None = None,
    ) -> None:
        """A table.

        Args:
            columns: headings; a pair adds how the column is set: "r" to the right, never wrapped;
                "w" never wrapped; "c" cut at its end, "p" (a path) at its start, with an ellipsis
                where there is no room. Others wrap.
            rows: their cells; None is an empty one.
            styled: number of a column whose words ("gpu", "missing", ...) are coloured.
            title: a heading.
            total: a last row, set off.
        """
        if title:
            self.heading(title)
        table = Table(
            box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_footer=False
        )
        table.add_column("", width=0)
        kinds = [("", "") if isinstance(column, str) else column for column in columns]
        for column, (_, kind) in zip(columns, kinds):
            name = printable(column if isinstance(column, str) else column[0])
            fixed = kind in ("r", "w")
            table.add_column(
                name,
                justify="right" if kind == "r" else "left",
                no_wrap=fixed,
                overflow="fold",
                min_width=len(name) if fixed else None,
            )
        for row in rows:
            cells = [
                _cell(cell, number == styled, kinds[number][1]) for number, cell in enumerate(row)
            ]
            table.add_row("", *cells)
        if total is not None:
            table.add_row(
                "", *[_text("" if cell is None else cell, style="bold") for cell in total]
            )
        self.console.print(table)
        self._any = True


class _Path:
    """Paths in a cell: "module.layer", "model.py:12, in forward". The end of a path says more than its
    start, and a line more than its function."""

    def __init__(self, text: str) -> None:
        self._text = printable(text)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        length = cell_len(self._text)
        return Measurement(min(length, _PATH), length)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text, most = self._text, options.max_width
        if cell_len(text) > most:
            text = re.sub(r", in [^;]+", "", text)
        if cell_len(text) > most:
            text = "\u2026" + set_cell_size(text[::-1], most - 1)[::-1] if most > 1 else ""
        yield Text(text, no_wrap=True)


def _cell(value: Any, styled: bool, kind: str) -> Text | _Path:
    text = "" if value is None else str(value)
    if kind == "p":
        return _Path(text)
    cut = kind == "c"
    style = STYLES.get(text.partition(" ")[0], "") if styled else ""
    return _text(text, style, no_wrap=True, overflow="ellipsis") if cut else _text(text, style)


def _text(value: Any, style: str = "", **options: Any) -> Text:
    """A value as text that a terminal may get."""
    return Text(printable(str(value)), style, **options)


def error_data(error: PurevkError) -> dict[str, str]:
    """An error as JSON values: type, what, where, why, next."""
    return {
        "type": type(error).__name__,
        "what": error.what,
        "where": error.where,
        "why": error.why,
        "next": error.next,
    }


def show_error(error: PurevkError) -> None:
    """Prints an error to stderr: what, where, why, next."""
    console = _console(sys.stderr)
    console.print(
        Text.assemble((f"{type(error).__name__}: ", "bold red"), _text(error.what)), soft_wrap=True
    )
    for label, text in (("where", error.where), ("why", error.why), ("next", error.next)):
        if text:
            console.print(Text.assemble((f"  {label}: ", "dim"), _text(text)), soft_wrap=True)


def warning_text(message: Warning | str, *args: Any, **options: Any) -> str:
    """A warning as one line, in place of `warnings.formatwarning`, which adds a line of source. It
    replaces the line of a progress bar."""
    console = _console(sys.stderr)
    bar = console.is_terminal and not console.is_dumb_terminal
    return f"{chr(13) + chr(27) + '[2K' if bar else ''}warning: {printable(str(message))}\n"


def check_output(path: str, subject: str) -> None:
    """Raises InputError or OutputError if a file cannot be written, before any work is done for it."""
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        why = "this is a folder"
    elif not os.path.isdir(folder):
        why = f"there is no folder {folder}"
    else:
        target, status = output_target(path)
        may = os.access(target.parent, os.W_OK) or (status is not None and os.access(path, os.W_OK))
        if may:
            return
        why = f"this user may not write the folder {target.parent}"
    raise _not_written(path, subject, why)


@contextlib.contextmanager
def output_file(path: str, subject: str) -> Iterator[BinaryIO]:
    """Opens a file to be written as `replace_file` does.

    Raises:
        OutputError: as for `replace_file`.
        InputError: it cannot be written.
    """
    try:
        with replace_file(path) as file:
            yield file
    except OutputError:
        raise
    except OSError as error:
        raise _not_written(path, subject, error.strerror or str(error)) from error


def _not_written(path: str, subject: str, why: str) -> InputError:
    return InputError(
        f"{subject} cannot be written",
        where=path,
        why=why,
        next="check the folder and its permissions",
    )


def bundle_data(path: str, written: WrittenBundle) -> dict[str, Any]:
    """A bundle that was written, as JSON values."""
    return {
        "path": path,
        "entries": written.entries,
        "bytes": written.nbytes,
        "sha256": written.sha256,
    }


def size(nbytes: float | None) -> str | None:
    """Bytes for people: "13.3 MiB"."""
    if nbytes is None:
        return None
    if abs(nbytes) < 1024:
        return f"{int(nbytes)} B"
    value = float(nbytes)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if abs(value) < 1023.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"


def duration(seconds: float | None) -> str | None:
    """Seconds for people, three digits: "12.3 ms"."""
    if seconds is None:
        return None
    if seconds == 0:
        return "0"
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        value = seconds * factor
        if abs(value) >= 1 or unit == "us":
            digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
            return f"{value:.{digits}f} {unit}"
    return None


def count(number: int, noun: str) -> str:
    """A number with its noun: "1 node", "3 nodes", "2 entries"."""
    if number != 1:
        noun = (
            noun[:-1] + "ies"
            if noun.endswith("ry")
            else noun + ("es" if noun.endswith("ch") else "s")
        )
    return f"{number} {noun}"


def version_text(parts: Sequence[int]) -> str:
    """(1, 3, 230) as "1.3.230"."""
    return ".".join(map(str, parts))
