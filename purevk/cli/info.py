"""`purevk info`: devices, features, compiler, cache and versions."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from purevk import api
from purevk.api.features import FEATURES, choose
from purevk.cache import default_cache
from purevk.cli.machine import compiler, versions
from purevk.cli.output import Output, error_data, size, version_text
from purevk.errors import DeviceError
from purevk.graph.context import profile_of


def collect(args: argparse.Namespace) -> dict[str, Any]:
    data: dict[str, Any] = {
        "versions": versions(),
        "devices": [],
        "device_error": None,
        "picked": None,
        "features": [],
        "all": args.all,
    }
    try:
        instance = api.Instance()
    except DeviceError as error:
        data["device_error"] = error_data(error)
    else:
        with instance:
            data["devices"] = [_device(device, instance) for device in instance.physical_devices]
            try:
                picked = instance.pick(args.device)
            except DeviceError as error:
                data["device_error"] = error_data(error)
            else:
                data["picked"] = picked.index
                data["features"] = _features(picked)
                data["matrix_shapes"] = [asdict(shape) for shape in picked.matrix_shapes]
    cache = default_cache()
    return {
        **data,
        "compiler": compiler(),
        "cache": {**asdict(cache.stats()), "max_bytes": cache.max_bytes},
    }


def _device(device: api.PhysicalDevice, instance: api.Instance) -> dict[str, Any]:
    api_version = version_text(device.api_version)
    return {
        "index": device.index,
        "name": device.name,
        "kind": device.kind,
        "driver": device.driver,
        "api_version": api_version,
        "uuid": str(device.uuid),
        "vendor_id": device.vendor_id,
        "device_id": device.device_id,
        "heaps": [{"bytes": heap.size, "device_local": heap.device_local} for heap in device.heaps],
        "unified": device.is_unified,
        "cores": device.core_count,
        "subgroup_size": device.subgroup_size,
        "max_storage_buffer_range": device.limits.max_storage_buffer_range,
        "max_shared_memory": device.limits.max_shared_memory,
        "max_workgroup_invocations": device.limits.max_workgroup_invocations,
        "profile": _plain(profile_of(device)),
    }


def _features(device: api.PhysicalDevice) -> list[dict[str, Any]]:
    on = choose(device.available)
    return [
        {
            "name": row.name,
            "offered": row.name in device.available,
            "on": row.name in on,
            "on_request": row.on_request,
            "doc": row.doc,
        }
        for row in FEATURES
    ]


# -- for people ----------------------------------------------------------------------------------
def show(data: dict[str, Any], out: Output) -> None:
    """Prints some 15 lines for a machine with one device, or everything with `--all`."""
    packages = {name: version for name, version in data["versions"].items() if version is not None}
    out.pairs([("versions", ", ".join(f"{name} {version}" for name, version in packages.items()))])
    if data["device_error"] is not None:
        error = data["device_error"]
        out.line(f"  {error['what']}", "bold red")
        out.pairs([("why", error["why"] or None), ("next", error["next"] or None)], 4)
    for device in data["devices"]:
        _show_device(device, data, out)
    compiler_data, cache = data["compiler"], data["cache"]
    folder = cache["folder"] or "none, in memory only (PUREVK_CACHE=0)"
    used = f"{size(cache['bytes'])} of at most {size(cache['max_bytes'])}"
    error = compiler_data["error"]
    out.heading("compiler and cache")
    out.pairs(
        [
            ("compiler", compiler_data["version"] if error is None else error["what"]),
            ("from", compiler_data["origin"] if error is None else None),
            ("next", None if error is None else "`purevk doctor` says how to get one"),
            ("cache", f"{folder}: {cache['entries']} entries, {used}"),
        ]
    )
    if data["all"]:
        _show_details(data, out)
    else:
        out.line("purevk info --all also shows all features and the device's profile", "dim")


def _show_device(device: dict[str, Any], data: dict[str, Any], out: Output) -> None:
    picked = device["index"] == data["picked"]
    out.heading(f"device {device['index']}: {device['name']}{'  <- picked' * picked}")
    heaps = ", ".join(
        f"{size(heap['bytes'])} {'of the device' if heap['device_local'] else 'of the host'}"
        for heap in device["heaps"]
    )
    subgroups = f"subgroups of {device['subgroup_size']}"
    shared = f"{size(device['max_shared_memory'])} of shared memory"
    workgroups = f"workgroups of up to {device['max_workgroup_invocations']}"
    off = [row["name"] for row in data["features"] if not row["on"]]
    out.pairs(
        [
            ("kind", device["kind"] + ", shares the host's memory" * device["unified"]),
            ("driver", f"{device['driver']}, Vulkan {device['api_version']}"),
            ("memory", f"{heaps}; bindings of up to {size(device['max_storage_buffer_range'])}"),
            ("cores", device["cores"] or None),
            ("invocations", f"{subgroups}, {shared}, {workgroups}"),
            ("profile", device["profile"]["name"]),
            ("features off", ", ".join(off) if picked and off else None),
        ]
    )


def _show_details(data: dict[str, Any], out: Output) -> None:
    """The features, matrix shapes and profile of the device that a program would use."""
    if data["features"]:
        out.table(
            ["feature", ("state", "w"), "what it gives"],
            [[row["name"], _state(row), row["doc"]] for row in data["features"]],
            styled=1,
            title=f"features of device {data['picked']}",
        )
    if data.get("matrix_shapes"):
        out.table(
            [("m", "r"), ("n", "r"), ("k", "r"), "a", "b", "c", "result", "scope"],
            [
                [
                    *(s[name] for name in ("m", "n", "k", "a", "b", "c", "result")),
                    s["scope"] + ", multiples" * s["flexible"],
                ]
                for s in data["matrix_shapes"]
            ],
            title="matrix cores",
        )
    for device in data["devices"]:
        if device["index"] == data["picked"]:
            profile = device["profile"]
            out.table(
                ["name", ("value", "r")],
                [[name, value] for name, value in _flat(profile) if name != "name"],
                title=f"profile of device {device['index']}: {profile['name']}",
            )


def _plain(value: Any) -> Any:
    """Dataclasses and named tuples as dicts."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if hasattr(value, "_asdict"):
        return {name: _plain(item) for name, item in value._asdict().items()}
    return list(map(_plain, value)) if isinstance(value, tuple) else value


def _flat(profile: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The fields of a profile; those of its cost models are named `model.field`. Each tile takes one
    row."""
    for name, value in profile.items():
        if prefix == "tiles.":
            for number, tile in enumerate(value if isinstance(value, list) else [value]):
                text = str(tile)
                if isinstance(tile, dict):
                    text = ", ".join(f"{size} {number}" for size, number in tile.items())
                yield "" if number else prefix + name, text
        elif isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, str(value)


def _state(row: dict[str, Any]) -> str:
    if row["on"]:
        return "on"
    if row["on_request"]:
        return "off (on request)" if row["offered"] else "off"
    return "off (disabled)" if row["offered"] else "off"
