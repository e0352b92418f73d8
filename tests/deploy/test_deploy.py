"""The files under deploy/: they parse, and name what there is."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

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
    server = json.loads(found[-1][1])
    _check_command(server)
    assert server[server.index("--host") + 1] == "0.0.0.0"  # of the container
    # The warmup runs as the user of the server, and before compiling is an error.
    warmup = order.index("RUN purevk warmup /srv/model.pte")
    assert (
        order.index("USER 10001")
        < warmup
        < order.index("ENV PUREVK_CACHE=/var/cache/purevk,only=1")
    )


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
        folder, _, options = environment[knobs.CACHE.name].partition(",")
        assert options == ("only=1" if container is server else "")
        folders.append(folder)
        assert folders[-1].startswith(container["volumeMounts"][0]["mountPath"])
    assert folders[0] == folders[1]
    source = (DEPLOY / "serve.py").read_text(encoding="utf-8")
    (port,) = (each["containerPort"] for each in server["ports"])
    assert server["command"][server["command"].index("--host") + 1] == "0.0.0.0"  # of the pod
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        request = server[probe]["httpGet"]
        assert request["path"] in source and request["port"] == port
    assert server["readinessProbe"]["httpGet"]["path"] == "/v2/health/ready"


@pytest.mark.device
def test_kubernetes_runs_from_the_image(tmp_path: Path) -> None:
    """The init container fills the cache that the server asserts, both with the image's variables."""
    yaml = pytest.importorskip("yaml")
    text = (DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")
    spec = yaml.safe_load(text)["spec"]["template"]["spec"]
    image = dict(rest.split("=", 1) for name, rest in _instructions() if name == "ENV")
    folder = tmp_path / "purevk"
    model = DATA / "linear_relu.pte"

    def run(container: dict[str, Any], words: list[str]) -> subprocess.CompletedProcess[str]:
        given = {each["name"]: each["value"] for each in container["env"]}
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **image, **given}
        environment[knobs.CACHE.name] = given[knobs.CACHE.name].replace(
            "/cache/purevk", str(folder)
        )
        words = [word.replace("/srv/model.pte", str(model)) for word in words]
        return subprocess.run(
            [sys.executable, "-m", *words], env=environment, capture_output=True, text=True
        )

    (warmup,), (server,) = spec["initContainers"], spec["containers"]
    assert "only=1" in image[knobs.CACHE.name]
    ran = run(warmup, warmup["command"])
    assert ran.returncode == 0, ran.stderr
    # What the server does first; test_server.py starts the server itself.
    ran = run(server, ["purevk", "run", "/srv/model.pte"])
    assert ran.returncode == 0, ran.stderr


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
