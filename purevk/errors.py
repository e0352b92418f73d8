"""All errors that purevk raises.

Each error says *what* happened, *where* (file, node, input), *why* (what was given and what is
accepted) and what to do *next*. Errors can be pickled, so they pass through a process pool.
"""

from __future__ import annotations

import re
from typing import Any

from purevk.plain_text import printable


class PurevkError(RuntimeError):
    """Base of all purevk errors. It is a RuntimeError, as the errors of torch and ExecuTorch are.

    Args:
        what: one sentence, with numbers.
        where: the file, method, node or input.
        why: what was given, and what is accepted.
        next: what the user can do.

    The text of an error, as a traceback shows it, is `purevk.plain_text.printable`; the attributes
    are as they were given.
    """

    def __init__(self, what: str, *, where: str = "", why: str = "", next: str = "") -> None:
        self.what, self.where, self.why, self.next = map(_shortened, (what, where, why, next))
        lines = [self.what]
        lines += [
            f"  {label}: {text}"
            for label, text in (("where", self.where), ("why", self.why), ("next", self.next))
            if text
        ]
        super().__init__(printable("\n".join(lines)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.what, self.where, self.why, self.next)


_LONG_WORD = re.compile(r"\S{2000,}")  # such as a variable of 100,000 characters; no path


def _shortened(text: str) -> str:
    """A text whose words can be read."""
    return _LONG_WORD.sub(lambda word: f"{word[0][:100]}... ({len(word[0])} characters)", text)


def located(error: PurevkError, source: str, line: str) -> PurevkError:
    """The error, which also says on which line of the user's code the node `source` stands."""
    if line in error.where:
        return error
    where = error.where
    if source not in where:
        where = f"{where}, {source}" if where else source
    made = _rebuild(type(error), error.what, f"{where} ({line})", error.why, error.next)
    made.__dict__.update({k: v for k, v in error.__dict__.items() if k not in made.__dict__})
    return made.with_traceback(error.__traceback__)


def _rebuild(cls: type[PurevkError], what: str, where: str, why: str, next_: str) -> PurevkError:
    return cls(what, where=where, why=why, next=next_)


class FileFormatError(PurevkError, ValueError):
    """A file is damaged or has another format: a wrong identifier, missing bytes, or an offset out
    of range."""


class OutputError(PurevkError, OSError):
    """A path that the user named for an output is refused: a socket, a link to nothing, a link in a
    folder that others may write, or a pipe from which nobody reads. Or no temporary folder can be
    made, or a file of `PUREVK_DUMP` cannot be written."""


class UnsupportedProgramError(PurevkError):
    """A valid program needs something that purevk cannot run, such as a delegate of another
    backend."""


class UnsupportedOperatorError(PurevkError):
    """An operator has no kernel and no CPU function."""


class GraphError(PurevkError):
    """A graph breaks a rule of the IR, or an argument of a node is not of the kind that its operator
    takes. The cause is a bug in a front end or a pass."""


class ShapeError(PurevkError, ValueError):
    """An operator's shape function refuses its arguments."""


class InputError(PurevkError, ValueError):
    """The inputs of a call do not match the method: their number, rank, dtype or sizes."""


class SignatureError(InputError):
    """The arguments of a call are of another form than those of the export: nested otherwise, other
    names, or another Python value where the export made one part of the graph."""


class SizeConstraintError(InputError):
    """The sizes of a call are outside of what the model was exported for: outside of a bound, or they
    break a decision that the exporter took from the sizes of its example inputs."""


class StaleStateError(PurevkError, RuntimeError):
    """A call has written states with weights that the module no longer has: it was changed in a way
    that torch does not count, such as a write through `tensor.data`."""


class DeviceError(PurevkError, RuntimeError):
    """There is no usable Vulkan device, or a Vulkan call failed."""


class OutOfDeviceMemoryError(DeviceError, MemoryError):
    """The device has too little memory for an allocation."""


class DeviceLostError(DeviceError):
    """The device was lost: the driver reset it, or a kernel ran for too long."""


class ValidationError(DeviceError):
    """The Vulkan validation layers reported a message (`PUREVK_VALIDATION=1`)."""


class ShaderCompilerError(PurevkError, RuntimeError):
    """No shaderc library could be loaded, or it rejected a shader."""


class KernelNotCachedError(ShaderCompilerError):
    """A kernel is not in the cache, and must not be compiled (`PUREVK_CACHE=only=1`,
    `compile="never"`)."""


class KernelInterfaceError(PurevkError, ValueError):
    """A dispatch passes what its kernel template does not declare, or not all that it declares: a
    parameter, a specialization constant or a macro. A bug of an operator or a template."""


class FallbackError(PurevkError, RuntimeError):
    """A node must run on the CPU but cannot: torch is not installed, or does not know the
    operator."""


class TorchNeededWarning(UserWarning):
    """A program has nodes on the CPU that only torch runs: given where it is saved, and where it is
    loaded without torch."""


class DifferenceError(PurevkError):
    """The device computes something else than eager torch (`PUREVK_CHECK=1`).

    Args:
        node: the number of the node in the graph of the front end; None: each node is right by
            itself, and the results of the optimized program differ.
        operator: of the node; "" without one.
        source: where in the file or module the node comes from.
        largest: the largest absolute difference; infinite where sizes, or NaNs, differ.
        index: of the element with the largest difference; () where sizes differ.
        path: the file with the tensors; "" if it could not be written.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        why: str = "",
        next: str = "",
        node: int | None = None,
        operator: str = "",
        source: str = "",
        largest: float = 0.0,
        index: tuple[int, ...] = (),
        path: str = "",
    ) -> None:
        super().__init__(what, where=where, why=why, next=next)
        self.node, self.operator, self.source = node, operator, source
        self.largest, self.index, self.path = largest, index, path

    def __reduce__(self) -> tuple[Any, ...]:
        names = ("node", "operator", "source", "largest", "index", "path")
        return (*super().__reduce__(), {name: getattr(self, name) for name in names})
