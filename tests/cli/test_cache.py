"""`purevk cache`, on folders with entries of every kind."""

from __future__ import annotations

import json
import os
import struct
import time
import zipfile
from pathlib import Path

import pytest

from purevk import knobs
from purevk.cache import Cache
from purevk.shaders.cache_entry import pack
from purevk.shaders.source import text_hash
from tests.cache.harness import key_of, spirv_of

PIPELINE = struct.pack("<4I", 32, 1, 7, 8) + bytes(16) + b"made by a driver"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with three SPIR-V modules, a pipeline cache and a tuning result."""
    path = tmp_path / "cache"
    monkeypatch.setenv(knobs.CACHE.name, str(path))
    cache = Cache(path)
    for number in range(3):
        cache.put_spirv(key_of(number), spirv_of(number), {"compiler": f"test {number}"})
    cache.put_pipeline_cache("a device|1|2", PIPELINE)
    cache.put_tuning("a device", "limits", {"copy": 1.5})
    return path


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _path(folder: Path, number: int) -> Path:
    digest = key_of(number).digest()
    return folder / "spirv" / digest[:2] / f"{digest}.pvk"


def test_list(cli, folder: Path) -> None:
    data = cli("cache", "ls", "--json").json
    kinds = sorted(entry["kind"] for entry in data["entries"])
    assert kinds == ["pipeline", "spirv", "spirv", "spirv", "tuning"]
    assert data["bytes"] == sum(path.stat().st_size for path in _files(folder))
    assert {e["device"] for e in data["entries"]} == {None, "a device", "a device|1|2"}
    assert all(entry["problem"] is None for entry in data["entries"])
    text = cli("cache", "ls").out
    assert "a.comp" in text and "5 entries" in text and str(folder) in text


def test_the_list_names_devices_and_compilers(cli, folder: Path) -> None:
    cache = Cache(folder)
    cache.put_tuning("llvmpipe (LLVM 15.0.6, 256 bits)|mesa|1", "limits", 1)
    cache.put_spirv(key_of(7), spirv_of(7), {"compiler": "shaderc 1.0, SPIR-V 1.6"})
    text = cli("cache", "ls").out
    assert "llvmpipe (LLVM 15.0.6, 256 bits)" in text and "mesa" not in text
    assert "shaderc 1.0 " in text


def test_verify(cli, folder: Path) -> None:
    assert cli("cache", "verify").code == 0
    damaged, renamed = _path(folder, 0), _path(folder, 1)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    # A sound checksum under the name of another key.
    digest = key_of(1).digest()
    other = {"key": {"template": "other.comp"}}
    renamed.write_bytes(pack(digest, spirv_of(1), other))
    ran = cli("cache", "verify", "--json")
    assert ran.code == 1 and ran.json["sound"] == 3 and ran.json["removed"] == 0
    assert {e["problem"] for e in ran.json["damaged"]} == {
        "damaged, or of another version",
        "the key is not that of its name",
    }
    assert damaged.exists()
    assert cli("cache", "verify", "--remove").code == 0
    assert not damaged.exists() and not renamed.exists() and len(_files(folder)) == 3


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no modes here")
def test_a_file_that_others_may_write_is_a_problem(cli, folder: Path) -> None:
    _path(folder, 2).chmod(0o666)
    (entry,) = cli("cache", "verify", "--json").json["damaged"]
    assert entry["problem"] == "not readable, or others may write it"


def test_prune_by_age(cli, folder: Path) -> None:
    old = time.time() - 10 * 86400
    for number in (0, 2):
        os.utime(_path(folder, number), (old, old))
    assert cli("cache", "prune", "--older-than", 9, "--dry-run", "--json").json["removed"] == 2
    assert len(_files(folder)) == 5
    assert cli("cache", "prune", "--older-than", 11, "--json").json["removed"] == 0
    assert cli("cache", "prune", "--older-than", 9, "--json").json["removed"] == 2
    assert not _path(folder, 0).exists() and _path(folder, 1).exists()


def test_prune_by_size_keeps_what_was_used_last(cli, folder: Path) -> None:
    for age, path in enumerate(_files(folder)):
        used = time.time() - age * 7200
        os.utime(path, (used, used))
    newest = _files(folder)[0]
    assert cli("cache", "prune", "--max-size", newest.stat().st_size, "--json").json["kept"] == 1
    assert _files(folder) == [newest]
    assert cli("cache", "prune", "--max-size", "1K").code == 0


def test_clear(cli, folder: Path) -> None:
    driver = folder / knobs.DRIVER_FOLDER / "mesa_shader_cache" / "ab" / "cdef"
    driver.parent.mkdir(parents=True)
    driver.write_bytes(b"shader")
    (folder / "notes.txt").write_text("not of the cache")
    assert cli("cache", "ls", "--json").json["driver_bytes"] == 6
    assert cli("cache", "clear", "--json").json["removed"] == 6
    assert _files(folder) == [folder / "notes.txt"]


def test_difference(cli, folder: Path, tmp_path: Path) -> None:
    other = Cache(tmp_path / "other")
    other.put_spirv(key_of(0), spirv_of(0), {"compiler": "another, which made the same"})
    other.put_spirv(key_of(1), spirv_of(9))
    other.put_spirv(key_of(5), spirv_of(5))
    ran = cli("cache", "diff", tmp_path / "other", "--json")
    data = ran.json
    assert ran.code == 1 and data["same"] == 1
    assert [entry["digest"] for entry in data["changed"]] == [key_of(1).digest()]
    assert [entry["digest"] for entry in data["only_there"]] == [key_of(5).digest()]
    assert len(data["only_here"]) == 3
    assert "other content" in cli("cache", "diff", tmp_path / "other").out
    same = cli("cache", "diff", folder, "--json")
    assert same.code == 0 and same.json["same"] == 5


def test_export_and_import(cli, folder: Path, tmp_path: Path) -> None:
    damaged = _path(folder, 0)
    damaged.write_bytes(b"nothing")
    archive, target = tmp_path / "kernels.zip", tmp_path / "target"
    ran = cli("cache", "export", archive, "--json")
    assert ran.code == 0 and ran.json["entries"] == 3 and ran.json["damaged"] == 1
    digest = ran.json["sha256"]
    assert (tmp_path / "kernels.zip.sha256").read_text() == f"{digest}  kernels.zip\n"
    assert damaged.exists()
    out = cli("cache", "export", archive).out
    assert "1 damaged entry left out" in out and f"sha256 {digest}" in out
    refused = cli("cache", "import", archive, "--folder", target)
    assert refused.code == 1 and "--sha256" in refused.err and not target.exists()
    imported = cli("cache", "import", archive, "--folder", target, "--sha256", digest, "--json")
    assert imported.json["entries"] == 3
    cache = Cache(target)
    assert [cache.get_spirv(key_of(n)) == spirv_of(n) for n in range(3)] == [False, True, True]
    assert cache.get_tuning("a device", "limits") == {"copy": 1.5}
    assert cache.get_pipeline_cache("a device|1|2") is None  # nobody can verify it


DAMAGED = ("link", "another key", "no key", "deep JSON", "cut JSON")


def _add_damaged(made: zipfile.ZipFile, entry: bytes, damaged: str) -> None:
    """Adds an entry that is not what its name says, in the middle of the others."""
    digest = key_of(8).digest()
    if damaged == "link":
        link = zipfile.ZipInfo(f"spirv/{digest}.pvk")
        link.external_attr = 0o120777 << 16
        made.writestr(link, "/etc/passwd")
    elif damaged == "another key":
        made.writestr(f"spirv/{digest}.pvk", entry)
    elif damaged == "no key":
        made.writestr(f"spirv/{digest}.pvk", pack(digest, spirv_of(8), {"key": {"template": 1}}))
    elif damaged:
        meta = {"device": "a", "name": "b"}
        name = text_hash(json.dumps(list(meta.values())))
        payload = b"[" * 100_000 if damaged == "deep JSON" else b"{"
        made.writestr(f"tuning/{name}.pvk", pack(name, payload, meta))


@pytest.mark.parametrize("damaged", ["", *DAMAGED])
def test_hostile_archives(cli, folder: Path, tmp_path: Path, damaged: str) -> None:
    good, evil = tmp_path / "good.zip", tmp_path / "evil.zip"
    assert cli("cache", "export", good).code == 0
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(evil, "w") as made:
        for info in source.infolist():
            if info.filename != f"spirv/{key_of(1).digest()}.pvk":
                made.writestr(info.filename, source.read(info))
        entry = source.read(f"spirv/{key_of(1).digest()}.pvk")
        for name in ("../escaped.pvk", "/escaped.pvk", f"spirv/../../{key_of(1).digest()}.pvk"):
            made.writestr(name, entry)
        digest = key_of(8).digest()
        made.writestr(f"pipeline/{digest}.pvk", pack(digest, PIPELINE, {"device": "a"}))
        _add_damaged(made, entry, damaged)
    before = {path: path.read_bytes() for path in _files(tmp_path)}
    target = tmp_path / "target"
    ran = cli("cache", "import", evil, "--folder", target, "--trust", "--json")
    if damaged:  # nothing of it
        assert ran.code == 1 and "damaged entry" in ran.json["error"]["what"]
        assert not target.exists()
        return
    assert ran.code == 0 and ran.json["entries"] == 3
    assert {p: p.read_bytes() for p in _files(tmp_path) if target not in p.parents} == before
    assert all(path.is_file() and not path.is_symlink() for path in target.rglob("*.pvk"))
    assert cli("cache", "verify", "--folder", target).code == 0


@pytest.mark.parametrize(
    "arguments, what",
    [
        (["prune"], "prune needs --older-than DAYS"),
        (["prune", "--older-than", "-3"], "'-3' is not a number of 0 or more"),
        (["prune", "--older-than", "nan"], "'nan' is not a number of 0 or more"),
        (["prune", "--max-size", "5X"], "'5X' is no size"),
        (["prune", "--max-size", "banana"], "'banana' is no size"),
        (["prune", "--max-size=-5M"], "'-5M'"),
        (["diff"], "takes the folder PATH, and 0 are given"),
        (["ls", "x"], "takes no PATH"),
        (["ls", "--older-than", "3"], "ls has no --older-than: prune takes it"),
        (["export", "x", "--trust"], "export has no --trust: import takes it"),
        (["clear", "--dry-run"], "clear has no --dry-run: prune and verify take it"),
    ],
)
def test_a_wrong_command_line(cli, folder: Path, arguments: list[str], what: str) -> None:
    ran = cli("cache", *arguments)
    assert ran.code == 2 and what in ran.err and "usage: purevk cache" in ran.err
    assert len(_files(folder)) == 5


@pytest.mark.parametrize(
    "arguments, what",
    [
        (["diff", "absent"], "there is no such folder"),
        (["ls", "--folder", "absent"], "there is no such folder"),
        (["export", "made.zip", "--folder", "absent"], "there is no such folder"),
        (["import", "absent.zip", "--trust"], "No such file or directory"),
        (["diff", __file__], "this is a file"),
        (["import", "absent.zip", "--folder", __file__], "this is a file"),
    ],
)
def test_what_is_refused(cli, folder: Path, arguments: list[str], what: str) -> None:
    ran = cli("cache", *arguments)
    assert ran.code == 1 and what in ran.err
    assert len(_files(folder)) == 5


def test_what_is_imported_has_to_be_kept(cli, folder: Path, tmp_path: Path) -> None:
    archive, taken = tmp_path / "made.zip", tmp_path / "file"
    assert cli("cache", "export", archive).code == 0
    taken.touch()
    with pytest.warns(RuntimeWarning, match="cannot write its cache"):
        ran = cli("cache", "import", archive, "--folder", taken / "cache", "--trust")
    assert ran.code == 1 and "the entries could not be kept" in ran.err
    assert "Not a directory" in ran.err


def test_without_a_cache_on_disk(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(knobs.CACHE.name, "0")
    ran = cli("cache", "ls", "--json")
    assert ran.code == 1 and json.loads(ran.out)["error"]["what"] == "there is no cache on disk"
