"""The files under deploy/: they parse, name what there is, and the server runs."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from purevk import knobs
from purevk.cli import make_parser
from tests.harness import DATA

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KNOBS = {knob.name for knob in knobs.ALL}


def _instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, with their arguments."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines()]  # type: ignore[misc]


def _check_command(words: list[str]) -> None:
    """A command of purevk is one that its parser takes; a server gets arguments that it has."""
    if words[0].endswith("purevk"):
        make_parser().parse_args(words[1:])
    else:
        assert words[0].endswith("python") and words[1].endswith("/serve.py")
        source = (DEPLOY / "serve.py").read_text(encoding="utf-8")
        assert all(f'"{word}"' in source for word in words if word.startswith("--"))


def test_dockerfile() -> None:
    found = _instructions()
    assert found[0][0] == "FROM" and found[-1][0] == "CMD"
    order = [f"{name} {rest}" for name, rest in found]
    for name, rest in found:
        assert name in {"FROM", "RUN", "USER", "ENV", "COPY", "EXPOSE", "CMD"}
        if name == "RUN":
            subprocess.run(["sh", "-n", "-c", rest], check=True)
            if rest.startswith("purevk"):
                _check_command(shlex.split(rest))
        if name == "ENV":
            assert rest.partition("=")[0] in KNOBS
        if name == "COPY":
            *sources, _ = rest.split()
            made = {"model.pte", "dist/*manylinux*.whl"}  # by who builds the image
            assert all((ROOT / each).exists() for each in sources if each not in made)
    _check_command(json.loads(found[-1][1]))
    # The warmup runs as the user of the server, and before compiling is an error.
    warmup = order.index("RUN purevk warmup /srv/model.pte")
    assert order.index("USER 10001") < warmup < order.index(f"ENV {knobs.ASSERT_CACHED.name}=1")


def test_kubernetes() -> None:
    yaml = pytest.importorskip("yaml")
    text = (DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")
    spec = yaml.safe_load(text)["spec"]["template"]["spec"]
    (warmup,), (server,) = spec["initContainers"], spec["containers"]
    volumes = {volume["name"] for volume in spec["volumes"]}
    folders = []
    for container in (warmup, server):
        _check_command(container["command"])
        environment = {each["name"]: each["value"] for each in container["env"]}
        assert environment.keys() <= KNOBS
        assert all(mount["name"] in volumes for mount in container["volumeMounts"])
        folders.append(environment[knobs.CACHE_DIR.name])
        assert folders[-1].startswith(container["volumeMounts"][0]["mountPath"])
    assert folders[0] == folders[1]
    source = (DEPLOY / "serve.py").read_text(encoding="utf-8")
    (port,) = (each["containerPort"] for each in server["ports"])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        request = server[probe]["httpGet"]
        assert f'"{request["path"]}"' in source and request["port"] == port
    assert server["readinessProbe"]["httpGet"]["path"] == "/readyz"


def _unit_value(name: str) -> str:
    text = (DEPLOY / "purevk.service").read_text(encoding="utf-8")
    found = re.findall(rf"^{name}=(.*)$", text, re.MULTILINE)
    assert len(found) == 1
    return found[0]


def test_systemd_unit(tmp_path: Path) -> None:
    _check_command(shlex.split(_unit_value("ExecStartPre")))
    words = shlex.split(_unit_value("ExecStart"))
    assert words[0] == "/usr/bin/env" and words[1].partition("=")[0] in KNOBS
    _check_command(words[2:])
    assert _unit_value("Environment").partition("=")[0] in KNOBS
    assert _unit_value("CacheDirectory") == "purevk"
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    text = (DEPLOY / "purevk.service").read_text(encoding="utf-8")
    unit = tmp_path / "purevk.service"
    text = text.replace("/opt/purevk/venv/bin/purevk", sys.executable)
    unit.write_text(text.replace("/opt/purevk/venv/bin/python", sys.executable))
    ran = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True)
    assert "purevk.service" not in ran.stderr, ran.stderr


# -- the server ----------------------------------------------------------------------------------
def _start(model: Path, folder: Path) -> tuple[subprocess.Popen[str], str]:
    environment = {
        **os.environ,
        knobs.CACHE_DIR.name: str(folder),
        knobs.ASSERT_CACHED.name: "1",
    }
    command = [sys.executable, str(DEPLOY / "serve.py"), str(model), "--port", "0"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    return process, f"http://127.0.0.1:{line.rpartition(' ')[2].strip()}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that was warmed up."""
    folder, model = tmp_path_factory.mktemp("cache"), DATA / "linear_relu.pte"
    command = [sys.executable, "-m", "purevk", "warmup", str(model)]
    environment = {**os.environ, knobs.CACHE_DIR.name: str(folder)}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    process, address = _start(model, folder)
    try:
        assert process.stdout is not None
        assert "is ready on" in process.stdout.readline()
        yield address
    finally:
        process.terminate()
        assert process.wait(30) == 0


def _ask(address: str, body: bytes | None = None) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(address, body, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def _packed(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


@pytest.mark.device
def test_the_server_answers(server: str) -> None:
    import purevk

    assert _ask(f"{server}/livez")[0] == _ask(f"{server}/readyz")[0] == 200
    x = np.linspace(-1, 1, 10, dtype=np.float32).reshape(2, 5)
    code, body = _ask(f"{server}/forward", _packed(x=x))
    assert code == 200
    with np.load(io.BytesIO(body)) as outputs, purevk.load(DATA / "linear_relu.pte") as program:
        np.testing.assert_allclose(outputs["output_0"], program.forward(x), rtol=1e-5)


@pytest.mark.device
def test_the_server_refuses(server: str) -> None:
    wrong = _packed(x=np.ones((3, 5), np.float32))
    objects = _packed(x=np.array([{}], dtype=object))
    for body, words in (
        (b"text", "no .npz"),
        (wrong, "float32[2,5] is expected"),
        (objects, "no .npz"),
    ):
        code, text = _ask(f"{server}/forward", body)
        assert code == 400 and words in text.decode(), text
    assert _ask(f"{server}/nothing")[0] == _ask(f"{server}/nothing", b"x")[0] == 404


@pytest.mark.device
def test_a_cold_cache_ends_the_server(tmp_path: Path) -> None:
    process, _ = _start(DATA / "linear_relu.pte", tmp_path)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "must not be compiled" in out
