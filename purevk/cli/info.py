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
            data["devices"] = [_device(each, instance) for each in instance.physical_devices]
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
    found = data["versions"]
    out.heading("versions")
    out.pairs(
        [
            (name, version if version is not None else "not installed")
            for name, version in found.items()
        ]
    )
    _show_devices(data, out)
    compiler_data, cache = data["compiler"], data["cache"]
    out.heading("shader compiler")
    if compiler_data["error"] is None:
        out.pairs([("version", compiler_data["version"]), ("from", compiler_data["origin"])])
    else:
        out.line(
            f"  {compiler_data['error']['what']}; `purevk doctor` says how to get one", "yellow"
        )
    out.heading("cache")
    out.pairs(
        [
            ("folder", cache["folder"] or "none, in memory only (PUREVK_CACHE=0)"),
            (
                "entries",
                f"{cache['entries']}, {size(cache['bytes'])} of at most {size(cache['max_bytes'])}",
            ),
        ]
    )


def _show_devices(data: dict[str, Any], out: Output) -> None:
    if data["device_error"] is not None:
        out.heading("devices")
        error = data["device_error"]
        out.line(f"  {error['what']}", "bold red")
        out.pairs([("why", error["why"] or None), ("next", error["next"] or None)], 4)
    for device in data["devices"]:
        picked = "  <- picked" if device["index"] == data["picked"] else ""
        out.heading(f"device {device['index']}: {device['name']}{picked}")
        heaps = ", ".join(
            f"{size(heap['bytes'])} {'of the device' if heap['device_local'] else 'of the host'}"
            for heap in device["heaps"]
        )
        out.pairs(
            [
                (
                    "kind",
                    device["kind"] + (", shares the host's memory" if device["unified"] else ""),
                ),
                ("driver", device["driver"]),
                ("Vulkan", device["api_version"]),
                ("memory", heaps),
                ("cores", device["cores"] or None),
                ("subgroups of", device["subgroup_size"]),
                ("largest buffer", size(device["max_storage_buffer_range"])),
                (
                    "shared memory",
                    f"{size(device['max_shared_memory'])}, workgroups of up to {device['max_workgroup_invocations']}",
                ),
                ("profile", device["profile"]["name"]),
            ]
        )
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
                    s["m"],
                    s["n"],
                    s["k"],
                    s["a"],
                    s["b"],
                    s["c"],
                    s["result"],
                    s["scope"] + ", multiples" * s["flexible"],
                ]
                for s in data["matrix_shapes"]
            ],
            title="matrix cores",
        )
    for device in data["devices"]:
        if device["index"] == data["picked"]:
            profile = device["profile"]
            rows = [
                [name, value]
                for name, value in _flat(profile)
                if name != "name" and (data["all"] or isinstance(profile.get(name), bool))
            ]
            out.table(
                ["name", ("value", "r")],
                rows,
                title=f"profile of device {device['index']}: {profile['name']}",
            )
            if not data["all"]:
                out.line("  purevk info --all also shows its numbers and cost models", "dim")


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
