"""The numbers and capabilities by which kernels are chosen for a device family."""

from __future__ import annotations

from dataclasses import dataclass


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
        has_fast_float_atomics: an atomic addition of floats is faster than a loop of
            compare-and-exchange.

        loads_in_flight: loads that an invocation issues before it waits for the first of them.
        busy_invocations: invocations that keep the device busy.
        assumed_cores: multiprocessors to assume if the driver does not say how many there are.
        max_iterations: iterations of loops that one invocation may take.

        workgroup_size: invocations per workgroup, if they do not depend on each other.
        max_select_workgroup: invocations per workgroup that select elements of one row, at most.
        max_sort_workgroup: invocations per workgroup that sort a block in shared memory, at most.
        max_workgroups_per_core: workgroups per multiprocessor that are worth starting for short
            rows; more cost more than they compute. 0: no limit.
        max_counted_row: elements; shorter rows are sorted by counting the elements before each.
        min_atomic_entries: entries per row of a scatter, above which atomics of many invocations
            are faster than a loop of one.
    """

    name: str

    has_fast_shared_memory: bool
    coalesces_accesses: bool
    needs_many_invocations: bool
    prefers_texel_reads: bool
    prefers_word_access: bool
    specialize_sizes: bool
    prefers_unrolled_code: bool
    has_fast_float_atomics: bool

    loads_in_flight: int
    busy_invocations: int
    assumed_cores: int
    max_iterations: int

    workgroup_size: int
    max_select_workgroup: int
    max_sort_workgroup: int
    max_workgroups_per_core: int
    max_counted_row: int
    min_atomic_entries: int

    def __hash__(self) -> int:
        """The name alone: profiles are part of the keys of caches, which hash them often."""
        return hash(self.name)

    @property
    def overlaps_loads(self) -> bool:
        """Whether an invocation gains if it issues several loads at once."""
        return self.loads_in_flight > 1
