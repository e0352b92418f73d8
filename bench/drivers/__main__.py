"""Makes bench/devices.json, and the table of docs/help/devices.md from it.

    python -m bench.drivers                     all drivers that this machine can have
    python -m bench.drivers --rows SwiftShader "Turnip 660"
    python -m bench.drivers --models vit --rows "RADV navi31"

Needs Debian: drivers come from packages of its releases, unpacked into build/drivers; the rows of
Arm's devices need qemu-user-static, those of Metal spirv-cross. A row is written when it is done,
so that a run can be cut off. --tests also runs the operators' tests on the drivers of this system.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.drivers.kernels import store_for, translate, write_kernels
from bench.drivers.models import NAMES, tolerance_of, write_models
from bench.drivers.page import write_page
from bench.drivers.rows import ROOT, ROWS, Row
from bench.drivers.tests import operator_tests

BASE = ROOT / "build" / "drivers"
DATA = ROOT / "bench" / "devices.json"
FILES = ROOT / "tests" / "data" / "pte"
# The statistics that are kept, by the drivers' own names; of some, the smallest value is the worst.
SMALLER_IS_WORSE = ("subgroups per simd", "max warps/sm", "max waves per core", "threads")
KEPT = (
    "vgprs", "sgprs", "gprs", "registers", "half-registers", "spill", "fill", "scratch", "stp count", "ldp count",
    "slm size", "instructions", "instruction count", "code size", "lds size", "latency", "cycle count",
    *SMALLER_IS_WORSE,
)  # fmt: skip
METAL = {"2.3": "20300", "3.1": "30100"}


def worker(row: Row, what: str, folder: Path, count: int, limit: float) -> Iterator[dict[str, Any]]:
    """Runs the worker with a driver, and again after each item with which the process ends.

    Args:
        count: the number of items, of "pipelines" and "models".
        limit: seconds that one item may take.
    """
    first = 0
    while True:
        command, environment = row.command(BASE)
        arguments = ["-m", "bench.drivers.worker", what, str(folder), str(first)]
        begun: dict[str, Any] | None = None
        with subprocess.Popen(
            ["timeout", str(limit * max(count - first, 1)), *command, *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        ) as process:
            assert process.stdout is not None and process.stderr is not None
            for line in process.stdout:
                if not line.startswith("{"):
                    continue
                said = json.loads(line)
                if "begin" in said:
                    begun = said
                    continue
                begun = None
                yield said
            text = process.stderr.read()
            code = process.wait()
        lines = text.strip().splitlines() or ["no text"]
        errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
        last = errors[-1] if errors else lines[-1]
        if begun is None:
            if code:
                yield {"ended": code, "text": last}
            return
        first = begun["begin"] + 1
        why = f"the process ended with code {code}: {last}"
        yield {"end": begun["begin"], "model": begun.get("model"), "failed": why}
        if first >= count:
            return


def facts_of(row: Row) -> dict[str, Any]:
    """What the driver reports; "ended" and "text" if it opens no device."""
    return next(worker(row, "facts", BASE, 1, 1800), {"ended": 1, "text": "no output"})


def worst_statistics(executables: Sequence[dict[str, Any]], into: dict[str, float]) -> None:
    """Takes the worst value of each statistic."""
    for executable in executables:
        for name, value in executable["statistics"].items():
            text = name.lower()
            if not any(each in text for each in KEPT) or text.startswith("cat"):
                continue
            choose = min if text.startswith(SMALLER_IS_WORSE) else max
            into[name] = choose(into.get(name, value), value)


def pipelines_of(row: Row, kernels: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Makes the pipelines of kernels, and sums up what the driver says of them."""
    templates: dict[str, dict[str, float]] = {}
    refused: dict[str, list[str]] = {}
    made, seconds = 0, 0.0
    for said in worker(row, "pipelines", folder, len(kernels), 120):
        if "end" not in said:
            refused.setdefault(said.get("text", "no text"), [])
            continue
        template = kernels[said["end"]]["template"]
        if said["failed"]:
            refused.setdefault(said["failed"].splitlines()[0], []).append(template)
            continue
        made, seconds = made + 1, seconds + said["seconds"]
        worst = templates.setdefault(template, {"pipelines": 0})
        worst["pipelines"] += 1
        worst_statistics(said["executables"], worst)
    return {
        "pipelines": made,
        "seconds": round(seconds, 2),
        "refused": {text: sorted(names) for text, names in refused.items()},
        "templates": dict(sorted(templates.items())),
    }


def models_of(row: Row, models: Sequence[str], source: Path) -> dict[str, Any]:
    """Runs models, and gives their errors."""
    folder = BASE / "models" / row.name.replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.stem in models:
            (folder / path.name).symlink_to(path)
    count = len(list(folder.glob("*.pvk")))
    errors, failed = {}, {}
    for said in worker(row, "models", folder, count, 300):
        if said.get("failed") or "end" not in said:
            failed[said.get("model") or "?"] = said.get("failed") or said.get("text", "")
        else:
            errors[said["model"]] = said["error"]
            if not said["error"] <= tolerance_of(said["model"]):
                failed[said["model"]] = f"error {said['error']:.2g}"
    return {"errors": errors, "failed": failed}


def measure(row: Row, models: Sequence[str], tests: bool) -> dict[str, Any]:
    """All that a row has."""
    start = time.monotonic()
    facts = facts_of(row)
    made: dict[str, Any] = {
        "family": row.family,
        "date": datetime.date.today().isoformat(),
        "python": "this system's"
        if row.root is None
        else f"{row.root.release} {row.root.architecture}",
    }
    if "device" not in facts:
        return {**made, "opened": False, "reason": facts["text"]}
    kept = (
        "device", "driver", "version", "profile", "traits", "limits", "subgroup_operations", "chooses_subgroup_size",
    )  # fmt: skip
    made.update(opened=True, **{name: facts[name] for name in kept})
    floats, halves = BASE / "models" / "float32", BASE / "models" / "float16"
    files = sorted(FILES.glob("*.pte"))
    files += [folder / f"{name}.pvk" for folder in (floats, halves) for name in models]
    folder = BASE / "kernels" / row.name.replace(" ", "-")
    kernels, not_lowered = write_kernels(
        facts, [path for path in files if path.is_file() and "external" not in path.name], folder
    )
    made["not_lowered"] = not_lowered
    target = store_for(facts).target_env
    made["target"] = target
    made["invalid"] = translate(folder, kernels, "spirv-val", "--target-env", target)
    made["pipelines"] = pipelines_of(row, kernels, folder)
    if row.runs:
        made["models"] = models_of(row, models, floats)
        if tests and row.root is None:
            made["tests"] = operator_tests(row.command(BASE)[1])
    if made["profile"] in ("mobile", "apple"):
        made["metal"] = {
            version: translate(folder, kernels, "spirv-cross", "--msl", "--msl-version", number)
            for version, number in METAL.items()
        }
    made["seconds"] = round(time.monotonic() - start)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="these drivers")
    parser.add_argument("--models", nargs="*", default=NAMES, help="names of the gallery")
    parser.add_argument("--tests", action="store_true", help="run the tests of operators too")
    parser.add_argument("--list", action="store_true", help="name the drivers, and end")
    args = parser.parse_args()
    unknown = set(args.rows or ()).difference(row.name for row in ROWS)
    if unknown or args.list:
        print("\n".join(row.name for row in ROWS))
        return 1 if unknown else 0
    rows = [row for row in ROWS if not args.rows or row.name in args.rows]
    write_models(args.models, BASE / "models" / "float32")
    write_models(args.models, BASE / "models" / "float16", half=True)
    for row in rows:
        try:
            made = measure(row, args.models, args.tests)
        except FileNotFoundError as error:
            made = {"family": row.family, "opened": False, "reason": str(error)}
        data: dict[str, Any] = {"rows": {}}
        if DATA.is_file():  # read now: another run may have added rows
            data = json.loads(DATA.read_text(encoding="utf-8"))
        if "tests" not in made and "tests" in data["rows"].get(row.name, {}):
            made["tests"] = data["rows"][row.name]["tests"]
        data["rows"][row.name] = made
        ordered = {each.name: data["rows"][each.name] for each in ROWS if each.name in data["rows"]}
        data["rows"] = ordered
        DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        print(row.name, made.get("reason") or "done", file=sys.stderr, flush=True)
    write_page()
    return 0


if __name__ == "__main__":
    sys.exit(main())
