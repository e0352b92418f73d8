"""The folder: what goes in comes out, and nothing that happens to the disk is an error."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from purevk import knobs
from purevk.cache import Cache, default_cache
from purevk.errors import PurevkError
from purevk.shaders.cache_entry import pack, unpack
from tests.cache.harness import key_of, spirv_of


def entry_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.pvk"))


def test_kept_from_one_process_to_the_next(tmp_path: Path) -> None:
    first = Cache(tmp_path)
    assert first.get_spirv(key_of(1)) is None
    first.put_spirv(key_of(1), spirv_of(1), {"compiler": "test"})
    second = Cache(tmp_path)
    assert second.get_spirv(key_of(1)) == spirv_of(1)
    assert second.get_spirv(key_of(2)) is None
    stats = second.stats()
    assert (stats.entries, stats.hits, stats.memory_hits, stats.misses) == (1, 1, 0, 1)
    assert stats.bytes == sum(path.stat().st_size for path in entry_files(tmp_path))


def test_read_from_disk_once(tmp_path: Path) -> None:
    Cache(tmp_path).put_spirv(key_of(1), spirv_of(1))
    cache = Cache(tmp_path)
    assert cache.get_spirv(key_of(1)) == spirv_of(1)
    for path in entry_files(tmp_path):
        path.unlink()
    assert cache.get_spirv(key_of(1)) == spirv_of(1)
    assert cache.stats().memory_hits == 1


@pytest.mark.parametrize(
    "damage", ["truncated", "empty", "longer", "payload", "head", "zeros", "other entry"]
)
def test_damaged_entry_is_a_miss_and_goes(tmp_path: Path, damage: str) -> None:
    Cache(tmp_path).put_spirv(key_of(1), spirv_of(1))
    (path,) = entry_files(tmp_path)
    data = bytearray(path.read_bytes())
    if damage == "truncated":
        data = data[:-7]
    elif damage == "empty":
        data = bytearray()
    elif damage == "longer":
        data += b"\0"
    elif damage == "payload":
        data[-1] ^= 1
    elif damage == "head":
        data[0] ^= 1
    elif damage == "zeros":
        data = bytearray(len(data))
    else:
        data = bytearray(pack(key_of(2).digest(), spirv_of(2), {}))
    path.write_bytes(data)
    cache = Cache(tmp_path)
    assert cache.get_spirv(key_of(1)) is None
    assert not path.exists()
    assert cache.stats().damaged == 1
    cache.put_spirv(key_of(1), spirv_of(1))
    assert Cache(tmp_path).get_spirv(key_of(1)) == spirv_of(1)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(position=st.integers(0, 10_000), bit=st.integers(0, 7), cut=st.integers(0, 10_000))
def test_any_flipped_bit_or_cut_is_found(position: int, bit: int, cut: int) -> None:
    data = pack("d" * 64, spirv_of(3), {"compiler": "test"})
    assert unpack("d" * 64, data) == ({"compiler": "test", "digest": "d" * 64}, spirv_of(3))
    flipped = bytearray(data)
    flipped[position % len(data)] ^= 1 << bit
    assert unpack("d" * 64, bytes(flipped)) is None
    assert unpack("d" * 64, data[: cut % len(data)]) is None


@pytest.mark.parametrize("kind", ["file", "under a file", "proc", "dangling link", "long name"])
def test_unusable_folder_leaves_the_cache_in_memory(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "cache"
    if kind == "proc":
        if not Path("/proc/self").exists():
            pytest.skip("this system has no /proc")
        folder = Path("/proc/purevk")
    elif kind == "dangling link":
        folder.symlink_to("/proc/absent/folder")
    elif (
        kind == "long name"
    ):  # os.stat raises, also for root, as for a folder that is closed to a user
        folder = tmp_path / ("x" * 300)
    else:
        folder.write_text("a file")
        folder = folder / "below" if kind == "under a file" else folder
    cache = Cache(folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(3):
            assert cache.get_spirv(key_of(number)) is None
            cache.put_spirv(key_of(number), spirv_of(number))
            assert cache.get_spirv(key_of(number)) == spirv_of(number)
        cache.put_tuning("device", "tile", [1, 2])
        assert cache.get_tuning("device", "tile") == [1, 2]
        cache.put_pipeline_cache("device", pipeline_data())
        assert cache.get_pipeline_cache("device") is None
        assert cache.stats().entries == 0
        assert cache.clear() == 0
    assert len(caught) == 1
    assert "in memory only" in str(caught[0].message)
    assert "PUREVK_CACHE" in str(caught[0].message)


def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    cache = Cache(tmp_path)
    with pytest.warns(RuntimeWarning, match="No space left"):
        cache.put_spirv(key_of(1), spirv_of(1))
    assert cache.get_spirv(key_of(1)) == spirv_of(1)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_folder_removed_meanwhile(tmp_path: Path) -> None:
    import shutil

    cache = Cache(tmp_path / "cache")
    cache.put_spirv(key_of(1), spirv_of(1))
    shutil.rmtree(tmp_path / "cache")
    cache.put_spirv(key_of(2), spirv_of(2))
    assert Cache(tmp_path / "cache").get_spirv(key_of(2)) == spirv_of(2)


HAMMER = """
import random, sys, warnings
warnings.simplefilter("error")
from purevk.cache import Cache
sys.path.insert(0, sys.argv[3])
from tests.cache.harness import key_of, spirv_of
draw = random.Random(int(sys.argv[2]))
found = 0
for iteration in range(150):
    cache = Cache(sys.argv[1], max_bytes=20_000)
    for _ in range(10):
        number = draw.randrange(40)
        data = cache.get_spirv(key_of(number))
        if data is None:
            cache.put_spirv(key_of(number), spirv_of(number))
        else:
            found += 1
            assert data == spirv_of(number), number
    cache.put_tuning("device", "shared", list(range(draw.randrange(50))))
    value = Cache(sys.argv[1]).get_tuning("device", "shared")
    assert value is None or value == list(range(len(value)))
    if iteration % 50 == 49:
        cache.clear()
    assert cache.stats().damaged == 0
print(found)
"""


def test_processes_at_once(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", HAMMER, str(tmp_path), str(seed), root],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=root,
        )
        for seed in range(3)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert sum(int(out) for out, _ in outputs) > 500
    leftovers = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".pvk"]
    assert leftovers == []


def test_least_recently_used_go_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path, max_bytes=1_000_000)
    for number in range(10):
        cache.put_spirv(key_of(number), spirv_of(number, 10_000))
    for age, path in enumerate(
        Cache(tmp_path)._entries._path("spirv", key_of(number).digest()) for number in range(10)
    ):
        os.utime(path, (1_000_000 + age, 1_000_000 + age))
    assert Cache(tmp_path).get_spirv(key_of(0)) is not None  # used now, so no more the oldest
    small = Cache(tmp_path, max_bytes=60_000)
    small.put_spirv(key_of(10), spirv_of(10, 10_000))
    stats = small.stats()
    assert stats.bytes <= 60_000
    assert stats.evicted == 11 - stats.entries
    after = Cache(tmp_path)
    kept = [number for number in range(11) if after.get_spirv(key_of(number)) is not None]
    assert kept[0] == 0
    assert kept[1:] == list(range(11 - len(kept) + 1, 11))


def test_entry_larger_than_the_bound_stays_in_memory(tmp_path: Path) -> None:
    cache = Cache(tmp_path, max_bytes=1000)
    cache.put_spirv(key_of(1), spirv_of(1, 4000))
    assert cache.get_spirv(key_of(1)) == spirv_of(1, 4000)
    assert cache.stats().entries == 0


def test_temporary_files_of_a_killed_process_go(tmp_path: Path) -> None:
    old, new = tmp_path / "spirv" / "aa" / ".purevk-old", tmp_path / "spirv" / "aa" / ".purevk-new"
    old.parent.mkdir(parents=True)
    for path in (old, new):
        path.write_bytes(b"x")
    os.utime(old, (1, 1))
    Cache(tmp_path).put_spirv(key_of(1), spirv_of(1))
    assert not old.exists()
    assert new.exists()


def test_clear_leaves_strangers_alone(tmp_path: Path) -> None:
    """Also saved programs, which have the suffix of entries, and what is behind links."""
    outside = tmp_path / "outside"
    (outside / "ab").mkdir(parents=True)
    names = (
        "notes.txt",
        "spirv/notes.txt",
        "plan/model.pvk",
        "driver/main.c",
        "outside/ab/model.pvk",
    )
    strangers = [tmp_path / name for name in names]
    cache = Cache(tmp_path)
    cache.put_spirv(key_of(1), spirv_of(1))
    cache.put_tuning("device", "tile", 3)
    cache.put_pipeline_cache("device", pipeline_data())
    for path in strangers:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    (tmp_path / "spirv" / "ab").symlink_to(outside / "ab")
    (tmp_path / "plan" / "ab").symlink_to(outside)
    assert cache.clear() == 3
    assert cache.get_spirv(key_of(1)) is None
    assert cache.get_tuning("device", "tile") is None
    assert all(path.read_text() == "mine" for path in strangers)
    small = Cache(tmp_path, max_bytes=1000)
    for number in range(20):
        small.put_spirv(key_of(number), spirv_of(number))
    assert small.clear() < 10 and all(path.read_text() == "mine" for path in strangers)


def test_what_is_no_spirv_is_not_kept(tmp_path: Path) -> None:
    for data in (b"", b"\x7fELF" * 10, spirv_of(1)[:-1]):
        with pytest.raises(PurevkError, match="no SPIR-V"):
            Cache(tmp_path).put_spirv(key_of(1), data)


def pipeline_data(
    vendor: int = 0x10DE,
    device: int = 0x2330,
    uuid: bytes = bytes(range(16)),
    size: int = 32,
    version: int = 1,
) -> bytes:
    return struct.pack("<4I", size, version, vendor, device) + uuid + b"driver data"


def test_pipeline_cache(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.put_pipeline_cache("device 1, driver 2", pipeline_data())
    again = Cache(tmp_path)
    read = again.get_pipeline_cache
    assert read("device 1, driver 2") == pipeline_data()
    same = {"vendor": 0x10DE, "device": 0x2330, "pipeline_uuid": bytes(range(16))}
    assert read("device 1, driver 2", **same) == pipeline_data()
    for other in ({"vendor": 1}, {"device": 1}, {"pipeline_uuid": bytes(16)}):
        assert read("device 1, driver 2", **{**same, **other}) is None
    assert read("device 1, driver 3") is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        pipeline_data()[:31],
        pipeline_data(size=31),
        pipeline_data(size=4000),
        pipeline_data(version=2),
    ],
)
def test_pipeline_cache_with_a_bad_header_is_not_kept(tmp_path: Path, data: bytes) -> None:
    cache = Cache(tmp_path)
    cache.put_pipeline_cache("device", data)
    assert cache.get_pipeline_cache("device") is None
    assert cache.stats().entries == 0


def test_tuning(tmp_path: Path) -> None:
    value = {"tile": [64, 64, 16], "ms": 0.25, "variant": "coop"}
    Cache(tmp_path).put_tuning("device", "matmul 512", value)
    cache = Cache(tmp_path)
    assert cache.get_tuning("device", "matmul 512") == value
    assert cache.get_tuning("device", "matmul 513") is None
    assert cache.get_tuning("other", "matmul 512") is None
    cache.get_tuning("device", "matmul 512")["tile"] = "changed by the caller"
    assert cache.get_tuning("device", "matmul 512") == value
    for bad in ({1, 2}, float("nan")):
        with pytest.raises(PurevkError, match="cannot be kept"):
            cache.put_tuning("device", "bad", bad)


def test_default_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUREVK_CACHE", f"{tmp_path},max_bytes=12345")
    cache = default_cache()
    assert (cache.folder, cache.max_bytes) == (tmp_path, 12345)
    assert default_cache() is cache
    monkeypatch.setenv("PUREVK_CACHE", "0")
    assert default_cache().folder is None
    monkeypatch.delenv("PUREVK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    if sys.platform == "linux":
        assert default_cache().folder == tmp_path / "xdg" / "purevk"
    assert not (tmp_path / "xdg").exists()


@pytest.mark.skipif(os.name == "nt", reason="needs modes and FIFOs of POSIX")
@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["fifo", "link", "folder", "sparse", "writable by others"])
def test_only_own_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "cache"
    Cache(folder).put_spirv(key_of(1), spirv_of(1))
    (path,) = entry_files(folder)
    assert path.stat().st_mode & 0o777 == 0o600
    moved = path.rename(tmp_path / "moved")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(moved)
    elif kind == "folder":
        path.mkdir()
    elif kind == "sparse":
        with open(moved.rename(path), "r+b") as file:
            file.truncate(1 << 40)
    else:
        moved.rename(path).chmod(0o666)
    assert Cache(folder).get_spirv(key_of(1)) is None
    if kind != "folder":
        Cache(folder).put_spirv(key_of(1), spirv_of(1))  # takes the place of what was there
        assert Cache(folder).get_spirv(key_of(1)) == spirv_of(1)


@pytest.mark.skipif(os.name == "nt", reason="needs modes of POSIX")
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o722, 0o2775])
def test_a_folder_that_others_may_write_is_refused(
    tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    Cache(folder).put_spirv(key_of(1), spirv_of(1))
    folder.chmod(mode)
    monkeypatch.setenv(knobs.CACHE.name, str(folder))
    monkeypatch.delenv(knobs.MESA_SHADER_CACHE_DIR.name, raising=False)
    for use in (
        lambda: Cache(folder),
        default_cache,
        lambda: Cache(None).difference(Cache(folder)),
    ):
        with pytest.raises(PurevkError, match="other users may write") as caught:
            use()
        assert caught.value.where == str(folder) and "chmod go-w" in caught.value.next
    knobs.set_driver_cache()  # the driver runs what is there too
    assert knobs.MESA_SHADER_CACHE_DIR.name not in os.environ
    folder.chmod(mode & ~0o022)
    assert Cache(folder).get_spirv(key_of(1)) == spirv_of(1)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
def test_the_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(PurevkError, match="other users may write") as caught:
        Cache(tmp_path)
    assert "it belongs to user 12345" in caught.value.why


@pytest.mark.skipif(os.name == "nt", reason="needs modes of POSIX")
def test_folders_are_made_for_their_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "above" / "cache"
    monkeypatch.setenv(knobs.CACHE.name, str(folder))
    monkeypatch.delenv(knobs.MESA_SHADER_CACHE_DIR.name, raising=False)
    before = os.umask(0)
    try:
        knobs.set_driver_cache()
        Cache(folder).put_spirv(key_of(1), spirv_of(1))
    finally:
        os.umask(before)
    made = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert len(made) == 5 and all(path.stat().st_mode & 0o777 == 0o700 for path in made)
    os.environ.pop(knobs.MESA_SHADER_CACHE_DIR.name, None)
    assert Cache(folder).get_spirv(key_of(1)) == spirv_of(1)
