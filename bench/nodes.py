"""How the time to load a graph grows with its nodes: `python -m bench.nodes [--counts 1000 5000]`.

The graphs have layers of a linear layer, an activation, a softmax of heads, a residual, a layer norm,
views and a concatenation, 15 nodes each. All figures are microseconds for each node, with a warm
cache: the process's CPU time to load the graph, wall time of the phases of that, CPU time of the
calling thread to record the command buffer, and wall time of a call that the host takes beyond
submitting and waiting.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.signatures import Stopwatch, host_seconds, show
from purevk.dtypes import DType
from purevk.frontends.importer import Importer
from purevk.graph.compute_graph import ComputeGraph
from purevk.graph.context import default_context
from purevk.ir import Arg, Graph, TensorType, Value
from purevk.program import Program


def layers(count: int) -> Graph:
    """A graph of at least `count` nodes."""
    importer = Importer("forward", "layers")
    random = np.random.default_rng(0)

    def constant(*sizes: int) -> Value:
        data = random.standard_normal(sizes).astype(np.float32)
        return importer.constant(memoryview(data.tobytes()), TensorType(DType.float32, sizes))

    def call(name: str, *args: Arg) -> Value:
        return importer.emit(f"aten.{name}", args, [], [], name)[0]

    x = importer.input(DType.float32, (8, 16), False)
    weight, scale = constant(16, 16), constant(16)
    while len(importer.nodes) < count:
        y = call("gelu.default", call("linear.default", x, weight, scale))
        heads = call("permute.default", call("view.default", y, (8, 4, 4)), (1, 0, 2))
        heads = call("permute.default", call("softmax.int", heads, -1), (1, 0, 2))
        y = call("add.Tensor", call("reshape.default", heads, (8, 16)), x)
        y = call("native_layer_norm.default", y, (16,), scale, scale, 1e-5)
        y = call("mul.Tensor", call("slice.Tensor", y, 1, 0, 16, 1), 0.5)
        halves = tuple(call("slice.Tensor", y, 1, at, at + 8, 1) for at in (0, 8))
        x = call("mm.default", call("cat.default", halves, 1), weight)
    return importer.finish([x])


def measure(count: int) -> dict[str, Any]:
    """One row: the times of a graph of so many nodes."""
    graph = layers(count)
    start = time.process_time()
    with Program("layers", {"forward": lambda sizes: graph}, default_context()) as program:
        total = time.process_time() - start
        report = program.report()
        with Stopwatch((ComputeGraph, "_record")) as recording:
            program.forward(np.zeros((8, 16), np.float32))
        host = host_seconds(program, [8] * 5)
    of_node = 1e6 / len(graph.nodes)
    phases = {
        name: report["seconds"].get(name, 0.0) * of_node for name in ("passes", "lower", "buffers")
    }
    return {
        "nodes": len(graph.nodes),
        "dispatches": report["dispatches"],
        "load": total * of_node,
        **phases,
        "record": recording.cpu * of_node,
        "call": host * of_node,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[1000, 5000, 20_000])
    options = parser.parse_args(arguments)
    measure(50)  # opens the device, and fills the cache
    show([measure(count) for count in options.counts])
    return 0


if __name__ == "__main__":
    sys.exit(main())
