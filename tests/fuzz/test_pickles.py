"""No file that purevk reads runs code: pickles in place of files, of their members and of entries of
the cache. `.pt2` files and ETRecords have tests of their own."""

from __future__ import annotations

import ast
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import purevk
from purevk import api
from purevk.cache import Cache
from purevk.cli import main
from purevk.errors import PurevkError
from purevk.graph.context import Context
from purevk.shaders.bundle import MANIFEST
from tests.ops.harness import context as shared_context
from tests.pickles import Evil, members, packed, pickles

ROOT = Path(purevk.__file__).parent
DATA = Path(__file__).parent.parent / "data"


def test_no_module_unpickles_with_code() -> None:
    """Nor evaluates text. `torch.load` and `numpy.load` are called with what keeps them from it."""
    modules = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "copyreg"}
    safe = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}
    never = {"eval", "exec", "torch.export.load", "torch.jit.load", "parse_etrecord", "np.loads"}
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not re.search(r"\b(eval|exec|loads?|parse_etrecord|" + "|".join(modules) + r")\b", text):
            continue  # to parse all takes seconds
        for node in ast.walk(ast.parse(text)):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [each.name.partition(".")[0] for each in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").partition(".")[0]]
                names += [each.name for each in node.names if each.name in never]
            elif isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                argument, value = safe.get(called, ("", None))
                given = {each.arg: getattr(each.value, "value", None) for each in node.keywords}
                if called in never or (argument and given.get(argument) is not value):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {called}")
            if modules.intersection(names) or never.intersection(names):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} {names}")
    assert not found


def npz(payload: bytes | None, evil: Any) -> list[bytes]:
    """Files of arrays of objects, and with a pickle as a member."""
    objects = io.BytesIO()
    np.savez(objects, counter=np.array([evil, 1], dtype=object))
    whole = io.BytesIO()
    np.savez(whole, counter=np.ones(1, np.float32))
    contents = members(whole.getvalue())
    single = io.BytesIO()
    np.save(single, np.array([evil], dtype=object))
    return [
        objects.getvalue(), single.getvalue(), *[packed({**contents, name: payload}) for name in contents],
        packed({**contents, "more": payload}),
    ]  # fmt: skip


@pytest.mark.device
def test_arrays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """States, and inputs of commands."""
    mark = tmp_path / "ran"
    model = DATA / "pte" / "branch.pte"
    for payload in pickles(str(mark)):
        for number, content in enumerate(npz(payload, Evil(str(mark)))):
            for suffix in ("npz", "npy"):
                path = tmp_path / f"{number}.{suffix}"
                path.write_bytes(content)
                assert main(["run", str(model), "-i", str(path)]) != 0
                capsys.readouterr()
            with purevk.load(model, context=shared_context()) as program:
                with pytest.raises(PurevkError):
                    program.load_state(path)
        assert not mark.exists()


@pytest.mark.device
def test_programs_data_files_and_bundles(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    model = DATA / "pte" / "branch.pte"
    for payload in pickles(str(mark)):
        for suffix in ("pte", "pvk", "pt2", "bin"):
            path = tmp_path / f"m.{suffix}"
            path.write_bytes(payload)
            for file in (path, payload):
                with pytest.raises(PurevkError):
                    purevk.load(file)
        path = tmp_path / "m.ptd"
        path.write_bytes(payload)
        with pytest.raises(PurevkError):
            purevk.load(model, [path])
        with pytest.raises(PurevkError):
            Cache(tmp_path / "cache").import_bundle(path, trust=True)
        assert not mark.exists()


@pytest.mark.device
def test_the_cache_folder_and_a_bundle_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pickle in place of each file of the folder, after its head too, and of each member of a
    bundle."""
    monkeypatch.setenv("PUREVK_VERIFY", "0")
    # Plans are not cached once a process has registered operators, as other tests do.
    monkeypatch.setattr("purevk.program.plan_cache.cache._is_extended", lambda: False)
    mark, folder = tmp_path / "ran", tmp_path / "cache"
    model = DATA / "pte" / "branch.pte"

    def load() -> None:
        with (
            Context(api.open_device(), Cache(folder)) as context,
            purevk.load(model, context=context),
        ):
            pass

    load()
    entries = [path for path in folder.rglob("*") if path.is_file()]
    assert entries
    bundle = tmp_path / "bundle"
    Cache(folder).export_entries(bundle)
    contents = members(bundle.read_bytes())
    assert any("plan" in path.parent.parent.name + path.parent.name for path in entries)
    assert {name.partition("/")[0] for name in contents} <= {MANIFEST, "spirv", "tuning"}
    for payload in pickles(str(mark)):
        for path in entries:
            whole = path.read_bytes() if path.exists() else b""
            for content in (payload, whole[: whole.find(b"\n") + 1] + payload):
                path.write_bytes(content)
            load()
        assert not mark.exists()
        for name in contents:
            bundle.write_bytes(packed({**contents, name: payload}))
            try:
                Cache(tmp_path / "other").import_bundle(bundle, trust=True)
            except PurevkError:
                pass
            assert not mark.exists()
