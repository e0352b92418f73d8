"""Runs the command line in this process, with a cache of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from purevk import knobs
from purevk.cli import main
from purevk.ops import registry
from tests.harness import DATA


@dataclass
class Ran:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> None:
    monkeypatch.setenv(knobs.CACHE.name, str(cache_folder))
    monkeypatch.setenv("COLUMNS", "120")
    for knob in (knobs.SHADERC, knobs.DISABLE):
        monkeypatch.delenv(knob.name, raising=False)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Ran]]:
    """Runs `purevk` with arguments."""

    def run(*arguments: object) -> Ran:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Ran(code, *capsys.readouterr())

    yield run


@pytest.fixture
def data() -> Path:
    """The folder of small programs."""
    return DATA


@pytest.fixture
def unregister_topk() -> Iterator[None]:
    """Takes the definition of topk away, if there is one, so that the operator runs on the CPU."""
    definition = registry.find("aten.topk.default")
    if definition is not None:
        registry.unregister(definition.name)
    yield
    if definition is not None:
        registry.register(definition)


@pytest.fixture
def foreign(data: Path, tmp_path: Path) -> Path:
    """A program that cannot run: its delegate is for another backend."""
    path = tmp_path / "foreign.pte"
    path.write_bytes(
        (data / "linear_relu.pte").read_bytes().replace(b"VulkanBackend", b"CoreMLBackend")
    )
    return path
