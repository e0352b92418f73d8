"""The numbers and capabilities by which kernels are chosen for a device family."""

from __future__ import annotations

from dataclasses import dataclass

from purevk.tuning.costs import AttentionCosts, IntegerCosts, MatmulCosts, RegisterCosts
from purevk.tuning.tiles import TileSizes


@dataclass(frozen=True)
class DeviceProfile:
    """What kernels and cost models ask about a device family.

    Each field names a property that changes a choice. No field names a vendor. Limits that Vulkan
    reports are in `DeviceTraits` instead.

    Attributes:
        name: what `PUREVK_PROFILE` and `purevk info` call it.

        has_fast_shared_memory: the invocations of a workgroup exchange data through memory on the
            chip, and a barrier costs about as much as an instruction. Otherwise kernels keep tiles
            in registers, and exchange data inside a subgroup.
        coalesces_accesses: memory serves neighbouring invocations in one transaction if they
            access neighbouring elements. Otherwise only the order within an invocation matters.
        needs_many_invocations: the device hides the latency of memory by switching between
            invocations, so that rows are spread over many of them. Otherwise few are enough, and
            one invocation or subgroup takes a whole row.
        prefers_texel_reads: a texel buffer is read faster than a storage buffer.
        prefers_word_access: neighbouring elements of 1 or 2 bytes are moved as 32-bit words.
        specialize_sizes: the driver compiles fast and makes good use of constants, so that known
            sizes become specialization constants. Otherwise one pipeline serves all sizes.
        prefers_unrolled_code: registers and the compiler bear unrolled code, such as several
            results per invocation. Otherwise long code spills registers and takes seconds to
            compile.
        compiles_at_dispatch: the driver compiles a pipeline at its first dispatch, while the host goes
            on. Otherwise it does when the pipeline is made.
        has_fast_float_atomics: an atomic addition of floats is faster than a loop of
            compare-and-exchange.
        has_fast_matrix_cores: kernels on matrix cores are faster than others, where the driver offers
            them.
        packs_to_nearest: GLSL's packHalf2x16 rounds to the nearest float16, ties to even.

        subgroup_size: invocations of a subgroup that kernels ask for, where the device lets them choose
            (0: those that it has by itself).
        max_unrolled_code: products that the loops of a kernel may be unrolled to. More take seconds to
            compile.
        max_depthwise_code: products that a window of a depthwise convolution may be unrolled to. More
            need more registers than an invocation has.
        loads_in_flight: loads that an invocation issues before it waits for the first of them.
        max_iterations: iterations of loops that one invocation may take before the device ends them.
        dispatch_seconds: how long a dispatch may take before a watchdog of the system ends it.
        iteration_seconds: what an iteration of a loop takes that waits for memory; about.
        assumed_cores: multiprocessors to assume if the driver does not say how many there are.
        busy_invocations: invocations that keep the device busy.
        max_invocations_per_core: invocations that a multiprocessor holds at a time.
        enough_invocations_per_core: invocations per multiprocessor that hide the latency of memory.
        min_invocations_per_core: the same if each invocation has many loads in flight.
        depthwise_invocations_per_core: the same for depthwise convolutions.
        shared_memory_ratio: shared memory of a multiprocessor, divided by what one workgroup may
            have of it.

        sector_bytes: the least that is read from memory.
        transaction_bytes: what memory moves at its full rate.
        cached_bytes: part of a tensor that stays in a cache while all workgroups read from it; a
            power of two.
        dispatch_cost_bytes: what the device moves in the time that it takes to start a dispatch.

        workgroup_size: invocations per workgroup, if they do not depend on each other.
        max_select_workgroup: invocations per workgroup that select elements of one row, at most.
        max_sort_workgroup: invocations per workgroup that sort a block in shared memory, or merge
            sorted runs, at most.
        max_workgroups_per_core: workgroups per multiprocessor that are worth starting for short
            rows; more cost more than they compute. 0: no limit.
        staged_image_bytes: shared memory that a workgroup may take for images, so that a
            multiprocessor holds several workgroups.

        max_select_items: elements of a row that an invocation keeps in registers to select from.
        max_window_elements: elements of images that an invocation keeps in registers.
        max_tile_window_elements: the same where its part of a matmul tile needs registers as well.
        max_unrolled_window: elements of a pooling window whose loads are all issued at once.

        reduce_part_elements: elements of a row, from which on a part of it is worth a dispatch of
            its own.
        scan_part_elements: elements of a long row that one workgroup scans.
        select_part_elements: elements of a long row that one workgroup selects from.
        attention_queries: queries whose sums an invocation of `attention_tiled.comp` keeps in registers.
        attention_part_keys: keys of a query that one workgroup takes, at least.
        max_counted_row: elements; shorter rows are sorted by counting the elements before each.
        min_atomic_entries: entries per row of a scatter, above which atomics of many invocations
            are faster than a loop of one.
        min_norm_groups: groups of a group norm, from which on each gets a workgroup of its own.
        max_norm_elements: elements of a group, up to which a single kernel is the faster one for
            few groups too.
        recurrent_elements: elements of the weight of a recurrent layer that an invocation keeps in
            registers, of 32 and of 16 bits, at most.
        max_direct_flops: operations of a convolution of few channels, above which a conversion is
            worth it to use matrix cores.

        matmul: cost model of the matmul and convolution kernels with shared memory.
        attention: cost model of attention on matrix cores.
        integers: cost model of int8 times int8 on matrix cores.
        registers: cost model of the kernels without.
        tiles: the tiles that these and other kernels may take.
    """

    name: str

    has_fast_shared_memory: bool
    coalesces_accesses: bool
    needs_many_invocations: bool
    prefers_texel_reads: bool
    prefers_word_access: bool
    specialize_sizes: bool
    prefers_unrolled_code: bool
    compiles_at_dispatch: bool
    has_fast_float_atomics: bool
    has_fast_matrix_cores: bool
    packs_to_nearest: bool

    subgroup_size: int
    max_unrolled_code: int
    max_depthwise_code: int
    loads_in_flight: int
    max_iterations: int
    dispatch_seconds: float
    iteration_seconds: float
    assumed_cores: int
    busy_invocations: int
    max_invocations_per_core: int
    enough_invocations_per_core: int
    min_invocations_per_core: int
    depthwise_invocations_per_core: int
    shared_memory_ratio: int

    sector_bytes: int
    transaction_bytes: int
    cached_bytes: int
    dispatch_cost_bytes: int

    workgroup_size: int
    max_select_workgroup: int
    max_sort_workgroup: int
    max_workgroups_per_core: int
    staged_image_bytes: int

    max_select_items: int
    max_window_elements: int
    max_tile_window_elements: int
    max_unrolled_window: int

    reduce_part_elements: int
    scan_part_elements: int
    select_part_elements: int
    attention_queries: int
    attention_part_keys: int
    max_counted_row: int
    min_atomic_entries: int
    min_norm_groups: int
    max_norm_elements: int
    recurrent_elements: tuple[int, int]
    max_direct_flops: int

    matmul: MatmulCosts
    attention: AttentionCosts
    integers: IntegerCosts
    registers: RegisterCosts
    tiles: TileSizes

    def __hash__(self) -> int:
        """The name alone: profiles are part of the keys of caches, which hash them often."""
        return hash(self.name)

    @property
    def overlaps_loads(self) -> bool:
        """Whether an invocation gains if it issues several loads at once."""
        return self.loads_in_flight > 1
