"""Graphs for passes, the traits of a software device, and kernels of fragments in scalar arithmetic."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch

from purevk import fallback
from purevk.dtypes import DType
from purevk.ir import Graph, Value
from purevk.ir import dims as _dims
from purevk.ir.host import HOST
from purevk.lower.matrix_core_kernels import Fragments
from purevk.ops.attention.kernels import Coopmat
from purevk.tuning import SOFTWARE, DeviceTraits
from tests.ops.harness import Recorder, tensor

aten = torch.ops.aten
FEATURES = frozenset(
    {
        "storage_8bit",
        "int8",
        "storage_16bit",
        "int16",
        "int64",
        "float16",
        "subgroup_basic",
        "subgroup_arithmetic",
        "subgroup_shuffle",
    }
)


TRAITS = DeviceTraits(FEATURES, subgroup_size=8, profile=SOFTWARE)


def random_graph(seed: int) -> tuple[Graph, list[torch.Tensor]]:
    """Views of views, casts there and back, copies, pointwise operators, sums; values read twice,
    and never."""
    rng = random.Random(seed)
    recorder = Recorder()
    inputs = [
        tensor(2, 3, 4, seed=seed),
        tensor(4, 6, dtype=torch.int32, seed=seed),
        tensor(1, 4, dtype=torch.float16, seed=seed),
    ]
    values = [recorder.input(x) for x in inputs]
    values.append(recorder.constant(tensor(3, 1, seed=seed)))
    types = [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool]
    for _ in range(rng.randint(5, 25)):
        x = (
            values[-1] if rng.random() < 0.4 else rng.choice(values)
        )  # chains, and values read twice
        rank, sizes = x.type.rank, x.type.dims
        kind = rng.randrange(12)
        before = len(recorder.importer.nodes)
        if kind == 0 and rank:
            made = recorder.call(aten.permute.default, (x, rng.sample(range(rank), rank)), {})
        elif kind == 1:
            made = (
                recorder.call(aten.view.default, (x, [-1] if rank != 1 else [1, -1]), {})
                if 0 not in sizes
                else x
            )
        elif kind == 2 and rank < 5:
            made = recorder.call(aten.unsqueeze.default, (x, rng.randint(-rank - 1, rank)), {})
        elif kind == 3:
            made = recorder.call(aten.squeeze.dims, (x, list(range(rank))), {})
        elif kind == 4:
            made = recorder.call(aten._to_copy.default, (x,), {"dtype": rng.choice(types)})
        elif kind == 5:
            made = recorder.call(
                rng.choice([aten.clone.default, aten.alias.default, aten.detach.default]), (x,), {}
            )
        elif kind == 6 and rank:
            d = rng.randrange(rank)
            made = recorder.call(
                aten.slice.Tensor,
                (
                    x,
                    d,
                    rng.choice([0, 1, None]),
                    rng.choice([None, sizes[d], 2**63 - 1]),
                    rng.choice([1, 2]),
                ),
                {},
            )
        elif kind == 7 and rank >= 2:
            made = recorder.call(
                aten.transpose.int, (x, rng.randrange(rank), rng.randrange(-rank, 0)), {}
            )
        elif kind == 8:
            made = recorder.call(
                aten.expand.default, (x, [rng.choice([-1, int(n)]) for n in sizes]), {}
            )
        elif kind == 9:
            made = recorder.call(aten.add.Tensor, (x, rng.choice([1, 1.0, True, 2])), {})
        elif kind == 10 and x.type.dtype is not DType.bool:
            made = recorder.call(
                aten.sum.dim_IntList, (x, [0] if rank else [], rng.random() < 0.5), {}
            )
        else:
            made = recorder.call(aten.mul.Tensor, (x, x), {})
        assert len(recorder.importer.nodes) >= before
        values.append(made)
    outputs = rng.sample(values[4:], min(4, len(values) - 4))
    return recorder.importer.finish(outputs), inputs


def interpret(graph: Graph, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs, each node computed by torch from the schema of its operator."""
    arrays: dict[Value, np.ndarray] = {
        value: fallback.to_numpy(x) for value, x in zip(graph.inputs, inputs)
    }
    for value, constant in {**graph.constants, **graph.states}.items():
        arrays[value] = (
            np.zeros(value.type.dims, value.type.dtype.numpy)
            if constant is None
            else constant.array(value.type).copy()
        )
    for node in graph.nodes:
        name, args = (node.args[0], node.args[2]) if node.op == HOST else (node.op, node.args)
        if name == "purevk.store":
            arrays[args[0]] = np.array(arrays[args[1]])
        elif name == "purevk.copy":
            arrays[node.result] = arrays[args[0]]
        else:
            made = fallback.run(
                name, args, arrays, [value.type for value in node.results], node.source
            )
            arrays.update(zip(node.results, made))
    return [fallback.to_torch(arrays[value], value.type.dtype) for value in graph.outputs]


@dataclass(frozen=True)
class Stepwise(Fragments):
    """A small tile, without matrix cores."""

    subgroup = None

    @property
    def threads(self):
        return 32 * self.subs_m * self.subs_n * self.slices

    def macros(self):
        return {**super().macros(), "COOPMAT": 0}


class StepwiseAttention(Coopmat):
    """The same for attention."""

    def emit(self, lowering, call):
        lowering.dispatch(
            "attention/attention_coopmat.comp",
            {name: (operand, mode[0]) for name, (operand, mode) in call.buffers.items()},
            macros={
                **{name: value for name, value in call.macros.items() if "TEXEL" not in name},
                **{"COOPMAT": 0, "SUBS": 1, "KEYS": 16},
                "REVERSED": int(any(call.macros.get(name) for name in ("CAUSAL", "LIMITS"))),
            },
            params=call.params,
            grid=(_dims.ceil_div(call.queries, 16), call.heads, call.batches),
            flops=call.flops,
        )
