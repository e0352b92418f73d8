"""Subcommands, and the arguments that several of them share."""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from purevk.cli.output import Output


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
        name, help: as listed; `description` and `epilog` are for its own --help.
        add_arguments: adds its arguments to its parser.
        check: what is wrong with arguments that the parser takes one by one; "" if nothing is.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    description: str = ""
    epilog: str = ""
    check: Callable[[argparse.Namespace], str] = lambda args: ""

    def load(self) -> CommandModule:
        """Imports the module of the subcommand, `purevk.cli.NAME`."""
        return cast(CommandModule, importlib.import_module(f"purevk.cli.{self.name}"))


class CommandModule(Protocol):
    """What the module of a subcommand has."""

    def collect(self, args: argparse.Namespace) -> dict[str, Any]:
        """Does the work; gives what --json prints: JSON values only. "ok": False makes the exit
        code 1."""

    def show(self, data: dict[str, Any], out: Output) -> None:
        """Prints the same for people."""


def option(parser: argparse._ActionsContainer, usage: str, help: str, **settings: Any) -> None:
    """Adds an argument by how it is written: "MODEL", "--spill", "--runs N", "--data FILE..." for an
    option that may be repeated. `settings` are those of `add_argument`."""
    names = [word for word in usage.split() if word.startswith("-")]
    value = usage.split()[-1]
    if not names:
        settings["metavar"], names = value, [value.lower()]
    elif not value.startswith("-"):
        settings["metavar"] = value.removesuffix("...")
        if value.endswith("..."):
            settings |= {"action": "append", "default": []}
    elif "choices" not in settings:
        settings["action"] = "store_true"
    parser.add_argument(*names, help=help, **settings)


def add_device(parser: argparse.ArgumentParser, no_device: bool = False) -> None:
    """Adds --device, and --no-device if the command can run without a device."""
    group = parser.add_mutually_exclusive_group() if no_device else parser
    option(
        group,
        "--device NAME",
        "Vulkan device: its index, or a part of its name (default: PUREVK_DEVICE, or the best)",
    )
    if no_device:
        option(group, "--no-device", "do not use Vulkan; assume a typical desktop GPU")


def add_model(parser: argparse.ArgumentParser, method: bool = True) -> None:
    """Adds the file, its data files and the method."""
    option(parser, "MODEL", "a .pte, .ptn, .pvk or .pt2 file")
    add_data(parser)
    if method:
        option(parser, "--method NAME", 'method (default: "forward", or the only one)')


def add_data(parser: argparse.ArgumentParser) -> None:
    """Adds --data."""
    option(parser, "--data FILE.ptd...", "data file with weights; may be repeated")


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the inputs of a call."""
    group = parser.add_argument_group("inputs")
    option(
        group,
        "--input -i SPEC...",
        "one input; repeat it for further inputs, in order; the last word or number serves the rest."
        " FILE.npy; FILE.npz (all its arrays); FILE.npz:PATTERN (the arrays with matching names, such"
        " as x.npz:in_*); a number; random; random:N (integers below N); ones; zeros"
        " (default: random)",
    )
    option(
        group,
        "--size NAME=N...",
        "value of a dynamic size, such as s0=17 (default: its upper bound); `purevk inspect`"
        " lists the sizes",
        type=size_argument,
    )
    group.add_argument("--seed", type=natural, default=0, help="seed of random inputs (default: 0)")


def size_argument(text: str) -> tuple[str, int]:
    """Reads NAME=N."""
    name, equals, number = text.partition("=")
    if not equals or not name or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=N, such as s0=17")
    return name, int(number)


def positive(text: str) -> int:
    """Reads an integer above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer above 0")
    return int(text)


def natural(text: str) -> int:
    """Reads an integer of 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 0 or more")
    return int(text)


def natural_number(text: str) -> float:
    """Reads a number of 0 or more."""
    number = _number(text)
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return number


def _number(text: str) -> float:
    """Reads a number; NaN if it is none, or not finite."""
    try:
        number = float(text)
    except ValueError:
        return math.nan
    return number if math.isfinite(number) else math.nan


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def byte_size(text: str) -> int:
    """Reads a size such as 500M."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if unit not in _UNITS or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no size, such as 500M; units: K, M, G")
    return int(number) * _UNITS[unit]


def pick_method(names: Iterable[str], name: str | None, where: str) -> str:
    """The method of a command: the one that is named, "forward", or the only one.

    Raises:
        InputError: there is no such method, or several to choose from.
    """
    from purevk.errors import InputError

    names = list(names)
    if name is not None and name in names:
        return name
    if name is None and "forward" in names:
        return "forward"
    if name is None and len(names) == 1:
        return names[0]
    raise InputError(
        "the program has several methods" if name is None else f"there is no method {name!r}",
        where=where,
        why=f"methods: {', '.join(names)}",
        next="name one of them: --method NAME",
    )
