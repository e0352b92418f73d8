"""The table of environment variables, and what purevk says of others."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from purevk import knobs
from purevk.errors import PurevkError
from tests.harness import DATA, python


@pytest.fixture(autouse=True)
def nothing_was_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs, "_warned", set())


def test_a_misspelt_variable_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUREVK_CACHE_DIRS", "/x")
    with pytest.warns(
        RuntimeWarning, match="PUREVK_CACHE_DIRS is no .*; is PUREVK_CACHE_DIR meant"
    ):
        knobs.warn_of_unknown()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        knobs.warn_of_unknown()


def test_another_variable_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUREVK_ZZZ", "1")
    with pytest.warns(
        RuntimeWarning, match=r"PUREVK_ZZZ is no variable .*; docs/knobs\.md"
    ) as found:
        knobs.warn_of_unknown()
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
        knobs.warn_of_unknown()


def test_a_variable_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUREVK_VERIFY", "perhaps")
    with pytest.raises(PurevkError, match="PUREVK_VERIFY='perhaps' cannot be read") as caught:
        knobs.VERIFY()
    assert "1 or 0" in caught.value.why and "docs/knobs.md" in caught.value.next


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "-inf"])
@pytest.mark.parametrize("name", ["PUREVK_TIMEOUT", "PUREVK_POLL"])
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
    for knob in (knobs.TIMEOUT, knobs.POLL, knobs.MAX_NODES, knobs.CACHE_MAX_BYTES):
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
