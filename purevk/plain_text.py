"""Texts for terminals and logs. Names in files may hold control characters, which move the cursor,
change the title or hide text, and marks that change the direction of what follows."""

from __future__ import annotations

import json
import logging
from typing import Any

LOGGERS = ("purevk", "purevk.cache")
"""The loggers of the package. What they log is `printable`."""


class _Escapes(dict[int, str]):
    """What `str.translate` puts in place of each character."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        shown = character.isprintable() or character in "\n\t"
        self[code] = character if shown else character.encode("unicode_escape").decode("ascii")
        return self[code]


class _JsonEscapes(dict[int, str]):
    def __missing__(self, code: int) -> str:
        character = chr(code)
        shown = character.isprintable() or character == "\n"
        units = character.encode("utf-16-be", "surrogatepass").hex()
        escaped = "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
        self[code] = character if shown else escaped
        return self[code]


_escapes, _json_escapes = _Escapes(), _JsonEscapes()


def printable(text: str) -> str:
    """A text as a terminal may get it: characters that cannot be printed become escapes such as
    `\\x1b`; line breaks and tabs stay. These are the control characters (C0 and C1), marks of
    direction, spaces that look like others, and halves of surrogate pairs."""
    return text if text.isprintable() else text.translate(_escapes)


def json_text(data: Any, indent: int | None = 2) -> str:
    """JSON in which each character that cannot be printed is an escape, such as `\\u009b`."""
    text = json.dumps(data, indent=indent, ensure_ascii=False, allow_nan=True)
    return text.translate(_json_escapes)


class PrintableRecords(logging.Filter):
    """Makes what a logger logs `printable`, tracebacks included."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = printable(record.getMessage()), ()
        if record.exc_info:
            record.exc_text = printable(logging.Formatter().formatException(record.exc_info))
        return True


for _name in LOGGERS:
    logging.getLogger(_name).addFilter(PrintableRecords())
