"""The attention kernels, with their sizes and how they are dispatched. `choice.py` takes one of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from purevk.dtypes import DType
from purevk.ir import Size, TensorType
from purevk.ir import dims as _dims
from purevk.lower.gpu_kernels import limits
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.numbers import gcd8
from purevk.tuning import DeviceTraits
from purevk.tuning.candidates import Candidate, Needs

FEW_QUERIES = 4  # of a head, up to which kernels for decoding are better
STEP_BYTES = 96
"""Bytes of shared memory that steps.glslh takes, at most."""
_NARROW = 128  # columns of fragments, up to which two fragments of queries fit into registers
_WIDEST = 256  # columns of a head, up to which a fragment fits into registers: measured on NVIDIA
_SPILLING = 192  # columns of heads, from which on registers are too few: measured for 256


@dataclass(frozen=True)
class Problem:
    """What a kernel is chosen for.

    Attributes:
        queries, keys: of a head; up to so many keys.
        width, value_width: columns of keys and queries, and of values.
        half: all three operands are float16, or (`bfloat16`) bfloat16.
        limited: queries see different numbers of keys.
        shared: heads of queries that have the same keys.
    """

    batches: Size
    heads: Size
    queries: Size
    keys: Size
    width: int
    value_width: int
    half: bool = False
    bfloat16: bool = False
    limited: bool = False
    shared: int = 1

    @property
    def groups(self) -> int:
        """Heads of all batches, at most."""
        return _dims.upper(self.batches) * _dims.upper(self.heads)

    @property
    def max_queries(self) -> int:
        return _dims.upper(self.queries)

    @property
    def max_keys(self) -> int:
        return _dims.upper(self.keys)

    @property
    def widest(self) -> int:
        return max(self.width, self.value_width)


@dataclass(frozen=True)
class Attention:
    """What all attention kernels take.

    Attributes:
        buffers: the operands by name.
        macros: those of `attention_io.glslh`.
        params: those of `attention_io.glslh`.
        width: of the values of a head.
    """

    buffers: dict[str, tuple[Operand, str]]
    macros: dict[str, str | int]
    params: dict[str, Size]
    out: Operand
    batches: Size
    heads: Size
    queries: Size
    width: int
    flops: Size

    @property
    def sinks(self) -> Operand | None:
        return self.buffers["sinks"][0] if "sinks" in self.buffers else None

    @property
    def widths(self) -> tuple[int, int]:
        """Of a row of keys, and of values."""
        return int(self.macros["HEAD_DIM"]), int(self.macros["VALUE_DIM"])

    @property
    def in_eights(self) -> bool:
        """Whether keys and values can be read 8 elements at a time."""
        starts = [self.params[f"{x}_{axis}"] for x in "kv" for axis in ("batch", "head", "row")]
        starts += [self.params["offset_k"], self.params["offset_v"]]
        return gcd8(*self.widths, *starts)


@dataclass(frozen=True)
class Simple:
    """`attention.comp`: a subgroup takes neighbouring queries and walks over the keys."""

    subgroup_size: int
    queries: int = 1
    subgroups: int = 1

    def emit(self, lowering: Lowering, call: Attention) -> None:
        lanes = self.subgroup_size if self.subgroup_size > 1 else 8
        groups = _dims.ceil_div(call.queries, lanes * self.queries * self.subgroups)
        lowering.dispatch(
            "attention/attention.comp",
            call.buffers,
            macros={
                **call.macros,
                "SG": self.subgroup_size,
                "RQ": self.queries,
                "WY": self.subgroups,
            },
            params=call.params,
            grid=(groups, call.heads, call.batches),
            subgroup_size=self.subgroup_size if self.subgroup_size > 1 else None,
            flops=call.flops,
            specialize=(),
        )


@dataclass(frozen=True)
class Tiled:
    """`attention_tiled.comp`: tiles of queries and keys in shared memory; `groups` groups of
    `lanes` invocations. If `part` is not 0, so many columns of keys and values at a time. If
    `subgroup`, the size of subgroups, is given, lanes exchange maxima by shuffles."""

    queries: int = 32
    keys: int = 32
    groups: int = 8
    lanes: int = 16
    subgroup: int | None = None
    part: int = 0

    def emit(self, lowering: Lowering, call: Attention) -> None:
        lowering.dispatch(
            "attention/attention_tiled.comp",
            call.buffers,
            macros={**call.macros, **self.macros()},
            params=call.params,
            grid=(_dims.ceil_div(call.queries, self.queries), call.heads, call.batches),
            subgroup_size=self.subgroup,
            flops=call.flops,
        )

    def macros(self) -> dict[str, int]:
        return {
            "QUERIES": self.queries,
            "KEYS": self.keys,
            "LANES": self.lanes,
            "GROUPS": self.groups,
            "PART": self.part,
            "SHUFFLE": int(self.subgroup is not None),
        }


@dataclass(frozen=True)
class Coopmat(Candidate[Problem]):
    """`attention_coopmat.comp`: each of the `subgroups` of a workgroup takes `fragments` times 16
    queries. Fragments of sums have `columns` columns (0: the device has none). `q_steps` as in
    `AttentionSizes`."""

    fragments: int = 1
    subgroups: int = 4
    keys: int = 64
    q_steps: int = 0
    columns: int = 8

    def emit(self, lowering: Lowering, call: Attention) -> None:
        groups = _dims.ceil_div(call.queries, 16 * self.fragments * self.subgroups)
        wide = self._loads_evenly(8, *call.widths) and call.in_eights
        limited = any(int(call.macros.get(name, 0)) for name in ("CAUSAL", "LIMITS"))
        lowering.dispatch(
            "attention/attention_coopmat.comp",
            call.buffers,
            macros={
                **call.macros,
                "COOPMAT": 1,
                "BFLOAT16": int(call.buffers["q"][0].dtype is DType.bfloat16),
                "FRAGMENTS_M": self.fragments,
                "FRAGMENT_N": self.columns,
                "SUBS": self.subgroups,
                "KEYS": self.keys,
                "VEC8_KV": int(wide),
                "Q_STEPS": self.q_steps if wide else 0,
                "REVERSED": int(limited),
                "MASK_WORDS": self.mask_words(call),
            },
            params=call.params,
            grid=(groups, call.heads, call.batches),
            subgroup_size=32,
            flops=call.flops,
        )

    def mask_words(self, call: Attention) -> int:
        """MASK_WORDS: how many words of the mask are read at a time; 0: an element."""
        macros, params = call.macros, call.params
        if "mask" not in call.buffers or macros.get("TEXEL_MASK") or macros.get("LIMITS") == 2:
            return 0  # limits of 2 let steps begin at any key
        itemsize = call.buffers["mask"][0].dtype.itemsize
        column = params["mask_column"]  # a size, if a call decides it
        if itemsize > 2 or not isinstance(column, int) or column != 1:
            return 0
        starts = [params[name] for name in ("T", "mask_batch", "mask_head", "mask_row")]
        common = math.gcd(*map(_dims.gcd_of, (*starts, params["offset_mask"])), self.keys // 4)
        return next((n for n in (4, 2, 1) if common % (4 * n // itemsize) == 0), 0)

    def _loads_evenly(self, elements: int, *widths: int) -> bool:
        """Whether all invocations load equally many vectors of so many elements in a step."""
        local = 32 * self.subgroups
        return all(self.keys * _padded(width) // elements % local == 0 for width in widths)

    def needs(self, traits: DeviceTraits, problem: Problem) -> Needs:
        width, value_width = problem.width, problem.value_width
        padded = _padded(width, value_width)
        yield traits.profile.has_fast_shared_memory, "fast shared memory"
        yield problem.max_queries > FEW_QUERIES, lambda: f"more than {FEW_QUERIES} queries"
        yield problem.half, "operands of 16 bits"
        yield problem.widest <= _WIDEST, lambda: f"heads of up to {_WIDEST} columns"
        yield self.columns > 0 and traits.has("subgroup_shuffle"), "matrix cores and shuffles"
        yield from limits(traits, 32 * self.subgroups, self._shared(padded))
        yield (
            self.fragments == 1 or padded <= _NARROW,
            lambda: f"heads of up to {_NARROW // 2} columns",
        )
        wide = padded > _NARROW and width >= 16 * self.q_steps
        yield not self.q_steps or wide, "wider heads"
        even = self._loads_evenly(8 if self.q_steps else 4, width, value_width)
        yield even, "invocations that load equally many vectors"

    def _shared(self, padded: int) -> int:
        """Bytes of shared memory."""
        queries = 32 * self.fragments * self.subgroups * (16 * self.q_steps + 8)
        return 2 * self.keys * (padded + 16) + STEP_BYTES + (queries if self.q_steps else 0)

    def cost(self, traits: DeviceTraits, problem: Problem) -> float:
        costs, profile = traits.profile.attention, traits.profile
        width, value_width = problem.width, problem.value_width
        queries, keys = problem.max_queries, problem.max_keys
        # Of keys that are limited, queries see half of their own number less on average.
        keys -= min(queries, keys) // 2 if problem.limited else 0
        padded, columns = _padded(width, value_width), _padded(width, value_width) / 128
        # Of keys and values on their way to shared memory; of queries, sums and scores.
        needed = self.keys * padded / (64 * self.subgroups)
        in_registers = _padded(width) / 4 - 4 * self.q_steps
        needed += self.fragments * (in_registers + _padded(value_width) / 2 + self.keys / 2)
        wanted = costs.registers[0] * needed + costs.registers[1]
        registers = min(wanted, 255)
        local, shared = 32 * self.subgroups, self._shared(padded)
        resident = max(
            1,
            min(
                profile.max_invocations_per_core // local,
                profile.shared_memory_ratio * traits.max_shared_memory // shared,
                int(costs.register_file / registers) // local,
            ),
        )
        workgroups = -(-queries // (16 * self.fragments * self.subgroups)) * problem.groups
        cores = traits.processors
        load = max(workgroups / cores, 1.0)
        load += costs.fullest * (-(-workgroups // cores) - load)
        fragments = self.keys / 16
        work = (
            self.subgroups * self.fragments * fragments * costs.product * columns
            + self.subgroups * self.fragments * self.keys / 64 * costs.softmax
            + fragments * columns * (self.subgroups * costs.read + costs.stage)
        )
        wait = costs.latency + costs.step * self.fragments * self.keys / 64
        rounds = -(-workgroups // (cores * resident))
        step = rounds * wait + load * work
        if padded >= _SPILLING and wanted > registers:
            step *= 1.2 + 0.0045 * (wanted - registers)
        return costs.start + -(-keys // self.keys) * step + costs.group * load


@dataclass(frozen=True)
class Decode:
    """`attention_decode.comp`: a workgroup takes `queries` queries of `heads` heads that share keys,
    and all keys or one of `splits` parts of them. `local` invocations take `rows` of these rows of
    queries, and `lanes` of them a key; `wide`: 8 elements at a time, if that can be. If `subgroup`,
    the size of subgroups, is given, lanes add up by shuffles."""

    splits: int = 1
    local: int = 128
    subgroup: int | None = None
    heads: int = 1
    queries: int = 1
    rows: int = 1
    lanes: int = 8
    wide: bool = False

    def emit(self, lowering: Lowering, call: Attention) -> None:
        batches, heads, queries = call.batches, call.heads, call.queries
        if self.rows > 1 and (call.macros.get("SCORED") or call.macros.get("MASKED")):
            # Functions of scores are for one head.
            replace(self, heads=1, queries=1, rows=1).emit(lowering, call)
            return
        plain = all(
            call.buffers[name][1] == "r" and call.buffers[name][0].dtype.itemsize == 2
            for name in "kv"
        )
        macros = {
            **call.macros,
            "LOCAL": self.local * (self.heads * self.queries // self.rows),
            "SG": self.subgroup or 0,
            "HEADS": self.heads,
            "QUERIES": self.queries,
            "ROWS": self.rows,
            "LANES": self.lanes,
            "VEC8_KV": int(self.wide and plain and call.in_eights),
        }
        taken = queries // self.queries, heads // self.heads
        if self.splits == 1:
            lowering.dispatch(
                "attention/attention_decode.comp",
                call.buffers,
                macros=macros,
                params={**call.params, "splits": 1},
                grid=(*taken, batches),
                subgroup_size=self.subgroup,
                flops=call.flops,
            )
            return
        parts = lowering.temporary(
            TensorType(DType.float32, (batches, heads, queries, self.splits, call.width + 4))
        )
        counters = lowering.counters(TensorType(DType.int32, (batches, heads, queries)))
        lowering.dispatch(
            "attention/attention_decode.comp",
            {**call.buffers, "parts": (parts, "rw"), "counters": (counters, "rw")},
            macros={**macros, "SPLIT": 1},
            params={**call.params, "splits": self.splits},
            grid=(taken[0] * self.splits, taken[1], batches),
            subgroup_size=self.subgroup,
            flops=call.flops,
        )


Choice = Simple | Tiled | Coopmat | Decode


def _padded(*widths: int) -> int:
    """Columns of the fragments of keys, of values, or of both."""
    return sum(-(-width // 16) * 16 for width in widths)
