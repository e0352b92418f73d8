"""ExecuTorch's own tests of its Python runtime, run against the same names of purevk."""

from __future__ import annotations

import importlib.util
import sys
import types
import unittest
from collections.abc import Iterator
from pathlib import Path

import pytest

import purevk.portable_lib
import purevk.runtime
import purevk.runtime.llm

pytestmark = [pytest.mark.export, pytest.mark.device, pytest.mark.slow]
executorch = pytest.importorskip("executorch")

FILES = {
    "runtime": "runtime/test/test_runtime.py",
    "pybindings": "extension/pybindings/test/test_pybindings.py",
    "runner": "extension/llm/runner/test/test_runner_pybindings.py",
    "bundled": "devtools/bundled_program/test/test_end2end.py",
}
# What purevk does otherwise, and why.
OTHERWISE = {
    "test_initialization_failure": "the text of the error",
    "test_program_loads_when_one_method_is_device_planned": "the text names ExecuTorch's allocators",
    "test_method_rejects_input_on_unrepresentable_device": "the text of the error",
    "test_program_method_rejects_input_on_unrepresentable_device": "the text of the error",
}


@pytest.fixture
def their_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """ExecuTorch's modules are purevk's while a test runs."""
    bindings = pytest.importorskip("executorch.extension.pybindings")
    pytest.importorskip("executorch.kernels.quantized")  # registers what the exports need
    monkeypatch.setattr(bindings, "portable_lib", purevk.portable_lib, raising=False)
    for name, module in (
        ("executorch.runtime", purevk.runtime),
        ("executorch.extension.llm.runner", purevk.runtime.llm),
        ("executorch.extension.pybindings.portable_lib", purevk.portable_lib),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    yield


def _module(name: str) -> types.ModuleType:
    (folder,) = executorch.__path__
    path = Path(folder) / FILES[name]
    if not path.is_file():
        pytest.skip(f"this executorch has no {FILES[name]}")
    spec = importlib.util.spec_from_file_location(f"executorch_test_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", FILES)
def test_executorchs_tests_pass(name: str, their_names: None) -> None:
    suite = unittest.defaultTestLoader.loadTestsFromModule(_module(name))
    cases = [case for group in suite for case in group]  # type: ignore[union-attr]
    chosen = unittest.TestSuite(
        case for case in cases if case.id().rpartition(".")[2] not in OTHERWISE
    )
    result = unittest.TestResult()
    chosen.run(result)
    failed = [f"{case.id()}: {text}" for case, text in result.failures + result.errors]
    assert not failed, "\n".join(failed)
    assert result.testsRun > len(result.skipped)


def test_there_is_no_other_backend() -> None:
    backends = purevk.runtime.Runtime.get().backend_registry
    assert backends.registered_backend_names == ["VulkanBackend"]
    assert not backends.is_available("XnnpackBackend")
