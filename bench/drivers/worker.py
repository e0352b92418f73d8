"""What runs with a driver: `python -m bench.drivers.worker facts|pipelines|models FOLDER [FIRST]`.

Imports neither torch nor what needs it, so that the Python of any system does. Prints a line of
JSON for each thing that is done, and one before it is begun, so that a driver that crashes says
with what.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from purevk import api, knobs
from purevk.errors import PurevkError
from purevk.graph.context import identity_of, traits_of


def say(**row: Any) -> None:
    """Prints a row."""
    print(json.dumps(row), flush=True)


def open_device() -> api.Device:
    """The picked device, with statistics of pipelines where it has them. The driver's pipeline cache
    stays off, so that each pipeline is compiled."""
    disabled = (*knobs.DISABLE(), "pipeline_cache")
    return api.Device(api.Instance().pick(), disable=disabled, request=("pipeline_statistics",))


def facts() -> None:
    """Prints what the driver says of its device."""
    device = open_device()
    traits, physical = traits_of(device), device.physical
    skipped = ("profile", "fragment_order", "choices", "features")
    say(
        device=device.name,
        driver=device.driver,
        version=".".join(map(str, physical.offered_version)),
        api_version=physical.api_version,
        extensions=sorted(physical.extensions),
        offered=sorted(physical.available),
        identity={
            **dataclasses.asdict(identity_of(physical)),
            "features": sorted(physical.available),
        },
        profile=traits.profile.name,
        traits={
            "features": sorted(traits.features),
            **{
                each.name: getattr(traits, each.name)
                for each in dataclasses.fields(traits)
                if each.name not in skipped
            },
        },
        limits=dataclasses.asdict(physical.limits),
        subgroup_operations=physical.subgroup_operations,
        chooses_subgroup_size=device.chooses_subgroup_size,
    )


def pipelines(folder: Path, first: int) -> None:
    """Makes the pipelines that `kernels.write_specs` has listed in a folder, one by one, and says
    the CPU seconds of each."""
    device = open_device()
    for index, kernel in enumerate(json.loads((folder / "kernels.json").read_text())):
        if index < first:
            continue
        say(begin=index)
        row: dict[str, Any] = {"failed": None, "executables": []}
        start = time.process_time()
        try:
            pipeline = api.ComputePipeline(
                device,
                (folder / kernel["spirv"]).read_bytes(),
                tuple(kernel["bindings"]),
                specialization={int(name): value for name, value in kernel["constants"].items()},
                required_subgroup_size=kernel["subgroup_size"],
                label=kernel["template"],
            )
            row["seconds"] = round(time.process_time() - start, 4)
            if device.features.pipeline_statistics:
                row["executables"] = api.pipeline_statistics(pipeline)
            pipeline.destroy()
        except PurevkError as error:
            row["failed"] = str(error)
        say(end=index, **row)
    device.close()


def models(folder: Path, first: int) -> None:
    """Runs the models of a folder, and compares their results with those that lie beside them."""
    import numpy

    import purevk

    for index, path in enumerate(sorted(folder.glob("*.pvk"))):
        if index < first:
            continue
        say(begin=index, model=path.stem)
        row: dict[str, Any] = {"model": path.stem, "failed": None, "error": None}
        start = time.perf_counter()
        try:
            with numpy.load(path.with_suffix(".npz")) as arrays:
                inputs = [arrays[f"input{i}"] for i in range(int(arrays["inputs"]))]
                expected = [arrays[f"output{i}"] for i in range(int(arrays["outputs"]))]
            with purevk.load(path) as program:
                made = program.forward(*inputs)
                results = list(made) if isinstance(made, (list, tuple)) else [made]
                row["error"] = max(
                    (difference(a, b) for a, b in zip(results, expected)), default=0.0
                )
                if len(results) != len(expected):
                    row["failed"] = f"{len(results)} results, not {len(expected)}"
        except PurevkError as error:
            row["failed"] = f"{type(error).__name__}: {error}"
        row["seconds"] = round(time.perf_counter() - start, 2)
        say(end=index, **row)


def difference(made: Any, expected: Any) -> float:
    """The largest difference of two arrays, relative to the largest expected magnitude; infinite if
    sizes, infinities or NaNs differ."""
    import numpy

    a, b = numpy.asarray(made), numpy.asarray(expected)
    if b.dtype.kind not in "fc":
        return 0.0 if a.shape == b.shape and (a == b).all() else float("inf")
    finite = numpy.isfinite(b)
    if a.shape != b.shape or (numpy.isfinite(a) != finite).any():
        return float("inf")
    if not finite.any():
        return 0.0
    a, b = a[finite].astype(numpy.float64), b[finite].astype(numpy.float64)
    return float(numpy.abs(a - b).max() / max(numpy.abs(b).max(), 1e-30))


def main() -> None:
    what, first = sys.argv[1], int(sys.argv[3]) if len(sys.argv) > 3 else 0
    if what == "facts":
        facts()
    elif what == "pipelines":
        pipelines(Path(sys.argv[2]), first)
    else:
        models(Path(sys.argv[2]), first)


if __name__ == "__main__":
    main()
