"""The kernels of models for what a driver reports, as SPIR-V that another process makes pipelines
of."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from purevk.api.features import Features
from purevk.cache import Cache, default_cache
from purevk.errors import PurevkError
from purevk.frontends.files import open_file
from purevk.graph.kernels import KernelStore
from purevk.lower.lowering import KernelSpec
from purevk.report.lowered import lower
from purevk.tuning import DeviceTraits
from purevk.tuning.registry import DeviceIdentity, choose_profile


def traits_from(facts: dict[str, Any]) -> DeviceTraits:
    """The traits that `worker.facts` printed."""
    identity = facts["identity"]
    profile = choose_profile(
        DeviceIdentity(**{**identity, "features": frozenset(identity["features"])})
    )
    values = {name: _frozen(value) for name, value in facts["traits"].items()}
    values["features"] = frozenset(values["features"])
    return DeviceTraits(**values, profile=profile)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(each) for each in value) if isinstance(value, list) else value


def store_for(facts: dict[str, Any], cache: Cache | None = None) -> KernelStore:
    """What compiles kernels as for the device of these facts. It makes no pipelines."""
    device: Any = SimpleNamespace(
        features=Features(facts["traits"]["features"]),
        physical=SimpleNamespace(api_version=tuple(facts["api_version"])),
    )
    return KernelStore(device, cache or default_cache(), traits_from(facts))


def write_kernels(
    facts: dict[str, Any], models: Iterable[Path], folder: Path
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Lowers models for a device, and writes `kernels.json` and the SPIR-V of each kernel.

    Args:
        facts: what `worker.facts` printed.
        models: .pvk and .pte files.
        folder: made anew.

    Returns:
        What the file lists, and why a model could not be lowered, by its name.
    """
    store = store_for(facts)
    users, failed = lowered_specs(models, store.traits)
    return write_specs(users, store, facts, folder), failed


def lowered_specs(
    models: Iterable[Path], traits: DeviceTraits
) -> tuple[dict[KernelSpec, list[str]], dict[str, str]]:
    """The kernels of .pvk and .pte files with the names of their users, and why a model could not
    be lowered, by its name."""
    users: dict[KernelSpec, list[str]] = {}
    failed: dict[str, str] = {}
    for path in models:
        try:
            with open_file(path, check=False) as program:
                for method in program.methods:
                    for spec in lower(program, method, traits).plan.kernels:
                        users.setdefault(spec, []).append(path.stem)
        except PurevkError as error:
            failed[path.stem] = f"{type(error).__name__}: {error}".splitlines()[0]
    return users, failed


def write_specs(
    users: dict[KernelSpec, list[str]], store: KernelStore, facts: dict[str, Any], folder: Path
) -> list[dict[str, Any]]:
    """Writes the kernels into a folder, which is made anew; see `write_kernels`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rows = []
    for spec, code in store.spirv(users).items():
        name = f"{hashlib.sha256(code).hexdigest()[:16]}.spv"
        (folder / name).write_bytes(code)
        size = spec.subgroup_size
        if size == store.traits.subgroup_size and not facts["chooses_subgroup_size"]:
            size = None  # the size that kernels have anyway
        rows.append(
            {
                "template": spec.template,
                "models": list(dict.fromkeys(users[spec])),
                "spirv": name,
                "bindings": [kind.partition(":")[0] for kind in spec.bindings],
                "constants": dict(spec.constants),
                "subgroup_size": size,
                "target": store.target_env,
            }
        )
    (folder / "kernels.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return rows


def translate(
    folder: Path, rows: list[dict[str, Any]], tool: str, *options: str
) -> dict[str, list[str]]:
    """Runs a tool of SPIR-V over each module once.

    Args:
        tool: "spirv-val" or "spirv-cross".
        options: what follows the file's name.

    Returns:
        The templates that it refuses, by its first line of text.
    """
    refused: dict[str, list[str]] = {}
    for name, template in {row["spirv"]: row["template"] for row in rows}.items():
        done = subprocess.run(
            [tool, str(folder / name), *options], capture_output=True, text=True, timeout=120
        )
        if done.returncode:
            text = (done.stderr or done.stdout).strip().splitlines() or ["no text"]
            refused.setdefault(text[0], []).append(template)
    return refused
