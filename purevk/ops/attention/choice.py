"""Which attention kernel a device runs for given sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from purevk.dtypes import DType
from purevk.ir import Size, TensorType
from purevk.ir import dims as _dims
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.numbers import gcd8
from purevk.tuning import DeviceTraits

_LANES, _KEYS = 8, 4  # of `attention_decode.comp`: that share a key, and that a lane reads ahead
_STEP_BYTES = 96  # of shared memory that steps.glslh takes, at most


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
        )


@dataclass(frozen=True)
class Tiled:
    """`attention_tiled.comp`: tiles of queries and keys in shared memory; `groups` groups of
    `lanes` invocations. If `subgroup`, the size of subgroups, is given, lanes exchange maxima by
    shuffles."""

    queries: int = 32
    keys: int = 32
    groups: int = 8
    lanes: int = 16
    subgroup: int | None = None

    def emit(self, lowering: Lowering, call: Attention) -> None:
        lowering.dispatch(
            "attention/attention_tiled.comp",
            call.buffers,
            macros={**call.macros, **self.macros()},
            params=call.params,
            specialize=lowering.fixed(_known(call.params)),
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
            "SHUFFLE": int(self.subgroup is not None),
        }


@dataclass(frozen=True)
class Coopmat:
    """`attention_coopmat.comp`: each of the `subgroups` of a workgroup takes `fragments` times 16
    queries. Fragments of sums have `columns` columns. `q_steps` as in `AttentionSizes`."""

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
            },
            params=call.params,
            specialize=lowering.fixed(_known(call.params)),
            grid=(groups, call.heads, call.batches),
            subgroup_size=32,
            flops=call.flops,
        )

    def _loads_evenly(self, elements: int, *widths: int) -> bool:
        """Whether all invocations load equally many vectors of so many elements in a step."""
        local = 32 * self.subgroups
        return all(self.keys * _padded(width) // elements % local == 0 for width in widths)

    def fits(self, traits: DeviceTraits, width: int, value_width: int) -> bool:
        """Whether the template's conditions and the device's limits hold."""
        padded = _padded(width, value_width)
        return (
            32 * self.subgroups <= traits.max_invocations
            and self._shared(padded) <= traits.max_shared_memory
            and (self.fragments == 1 or padded <= _NARROW)
            and (not self.q_steps or (padded > _NARROW and width >= 16 * self.q_steps))
            and self._loads_evenly(8 if self.q_steps else 4, width, value_width)
        )

    def _shared(self, padded: int) -> int:
        """Bytes of shared memory."""
        queries = 32 * self.fragments * self.subgroups * (16 * self.q_steps + 8)
        return 2 * self.keys * (padded + 16) + _STEP_BYTES + (queries if self.q_steps else 0)

    def cost(
        self,
        traits: DeviceTraits,
        groups: int,
        queries: int,
        keys: int,
        width: int,
        value_width: int,
    ) -> float:
        """Microseconds for `groups` heads of all batches, about."""
        costs, profile = traits.profile.attention, traits.profile
        padded, columns = _padded(width, value_width), _padded(width, value_width) / 128
        # Of keys and values on their way to shared memory; of queries, sums and scores.
        needed = self.keys * padded / (64 * self.subgroups)
        in_registers = _padded(width) / 4 - 4 * self.q_steps
        needed += self.fragments * (in_registers + _padded(value_width) / 2 + self.keys / 2)
        registers = min(costs.registers[0] * needed + costs.registers[1], 255)
        local, shared = 32 * self.subgroups, self._shared(padded)
        resident = max(
            1,
            min(
                profile.max_invocations_per_core // local,
                profile.shared_memory_ratio * traits.max_shared_memory // shared,
                int(costs.register_file / registers) // local,
            ),
        )
        workgroups = -(-queries // (16 * self.fragments * self.subgroups)) * groups
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
        return (
            costs.start + -(-keys // self.keys) * (rounds * wait + load * work) + costs.group * load
        )


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
                specialize=lowering.fixed((*_known(call.params), "splits")),
                grid=(*taken, batches),
                subgroup_size=self.subgroup,
                flops=call.flops,
            )
            return
        shares = lowering.temporary(
            TensorType(DType.float32, (batches, heads, queries, self.splits, call.width + 4))
        )
        split_params = {**call.params, "offset_o": 0, "splits": self.splits}
        lowering.dispatch(
            "attention/attention_decode.comp",
            {**call.buffers, "out": (shares, "w")},
            macros={**macros, "SPLIT": 1, "T_OUT": "float"},
            params=split_params,
            specialize=lowering.fixed(_known(split_params)),
            grid=(taken[0] * self.splits, taken[1], batches),
            subgroup_size=self.subgroup,
            flops=call.flops,
        )
        join_params: dict[str, Size] = {
            "S": queries,
            "DV": call.width,
            "splits": self.splits,
            **{name: call.params[name] for name in ("o_batch", "o_head", "o_row")},
            "offset_shares": 0,
            "offset_o": call.out.offset,
        }
        lowering.dispatch(
            "attention/attention_join.comp",
            {"shares": (shares, "r"), "out": (call.out, "w")},
            macros={"T_OUT": call.out.dtype.glsl},
            params=join_params,
            specialize=lowering.fixed(join_params),
            grid=(queries, heads, batches),
        )


Choice = Simple | Tiled | Coopmat | Decode
_NARROW = 128  # columns of fragments, up to which two fragments of queries fit into registers
_SHARED_PART_KEYS = 16  # keys of a part for each row that shares them, at least
_WIDEST = 256  # columns of a head, up to which one does: measured on an NVIDIA GPU


def _known(params: Mapping[str, Size]) -> list[str]:
    """Parameters that are known. What functions of scores declare can be no constants."""
    return [name for name, size in params.items() if isinstance(size, int)]


def choose(
    traits: DeviceTraits,
    batches: Size,
    heads: Size,
    queries: Size,
    keys: Size,
    width: int,
    value_width: int,
    half: bool = False,
    bfloat16: bool = False,
    limited: bool = False,
    shared: int = 1,
) -> Choice:
    """The kernel for `queries` queries over up to `keys` keys per head. With `half`, all three
    operands are float16, or (`bfloat16`) bfloat16. With `limited`, queries see different numbers of
    keys. `shared` heads of queries have the same keys."""
    upper = _dims.upper
    default = _choose(
        traits, batches, heads, queries, keys, width, value_width, half, bfloat16, limited, shared
    )
    sizes = (upper(batches), upper(heads), upper(queries), upper(keys))
    return traits.choices.take(
        "attention",
        (*sizes, width, value_width, half, bfloat16, limited, shared),
        lambda: _candidates(traits, default, upper(keys), width, value_width, bfloat16),
        default,
    )


def _candidates(
    traits: DeviceTraits,
    default: Choice,
    keys: int,
    width: int,
    value_width: int,
    bfloat16: bool,
) -> Iterator[Choice]:
    """Kernels of the same template: with other tiles, or other parts of the keys."""
    yield default
    widest = max(width, value_width)
    if isinstance(default, Simple):
        most = max(1, min(128 // widest, 4)) if default.subgroup_size > 1 else 1
        yield from (replace(default, queries=n) for n in range(1, most + 1))
    elif isinstance(default, Decode) and traits.profile.has_fast_shared_memory:
        most = max(keys // 16, 1)
        for form in dict.fromkeys((default, replace(default, heads=1, queries=1, rows=1))):
            yield from (replace(form, splits=n) for n in (1, 2, 4, 8, 16, 32, 64) if n <= most)
    elif isinstance(default, Coopmat):
        yield from _coopmats(traits, width, value_width, bfloat16)
    elif isinstance(default, Tiled):
        for rows in (64, 32, 16, 8):
            for step in (64, 32, 16):
                if _tile_bytes(rows, step, widest) <= traits.max_shared_memory:
                    yield _tiled(traits, rows, step)


def _choose(
    traits: DeviceTraits,
    batches: Size,
    heads: Size,
    queries: Size,
    keys: Size,
    width: int,
    value_width: int,
    half: bool,
    bfloat16: bool,
    limited: bool,
    shared: int,
) -> Choice:
    widest = max(width, value_width)
    few = _dims.upper(queries) <= 4
    in_registers = not traits.profile.has_fast_shared_memory
    if in_registers and traits.has("subgroup_shuffle"):
        lanes, cores = traits.subgroup_size, max(traits.cores, 1)
        groups = _dims.upper(batches) * _dims.upper(heads)
        # More queries share the loads of a key, but make longer code, which takes seconds to
        # compile.
        key = traits.profile.registers.attention_key
        most = max(1, min(128 // widest, 4))
        rounds = {
            n: -(-(-(-_dims.upper(queries) // (lanes * n)) * groups) // cores) * (n + key)
            for n in range(1, most + 1)
        }
        return Simple(lanes, min(rounds, key=rounds.__getitem__))
    if in_registers:
        return Decode(1, _decode_local(traits, value_width, 64)) if few else Simple(1)
    cores = traits.processors
    groups = _dims.upper(batches) * _dims.upper(heads)
    if few:
        return _decode(traits, batches, heads, queries, keys, width, value_width, shared)
    if half:
        sizes = (groups, _dims.upper(queries), _dims.upper(keys), width, value_width)
        coopmat = _coopmat(traits, *sizes, bfloat16, limited)
        if coopmat is not None:
            return coopmat
    # More queries read keys fewer times, fewer make more workgroups.
    for rows, wanted in ((64, 2 * cores), (32, 0.6 * cores), (16, 0.6 * cores), (8, 0)):
        steps = [
            step
            for step in (64, 32, 16)
            if _tile_bytes(rows, step, widest) <= traits.max_shared_memory
        ]
        if steps and -(-_dims.upper(queries) // rows) * groups >= wanted:
            step = steps[0] if rows < 32 else min(steps[0], 32)
            return _tiled(traits, rows, step)
    return Simple(traits.subgroup_size if traits.has("subgroup_shuffle") else 1)


def _decode(
    traits: DeviceTraits,
    batches: Size,
    heads: Size,
    queries: Size,
    keys: Size,
    width: int,
    value_width: int,
    shared: int,
) -> Decode:
    """The kernel for few queries."""
    upper, cores = _dims.upper, traits.processors
    groups = max(upper(batches) * upper(heads) * upper(queries), 1)
    shuffles = traits.subgroup_size in (8, 16, 32, 64) and traits.has(
        "subgroup_shuffle", "subgroup_basic", "subgroup_size_control"
    )
    subgroup = traits.subgroup_size if shuffles else None
    # Few keys are not split, to save a dispatch.
    part = traits.profile.attention_part_keys
    split = upper(keys) > 2 * part
    # Workgroups take parts of the keys as long as a multiprocessor has fewer than eight of them.
    most = upper(keys) // part if split else 1
    splits = max(min(8 * cores // groups, most, 128), 1)
    alone = Decode(splits, _decode_local(traits, value_width, 128, subgroup), subgroup)
    taken = _shared_heads(shared)
    several = queries if isinstance(queries, int) and taken * queries <= 4 else 1
    rows = taken * several
    if subgroup is None or not split or rows == 1:
        return alone
    # Rows that have the same keys: measured on an NVIDIA H200, heads of 64, 128 and 256 columns.
    most = upper(keys) // (_SHARED_PART_KEYS * rows)
    workgroups = -(-groups // rows)
    splits = max(min(4 * cores // workgroups, most, 128), 1)
    lanes = min(8 if width <= 64 else 16 if width <= 128 else 32, subgroup)
    few_lanes = min(lanes, 16)
    local = _decode_local(traits, value_width, 128, subgroup, rows)
    together = Decode(splits, local, subgroup, taken, several, rows, lanes, True)
    if workgroups * splits > 2 * cores:
        return together
    # With few workgroups, each row has invocations of its own.
    if workgroups * splits >= 0.9 * cores and local * rows <= traits.max_invocations:
        return replace(together, rows=1, lanes=few_lanes)
    splits = max(min(8 * cores // groups, most, 128), 1)
    return replace(alone, splits=splits, lanes=few_lanes, wide=True)


def _shared_heads(shared: int) -> int:
    """How many of the heads that share keys a workgroup takes: up to 4, or up to 8 if that is 3 or
    more times as many."""
    few, many = (max(n for n in range(1, most + 1) if shared % n == 0) for most in (4, 8))
    return many if many >= 3 * few else few


def _decode_local(
    traits: DeviceTraits, value_width: int, most: int, subgroup: int | None = None, rows: int = 1
) -> int:
    """Invocations for a set of rows in `attention_decode.comp`; a workgroup takes `rows` in all, and
    their sums fit into shared memory."""
    local, lanes = most, subgroup or _LANES
    while local > lanes:
        scores = 0 if subgroup else 4 * _KEYS * local
        if local // lanes * rows * (4 * value_width + 8) + scores <= traits.max_shared_memory:
            break
        local //= 2
    return local


def _tiled(traits: DeviceTraits, rows: int, step: int) -> Tiled:
    """The kernel with tiles of so many queries and keys."""
    tile = Tiled(rows, step, 16, 8) if rows == 64 else Tiled(rows, step)
    shuffles = (
        traits.has("subgroup_shuffle", "subgroup_basic") and traits.subgroup_size % tile.lanes == 0
    )
    if shuffles and tile.groups * tile.lanes % traits.subgroup_size == 0:
        tile = replace(tile, subgroup=traits.subgroup_size)
    return tile


def _coopmat(
    traits: DeviceTraits,
    groups: int,
    queries: int,
    keys: int,
    width: int,
    value_width: int,
    bfloat16: bool,
    limited: bool,
) -> Coopmat | None:
    """The cheapest kernel on matrix cores, if fragments of these widths fit into registers."""
    if max(width, value_width) > _WIDEST or not traits.has("subgroup_shuffle"):
        return None
    # Of keys that are limited, queries see half of their own number less on average.
    seen = keys - min(queries, keys) // 2 if limited else keys
    sizes = groups, queries, seen, width, value_width
    most = 1 if limited else 2  # two are slower then: measured on an NVIDIA GPU
    found = [
        each for each in _coopmats(traits, width, value_width, bfloat16) if each.fragments <= most
    ]
    return min(found, key=lambda each: each.cost(traits, *sizes), default=None)


def _coopmats(
    traits: DeviceTraits, width: int, value_width: int, bfloat16: bool
) -> Iterator[Coopmat]:
    """The kernels on matrix cores that fit."""
    columns = traits.fragment_columns(DType.bfloat16 if bfloat16 else DType.float16)
    for sizes in traits.profile.tiles.attention if columns else ():
        choice = Coopmat(*sizes, max(columns) if sizes.q_steps else min(columns))
        if choice.fits(traits, width, value_width):
            yield choice


def _padded(*widths: int) -> int:
    """Columns of the fragments of keys, of values, or of both."""
    return sum(-(-each // 16) * 16 for each in widths)


def _tile_bytes(queries: int, keys: int, width: int) -> int:
    """Shared memory of `attention_tiled.comp`, at most."""
    tiles = queries * (width + 4) + 2 * keys * (width + 4) + queries * (keys + 4)
    return 4 * tiles + _STEP_BYTES
