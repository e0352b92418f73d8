"""All files that purevk writes are written through `purevk/whole_file.py`: it keeps devices, links, modes
and owners, and leaves no part of a file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "purevk").rglob("*.py"))
# Calls that write a file, and what they may be used for elsewhere.
ALLOWED = {
    ("cli/__init__.py", "open"): "the null device, in place of a closed stdout",
    ("cli/bench.py", "mkdir"): "in a temporary folder",
    ("cli/doctor.py", "NamedTemporaryFile"): "tries whether the cache folder can be written",
    ("paths.py", "open"): "for reading",
    ("knobs.py", "mkdir"): "the folder of PUREVK_DUMP",
}
# By attribute or name: whether a call writes, from its node.
_ALWAYS = {
    *("write_text", "write_bytes", "tofile", "touch", "mkdir", "makedirs", "mkdtemp", "mkstemp"),
    *("TemporaryDirectory", "NamedTemporaryFile", "TemporaryFile", "SpooledTemporaryFile"),
    *("symlink", "symlink_to", "hardlink_to", "mkfifo", "mknod", "fdopen", "copyfile", "copytree"),
    *("copy2", "copyfileobj", "move", "savetxt", "memmap"),
}
_STREAMS = {"savez", "savez_compressed", "ZipFile"}  # these take a path or a stream


def _writes(call: ast.Call, streams: set[str]) -> str:
    """The name of a function that writes a file; "" if the call writes none."""
    function = call.func
    name = getattr(function, "attr", None) or getattr(function, "id", "")
    owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
    if name in _ALWAYS or (
        owner == "os" and name in {"open", "rename", "replace", "link", "renames"}
    ):
        return name
    if owner in {"np", "numpy", "torch", "torch.export"} and name == "save":
        return name
    modes = [each.value for each in call.keywords if each.arg == "mode"]
    if name == "open" and owner in {"", "io", "gzip", "bz2", "lzma"}:
        modes += call.args[1:2]
    elif name == "open":  # Path.open; other objects that are opened get no text
        modes += [each for each in call.args[:1] if isinstance(each, ast.Constant)]
    elif name in _STREAMS:
        if call.args and isinstance(call.args[0], ast.Name) and call.args[0].id in streams:
            return ""
        if name != "ZipFile":
            return name
        modes += call.args[1:2]
    else:
        return ""
    for mode in modes:
        if not (isinstance(mode, ast.Constant) and set(str(mode.value)) <= set("rbt")):
            return name
    return ""


def written_in(text: str) -> list[tuple[int, str]]:
    """(line, function) of calls that write files."""
    tree = ast.parse(text)
    # What `with ... as name` opens, and streams in memory.
    streams = {
        item.optional_vars.id
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        for item in node.items
        if isinstance(item.optional_vars, ast.Name)
    } | {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("io.BytesIO")
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [(call.lineno, name) for call in calls if (name := _writes(call, streams))]


@pytest.mark.parametrize("line, name", [
    ("open(path, 'w')", "open"),
    ("open(path, mode)", "open"),
    ("open(path, 'r+b')", "open"),
    ("Path(path).open('ab')", "open"),
    ("path.open(mode='x')", "open"),
    ("os.open(path, flags)", "open"),
    ("path.write_text('')", "write_text"),
    ("np.savez(path, **named)", "savez"),
    ("np.save(path, array)", "save"),
    ("torch.save(module, path)", "save"),
    ("zipfile.ZipFile(path, 'w')", "ZipFile"),
    ("os.replace(a, b)", "replace"),
    ("open(path)", ""),
    ("open(path, 'rb')", ""),
    ("device.open(pair)", ""),
    ("text.replace('a', 'b')", ""),
    ("with replace_file(path) as stream: np.savez(stream, **named)", ""),
    ("zipfile.ZipFile(path)", ""),
])  # fmt: skip
def test_calls_that_write(line: str, name: str) -> None:
    assert [each for _, each in written_in(line)] == ([name] if name else [])


def test_no_other_module_writes_files() -> None:
    found, used = [], set()
    for path in FILES:
        module = str(path.relative_to(ROOT / "purevk"))
        if module == "whole_file.py":
            continue
        for line, name in written_in(path.read_text(encoding="utf-8")):
            if (module, name) in ALLOWED:
                used.add((module, name))
            else:
                found.append(f"purevk/{module}:{line}: {name}: use purevk.whole_file")
    assert not found, "\n".join(found)
    assert used == set(ALLOWED), f"not used any more: {set(ALLOWED) - used}"
