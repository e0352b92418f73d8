"""Software devices, which run kernels on the CPU. The numbers were measured on llvmpipe of Mesa.

An invocation is a lane of a vector of the CPU, and a workgroup runs on one thread. Shared memory is
ordinary memory, and a barrier saves and restores the state of every invocation. The CPU overlaps
loads by itself. LLVM compiles long code slowly.

Numbers that this file does not give are the default's. They concern kernels with shared memory,
which no software device runs, or were found to suit both.
"""

import math
from dataclasses import replace

from purevk.tuning.families.default import DEFAULT
from purevk.tuning.registry import Family, register

SOFTWARE = replace(
    DEFAULT,
    name="software",
    has_fast_shared_memory=False,
    coalesces_accesses=False,
    needs_many_invocations=False,
    prefers_texel_reads=True,
    prefers_word_access=False,
    specialize_sizes=False,
    prefers_unrolled_code=False,
    compiles_at_dispatch=True,
    has_fast_float_atomics=False,
    loads_in_flight=1,
    max_iterations=60000,  # old Mesa ends loops of its software device after 65535
    dispatch_seconds=math.inf,
    busy_invocations=64,
    workgroup_size=64,
    max_select_workgroup=64,
    max_sort_workgroup=128,
    max_workgroups_per_core=0,
    max_select_items=8,
    max_counted_row=128,
    min_atomic_entries=4096,
)

register(Family(SOFTWARE, lambda device: device.kind == "cpu", priority=2))
