"""Which attention kernel a device runs for given sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from purevk.dtypes import DType
from purevk.ir import Size
from purevk.ir import dims as _dims
from purevk.ops.attention.kernels import STEP_BYTES, Choice, Coopmat, Decode, Simple, Tiled
from purevk.tuning import DeviceTraits

_LANES, _KEYS = 8, 4  # of `attention_decode.comp`: that share a key, and that a lane reads ahead
_SHARED_PART_KEYS = 16  # keys of a part for each row that shares them, at least
_FEW_KEYS = 160_000  # of all heads, up to which heads that share keys read them independently
_PART = 64  # columns of keys and values at a time, where a step of all columns would be short
_LONG_STEP = 160  # columns of a head, up to which steps of parts are of 64 keys
_WIDEST = 256  # columns of a head, up to which a fragment fits into registers: measured on NVIDIA


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
        _candidates(traits, default, upper(keys), width, value_width, bfloat16),
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
            for part in (0, _PART):
                for step in (64, 32, 16):
                    if _tile_bytes(rows, step, widest, part) <= traits.max_shared_memory:
                        yield _tiled(traits, rows, step, part)


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
        tiled = _tile_of(traits, rows, widest)
        if tiled is not None and -(-_dims.upper(queries) // rows) * groups >= wanted:
            return tiled
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
    # Rows that have the same keys: measured on an NVIDIA H200, heads of 64, 128 and 256 columns. Of
    # 4352 keys and 32 heads, more workgroups save 2 us at 1024 keys, and cost nothing at 4096.
    most = upper(keys) // (_SHARED_PART_KEYS * rows)
    workgroups = -(-groups // rows)
    splits = max(min(4 * cores // workgroups, most, 128), 1)
    lanes = min(8 if width <= 64 else 16 if width <= 128 else 32, subgroup)
    few_lanes = min(lanes, 16)
    local = _decode_local(traits, value_width, 128, subgroup, rows)
    together = Decode(splits, local, subgroup, taken, several, rows, lanes, True)
    if workgroups * splits > 2 * cores:
        if groups * upper(keys) > _FEW_KEYS:
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
    tile = Tiled(rows, step, 16, 8) if rows == 64 else Tiled(rows, step)
    if part:
        tile = Tiled(rows, step, max(rows // 4, 2), 16, part=part)
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


def _tile_bytes(queries: int, keys: int, width: int, part: int = 0) -> int:
    """Shared memory of `attention_tiled.comp`, at most."""
    columns = part + 4 if part else 2 * (width + 4)
    tiles = queries * (width + 4) + keys * columns + queries * (keys + 4)
    return 4 * tiles + STEP_BYTES
