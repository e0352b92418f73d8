"""The pytest plugin, in test sessions of its own."""

from __future__ import annotations

import re

import pytest

from purevk import knobs
from purevk.graph.context import Context
from tests.harness import ROOT

FILE = """
import numpy as np, pytest, purevk

@pytest.mark.purevk
def test_marked():
    pass

@pytest.mark.purevk("float16")
def test_lacking():
    raise AssertionError

def test_device(purevk_device):
    assert purevk_device.device.name

def test_without_a_device():
    pass
"""
# `-p no:` keeps the plugins of the outer session from being there twice.
QUIET = ("-p", "no:cacheprovider", "-rs")


@pytest.mark.purevk
def test_skips_what_a_feature_is_missing_for(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(knobs.DISABLE.name, "float16")
    pytester.makepyfile(FILE)
    result = pytester.runpytest_subprocess(*QUIET)
    result.assert_outcomes(passed=3, skipped=1)
    result.stdout.fnmatch_lines(["*lacks float16*"])


@pytest.mark.purevk
def test_a_misspelt_feature_fails(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(FILE.replace("float16", "flaot16"))
    result = pytester.runpytest_inprocess("-p", "purevk.testing.plugin", *QUIET)
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["*no feature is named flaot16; the names are *float16*"])


def test_a_difference_shows_the_test_and_not_the_comparison(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "from purevk.testing import assert_close\ndef test_it():\n    assert_close({'a': [1]}, {'a': [2]})"
    )
    result = pytester.runpytest_inprocess("-p", "purevk.testing.plugin", *QUIET)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([">   *assert_close({'a': [[]1[]]}, {'a': [[]2[]]})", "E *'a'*"])
    assert "_compare" not in result.stdout.str()


def test_skips_where_there_is_no_device(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(knobs.VISIBLE_DEVICES.name, "no such device")
    pytester.makepyfile(FILE)
    result = pytester.runpytest_subprocess(*QUIET)
    result.assert_outcomes(passed=1, skipped=3)
    result = pytester.runpytest_subprocess(*QUIET, "--purevk-required")
    result.assert_outcomes(passed=1, errors=3)


def test_fails_without_the_device_that_was_named(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(FILE)
    options = ("-p", "purevk.testing.plugin", *QUIET, "--purevk-device", "no such device")
    result = pytester.runpytest_inprocess(*options)
    result.assert_outcomes(passed=1, errors=3)
    result.stdout.fnmatch_lines(["*no Vulkan device: No Vulkan device fits*no such device*"])


def test_markers_are_listed(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess("-p", "purevk.testing.plugin", "--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.purevk(*features): *"])


@pytest.mark.device
def test_the_device_goes_into_load_and_compile(purevk_device: Context) -> None:
    import torch

    import purevk

    x = torch.randn(3)
    with purevk.compile(torch.nn.ReLU(), (x,), device=purevk_device) as program:
        assert program.context is purevk_device


@pytest.mark.device
def test_the_file_of_the_documentation_runs(pytester: pytest.Pytester) -> None:
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    pytester.makepyfile(source)
    result = pytester.runpytest_inprocess("-p", "purevk.testing.plugin", *QUIET)
    outcomes = result.parseoutcomes()
    assert outcomes.get("passed", 0) + outcomes.get("skipped", 0) == 2 and outcomes["passed"]
