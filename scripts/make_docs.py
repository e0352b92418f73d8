#!/usr/bin/env python3
"""Writes docs/knobs.md, docs/ops.md and docs/models.md from the tables that they describe.

python scripts/make_docs.py            writes them
python scripts/make_docs.py --check    exits with 1 if one is not what would be written
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from purevk import knobs  # noqa: E402
from purevk.cli.ops import operators  # noqa: E402

ETVK = ROOT / "docs" / "data" / "etvk-op-support.csv"
SAMPLES = ROOT / "docs" / "data" / "opinfo.json"
TYPES = ROOT / "docs" / "data" / "operator_dtypes.json"
MODELS = ROOT / "docs" / "data" / "models.json"
_MADE = "<!-- Made by scripts/make_docs.py; do not edit. -->\n\n"
# What the front end takes care of, so that no row is needed.
_NO_ROW = ("operator.", "aten._assert_scalar", "aten.sym_")


def knobs_page() -> str:
    """The environment variables, as Markdown."""
    lines = [
        "# Environment variables\n",
        _MADE,
        "A variable is read when it is used, so it may be set at any time. 1, true, yes and on mean yes; 0, false, no,"
        " off and nothing mean no.\n\n",
        "| variable | default | what it does |\n",
        "|---|---|---|\n",
    ]
    lines += [
        f"| `{knob.name}` | {_default(knob.default)} | {_cell(knob.doc)} |\n" for knob in knobs.ALL
    ]
    return "".join(lines)


def _default(value: object) -> str:
    if value in ("", ()):
        return ""
    return f"`{int(value) if isinstance(value, bool) else value}`"


def read_etvk() -> dict[str, str]:
    """For each operator of ExecuTorch's Vulkan backend, "namespace.name" or with overload: its
    limit there, or ""."""
    with open(ETVK, encoding="utf-8", newline="") as file:
        return {
            f"{row['namespace']}.{row['operator']}": row["limit_in_etvk"]
            for row in csv.DictReader(file)
        }


def etvk_names(names: list[str], table: dict[str, str]) -> list[str]:
    """The entries of the table that names "namespace.name.overload" of one operator stand for: that
    of the overload, or of the operator, also where the table has the variant that copies
    ("aten.view_copy")."""
    found: dict[str, None] = {}
    for name in names:
        if name in table:
            found[name] = None
            continue
        base = name.rpartition(".")[0]
        found.update(dict.fromkeys(each for each in (base, f"{base}_copy") if each in table))
    return list(found)


def ops_page() -> str:
    """The operators, as Markdown."""
    table = read_etvk()
    types = json.loads(TYPES.read_text(encoding="utf-8"))["rows"]
    refused = read_refusals()
    rows = [row for row in operators() if not row["operator"].startswith("purevk.")]
    seen: set[str] = set()
    body = []
    for row in rows:
        names = etvk_names([row["operator"], *row["names"]], table)
        seen.update(names)
        limits = [(name, table[name]) for name in names if table[name]]
        shown = "; ".join(
            f"`{name}`: {limit}" if len(names) > 1 else limit for name, limit in limits
        )
        etvk = (shown or "yes") if names else "no"
        others = ", ".join(f"`{name}`" for name in row["names"])
        entry = types.get(row["operator"])
        limit = limits_here(
            entry,
            [why for name in (row["operator"], *row["names"]) for why in refused.get(name, ())],
        )
        body.append(
            f"| `{row['operator']}` | {others} | {row['form']} | {dtypes_here(entry)} |"
            f" {_cell(limit)} | {_cell(etvk)} |\n"
        )
    missing = [name for name in table if name not in seen and not name.startswith(_NO_ROW)]
    lines = [
        "# Operators\n",
        _MADE,
        f"{sum(row['form'] != 'cpu' for row in rows)} operators have a kernel. Every other operator of ATen runs on the"
        " CPU through torch (`purevk ops --check model.pte` says which of a model's do, and why).\n\n"
        "Forms: *pointwise*, an expression per element, chains of which become one kernel; *view*, another layout of"
        " the same bytes, so nothing runs; *rewrite*, expressed by other operators; *kernel*, templates of its own;"
        " *cpu*, no kernel yet. *Dtypes* are those of the first argument that run on the device,"
        " of those that eager torch takes;"
        " nothing is said of what torch takes apart before it can be asked, and of formats with dtypes of their own"
        " (`python scripts/operator_dtypes.py --update` finds out). *Runs on the CPU*: what no"
        " kernel takes. The last column says"
        " whether ExecuTorch's Vulkan backend (1.5.1) takes the operator, and its limit there.\n\n",
        "| operator | other names | form | dtypes | runs on the CPU | in ExecuTorch's Vulkan backend |\n",
        "|---|---|---|---|---|---|\n",
        *body,
    ]
    if missing:
        lines += [
            "\n## In ExecuTorch's Vulkan backend, without a kernel here\n\n",
            "| operator | limit there |\n",
            "|---|---|\n",
            *[f"| `{name}` | {_cell(table[name])} |\n" for name in sorted(missing)],
        ]
    return "".join(lines) + samples_section()


_KINDS = {
    "floats": {"float32", "float16", "bfloat16"},
    "integers": {"int64", "int32", "int16", "int8", "uint8"},
}


def dtypes_here(entry: dict | None) -> str:
    """The dtypes that run on the device, briefly: "floats" are float32, float16 and bfloat16,
    "integers" all five."""
    if entry is None:
        return ""
    left, shown = set(entry["device"]), []
    for name, kind in _KINDS.items():
        if kind <= left:
            shown.append(name)
            left -= kind
    return ", ".join([*shown, *(dtype for dtype in DTYPES if dtype in left)])


def limits_here(entry: dict | None, refused: list[str]) -> str:
    """What of an operator runs on the CPU: dtypes, then what PyTorch's samples came upon."""
    found: dict[str, None] = {}
    for dtype, why in (entry or {}).get("cpu", {}).items():
        found[
            dtype if why.endswith(dtype) and why.startswith("no kernel for") else f"{dtype}: {why}"
        ] = None
    for why in refused:
        dtype = why.removeprefix("no kernel for ")
        if not any(each.endswith(why) for each in found) and dtype not in found:
            found[why] = None
    return "; ".join(found)


def read_refusals() -> dict[str, list[str]]:
    """Why nodes of PyTorch's samples ran on the CPU though there is a row, by operator."""
    found: dict[str, dict[str, None]] = {}
    for entry in json.loads(SAMPLES.read_text(encoding="utf-8"))["operators"].values():
        for outcome, reasons, _ in entry.get("why", []):
            for reason in re.split(r", (?=[a-z_]+\.)", reasons) if outcome == "fallback" else ():
                name, _, why = reason.partition(": ")
                if why:
                    found.setdefault(name, {})[why] = None
    return {name: list(reasons) for name, reasons in found.items()}


def samples_section(path: Path = SAMPLES) -> str:
    """What scripts/opinfo.py counted, as Markdown: totals, then every operator; nothing where there
    is no file."""
    if not path.is_file():
        return ""
    table = json.loads(path.read_text(encoding="utf-8"))
    operators = table["operators"]
    used = list(
        dict.fromkeys(dtype for entry in operators.values() for dtype in entry if dtype != "why")
    )
    dtypes = [dtype for dtype in DTYPES if dtype in used]
    lines = [
        "\n## PyTorch's samples\n\n",
        f"PyTorch {table['torch']} tests its operators with samples (`torch.testing`, op_db). Here"
        f" each is exported with"
        " torch.export and takes the way of a model, on lavapipe; results are held against eager"
        " torch, with the tolerances of"
        ' `torch.testing.assert_close` or those of the operator\'s OpInfo. "On the CPU" are'
        " samples that agree and of which a"
        " node ran on the CPU; skipped are those without a result to compare (random numbers, sparse tensors, what"
        " torch.export refuses).\n\n"
        "`python scripts/opinfo.py --update` runs what is new, with `--again --ops REGEX` some again, and"
        " `python scripts/make_docs.py` remakes this page.\n\n",
        "| dtype | samples | on the device | on the CPU | failed | skipped | samples an operator |\n",
        "|---|---|---|---|---|---|---|\n",
    ]
    for dtype in dtypes:
        counts = [
            sum(column)
            for column in zip(
                *(_four(entry[dtype]) for entry in operators.values() if dtype in entry)
            )
        ]
        limit = table["limits"].get(dtype)
        lines.append(
            f"| {dtype} | {sum(counts)} | {' | '.join(map(str, counts))} | {f'at most {limit}' if limit else 'all'} |\n"
        )
    lines.append(
        "\nIn float64 kernels that are written for float32 are expressed by others, which are"
        " slower. It is left out of what follows.\n"
    )
    dtypes = [dtype for dtype in dtypes if dtype != "float64"]
    done, rest = [], []
    for name, entry in sorted(operators.items()):
        total = sum(sum(entry[dtype]) for dtype in dtypes if dtype in entry)
        passed = sum(_four(entry[dtype])[0] for dtype in dtypes if dtype in entry)
        if total == passed:
            done.append(f"`{name}` {total}")
            continue
        shown = [
            "" if dtype not in entry else f"{_four(entry[dtype])[0]}/{sum(entry[dtype])}"
            for dtype in dtypes
        ]
        why = "; ".join(
            dict.fromkeys(
                f"{'on the CPU' if outcome == 'fallback' else outcome}: {_brief(reason)}"
                for outcome, reason, of in entry.get("why", [])
                if of != ["float64"]
            )
        )
        rest.append(f"| `{name}` | {' | '.join(shown)} | {_cell(why)} |\n")
    lines += [
        f"\nAll samples of {len(done)} operators pass on the device (name and number of samples of all dtypes): ",
        ", ".join(done),
        f".\n\nThe other {len(rest)}, passed on the device of all, and why not the rest:\n\n",
        f"| operator | {' | '.join(dtypes)} | why |\n",
        f"|---|{'---|' * len(dtypes)}---|\n",
        *rest,
    ]
    return "".join(lines)


DTYPES = (
    "float32",
    "float16",
    "bfloat16",
    "float64",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
)


def _brief(reason: str) -> str:
    """A message of torch's without what differs from sample to sample."""
    return (
        re.split(r"(?<=Error): |(?<=Exception): |(?<=NotFound): ", reason)[0]
        if reason.startswith(("torch.export", "eager torch"))
        else reason
    )


def _four(counts: list[int]) -> list[int]:
    """passed, fallback, failed and skipped, of which the file leaves out zeros at the end."""
    return [*counts, 0, 0, 0, 0][:4]


def models_page() -> str:
    """The gallery of models, as scripts/models.py measured it, as Markdown."""
    data = json.loads(MODELS.read_text(encoding="utf-8"))
    rows = data["models"]
    ways = [
        way
        for row in rows.values()
        for way in (row.get("compile"), row.get("pte"))
        if way is not None
    ]
    agree = [way for way in ways if "failed" not in way]
    exporter = sum(way.get("failed", "").startswith("NotExported") for way in ways)
    one = sum(way["segments"] == 1 and not way["cpu"] for way in agree)
    packages = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    lines = [
        "# Models\n",
        _MADE,
        "Small models of many architectures, each with seeded random weights (tests/models/gallery has them), run by"
        " `python scripts/models.py --json docs/data/models.json` in two ways: straight from torch"
        " with `purevk.compile`, and"
        " as a `.pte` that ExecuTorch's VulkanPartitioner made (a few after ExecuTorch's own"
        " folding of constants, without"
        " which it cannot lower them). Both are compared with eager torch.\n\n"
        f"{len(rows)} models; of {len(ways)} runs {one} are one GPU segment with nothing on the CPU"
        f", {exporter} could not be exported by ExecuTorch, and {len(ways) - len(agree) - exporter} failed.\n\n"
        f"Device: {data['device']}, 2 cores; {packages}.\n\n"
        "- *error*: the largest difference from eager torch over all outputs and calls, relative"
        " to the largest output.\n"
        "- *ms*: one call, the fastest of a few (batch 1; the last of the recorded calls, so one"
        " token for models with a"
        " cache). Eager torch uses both cores, as lavapipe does; weights and inputs are small, so"
        " that this compares what a"
        " call costs rather than peak speed ([bench/RESULTS.md](../bench/RESULTS.md) has that).\n"
        "- *s*: `purevk.compile` of the exported program (with torch's own decompositions), and `purevk.load` of the"
        " file, with no kernel in any cache.\n"
        "- *delegates*: delegate calls in the `.pte`, and after the + the CPU kernels that"
        " ExecuTorch would run between them.\n"
        "- *segments*: command buffers on the GPU, and the nodes on the CPU between them.\n",
    ]
    for library in dict.fromkeys(row["library"] for row in rows.values()):
        lines += [
            f"\n## {library}\n\n",
            "| model | what | parameters | eager ms | straight: segments | error | ms | s |"
            " `.pte`: delegates | segments | error | ms | s |\n",
            "|---|---|--:|--:|---|--:|--:|--:|--:|---|--:|--:|--:|\n",
            *[_model_line(name, row) for name, row in rows.items() if row["library"] == library],
        ]
    return "".join(lines)


def _model_line(name: str, row: dict) -> str:
    count = row["parameters"]
    shown = f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count / 1e3:.0f} k"
    cells = [f"`{name}`", row["about"], shown, _number(row["eager_ms"])]
    cells += _way_cells(row.get("compile")) + _way_cells(row.get("pte"), file=True)
    return f"| {' | '.join(_cell(cell) for cell in cells)} |\n"


def _way_cells(way: dict | None, file: bool = False) -> list[str]:
    if way is None or "failed" in way:
        reason = "" if way is None else way["failed"].split(":")[0]
        reason = (
            "not exported by ExecuTorch"
            if reason == "NotExported"
            else reason and f"failed: {reason}"
        )
        return [""] * file + [reason, "", "", ""]
    host = ", ".join(
        f"`{name}`" + (f" x {count}" if count > 1 else "") for name, count in way["cpu"].items()
    )
    first = (
        [f"{way['delegates']}" + (f" + {way['kernels']}" if way["kernels"] else "")] if file else []
    )
    return [
        *first,
        f"{way['segments']}" + (f"; CPU: {host}" if host else ""),
        f"{way['error']:.0e}",
        _number(way["ms"]),
        f"{way['compile_s']:.1f}",
    ]


def _number(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


PAGES = {"docs/knobs.md": knobs_page, "docs/ops.md": ops_page, "docs/models.md": models_page}


def stale() -> list[str]:
    """The pages that are not what would be written."""
    found = []
    for name, make in PAGES.items():
        path = ROOT / name
        if not path.is_file() or path.read_text(encoding="utf-8") != make():
            found.append(name)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a page is stale"
    )
    if parser.parse_args().check:
        names = stale()
        for name in names:
            print(f"{name} is stale: run python scripts/make_docs.py", file=sys.stderr)
        return 1 if names else 0
    for name, make in PAGES.items():
        (ROOT / name).write_text(make(), encoding="utf-8")
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
