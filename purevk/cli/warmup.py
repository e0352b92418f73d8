"""`purevk warmup`: compiles the kernels of models ahead of time, and bundles them for other
machines."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from purevk import knobs
from purevk import progress as progress_bars
from purevk.cache import default_cache
from purevk.cli import lowered
from purevk.cli.machine import device_data, device_line, open_context
from purevk.cli.output import Output, count, duration, size
from purevk.errors import InputError
from purevk.frontends.files import open_file
from purevk.graph import fragments
from purevk.graph.context import Context
from purevk.graph.tuned import entry_name


def collect(args: argparse.Namespace) -> dict[str, Any]:
    if not args.models and not args.from_bundle:
        raise InputError(
            "nothing to warm up", next="name a model, or a bundle: --from-bundle FILE.zip"
        )
    if args.bundle and not args.models:
        raise InputError(
            "a bundle is made from models", next="name the models whose kernels it shall hold"
        )
    cache = default_cache()
    imported = [{"path": path, "entries": cache.import_bundle(path)} for path in args.from_bundle]
    data: dict[str, Any] = {
        "device": None,
        "imported": imported,
        "models": [],
        "bundle": None,
        "cache": {"folder": str(cache.folder or "")},
        "persistent": cache.folder is not None,
    }
    if not args.models:
        return data
    bar = progress_bars.ProgressBar(delay=0.0) if progress_bars.default() is not None else None
    with open_context(args) as context, progress_bars.closing(bar):
        data["device"] = device_data(context.device)
        keys: dict[Any, None] = {}
        for path in args.models:
            report, used = _warm(path, args.data, context, bar)
            data["models"].append(report)
            keys.update(used)
        if args.bundle:
            tuning = [(context.kernels.device_key, entry_name())] if knobs.TUNED() else []
            entries = context.cache.export_bundle(args.bundle, keys, tuning)
            data["bundle"] = {
                "path": args.bundle,
                "entries": entries,
                "bytes": Path(args.bundle).stat().st_size,
            }
    return data


def _warm(
    path: str, data_files: list[str], context: Context, bar: Any
) -> tuple[dict[str, Any], dict[Any, None]]:
    """Makes the kernels of one model. Returns its report and the cache keys of its SPIR-V."""
    report = context.kernels.report
    compiled, pipelines = report.compiled, report.pipelines
    start = time.perf_counter()
    keys: dict[Any, None] = {}
    with open_file(path, data_files, check=False) as program:
        plans = [lowered.lower(program, name, context.traits).plan for name in program.methods]
        specs = list(dict.fromkeys(spec for plan in plans for spec in plan.kernels))
        context.kernels.prepare(specs, bar)
        if any(
            spec.template in ("quantized/qmatmul_coopmat.comp", "attention/attention_coopmat.comp")
            for spec in specs
        ):  # chosen where this one ran
            specs.append(fragments.SPEC)
        keys.update(dict.fromkeys(context.kernels.key(spec) for spec in specs))
    context.kernels.save()
    compiled, pipelines = report.compiled - compiled, report.pipelines - pipelines
    return {
        "path": path,
        "methods": len(plans),
        "modules": len(keys),
        "compiled": compiled,
        "cached": len(keys) - compiled,
        "pipelines": pipelines,
        "seconds": time.perf_counter() - start,
    }, keys


def show(data: dict[str, Any], out: Output) -> None:
    for each in data["imported"]:
        out.line(f"{count(each['entries'], 'module')} copied from {each['path']}")
    if data["device"] is not None:
        out.pairs([("device", device_line(data["device"]))], indent=0)
        out.line()
        out.table(
            [
                "model",
                ("modules", "r"),
                ("compiled", "r"),
                ("cached", "r"),
                ("pipelines", "r"),
                ("time", "r"),
            ],
            [
                [
                    Path(m["path"]).name,
                    m["modules"],
                    m["compiled"],
                    m["cached"],
                    m["pipelines"],
                    duration(m["seconds"]),
                ]
                for m in data["models"]
            ],
        )
        out.line()
    if data["bundle"] is not None:
        bundle = data["bundle"]
        out.line(
            f"bundle {bundle['path']}: {count(bundle['entries'], 'module')}, {size(bundle['bytes'])}"
        )
    if data["persistent"]:
        out.line(f"cache {data['cache']['folder']}", "dim")
    elif data["bundle"] is None:
        out.line(f"{knobs.CACHE.name}=0: nothing was kept on disk", "yellow")
