"""Which attention kernel a device runs for given sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from purevk.dtypes import DType
from purevk.ir import dims as _dims
from purevk.ops.attention.kernels import (
    FEW_QUERIES,
    STEP_BYTES,
    Choice,
    Coopmat,
    Decode,
    Problem,
    Simple,
    Tiled,
)
from purevk.tuning import DeviceTraits
from purevk.tuning.candidates import by_cost, reasons

_LANES, _KEYS = 8, 4  # of `attention_decode.comp`: that share a key, and that a lane reads ahead
_SHARED_PART_KEYS = 16  # keys of a part for each row that shares them, at least
_FEW_KEYS = 160_000  # of all heads, up to which heads that share keys read them independently
_PART = 64  # columns of keys and values at a time, where a step of all columns would be short
_LONG_STEP = 160  # columns of a head, up to which steps of parts are of 64 keys


def choose(traits: DeviceTraits, problem: Problem) -> Choice:
    """The kernel for a problem."""
    sizes = (problem.batches, problem.heads, problem.queries, problem.keys)
    named = (*map(_dims.upper, sizes), *tuple(vars(problem).values())[len(sizes) :])
    kernel = traits.choices.take("attention", named, _candidates(traits, problem))
    traits.choices.note(
        "attention", named, kernel, lambda: reasons(traits, problem, _coopmats(traits, problem))
    )
    return kernel


def _candidates(traits: DeviceTraits, problem: Problem) -> Iterator[Choice]:
    """The kernel of the cost model; others of the same template, with other tiles, or other parts of
    the keys."""
    default = _default(traits, problem)
    yield default
    widest = problem.widest
    if isinstance(default, Simple):
        most = max(1, min(128 // widest, 4)) if default.subgroup_size > 1 else 1
        yield from (replace(default, queries=n) for n in range(1, most + 1))
    elif isinstance(default, Decode) and traits.profile.has_fast_shared_memory:
        most = max(problem.max_keys // 16, 1)
        for form in dict.fromkeys((default, replace(default, heads=1, queries=1, rows=1))):
            yield from (replace(form, splits=n) for n in (1, 2, 4, 8, 16, 32, 64) if n <= most)
    elif isinstance(default, Coopmat):
        yield from by_cost(traits, problem, _coopmats(traits, problem))
    elif isinstance(default, Tiled):
        for rows in (64, 32, 16, 8):
            for part in (0, _PART):
                for step in (64, 32, 16):
                    if _tile_bytes(rows, step, widest, part) <= traits.max_shared_memory:
                        yield _tiled(traits, rows, step, part)


def _default(traits: DeviceTraits, problem: Problem) -> Choice:
    queries, groups, widest = problem.max_queries, problem.groups, problem.widest
    few = queries <= FEW_QUERIES
    in_registers = not traits.profile.has_fast_shared_memory
    if in_registers and traits.has("subgroup_shuffle"):
        lanes, cores = traits.subgroup_size, max(traits.cores, 1)
        # More queries share the loads of a key, but make longer code, which takes seconds to
        # compile.
        key = traits.profile.registers.attention_key
        most = max(1, min(128 // widest, 4))
        rounds = {
            n: -(-(-(-queries // (lanes * n)) * groups) // cores) * (n + key)
            for n in range(1, most + 1)
        }
        return Simple(lanes, min(rounds, key=rounds.__getitem__))
    if in_registers:
        return Decode(1, _decode_local(traits, problem.value_width, 64)) if few else Simple(1)
    if few:
        return _decode(traits, problem)
    most = 1 if problem.limited else 2  # two are slower then: measured on an NVIDIA GPU
    kernels = (coopmat for coopmat in _coopmats(traits, problem) if coopmat.fragments <= most)
    if fitting := by_cost(traits, problem, kernels):
        return fitting[0]
    # More queries read keys fewer times, fewer make more workgroups.
    cores = traits.processors
    for rows, wanted in ((64, 2 * cores), (32, 0.6 * cores), (16, 0.6 * cores), (8, 0)):
        tiled = _tile_of(traits, rows, widest)
        if tiled is not None and -(-queries // rows) * groups >= wanted:
            return tiled
    return Simple(traits.subgroup_size if traits.has("subgroup_shuffle") else 1)


def _decode(traits: DeviceTraits, problem: Problem) -> Decode:
    """The kernel for few queries."""
    cores, keys, queries = traits.processors, problem.max_keys, problem.queries
    width, value_width = problem.width, problem.value_width
    groups = max(problem.groups * problem.max_queries, 1)
    shuffles = traits.subgroup_size in (8, 16, 32, 64) and traits.has(
        "subgroup_shuffle", "subgroup_basic", "subgroup_size_control"
    )
    subgroup = traits.subgroup_size if shuffles else None
    # Few keys are not split, to save a dispatch.
    part = traits.profile.attention_part_keys
    split = keys > 2 * part
    # Workgroups take parts of the keys as long as a multiprocessor has fewer than eight of them.
    most = keys // part if split else 1
    splits = max(min(8 * cores // groups, most, 128), 1)
    alone = Decode(splits, _decode_local(traits, value_width, 128, subgroup), subgroup)
    taken = _shared_heads(problem.shared)
    several = queries if isinstance(queries, int) and taken * queries <= 4 else 1
    rows = taken * several
    if subgroup is None or not split or rows == 1:
        return alone
    # Rows that have the same keys: measured on an NVIDIA H200, heads of 64, 128 and 256 columns. Of
    # 4352 keys and 32 heads, more workgroups save 2 us at 1024 keys, and cost nothing at 4096.
    most = keys // (_SHARED_PART_KEYS * rows)
    workgroups = -(-groups // rows)
    splits = max(min(4 * cores // workgroups, most, 128), 1)
    lanes = min(8 if width <= 64 else 16 if width <= 128 else 32, subgroup)
    few_lanes = min(lanes, 16)
    local = _decode_local(traits, value_width, 128, subgroup, rows)
    together = Decode(splits, local, subgroup, taken, several, rows, lanes, True)
    if workgroups * splits > 2 * cores:
        if groups * keys > _FEW_KEYS:
            return together
    # With few workgroups, each row has invocations of its own.
    elif workgroups * splits >= 0.9 * cores and local * rows <= traits.max_invocations:
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


def _tile_of(traits: DeviceTraits, rows: int, widest: int) -> Tiled | None:
    """The tile of so many queries, with the longest step of keys that shared memory has room for.
    Measured on an NVIDIA H100, in float32."""

    def steps(part: int) -> list[int]:
        limit = traits.max_shared_memory
        return [step for step in (64, 32, 16) if _tile_bytes(rows, step, widest, part) <= limit]

    whole = steps(0)
    # The sums of wide heads take the registers of a longer step.
    parts = [step for step in steps(_PART) if step == 32 or (step == 64 and widest <= _LONG_STEP)]
    if rows in (16, 32) and parts and not (whole and whole[0] >= 32):
        return _tiled(traits, rows, parts[0], _PART)
    if not whole:
        return None
    return _tiled(traits, rows, whole[0] if rows < 32 else min(whole[0], 32))


def _tiled(traits: DeviceTraits, rows: int, step: int, part: int = 0) -> Tiled:
    """The kernel with tiles of so many queries and keys, and `part` of their columns."""
    lanes = 8 if rows == 64 else 16
    groups = max(rows // traits.profile.attention_queries, 8)
    if groups * lanes > traits.max_invocations:
        groups //= 2
    tile = Tiled(rows, step, groups, lanes)
    if part:
        tile = Tiled(rows, step, max(rows // 4, 2), 16, part=part)
    shuffles = (
        traits.has("subgroup_shuffle", "subgroup_basic") and traits.subgroup_size % tile.lanes == 0
    )
    if shuffles and tile.groups * tile.lanes % traits.subgroup_size == 0:
        tile = replace(tile, subgroup=traits.subgroup_size)
    return tile


def _coopmats(traits: DeviceTraits, problem: Problem) -> Iterator[Coopmat]:
    """The kernels on matrix cores, some of which may not fit."""
    dtype = DType.bfloat16 if problem.bfloat16 else DType.float16
    columns = traits.fragment_columns(dtype) if problem.half else ()
    for sizes in traits.profile.tiles.attention:
        yield Coopmat(*sizes, (max if sizes.q_steps else min)(columns, default=0))


def _tile_bytes(queries: int, keys: int, width: int, part: int = 0) -> int:
    """Shared memory of `attention_tiled.comp`, at most."""
    columns = part + 4 if part else 2 * (width + 4)
    tiles = queries * (width + 4) + keys * columns + queries * (keys + 4)
    return 4 * tiles + STEP_BYTES
