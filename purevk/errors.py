"""Every error that purevk raises on purpose, as one small tree.

Each says *what* happened, *where* (file, node, input), *why* (what was offered and what is
accepted) and what to do *next*. They pickle, so they survive a process pool.
"""

from __future__ import annotations

from typing import Any


class PurevkError(Exception):
    """Base of all purevk errors.

    Args:
        what: one sentence, with numbers.
        where: file, method, node or input concerned.
        why: what was offered against what is accepted.
        next: what the user can do about it.
    """

    def __init__(self, what: str, *, where: str = "", why: str = "", next: str = "") -> None:
        self.what, self.where, self.why, self.next = what, where, why, next
        lines = [what]
        lines += [
            f"  {label}: {text}"
            for label, text in (("where", where), ("why", why), ("next", next))
            if text
        ]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.what, self.where, self.why, self.next)


def _rebuild(cls: type[PurevkError], what: str, where: str, why: str, next_: str) -> PurevkError:
    return cls(what, where=where, why=why, next=next_)


class FileFormatError(PurevkError, ValueError):
    """The bytes are not the file that they should be: wrong identifier, truncated, or an offset out
    of range."""


class UnsupportedProgramError(PurevkError):
    """A well-formed file asks for something that purevk does not run, such as another backend's
    delegate."""


class UnsupportedOperatorError(PurevkError):
    """An operator has neither a kernel nor a CPU function."""


class GraphError(PurevkError):
    """A graph breaks the grammar of the IR, or an argument of a node is not of the kind that its
    operator takes. A bug of a front end or a pass."""


class InputError(PurevkError, ValueError):
    """The inputs of a call do not fit the method: number, rank, dtype or size."""


class DeviceError(PurevkError, RuntimeError):
    """No usable Vulkan device, or a Vulkan call failed."""


class OutOfDeviceMemoryError(DeviceError, MemoryError):
    """An allocation did not fit into the device's memory."""


class DeviceLostError(DeviceError):
    """The device was lost: a driver reset, or a kernel that ran for too long."""


class ValidationError(DeviceError):
    """The Vulkan validation layers reported a message (`PUREVK_VALIDATION=1`)."""


class ShaderCompilerError(PurevkError, RuntimeError):
    """No shaderc library could be loaded, or it refused a shader."""


class FallbackError(PurevkError, RuntimeError):
    """A node has to run on the CPU and cannot: torch is missing, or the operator is unknown to
    it."""
