"""What a first start costs on a driver: the kernels of a model, and the CPU seconds in which shaderc
compiles them and the driver makes their pipelines. `python -m bench.drivers.first_start --rows "Turnip 660"` adds to
bench/first_start.json. The driver runs on this machine: compare figures, and take none for a phone's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.drivers.__main__ import BASE, facts_of, worker
from bench.drivers.kernels import lowered_specs, store_for, write_specs
from bench.drivers.models import write_models
from bench.drivers.rows import ROOT, ROWS, Row
from bench.llm import Shape, write_file
from purevk.cache import Cache

DATA = ROOT / "bench" / "first_start.json"
SMOLLM2 = Shape(layers=30, width=576, heads=9, kv_heads=3, inner=1536, vocab=49152)
CONTEXT = 2048
SHOWN = ("kernels", "modules", "shaderc", "seconds")


@contextmanager
def decoder(path: Path) -> Iterator[Any]:
    """The methods of a language model of SmolLM2's shape: a token, and the shortest prompts."""
    from purevk.llm import loading

    if not path.is_file():
        write_file(path, SMOLLM2, "Q8_0", CONTEXT)
    with loading.open_model(path) as file:
        architecture, rows = loading._architecture(file, None)

        def graphs(traits: Any) -> Iterator[Any]:
            dtype = loading._computed("auto", traits)
            arguments = (file, architecture, rows, dtype, dtype.name)
            yield loading._step_graph(*arguments)
            name, length = next(iter(loading._prompts(rows, traits).items()))
            yield loading._step_graph(*arguments, name, length)

        yield graphs


def costs(row: Row, kernels: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Kernels and CPU seconds, in all and by template, the largest first."""
    templates: dict[str, list[float]] = {}
    for said in worker(row, "pipelines", folder, len(kernels), 300):
        if "end" in said and not said["failed"]:
            templates.setdefault(kernels[said["end"]]["template"], []).append(said["seconds"])
    by_cost = sorted(templates.items(), key=lambda item: -sum(item[1]))
    return {
        "kernels": len(kernels),
        "modules": len({kernel["spirv"] for kernel in kernels}),
        "seconds": round(sum(map(sum, templates.values())), 2),
        "templates": {
            name: {"kernels": len(times), "seconds": round(sum(times), 3)}
            for name, times in by_cost
        },
    }


def measure(row: Row) -> dict[str, Any]:
    """The figures of each model."""
    from purevk.program.variants.lowering import lower_graph

    facts = facts_of(row)
    store = store_for(facts)
    files = [BASE / "models" / "float32" / "mobilenet_v2.pvk"]
    specs, _ = lowered_specs(files, store.traits)
    with decoder(BASE / "models" / "smollm2.gguf") as graphs:
        plans = [
            lower_graph(lambda graph=graph: graph, store.traits) for graph in graphs(store.traits)
        ]
        steps = {spec: ["smollm2"] for each in plans for spec in each.plan.kernels}
    made = {}
    for name, users in (("mobilenet_v2", specs), ("smollm2", steps)):
        folder = BASE / "kernels" / f"first-{row.name}-{name}".replace(" ", "-")
        start = time.process_time()
        store_for(facts, Cache(None)).spirv(users)
        shaderc = round(time.process_time() - start, 2)
        kernels = write_specs(users, store, facts, folder)
        made[name] = {"shaderc": shaderc, **costs(row, kernels, folder)}
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", nargs="+", metavar="NAME", default=["Turnip 660", "Turnip 750"])
    args = parser.parse_args()
    write_models(["mobilenet_v2"], BASE / "models" / "float32")
    for name in args.rows:
        (row,) = (each for each in ROWS if each.name == name)
        made = measure(row)
        data = json.loads(DATA.read_text(encoding="utf-8")) if DATA.is_file() else {}
        data[name] = made
        DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        for model, figures in made.items():
            print(name, model, *(f"{key}: {figures[key]}" for key in SHOWN))
    return 0


if __name__ == "__main__":
    sys.exit(main())
