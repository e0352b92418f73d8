"""Counts what a SPIR-V module consists of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

# SPIR-V's numbers of instructions. What is in no class counts among all instructions alone.
_CLASSES: Mapping[str, frozenset[int]] = {
    "arithmetic": frozenset(
        (12, 111, 112, 113, 114, 115, *range(126, 153), *range(154, 192), *range(194, 206))
    ),
    "loads": frozenset((61, *range(87, 100))),
    "stores": frozenset((62, 63, 64)),
    "branches": frozenset((247,)),
    "loops": frozenset((246,)),
    "barriers": frozenset((224, 225)),
    "atomics": frozenset((*range(227, 243), 6035)),
    "subgroup": frozenset((*range(333, 367), *range(4421, 4433), 5345)),
    "matrix": frozenset((4459, 5361)),
}
_CAPABILITY, _VARIABLE = 17, 59
_WORKGROUP = 4  # the storage class of shared memory
_HEADER = 5  # words
_CAPABILITIES: Mapping[int, str] = {
    1: "Shader",
    9: "Float16",
    10: "Float64",
    11: "Int64",
    12: "Int64Atomics",
    22: "Int16",
    39: "Int8",
    46: "SampledBuffer",
    47: "ImageBuffer",
    50: "ImageQuery",
    61: "GroupNonUniform",
    62: "GroupNonUniformVote",
    63: "GroupNonUniformArithmetic",
    64: "GroupNonUniformBallot",
    65: "GroupNonUniformShuffle",
    66: "GroupNonUniformShuffleRelative",
    67: "GroupNonUniformClustered",
    4433: "StorageBuffer16BitAccess",
    4434: "UniformAndStorageBuffer16BitAccess",
    4435: "StoragePushConstant16",
    4448: "StorageBuffer8BitAccess",
    4449: "UniformAndStorageBuffer8BitAccess",
    5345: "VulkanMemoryModel",
    6019: "DotProduct",
    6022: "CooperativeMatrixKHR",
}


@dataclass(frozen=True)
class SpirvStatistics:
    """A SPIR-V module in numbers.

    Attributes:
        nbytes: its size.
        version: such as "1.3".
        instructions: all of them.
        classes: instructions by class, those that there are: "arithmetic", "loads", "stores",
            "branches" (selections), "loops", "barriers", "atomics", "subgroup", "matrix". Loads and
            stores are also those of local variables.
        shared: variables in shared memory.
        capabilities: what the module asks of a device.
    """

    nbytes: int
    version: str
    instructions: int
    classes: Mapping[str, int]
    shared: int
    capabilities: tuple[str, ...]


def statistics_of(spirv: bytes) -> SpirvStatistics:
    """Counts the instructions of a module, which the compiler or the cache gave."""
    words = memoryview(spirv).cast("I")
    counts: Counter[int] = Counter()
    capabilities: list[int] = []
    shared = 0
    at = _HEADER
    while at < len(words):
        length, op = words[at] >> 16, words[at] & 0xFFFF
        if not length or at + length > len(words):
            break
        counts[op] += 1
        if op == _CAPABILITY:
            capabilities.append(words[at + 1])
        elif op == _VARIABLE and words[at + 3] == _WORKGROUP:
            shared += 1
        at += length
    classes = {name: sum(counts[op] for op in ops) for name, ops in _CLASSES.items()}
    return SpirvStatistics(
        nbytes=len(spirv),
        version=f"{words[1] >> 16 & 255}.{words[1] >> 8 & 255}",
        instructions=counts.total(),
        classes={name: count for name, count in classes.items() if count},
        shared=shared,
        capabilities=tuple(
            _CAPABILITIES.get(number, f"capability {number}") for number in capabilities
        ),
    )
