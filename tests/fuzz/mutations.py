"""Changes of files: of bytes and 32-bit words, and of the JSON that describes a saved program.

A change is a plain list, so that a failing case can be written down, made shorter and run again.
"""

from __future__ import annotations

import copy
import json
import random
import struct
import zlib
from collections.abc import Iterator
from typing import Any

from purevk.frontends import saved

Change = list[Any]

NUMBERS = [
    0, 1, 2, 3, 4, 5, 7, 8, 64, 127, 255, 256, 1 << 15, 1 << 16, (1 << 31) - 1, 1 << 31,
    (1 << 32) - 2, (1 << 32) - 1,
]  # fmt: skip
ITEMS: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 7, 64, 1 << 31, 1 << 40, -(1 << 63), 1.5, 1e308, "", "x", "s0",
    "\x1b[2J\x9b\u202e",
    "float32", "int64", "bool", "aten.relu.default", "aten.cat.default", "aten.view.default",
    "aten.from_file.default", "purevk.store", [], [1], [-1], [0, 0], [[2, []]], [[2, ["s0"]]],
    [["//", 1, 0]], {}, {"value": 0}, {"value": 1}, {"value": 99}, {"size": [[1, ["s0"]]]},
    {"dtype": "bool"}, {"float": "nan"}, {"float": "inf"}, {"graph": {}}, {"complex": [0, 1]},
    {"fixed": 3},
]  # fmt: skip


def draw_changes(draw: random.Random, kind: str, data: bytes) -> list[Change]:
    """Between one and six changes of a file.

    Args:
        kind: "pvk" for a saved program, whose description is changed as JSON half of the time, as a
            "request" is; else bytes and words are changed.
    """
    count = draw.choice([1, 1, 1, 1, 1, 2, 2, 3, 6])
    if kind in ("pvk", "request") and draw.random() < 0.7:
        places = list(_places(description(data)))
        return [_draw_item(draw, places) for _ in range(count)]
    return [_draw_bytes(draw, data) for _ in range(count)]


def _draw_item(draw: random.Random, places: list[tuple[Any, ...]]) -> Change:
    place = list(draw.choice(places))
    how = draw.choice(["delete", "double", "swap", "nudge", "copy", "set", "set", "set"])
    other = list(draw.choice(places)) if how in ("swap", "copy") else None
    return ["json", place, how, draw.choice(ITEMS) if how == "set" else other, draw.randrange(9)]


def _draw_bytes(draw: random.Random, data: bytes) -> Change:
    size = max(len(data), 8)
    # Most of what decides is near the start or the end; weights are in between.
    near = draw.choice([size, size, min(size, 2048), min(size, 256)])
    at = draw.randrange(near) if draw.random() < 0.7 else size - 1 - draw.randrange(near)
    how = draw.choice(["word", "word", "word", "nudge", "byte", "bit", "copy", "cut", "insert"])
    if how in ("word", "nudge"):
        at = at // 4 * 4
        return [how, at, draw.choice(NUMBERS) if how == "word" else draw.choice([-4, -1, 1, 4])]
    if how == "copy":
        return [how, at, draw.randrange(size) // 4 * 4, draw.choice([4, 8, 16, 64])]
    return [how, at, draw.randrange(256)]


def apply(data: bytes, changes: list[Change]) -> bytes:
    """The file with the changes. A changed description gets right checksums."""
    if changes and changes[0][0] == "json":
        content = description(data)
        for _, place, how, other, number in changes:
            content = _changed(content, place, how, other, number)
        return with_description(data, content)
    made = bytearray(data)
    for how, at, *rest in changes:
        _change_bytes(made, how, at, rest)
    return bytes(made)


def _change_bytes(made: bytearray, how: str, at: int, rest: list[int]) -> None:
    if how == "cut":
        del made[at:]
    elif how == "insert":
        made[at:at] = bytes([rest[0]]) * (1 + rest[0] % 8)
    elif at >= len(made):
        return
    elif how == "byte":
        made[at] = rest[0]
    elif how == "bit":
        made[at] ^= 1 << rest[0] % 8
    elif how == "copy":
        source, count = rest
        piece = made[source : source + count]
        made[at : at + len(piece)] = piece
    elif at + 4 <= len(made):
        (old,) = struct.unpack_from("<I", made, at)
        new = rest[0] if how == "word" else (old + rest[0]) & 0xFFFFFFFF
        struct.pack_into("<I", made, at, new)


# -- saved programs --------------------------------------------------------------------------------
def description(data: bytes) -> Any:
    """The JSON of a sound .pvk file, or of a request."""
    if not data.startswith(saved.MAGIC):
        return json.loads(data)
    fields = saved._HEADER.unpack_from(data)
    start, size = fields[4], fields[5]
    return json.loads(data[start : start + size])


def with_description(data: bytes, content: Any) -> bytes:
    """A .pvk file with another description and right checksums; or another request."""
    if not data.startswith(saved.MAGIC):
        return json.dumps(content).encode()
    start = saved._HEADER.unpack_from(data)[4]
    text = json.dumps(content).encode()
    head = saved._HEADER.pack(
        saved.MAGIC, saved.VERSION, 0, start + len(text), start, len(text), zlib.crc32(text)
    )
    head += saved._CHECK.pack(zlib.crc32(head))
    return head.ljust(saved.ALIGNMENT, b"\0") + data[saved.ALIGNMENT : start] + text


def _places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each item."""
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, item in items:
        yield (*path, key)
        if isinstance(item, (dict, list)):
            yield from _places(item, (*path, key))


def _changed(content: Any, place: list[Any], how: str, other: Any, number: int) -> Any:
    made = copy.deepcopy(content)
    try:
        _change_item(made, place, how, other, number)
    except (LookupError, TypeError):
        return content  # an earlier change has removed the place
    return made


def _change_item(content: Any, place: list[Any], how: str, other: Any, number: int) -> None:
    around, key = _at(content, place[:-1]), place[-1]
    item = around[key]
    if how == "delete":
        del around[key]
    elif how == "double" and isinstance(around, list):
        around.insert(key, copy.deepcopy(item))
    elif how in ("copy", "swap"):
        theirs = _at(content, other[:-1])
        found = copy.deepcopy(theirs[other[-1]])
        if how == "swap":
            theirs[other[-1]] = copy.deepcopy(item)
        around[key] = found
    elif how == "nudge" and isinstance(item, (int, float)):
        around[key] = [item + 1, item - 1, -item, item * 2, item * 1000, 0, 1, item // 2, -1][
            number
        ]
    else:
        around[key] = copy.deepcopy(other)


def _at(content: Any, place: list[Any]) -> Any:
    for key in place:
        content = content[key]
    return content
