"""CPU functions that users register for operators, and operators of torch that they allow files to
run. `purevk.fallback` calls them; functions that take arrays also without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from purevk.errors import InputError

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Executor:
    """A CPU function of an operator. `tensors` is "numpy" or "torch": what it is given."""

    name: str
    function: Callable[..., Any]
    tensors: str


_executors: dict[str, Executor] = {}
_allowed: set[str] = set()  # "namespace.op"


def full_name(name: str) -> str:
    """The name "namespace.op.overload" of an operator, which may be written "namespace::op" or
    without its overload.

    Raises:
        InputError: it has no namespace.
    """
    parts = name.replace("::", ".").split(".")
    if len(parts) not in (2, 3) or not all(part.isidentifier() for part in parts):
        raise InputError(
            f"{name!r} is no name of an operator",
            why='"namespace.op" or "namespace.op.overload" is expected',
            next=f'say "mylib.{parts[-1]}"' if parts[-1].isidentifier() else "",
        )
    return ".".join([*parts, "default"][:3])


def register_executor(name: str, *, tensors: str = "numpy") -> Callable[[Function], Function]:
    """Registers a CPU function for an operator: `@register_executor("my_lib.gate")`.

    It runs wherever the operator has no GPU kernel, or none for the dtypes of a node. A second
    function of the same name takes the place of the first.

    Args:
        name: "namespace.op" or "namespace.op.overload" (also with "::"), as `torch.library` or the
            .pte file names it; an out-variant `my_lib::gate.out` of a file has the name of the
            operator, `my_lib.gate`.
        tensors: "numpy" gives the function numpy arrays (bfloat16 as the bits, in uint16) and needs
            no torch; "torch" gives it torch tensors. Neither may be written to.

    The function gets the operator's arguments by position in the order of its schema, keyword-only
    ones included; lists as lists, dtypes as numpy or torch dtypes, sizes as integers. It returns an
    array (or a number), or a tuple or list of them, one for each result; they are converted to the
    results' dtypes.

    Raises:
        InputError: no name of an operator, or another word for `tensors`.
    """
    if tensors not in ("numpy", "torch"):
        raise InputError(f"tensors={tensors!r}", where=name, why='"numpy" or "torch" is accepted')
    known = full_name(name)

    def decorate(function: Function) -> Function:
        _executors[known] = Executor(known, function, tensors)
        return function

    return decorate


def unregister_executor(name: str) -> None:
    """Removes the CPU function of an operator, if it has one."""
    _executors.pop(full_name(name), None)


def find_executor(name: str) -> Executor | None:
    """The CPU function of an operator by its full name, or None."""
    return _executors.get(name)


def executors() -> tuple[Executor, ...]:
    """All registered CPU functions, sorted by name."""
    return tuple(_executors[name] for name in sorted(_executors))


def allow_operator(name: str) -> None:
    """Allows model files to run an operator of `torch.ops` on the CPU: `allow_operator("mylib.gate")`.

    Files may run pure operators of ATen without it. Modules of the process (`purevk.compile`) may run
    any operator. Allow an operator if you trust it with the arguments of any file that you load.

    Args:
        name: "namespace.op" (also with "::"). All overloads are allowed.

    Raises:
        InputError: no name of an operator.
    """
    _allowed.add(full_name(name).rpartition(".")[0])


def disallow_operator(name: str) -> None:
    """Takes back what `allow_operator` allowed."""
    _allowed.discard(full_name(name).rpartition(".")[0])


def any_known() -> bool:
    """Whether there is any registered CPU function, or any operator that the user allows."""
    return bool(_executors or _allowed)


def is_allowed(name: str) -> bool:
    """Whether the user allows files to run an operator, by its full name."""
    return name.rpartition(".")[0] in _allowed
