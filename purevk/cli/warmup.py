"""`purevk warmup`: compiles the kernels of models ahead of time, and bundles them for other
machines."""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from purevk import knobs
from purevk import progress as progress_bars
from purevk.cache import Cache, CacheKey, default_cache
from purevk.cli.machine import device_data, device_line, open_context
from purevk.cli.output import Output, bundle_data, check_output, count, duration, size
from purevk.errors import FileFormatError, GraphError, PurevkError
from purevk.frontends.files import FileSource, ModelFile, open_file
from purevk.frontends.importer import InputSizes
from purevk.graph.context import Context
from purevk.graph.first_dispatch import dispatch_each
from purevk.graph.fragments import trial_of
from purevk.graph.tuned import entry_name
from purevk.ir.expected import Expected
from purevk.lower.lowering import KernelSpec
from purevk.program.leaves import Leaves
from purevk.program.plan_cache.cache import PlanCache
from purevk.program.variants.coverage import (
    decided_by,
    input_sizes,
    serves,
    uncovered_sizes,
    wider_sizes,
)
from purevk.report import lowered
from purevk.schedule.plan import Lowered


def collect(args: argparse.Namespace) -> dict[str, Any]:
    with knobs.compiling():  # an image may set it for its server
        return _collect(args)


def _collect(args: argparse.Namespace) -> dict[str, Any]:
    cache = default_cache()
    if cache.folder is None and knobs.CACHE().on and not args.bundle:
        raise _nothing_kept("this user has no home folder", "")
    if args.bundle:
        check_output(args.bundle, "the bundle")
    digests = args.sha256 or [None] * len(args.from_bundle)
    imported = [
        {"path": path, "entries": cache.import_bundle(path, sha256=sha256, trust=args.trust)}
        for path, sha256 in zip(args.from_bundle, digests, strict=True)
    ]
    start = time.perf_counter()
    data: dict[str, Any] = {
        "device": None,
        "imported": imported,
        "models": [],
        "bundle": None,
        "cache": {},
        "persistent": False,
        "seconds": 0.0,
    }
    keys = _warm_all(args, data) if args.models else ()
    data["persistent"] = cache.persistent
    if cache.folder is not None and not args.bundle and _is_lost(cache, keys):
        why = cache.problem or f"max_bytes={cache.max_bytes} of {knobs.CACHE.name} is too small"
        raise _nothing_kept(why, str(cache.folder))
    data["cache"] = {
        "folder": str(cache.folder or ""),
        "bytes": cache.stats().bytes,
        "driver_bytes": cache.driver_bytes(),
    }
    data["seconds"] = time.perf_counter() - start
    return data


def _is_lost(cache: Cache, keys: Collection[CacheKey]) -> bool:
    """Whether the folder could not be written, and lacks what it should have. A read-only folder that
    has all kernels is fine."""
    if not keys:
        return not cache.persistent
    if knobs.OVERRIDE():  # kernels that no cache keeps
        return False
    lost = sum(not cache.on_disk(key) for key in keys)
    return lost == len(keys) or (lost > 0 and not cache.persistent)


def _nothing_kept(why: str, folder: str) -> PurevkError:
    """The error of a warmup that has to be done again."""
    return PurevkError(
        "the warmup is not kept on disk",
        where=folder,
        why=why,
        next=f"name a folder that this user may write: {knobs.CACHE.name}; or write a bundle:"
        " --bundle FILE.zip",
    )


def _warm_all(args: argparse.Namespace, data: dict[str, Any]) -> Collection[CacheKey]:
    """Warms up the models, and writes the bundle. Returns the cache keys of their SPIR-V."""
    bar = progress_bars.ProgressBar(delay=0.0) if progress_bars.default() is not None else None
    with open_context(args) as context, progress_bars.closing(bar):
        data["device"] = device_data(context.device)
        keys: dict[CacheKey, None] = {}
        for path in args.models:
            report, used = _warm(path, args, context, bar)
            data["models"].append(report)
            keys.update(used)
        if args.bundle:
            tuning = [(context.kernels.device_key, entry_name())] if knobs.TUNED() else []
            written = context.cache.export_bundle(args.bundle, keys, tuning)
            data["bundle"] = bundle_data(args.bundle, written)
        return keys


def _warm(
    path: str, args: argparse.Namespace, context: Context, bar: Any
) -> tuple[dict[str, Any], dict[CacheKey, None]]:
    """Makes the kernels of one model, and runs each pipeline once. Returns its report and the cache
    keys of its SPIR-V."""
    report = context.kernels.report
    compiled, made = report.compiled, report.pipelines
    start = time.perf_counter()
    with open_file(path, args.data, check=False) as program:
        methods = [
            _lower(program, name, context, args.max_specializations, bar)
            for name in program.methods
        ]
    specs = list(dict.fromkeys(spec for method in methods for spec in method.kernels))
    pipelines = context.kernels.prepare(specs, bar)
    dispatch_each(context.device, list(zip(specs, pipelines)), bar)
    # These were chosen where a kernel that tries fragments ran.
    specs += dict.fromkeys(filter(None, map(trial_of, specs)))
    keys = dict.fromkeys(context.kernels.key(spec) for spec in specs)
    context.kernels.save()
    compiled, made = report.compiled - compiled, report.pipelines - made
    return {
        "path": path,
        "methods": len(methods),
        "specializations": sum(method.lowered for method in methods),
        "left_out": sum(method.left_out for method in methods),
        "all_sizes": all(method.complete for method in methods),
        "modules": len(keys),
        "compiled": compiled,
        "cached": len(keys) - compiled,
        "pipelines": made,
        "dispatched": len(pipelines),
        "seconds": time.perf_counter() - start,
    }, keys


@dataclass(frozen=True)
class _Method:
    """The kernels of all lowerings of a method.

    Attributes:
        lowered: number of lowerings. left_out: how many more there are.
        complete: whether all sizes within the exported bounds were considered.
    """

    kernels: dict[KernelSpec, None]
    lowered: int
    left_out: int
    complete: bool


# What a method is lowered for: sizes of inputs, and what open comparisons are decided by.
_Attempt = tuple[InputSizes | None, Mapping[str, Expected] | None]


def _lower(program: ModelFile, name: str, context: Context, limit: int, bar: Any) -> _Method:
    """Lowers a method for its exported bounds, and for the sizes that this does not serve."""
    leaves = Leaves()
    cache = PlanCache.of(context, FileSource(program, name), leaves)

    def lower(
        sizes: InputSizes | None = None, expected: Mapping[str, Expected] | None = None
    ) -> Lowered:
        lowered_method = lowered.lower(program, name, context.traits, sizes, leaves, expected)
        if cache is not None:
            key = cache.key(name, sizes, expected, len(program.methods) > 1)
            if key is not None:
                cache.put(key, lowered_method)
        return lowered_method

    first = lower()
    kernels = dict.fromkeys(first.plan.kernels)
    others = uncovered_sizes(first.graph, first.guards)
    wide: list[Lowered] = []
    tried: list[_Attempt] = []
    left, done = 0, 1
    for number, env in enumerate(others.sizes):
        if bar is not None:
            bar("lower", number + 1, len(others.sizes))
        if any(serves(plan.graph, plan.guards, env) for plan in wide):
            continue
        exact = input_sizes(first.graph, env)
        attempts: list[_Attempt] = [
            (wider_sizes(first.graph, exact), decided_by(first.guards, env))
        ]
        if attempts == [(None, None)] or attempts[0] in tried:
            attempts = []
        for attempt in (*attempts, (exact, None)):
            if done >= limit:
                left += 1
                break
            try:
                lowered_method = lower(*attempt)
            except (FileFormatError, GraphError):
                continue  # a call of its own sizes raises InputError
            finally:
                tried.append(attempt)
            kernels.update(dict.fromkeys(lowered_method.plan.kernels))
            done += 1
            if attempts and serves(lowered_method.graph, lowered_method.guards, env):
                wide.append(lowered_method)
                break
    return _Method(kernels, done, left, others.complete)


def show(data: dict[str, Any], out: Output) -> None:
    for entry in data["imported"]:
        out.line(f"{count(entry['entries'], 'entry')} copied from {entry['path']}")
    if data["device"] is not None:
        out.pairs([("device", device_line(data["device"]))], indent=0)
        out.line()
        out.table(
            [
                ("model", "p"),
                ("methods", "r"),
                ("lowerings", "r"),
                ("kernels", "r"),
                ("compiled", "r"),
                ("cached", "r"),
                ("time", "r"),
            ],
            [
                [
                    Path(m["path"]).name,
                    m["methods"],
                    m["specializations"],
                    m["modules"],
                    m["compiled"],
                    m["cached"],
                    duration(m["seconds"]),
                ]
                for m in data["models"]
            ],
        )
        out.line()
        for m in data["models"]:
            _show_left_out(m, out)
    if data["bundle"] is not None:
        bundle = data["bundle"]
        out.line(
            f"bundle {bundle['path']}: {count(bundle['entries'], 'entry')}, {size(bundle['bytes'])}"
        )
        out.line(f"sha256 {bundle['sha256']}")
    if data["persistent"]:
        cache = data["cache"]
        out.line(
            f"{duration(data['seconds'])}; cache {cache['folder']}: {size(cache['bytes'])}, and"
            f" {size(cache['driver_bytes'])} of the driver",
            "dim",
        )
    else:
        out.line(
            "nothing was kept on disk" + " but the bundle" * (data["bundle"] is not None), "yellow"
        )


def _show_left_out(model: dict[str, Any], out: Output) -> None:
    """Says which sizes a warmup has not prepared."""
    name = Path(model["path"]).name
    if model["left_out"]:
        out.line(
            f"{name}: calls of {count(model['left_out'], 'further size')} need a lowering each, which"
            " was left out; --max-specializations N prepares more of them",
            "yellow",
        )
    if not model["all_sizes"]:
        out.line(f"{name}: its bounds allow too many sizes to try; a part was tried", "yellow")
