"""Changes of files: of bytes, 32-bit words and pickles, of JSON, and of the members of archives.

Changes reach what is inside: the description of a saved program, a member of an archive and an
entry of the cache are changed as files of their own kind, and their checksums are right again. A
change is a plain list, so that a failing case can be written down, made shorter and run again.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import pickletools
import random
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

from purevk.frontends import saved
from purevk.shaders import cache_entry

Change = list[Any]
MARK = "ran-by-purevk-fuzz"
"""A folder that the pieces of code in changes would make."""
_JSON = ("request", "import", "session", "gguf", "transformers")
NODE = b"\0node "
"""How the content of a member begins that stands for a link, a pipe, a device or a folder."""

NUMBERS = [
    0, 1, 2, 3, 4, 5, 7, 8, 64, 127, 255, 256, 1 << 15, 1 << 16, (1 << 31) - 1, 1 << 31,
    (1 << 32) - 2, (1 << 32) - 1,
]  # fmt: skip
ITEMS: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 7, 64, 1 << 31, 1 << 40, -(1 << 63), 1.5, 1e308, "", "x", "s0",
    "\x1b[2J\x9b\u202e", f"__import__('os').mkdir('{MARK}')", "9**9**9**9", "../../x", "(" * 3000,
    json.loads("[" * 40 + "1" + "]" * 40), json.loads("[" * 70 + "null" + "]" * 70), [1] * 2000 + ["a" * 20_000],
    "float32", "int64", "bool", "aten.relu.default", "aten.cat.default", "aten.view.default",
    "aten.from_file.default", "purevk.store", [], [1], [-1], [0, 0], [[2, []]], [[2, ["s0"]]],
    [["//", 1, 0]], {}, {"value": 0}, {"value": 1}, {"value": 99}, {"size": [[1, ["s0"]]]},
    {"dtype": "bool"}, {"float": "nan"}, {"float": "inf"}, {"graph": {}}, {"complex": [0, 1]},
    {"fixed": 3},
]  # fmt: skip
_SUM = [[factor, ["s0"] * factor] for factor in range(20)]


def _nested(kind: str, size: Any, other: Any, depth: int) -> Any:
    return _nested(kind, [[1, [[kind, size, other]]]], other, depth - 1) if depth else size


# Sizes that would take all time or memory.
ITEMS += [
    [[1, [["//", [[1, ["s0"]], [1, [["%", [[1, ["s0"]]], 7]]]], 1]] * 40]], [[1, [["**", _SUM, 64]]]],
    [[1, [["**", [[1, ["s0"]]], 10**10]]]], _nested("**", [[1, ["s0"]]], 64, 6), _nested("**", 3, 64, 20),
    _nested("//", [[1, ["s0"]], [1, []]], 2, 30), _nested("min", [[1, ["s0"]]], [[1, ["s0"]], [-9, []]], 30),
    [[10**4000, ["s0"]]], 1 << 36, 1 << 61, [1 << 36, 1 << 36], {"size": [[1, [["**", _SUM, 3]] * 9]]},
]  # fmt: skip
# In place of bytes, as latin-1.
PIECES = [
    f"cos\nmkdir\n(X\x12\0\0\0{MARK}tR.", "cbuiltins\neval\n(X\x05\0\0\0hash()tR.", "|O", "-1", "99999999999",
    f"__import__('os').mkdir('{MARK}')", "\x1b[2J", "../../x", "PK\x03\x04", "PK\x05\x06", "", "\0",
]  # fmt: skip
# Each with what it leads to: "outside" is a file that is not of the case.
NODES = [
    "link outside", "link nowhere", "link /dev/zero", "link /dev/full", "link .", "link itself", "pipe",
    "folder", "hole", "socket",
]  # fmt: skip


def draw_changes(draw: random.Random, kind: str, data: bytes) -> list[Change]:
    """Between one and six changes of a file.

    Args:
        kind: "pvk" for a saved program, those of `_JSON` for JSON, "override" and "dump" for
            archives that stand for folders, whose members may become links, pipes and the like. Other
            archives and entries of the cache are known by how they begin.
    """
    count = draw.choice([1, 1, 1, 1, 1, 2, 2, 3, 6])
    if draw.random() < 0.7 or kind in ("import", "gguf", "transformers"):
        if kind in ("pvk", *_JSON) and data.startswith((b"{", saved.MAGIC)):
            places = list(_places(description(data)))
            return [_draw_item(draw, places) for _ in range(count)]
    folder = kind in ("override", "dump")
    if data.startswith(b"PK") and (folder or draw.random() < 0.9):
        return [_draw_member(draw, data, folder) for _ in range(count)]
    if data.startswith(cache_entry._MAGIC) and draw.random() < 0.7:
        return [_draw_entry(draw, data)]
    return [_draw_bytes(draw, data) for _ in range(count)]


def _draw_content(draw: random.Random, data: bytes) -> list[Change]:
    """A change of a member of an archive, as of a file of its kind."""
    if data.startswith(b"{"):
        kinds: dict[Any, list[tuple[Any, ...]]] = {}
        for place in _places(json.loads(data)):
            kinds.setdefault(tuple(step for step in place if isinstance(step, str))[-3:], []).append(place)  # fmt: skip
        return [_draw_item(draw, [draw.choice(places) for places in kinds.values()])]
    if data.startswith(b"PK"):
        return [_draw_member(draw, data)]
    if data.startswith(cache_entry._MAGIC):
        return [_draw_entry(draw, data)]
    if data.startswith(b"\x80\x02"):  # a pickle of torch.save
        ends = [at for _, _, at in pickletools.genops(data)]
        at, source = draw.sample(range(len(ends) - 1), 2)
        piece = data[ends[source] : ends[source + 1]].decode("latin-1")
        if draw.random() < 0.3:
            piece = draw.choice(PIECES)
        return [["splice", ends[at], draw.choice([0, ends[at + 1] - ends[at]]), piece]]
    return [_draw_bytes(draw, data)]


def _draw_member(draw: random.Random, data: bytes, folder: bool = False) -> Change:
    members = _members(data)
    names = list(members)
    # What decides most is JSON.
    texts = [name for name in names if members[name][1].startswith(b"{")]
    name = draw.choice(names + 3 * texts)
    if folder and draw.random() < 0.5:
        return ["become", name, draw.choice(NODES)]
    how = draw.choice(["within"] * 20 + ["remove", "double", "swap", "rename", "pack"])
    if how == "within":
        return [how, name, _draw_content(draw, members[name][1])]
    if how == "rename":
        return [how, name, draw.choice([name + "x", "x", "/x", "../x", " ", name.upper()])]
    return [how, name, draw.choice(names)]


def _draw_entry(draw: random.Random, data: bytes) -> Change:
    at = draw.choice([0, 1])
    return ["entry", at, _draw_content(draw, _entry(data)[at])]


def _draw_item(draw: random.Random, places: list[tuple[Any, ...]]) -> Change:
    place = list(draw.choice(places))
    how = draw.choice(["delete", "double", "swap", "nudge", "copy", "repeat", "set", "set", "set"])
    other = list(draw.choice(places)) if how in ("swap", "copy") else None
    return ["json", place, how, draw.choice(ITEMS) if how == "set" else other, draw.randrange(9000)]


def _draw_bytes(draw: random.Random, data: bytes) -> Change:
    size = max(len(data), 8)
    # Most of what decides is near the start or the end; weights are in between.
    near = draw.choice([size, size, min(size, 2048), min(size, 256)])
    at = draw.randrange(near) if draw.random() < 0.7 else size - 1 - draw.randrange(near)
    how = draw.choice(
        ["word", "word", "word", "nudge", "byte", "bit", "copy", "cut", "insert", "splice"]
    )
    if how == "splice":
        return [how, at, draw.choice([0, 1, 8]), draw.choice(PIECES)]
    if how in ("word", "nudge"):
        at = at // 4 * 4
        return [how, at, draw.choice(NUMBERS) if how == "word" else draw.choice([-4, -1, 1, 4])]
    if how == "copy":
        return [how, at, draw.randrange(size) // 4 * 4, draw.choice([4, 8, 16, 64])]
    return [how, at, draw.randrange(256)]


def apply(data: bytes, changes: list[Change]) -> bytes:
    """The file with the changes. What holds a checksum of what is changed gets the right one."""
    if changes and changes[0][0] == "json":
        content = description(data)
        for _, place, how, other, number in changes:
            content = _changed(content, place, how, other, number)
        return with_description(data, content)
    if changes and changes[0][0] in ("within", "become", "remove", "double", "swap", "rename", "pack"):  # fmt: skip
        members = [(name, *rest) for name, rest in _members(data).items()]
        for change in changes:
            _change_members(members, *change)
        return _packed(members)
    if changes and changes[0][0] == "entry":
        ((_, at, inner),) = changes
        contents = [*_entry(data)]
        contents[at] = apply(contents[at], inner)
        sizes = map(len, contents)
        checksum = hashlib.sha256(b"".join(contents)).digest()
        head = (cache_entry._MAGIC, cache_entry.FORMAT, checksum, *sizes)
        return cache_entry._HEADER.pack(*head) + b"".join(contents)
    made = bytearray(data)
    for how, at, *rest in changes:
        _change_bytes(made, how, at, rest)
    return bytes(made)


def _change_bytes(made: bytearray, how: str, at: int, rest: list[Any]) -> None:
    if how == "cut":
        del made[at:]
    elif how == "insert":
        made[at:at] = bytes([rest[0]]) * (1 + rest[0] % 8)
    elif how == "splice":
        count, text = rest
        made[at : at + count] = text.encode("latin-1")
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


# -- archives --------------------------------------------------------------------------------------
def _members(data: bytes) -> dict[str, tuple[int, bytes]]:
    """How each member is packed, and its content."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {
            info.filename: (info.compress_type, archive.read(info)) for info in archive.infolist()
        }


def _packed(members: list[tuple[str, int, bytes]]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name that is there twice
        for name, packing, content in members:
            archive.writestr(name, content, packing)
    return made.getvalue()


def _change_members(members: list[tuple[str, int, bytes]], how: str, name: str, other: Any) -> None:
    places = {member[0]: at for at, member in enumerate(members)}
    if name not in places:
        return  # an earlier change has removed it
    at = places[name]
    _, packing, content = members[at]
    if how == "within":
        try:
            members[at] = name, packing, apply(content, other)
        except (LookupError, ValueError, struct.error, zipfile.BadZipFile):
            pass  # an earlier change has made it something else
    elif how == "become":
        members[at] = name, packing, NODE + other.encode()
    elif how == "remove":
        del members[at]
    elif how == "double":
        members.append(members[at])
    elif how == "swap":
        members[at] = name, packing, members[places.get(other, at)][2]
    elif how == "rename":
        members[at] = other, packing, content
    else:
        members[at] = name, zipfile.ZIP_STORED if packing else zipfile.ZIP_DEFLATED, content


def _entry(data: bytes) -> tuple[bytes, bytes]:
    """What an entry of the cache says of its content, as JSON, and the content."""
    size = cache_entry._HEADER.unpack_from(data)[3]
    start = cache_entry._HEADER.size
    return data[start : start + size], data[start + size :]


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
    elif how == "repeat" and isinstance(around, list):
        around[key:key] = [item] * (1 + number % 1000)
    elif how in ("copy", "swap"):
        theirs = _at(content, other[:-1])
        found = copy.deepcopy(theirs[other[-1]])
        if how == "swap":
            theirs[other[-1]] = copy.deepcopy(item)
        around[key] = found
    elif how == "nudge" and isinstance(item, (int, float)):
        around[key] = [item + 1, item - 1, -item, item * 2, item * 1000, 0, 1, item // 2, -1][
            number % 9
        ]
    elif how == "nudge" and isinstance(item, str):
        at = number // 5 % (len(item) + 1)
        piece = (PIECES[number % len(PIECES)], "", chr(number % 300), "(", ",")[number % 5]
        around[key] = item[:at] + piece + item[at + number % 2 :]
    else:
        around[key] = copy.deepcopy(other)


def _at(content: Any, place: list[Any]) -> Any:
    for key in place:
        content = content[key]
    return content
