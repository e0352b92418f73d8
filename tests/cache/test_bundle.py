"""Bundles: a model's SPIR-V in one file, for a machine without a compiler; and `compile_cached`."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import warnings
import zipfile
from dataclasses import asdict
from pathlib import Path

import pytest

from purevk.cache import Cache, CacheKey
from purevk.compiling import compile_cached
from purevk.errors import FileFormatError, InputError, PurevkError, ShaderCompilerError
from purevk.shaders import shaderc
from purevk.shaders.cache_entry import pack
from purevk.shaders.shaderc import CompileJob
from tests.cache.harness import key_of, spirv_of

SOURCE = """#version 450
layout(local_size_x = 64) in;
layout(set = 0, binding = 0) buffer Data { float data[]; };
void main() { data[gl_GlobalInvocationID.x] *= FACTOR; }
"""
JOBS = [CompileJob(SOURCE, "scale.comp", {"FACTOR": f"{number}.5"}) for number in range(4)]


def full_cache(folder: Path | None, count: int = 5) -> Cache:
    cache = Cache(folder)
    for number in range(count):
        cache.put_spirv(key_of(number), spirv_of(number), {"compiler": f"test {number}"})
    return cache


@pytest.mark.parametrize("on_disk", [True, False])
def test_round_trip(tmp_path: Path, on_disk: bool) -> None:
    source = full_cache(tmp_path / "source" if on_disk else None)
    bundle = tmp_path / "model.bundle"
    written = source.export_bundle(bundle, [key_of(number) for number in (0, 1, 3, 3)])
    assert (written.entries, written.nbytes) == (3, bundle.stat().st_size)
    attached, imported = Cache(None), Cache(tmp_path / "target")
    assert attached.attach_bundle(bundle, sha256=written.sha256) == 3
    assert imported.import_bundle(bundle, sha256=written.sha256.upper()) == 3
    bundle.unlink()
    for cache in (attached, imported, Cache(tmp_path / "target")):
        found = [
            number for number in range(5) if cache.get_spirv(key_of(number)) == spirv_of(number)
        ]
        assert found == [0, 1, 3]


def test_export_of_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PurevkError, match="2 shaders are not in the cache") as caught:
        full_cache(None).export_bundle(tmp_path / "b", [key_of(1), key_of(50), key_of(51)])
    assert caught.value.where == "a.comp"
    assert not (tmp_path / "b").exists()


def test_export_to_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(PurevkError, match="cannot be written"):
        full_cache(None).export_bundle(tmp_path / "absent" / "b", [key_of(1)])


def test_no_bundle(tmp_path: Path) -> None:
    text, other = tmp_path / "text", tmp_path / "other.zip"
    text.write_text("not a zip")
    with zipfile.ZipFile(other, "w") as file:
        file.writestr("a", "b")
    for path in (text, other):
        for use in (Cache(None).attach_bundle, Cache(None).import_bundle):
            with pytest.raises(FileFormatError, match="no purevk bundle") as caught:
                use(path, trust=True)
            assert caught.value.where == str(path) and "purevk warmup" in caught.value.next
    for use in (Cache(None).attach_bundle, Cache(None).import_bundle):
        with pytest.raises(InputError, match="cannot be opened") as missing:
            use(tmp_path / "absent", trust=True)
        assert missing.value.where == str(tmp_path / "absent")


@pytest.mark.parametrize("manifest", ["[]", "{}", "nonsense", '{"format": 999}', '{"format": "1"}'])
def test_wrong_manifest(tmp_path: Path, manifest: str) -> None:
    with zipfile.ZipFile(tmp_path / "b", "w") as file:
        file.writestr("purevk-bundle.json", manifest)
    with pytest.raises(FileFormatError, match="no purevk bundle|another version"):
        Cache(None).attach_bundle(tmp_path / "b", trust=True)


def test_a_bundle_with_damaged_entries_is_attached_in_part_and_never_imported(
    tmp_path: Path,
) -> None:
    path = tmp_path / "b"
    full_cache(None).export_bundle(path, [key_of(number) for number in range(5)])
    with zipfile.ZipFile(path) as file:
        entries = {name: file.read(name) for name in file.namelist()}
    first, second = (f"spirv/{key_of(number).digest()}.pvk" for number in (0, 1))
    entries[first], entries[second] = entries[second], entries[first]
    third = f"spirv/{key_of(2).digest()}.pvk"
    entries[third] = entries[third][:-4]
    with zipfile.ZipFile(path, "w") as file:
        for name, data in entries.items():
            file.writestr(name, data)
    data = bytearray(path.read_bytes())
    at = data.index(spirv_of(3)[:60])
    data[at + 30] ^= 4
    path.write_bytes(data)
    cache = Cache(tmp_path / "cache")
    with pytest.raises(FileFormatError, match="damaged entry"):
        cache.import_bundle(path, trust=True)
    assert cache.get_spirv(key_of(4)) is None and not (tmp_path / "cache").exists()
    attached = Cache(None)
    attached.attach_bundle(path, trust=True)
    assert [number for number in range(5) if attached.get_spirv(key_of(number))] == [4]


def test_any_cut_of_a_bundle_is_refused_or_gives_right_entries(tmp_path: Path) -> None:
    path = tmp_path / "b"
    full_cache(None).export_bundle(path, [key_of(number) for number in range(5)])
    data = path.read_bytes()
    for end in range(0, len(data), 37):
        path.write_bytes(data[:end])
        cache = Cache(None)
        with pytest.raises(FileFormatError):
            cache.attach_bundle(path, trust=True)


def _changed(data: bytes, random: random.Random) -> bytes:
    """A bundle that was changed: bytes of it, or another shader with a right checksum, as somebody
    would write it who can write the file."""
    if random.random() < 0.3:
        at = random.randrange(len(data))
        cut = (
            data[:at]
            if random.random() < 0.3
            else data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        )
        return cut
    made = io.BytesIO()
    number = random.randrange(5)
    digest = key_of(number).digest()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(made, "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    with zipfile.ZipFile(made, "a") as target, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the last entry of a name counts
        shader = spirv_of(random.randrange(10, 1 << 30))
        entry = pack(digest, shader, {"key": asdict(key_of(number))})
        target.writestr(f"spirv/{digest}.pvk", entry)
    return made.getvalue()


def test_changed_bundles_are_refused(tmp_path: Path) -> None:
    """1,000 of them, half of which would be read if nobody asked for the digest."""
    chance = random.Random(7)
    path, folder = tmp_path / "b", tmp_path / "cache"
    written = full_cache(None, 5).export_bundle(path, [key_of(number) for number in range(5)])
    data, readable = path.read_bytes(), 0
    cache = Cache(folder)
    for number in range(1000):
        path.write_bytes(_changed(data, chance))
        use = (cache.import_bundle, cache.attach_bundle)[number % 2]
        with pytest.raises(FileFormatError, match="not the one that the SHA-256 names"):
            use(path, sha256=written.sha256)
        with pytest.raises(InputError, match="a bundle is code") as caught:
            use(path)
        readable += number % 10 == 0 and _is_readable(path)
    assert "--sha256" in caught.value.next and "trust=True" in caught.value.next
    assert not folder.exists() and cache.get_spirv(key_of(0)) is None
    assert readable > 30


def _is_readable(path: Path) -> bool:
    try:
        return Cache(None).import_bundle(path, trust=True) > 0
    except FileFormatError:
        return False


@pytest.mark.parametrize("digest", ["", "0" * 63, "x" * 64, "0" * 64 + "\n", 5, b"0" * 64])
def test_what_is_no_digest(tmp_path: Path, digest: object) -> None:
    full_cache(None).export_bundle(tmp_path / "b", [key_of(1)])
    with pytest.raises(InputError, match="no SHA-256"):
        Cache(None).import_bundle(tmp_path / "b", sha256=digest, trust=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("trust", [False, None, 0, 1, "", "no", "false", []])
def test_what_is_no_trust(tmp_path: Path, trust: object) -> None:
    full_cache(None).export_bundle(tmp_path / "b", [key_of(1)])
    with pytest.raises(InputError, match="by its SHA-256"):
        Cache(None).import_bundle(tmp_path / "b", trust=trust)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["kernels.zip", "a b", "back\\slash", "line\nbreak"])
def test_the_digest_beside_a_bundle(tmp_path: Path, name: str) -> None:
    """sha256sum reads it."""
    written = full_cache(None).export_bundle(tmp_path / name, [key_of(1)])
    beside = tmp_path / f"{name}.sha256"
    assert written.sha256 == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    assert written.sha256 in beside.read_text()
    if tool := shutil.which("sha256sum"):
        subprocess.run([tool, "-c", beside], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("node", ["fifo", "zero", "sparse", "folder"])
def test_what_has_no_end_is_no_bundle(tmp_path: Path, node: str) -> None:
    """Nothing waits for the bytes of a pipe, and nothing reads a file of 1 TB."""
    path = tmp_path / "b"
    if node == "fifo":
        os.mkfifo(path)
    elif node == "sparse":
        with open(path, "wb") as file:
            file.truncate(1 << 40)
    elif node == "folder":
        path.mkdir()
    path = Path("/dev/zero") if node == "zero" else path
    for options in ({"trust": True}, {"sha256": "0" * 64}):
        with pytest.raises(InputError, match="cannot be opened"):
            Cache(None).import_bundle(path, **options)


@pytest.fixture
def compiler() -> shaderc.Compiler:
    try:
        return shaderc.load()
    except ShaderCompilerError as error:
        pytest.skip(f"no shader compiler: {error.what}")


def test_compile_cached(tmp_path: Path, compiler: shaderc.Compiler) -> None:
    seen: list[tuple[int, int]] = []
    cache = Cache(tmp_path)
    jobs = [JOBS[0], JOBS[1], JOBS[0]]
    results = compile_cached(jobs, cache, threads=2, progress=lambda *step: seen.append(step))
    assert results == [compiler.compile_job(job) for job in jobs]
    assert seen == [(1, 2), (2, 2)]
    assert (
        compile_cached(jobs, Cache(tmp_path), progress=lambda *step: seen.append(step)) == results
    )
    assert len(seen) == 2
    assert compile_cached([], cache) == []
    meta, _ = cache._entries.read("spirv", CacheKey.of(JOBS[0]).digest())
    assert meta["compiler"] == compiler.version


WITHOUT = """
import json, sys
from pathlib import Path
from purevk.cache import Cache
from purevk.compiling import compile_cached
from purevk.shaders.shaderc import CompileJob
cache = Cache(sys.argv[1] or None)
if sys.argv[2]:
    cache.attach_bundle(sys.argv[2], trust=True)
jobs = [CompileJob(sys.argv[3], "scale.comp", {"FACTOR": f"{n}.5"}) for n in range(4)]
print(json.dumps([spirv.hex() for spirv in compile_cached(jobs, cache)]))
maps = Path("/proc/self/maps")
assert not maps.exists() or "shaderc" not in maps.read_text()
"""


@pytest.mark.parametrize("way", ["warm folder", "bundle"])
def test_warm_start_loads_no_compiler(
    tmp_path: Path, compiler: shaderc.Compiler, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path / "cache")
    expected = [spirv.hex() for spirv in compile_cached(JOBS, cache)]
    cache.export_bundle(tmp_path / "b", [CacheKey.of(job) for job in JOBS])
    monkeypatch.setenv("PUREVK_SHADERC", "/absent/libshaderc.so")
    arguments = [str(tmp_path / "cache"), ""] if way == "warm folder" else ["", str(tmp_path / "b")]
    command = [sys.executable, "-c", WITHOUT, *arguments, SOURCE]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2]
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == expected
    with pytest.raises(ShaderCompilerError, match="/absent"):
        compile_cached(JOBS, Cache(None))
