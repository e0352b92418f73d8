"""The table of environment variables, and what purevk says of others."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from purevk import knobs
from purevk.errors import PurevkError
from purevk.knob_values import RENAMED
from tests.harness import DATA, python


@pytest.fixture(autouse=True)
def nothing_was_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs, "_warned", set())


def test_a_misspelt_variable_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUREVK_CACHES", "/x")
    with pytest.warns(RuntimeWarning, match="PUREVK_CACHES is no .*; is PUREVK_CACHE meant"):
        knobs.warn_of_names()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        knobs.warn_of_names()


def test_another_variable_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUREVK_ZZZ", "1")
    with pytest.warns(
        RuntimeWarning, match=r"PUREVK_ZZZ is no variable .*; docs/knobs\.md"
    ) as found:
        knobs.warn_of_names()
    assert found[0].filename == __file__, "the line of the user, not one of purevk"


@pytest.mark.parametrize("name", ["PUREVK_DEVICE", "PUREVK_TEST_TRAITS", "OTHER_DEVICE"])
def test_variables_of_purevk_and_of_others_are_not_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for knob in knobs.ALL:
        monkeypatch.setenv(knob.name, "1")
    monkeypatch.setenv(name, "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        knobs.warn_of_names()


def test_a_variable_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUREVK_VERIFY", "perhaps")
    with pytest.raises(PurevkError, match="PUREVK_VERIFY='perhaps' cannot be read") as caught:
        knobs.VERIFY()
    assert "1 or 0" in caught.value.why and "docs/knobs.md" in caught.value.next


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "-inf"])
@pytest.mark.parametrize("name", ["PUREVK_TIMEOUT"])
def test_seconds_that_cannot_be_read(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(PurevkError, match=f"{name}='{text}' cannot be read") as caught:
        knobs.check()
    assert caught.value.why == "expected a number of seconds, 0 or more"


def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PUREVK_DUMP", str(tmp_path / "file" / "folder"))
    with pytest.raises(PurevkError, match="the folder of PUREVK_DUMP cannot be made"):
        knobs.check()


def test_an_empty_number_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for knob in (knobs.TIMEOUT, knobs.COMPILE_THREADS, knobs.LIMITS, knobs.CACHE):
        monkeypatch.setenv(knob.name, "")
        assert knob() == knob.default


OPEN = """
import json, sys, warnings
import purevk
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    purevk.load(sys.argv[1]).close()
print(json.dumps([[str(each.message), each.category.__name__] for each in caught]))
"""


@pytest.mark.device
def test_opening_a_device_names_it() -> None:
    found = python(OPEN, DATA / "linear_relu.pte", PUREVK_DEVISE="llvmpipe")
    ((text, kind),) = [each for each in found if "PUREVK_" in each[0]]
    assert "is PUREVK_DEVICE meant?" in text and kind == "RuntimeWarning"


LOAD = """
import json, sys
import purevk
try:
    purevk.load(sys.argv[1])
    print(json.dumps("loaded"))
except purevk.PurevkError as error:
    print(json.dumps(error.what))
"""


@pytest.mark.device
def test_a_wrong_variable_raises_at_load_also_if_only_slow_calls_read_it() -> None:
    found = python(LOAD, DATA / "linear_relu.pte", PUREVK_TIMEOUT="2 min")
    assert found == "PUREVK_TIMEOUT='2 min' cannot be read"


@pytest.mark.parametrize("text", ["x", "9", "/a", "1,"])
def test_texts_of_100_000_characters(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is read, or raises an error that can be read."""
    for knob in knobs.ALL:
        with monkeypatch.context() as patch:
            patch.setenv(knob.name, text * (100_000 // len(text)))
            try:
                knobs.check()
            except PurevkError as error:
                assert len(str(error)) < 3000 and knob.name in str(error)


OLD = {
    "PUREVK_CACHE_DIR": ("/x,y", knobs.CACHE, {"folder": "/x,y"}),
    "PUREVK_CACHE_MAX_BYTES": ("12", knobs.CACHE, {"max_bytes": 12}),
    "PUREVK_ASSERT_CACHED": ("1", knobs.CACHE, {"only": True}),
    "PUREVK_KEEP_PLANS": ("0", knobs.CACHE, {"plans": False}),
    "PUREVK_TEXELS": ("0", knobs.DISABLE, ("texels",)),
    "PUREVK_FRAGMENTS": ("off", knobs.DISABLE, ("fragments",)),
    "PUREVK_MAX_NODES": ("3", knobs.LIMITS, {"nodes": 3}),
    "PUREVK_MAX_SYMBOLS": ("4", knobs.LIMITS, {"symbols": 4}),
    "PUREVK_MAX_DEPTH": ("5", knobs.LIMITS, {"depth": 5}),
    "PUREVK_MAX_TENSOR_BYTES": ("6", knobs.LIMITS, {"tensor_bytes": 6}),
    "PUREVK_POLL": ("0", None, None),
    "PUREVK_RECORDINGS": ("0", None, None),
}


@pytest.fixture
def defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (knobs.CACHE.name, knobs.DISABLE.name, knobs.LIMITS.name, *OLD):
        monkeypatch.delenv(name, raising=False)


def test_all_old_names_are_tested() -> None:
    assert OLD.keys() == RENAMED.keys()
    assert not OLD.keys() & {knob.name for knob in knobs.ALL}


@pytest.mark.parametrize("old", OLD)
def test_an_old_name_works_and_warns_once(
    old: str, defaults: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, knob, parts = OLD[old]
    monkeypatch.setenv(old, text)
    with pytest.warns(RuntimeWarning, match=old) as caught:
        knobs.warn_of_names()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        knobs.warn_of_names()
    if knob is None:
        assert "has no effect" in str(caught[0].message) and not knobs.set_here().keys() & {old, ""}
        return
    value = replace(knob.default, **parts) if isinstance(parts, dict) else parts
    assert knob() == value != knob.default
    spelling = knobs.set_here()[knob.name]
    assert f"write {knob.name}={spelling}" in str(caught[0].message)
    monkeypatch.delenv(old)
    monkeypatch.setenv(knob.name, spelling)  # what the warning says to write
    assert knob() == value


def test_the_new_name_has_the_last_word(defaults: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for old, (text, _, _) in OLD.items():
        monkeypatch.setenv(old, text)
    monkeypatch.setenv("PUREVK_CACHE", "1,max_bytes=7,only=0")
    monkeypatch.setenv("PUREVK_LIMITS", "depth=8")
    monkeypatch.setenv("PUREVK_DISABLE", "float16")
    knobs.check()
    assert knobs.CACHE() == knobs.CacheOptions(True, "/x,y", 7, False, False)
    assert knobs.LIMITS() == knobs.Limits(3, 4, 8, 6)
    assert knobs.DISABLE() == ("texels", "fragments", "float16")
    texts = knobs.set_here()
    for name in OLD:
        monkeypatch.delenv(name)
    for name in ("PUREVK_LIMITS", "PUREVK_DISABLE"):
        monkeypatch.setenv(name, texts[name])
    assert knobs.LIMITS() == knobs.Limits(3, 4, 8, 6)
    assert knobs.DISABLE() == ("texels", "fragments", "float16")


@pytest.mark.parametrize("old", ["PUREVK_TEXELS", "PUREVK_MAX_NODES", "PUREVK_ASSERT_CACHED"])
def test_an_old_name_that_cannot_be_read(
    old: str, defaults: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(old, "perhaps")
    with pytest.raises(PurevkError, match=f"{old}='perhaps' cannot be read"):
        knobs.check()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", {}),
        ("1", {}),
        ("0", {"on": False}),
        ("off,max_bytes=3", {"on": False, "max_bytes": 3}),
        ("plans=0", {"plans": False}),
        (",plans=0, only=1", {"plans": False, "only": True}),
        ("/a=b/c,d,only=1", {"folder": "/a=b/c,d", "only": True}),
        ("~/x", {"folder": "~/x"}),
    ],
)
def test_the_cache(
    text: str, parts: dict[str, object], defaults: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PUREVK_CACHE", text)
    assert knobs.CACHE() == replace(knobs.CACHE.default, **parts)
    with knobs.compiling():
        assert knobs.CACHE() == replace(knobs.CACHE.default, **{**parts, "only": False})


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("PUREVK_CACHE", "flase", "0, 1 or a folder; write ./flase"),
        ("PUREVK_CACHE", "/x,bytes=3", "max_bytes, plans, only, not bytes"),
        ("PUREVK_CACHE", "/x,max_bytes=3,plans=no way", "1 or 0 for plans"),
        ("PUREVK_LIMITS", "nodes=-3", "a whole number, 0 or more for nodes"),
        ("PUREVK_LIMITS", "3", "name=number, not 3"),
        ("PUREVK_LIMITS", "nodes=3,leaves=4", "not leaves"),
    ],
)
def test_options_that_cannot_be_read(
    name: str, text: str, why: str, defaults: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(PurevkError, match=f"{name}='{text}' cannot be read") as caught:
        knobs.check()
    assert why in caught.value.why
