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
        wide = self._reads_wide(call)
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

    def _reads_wide(self, call: Attention) -> bool:
        """Whether keys and values can be read 8 elements at a time, as many by each invocation."""
        widths = [int(call.macros[name]) for name in ("HEAD_DIM", "VALUE_DIM")]
        starts = [call.params[f"{x}_{axis}"] for x in "kv" for axis in ("batch", "head", "row")]
        starts += [call.params["offset_k"], call.params["offset_v"]]
        return self._loads_evenly(8, *widths) and gcd8(*widths, *starts)

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
    """`attention_decode.comp`: a workgroup takes one query of one head, or one of `splits` parts of
    its keys. If `subgroup`, the size of subgroups, is given, lanes add up by shuffles."""

    splits: int = 1
    local: int = 128
    subgroup: int | None = None

    def emit(self, lowering: Lowering, call: Attention) -> None:
        batches, heads, queries = call.batches, call.heads, call.queries
        macros = {**call.macros, "LOCAL": self.local, "SG": self.subgroup or 0}
        if self.splits == 1:
            lowering.dispatch(
                "attention/attention_decode.comp",
                call.buffers,
                macros=macros,
                params={**call.params, "splits": 1},
                specialize=lowering.fixed((*_known(call.params), "splits")),
                grid=(queries, heads, batches),
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
            grid=(queries * self.splits, heads, batches),
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
) -> Choice:
    """The kernel for `queries` queries over up to `keys` keys per head. With `half`, all three
    operands are float16, or (`bfloat16`) bfloat16. With `limited`, queries see different numbers of
    keys."""
    upper = _dims.upper
    default = _choose(
        traits, batches, heads, queries, keys, width, value_width, half, bfloat16, limited
    )
    sizes = (upper(batches), upper(heads), upper(queries), upper(keys))
    return traits.choices.take(
        "attention",
        (*sizes, width, value_width, half, bfloat16, limited),
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
        yield from (replace(default, splits=n) for n in (1, 2, 4, 8, 16, 32, 64) if n <= most)
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
        # Workgroups take parts of the keys as long as a multiprocessor has fewer than eight of
        # them. Few keys are not split, to save a dispatch.
        groups *= _dims.upper(queries)
        part = traits.profile.attention_part_keys
        most = _dims.upper(keys) // part if _dims.upper(keys) > 2 * part else 1
        splits = max(min(8 * cores // max(groups, 1), most, 128), 1)
        shuffles = traits.subgroup_size in (8, 16, 32, 64) and traits.has(
            "subgroup_shuffle", "subgroup_basic", "subgroup_size_control"
        )
        subgroup = traits.subgroup_size if shuffles else None
        return Decode(splits, _decode_local(traits, value_width, 128, subgroup), subgroup)
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


def _decode_local(
    traits: DeviceTraits, value_width: int, most: int, subgroup: int | None = None
) -> int:
    """Invocations of a workgroup of `attention_decode.comp`, whose sums fit into shared memory."""
    local, lanes = most, subgroup or _LANES
    while local > lanes:
        scores = 0 if subgroup else 4 * _KEYS * local
        if local // lanes * (4 * value_width + 8) + scores <= traits.max_shared_memory:
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
