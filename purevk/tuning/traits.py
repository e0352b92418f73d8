"""The features and limits of one device, with the profile of its family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from purevk.dtypes import DType
from purevk.ir import Size
from purevk.ir import dims as _dims
from purevk.tuning.choices import Choices
from purevk.tuning.families.default import DEFAULT
from purevk.tuning.profile import DeviceProfile


def no(dtype: DType, columns: int) -> bool:
    """The answer about fragments that a device has not been asked for."""
    return False


@dataclass(frozen=True)
class DeviceTraits:
    """What the choice of kernels depends on.

    Attributes:
        features: names of the optional features that are on.
        subgroup_size: invocations of a subgroup.
        cores: multiprocessors, or threads of a software device (0: unknown).
        profile: what its family of devices does well.
        max_storage_range: bytes that one binding can span.
        max_shared_memory: bytes of shared memory of a workgroup.
        max_workgroups: workgroups along each dim of a grid.
        max_invocations: invocations of a workgroup.
        max_texels: elements of a texel buffer of any of `TEXEL_FORMATS` (0: not usable).
        coopmat_shape: the largest cooperative matrix of a subgroup, as rows, columns and depth,
            of halves with float sums; None without matrix cores or a compiler that knows them.
        coopmat_columns: columns (8, 16) that cooperative matrices of 16 rows and depth 16 may have,
            of halves with float sums, in subgroups of 32 invocations. Empty in other subgroups.
        bfloat16_columns: the same for operands of bfloat16.
        int8_columns: the same for operands of int8 with int sums and depth 32.
        workgroup_matrices: (m, n, k, invocations) for each kind of cooperative matrix of a
            workgroup, of halves with float sums: its sizes are multiples of m, n and k in
            workgroups of this many invocations. Empty without them or a compiler that knows them.
        max_workgroup_matrix: rows and columns of such a matrix, at most.
        bfloat16_fragments: whether the cooperative matrices of a subgroup exist for operands of
            bfloat16 too.
        bfloat16_matrices: whether those of a workgroup do.
        fragment_order: whether the elements of such fragments are in the order that
            `glsl/core/fragments.glslh` states, by the dtype of the operands and the columns; asks
            the device when called.
        choices: the kernels that were measured on the device.
    """

    features: frozenset[str]
    subgroup_size: int = 32
    cores: int = 0
    profile: DeviceProfile = DEFAULT
    max_storage_range: int = 2**27
    max_shared_memory: int = 16384
    max_workgroups: tuple[int, int, int] = (65535, 65535, 65535)
    max_invocations: int = 128
    max_texels: int = 0
    coopmat_shape: tuple[int, int, int] | None = None
    coopmat_columns: tuple[int, ...] = ()
    bfloat16_columns: tuple[int, ...] = ()
    int8_columns: tuple[int, ...] = ()
    workgroup_matrices: tuple[tuple[int, int, int, int], ...] = ()
    max_workgroup_matrix: int = 0
    bfloat16_fragments: bool = False
    bfloat16_matrices: bool = False
    fragment_order: Callable[[DType, int], bool] = field(default=no, compare=False, repr=False)
    choices: Choices = field(default_factory=Choices, compare=False, repr=False)

    @property
    def max_iterations(self) -> int:
        """Iterations of loops that one invocation may take: none of the device's limits, and no
        watchdog, ends them."""
        profile = self.profile
        return int(
            min(profile.max_iterations, profile.dispatch_seconds / profile.iteration_seconds)
        )

    def fragment_columns(self, dtype: DType) -> tuple[int, ...]:
        """Columns that fragments of a dtype may have whose order of elements is known."""
        listed = {
            DType.float16: self.coopmat_columns,
            DType.bfloat16: self.bfloat16_columns,
            DType.int8: self.int8_columns,
        }[dtype]
        return tuple(each for each in listed if self.fragment_order(dtype, each))

    def too_long(self, *counts: Size) -> str | None:
        """Why one invocation cannot run nested loops of these iterations, the outermost first; None
        if it can."""
        most = 0
        for count in reversed(counts):
            most = _dims.upper(count) * (1 + most) + 1
        return (
            f"no kernel for loops of {most} steps on this device"
            if most > self.max_iterations
            else None
        )

    def takes_matrices(self, m: int, n: int, k: int, invocations: int) -> bool:
        """Whether a workgroup of `invocations` multiplies matrices of these sizes."""
        return max(m, n, k) <= self.max_workgroup_matrix and any(
            invocations == matrix[3] and m % matrix[0] == n % matrix[1] == k % matrix[2] == 0
            for matrix in self.workgroup_matrices
        )

    @property
    def processors(self) -> int:
        """`cores`, or what the profile assumes if that is unknown."""
        return self.cores or self.profile.assumed_cores

    def has(self, *names: str) -> bool:
        return all(name in self.features for name in names)
