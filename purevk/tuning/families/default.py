"""Any GPU without a family of its own, and the start of the other families.

The numbers were measured on one GPU, an NVIDIA H200. They are a guess for all others.
"""

from purevk.tuning.profile import DeviceProfile
from purevk.tuning.registry import Family, register

DEFAULT = DeviceProfile(
    name="default",
    has_fast_shared_memory=True,
    coalesces_accesses=True,
    needs_many_invocations=True,
    prefers_texel_reads=False,
    prefers_word_access=True,
    specialize_sizes=True,
    prefers_unrolled_code=True,
    has_fast_float_atomics=True,
    loads_in_flight=8,
    busy_invocations=16384,
    assumed_cores=16,  # those of a small GPU
    max_iterations=2**31 - 1,
    workgroup_size=256,
    max_select_workgroup=1024,
    max_sort_workgroup=256,
    max_workgroups_per_core=64,
    max_counted_row=32,
    min_atomic_entries=64,
)

register(Family(DEFAULT, lambda device: True, priority=-1))
