"""The table of docs/help/devices.md, from bench/devices.json."""

from __future__ import annotations

import json
import re
from typing import Any

from bench.drivers.rows import ROOT

DATA = ROOT / "bench" / "devices.json"
PAGE = ROOT / "docs" / "help" / "devices.md"
_BEGIN, _END = "<!-- begin: bench/devices.json -->", "<!-- end: bench/devices.json -->"


def status(row: dict[str, Any]) -> str:
    """What was shown: "executed and compared", "pipelines created", "translated" or "assumed"."""
    if row.get("models", {}).get("errors"):
        return "executed and compared"
    if row.get("pipelines", {}).get("pipelines"):
        return "pipelines created"
    return "translated" if row.get("metal") else "assumed"


def findings(row: dict[str, Any]) -> str:
    """Figures of a row, in words."""
    if not row["opened"]:
        return f"opens no device: {_cell(row['reason'])}"
    parts = []
    if models := row.get("models"):
        right = len(models["errors"]) - len(set(models["failed"]) & set(models["errors"]))
        total = len(set(models["errors"]) | set(models["failed"]))
        wrong = f" ({', '.join(sorted(models['failed']))})" if models["failed"] else ""
        parts.append(f"{right} of {total} models right{wrong}")
    if tests := row.get("tests"):
        parts.append(f"{tests['passed']} tests of operators passed, {len(tests['failed'])} failed")
    made = row["pipelines"]
    refused = sum(map(len, made["refused"].values()))
    parts.append(f"{made['pipelines']} of {made['pipelines'] + refused} pipelines")
    if shape := row["traits"]["coopmat_shape"]:
        parts.append(f"matrix cores: {' x '.join(map(str, shape))}")
    if spills := spilled(made["templates"]):
        parts.append(f"spills: {', '.join(spills)}")
    if invalid := sum(map(len, row["invalid"].values())):
        parts.append(f"{invalid} modules invalid")
    for version, answers in row.get("metal", {}).items():
        count = sum(map(len, answers.values()))
        parts.append(f"MSL {version}: {f'{count} not translated' if count else 'all translated'}")
    if row["not_lowered"]:
        parts.append(f"not lowered: {', '.join(row['not_lowered'])}")
    return "; ".join(parts)


def spilled(templates: dict[str, dict[str, float]]) -> list[str]:
    """The templates of which a pipeline spills registers, by the statistics of any driver."""
    return [
        f"`{template}`"
        for template, worst in templates.items()
        if any(
            value > 0
            and re.search("spill|scratch|slm size|stp count", name, re.I)
            and "to reg" not in name  # to registers of another kind
            for name, value in worst.items()
        )
    ]


def table(data: dict[str, Any]) -> str:
    """The table, in Markdown."""
    lines = [
        "| row | driver and device | profile | subgroup | shown | figures | on |",
        "|---|---|---|--:|---|---|---|",
    ]
    for name, row in data["rows"].items():
        cells = [name]
        if row["opened"]:
            cells += [f"{row['driver']}: {row['device'].strip()}", row["profile"]]
            sizes = {row["limits"]["min_subgroup_size"], row["limits"]["max_subgroup_size"]}
            sizes.add(row["traits"]["subgroup_size"])
            cells.append(" to ".join(map(str, sorted({min(sizes), max(sizes)}))))
        else:
            cells += [row["family"], "", ""]
        cells += [status(row), findings(row), row.get("date", "")]
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines)


def page() -> str:
    """The page, with the table of the data."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    after = rest.partition(_END)[2]
    return f"{before}{_BEGIN}\n\n{table(data)}\n\n{_END}{after}"


def write_page() -> None:
    """Writes the page."""
    PAGE.write_text(page(), encoding="utf-8")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
