"""The command `purevk`. Each subcommand is a `Command` in a file of its own, which calls the
library and reports the results."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from purevk import __version__
from purevk.cli.command import Command
from purevk.cli.output import Output, error_data, show_error
from purevk.errors import InputError, PurevkError

NAMES = ("info", "inspect", "run", "bench", "bisect", "ops", "warmup", "doctor")


def load_commands(names: Sequence[str] = NAMES) -> tuple[Command, ...]:
    """The subcommands by name. Only the modules of these names are imported, so that `doctor` runs
    where others cannot."""
    return tuple(importlib.import_module(f"purevk.cli.{name}").COMMAND for name in names)


def make_parser(names: Sequence[str] = NAMES) -> argparse.ArgumentParser:
    """The parser of the command line, with the subcommands of these names."""
    parser = argparse.ArgumentParser(
        prog="purevk",
        description="Runs PyTorch models on any Vulkan device.",
        epilog="`purevk COMMAND --help` explains a command. docs/cli.md has examples and describes --json.",
    )
    parser.add_argument("--version", action="version", version=f"purevk {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in load_commands(names):
        sub = subparsers.add_parser(
            command.name,
            help=command.help,
            description=command.description or command.help,
            epilog=command.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(sub)
        common = sub.add_argument_group("output")
        common.add_argument(
            "--json", action="store_true", help="print one JSON object instead of tables"
        )
        common.add_argument(
            "--traceback", action="store_true", help="show the Python traceback of an error"
        )
        sub.set_defaults(chosen=command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: without the program's name; None: those of the process.

    Returns:
        The exit code: 0 done, 1 an error of purevk or something required is missing, 2 a wrong
        command line.

    Raises:
        KeyboardInterrupt: Ctrl-C; `purevk.__main__` ends quietly with 130.
    """
    words = sys.argv[1:] if arguments is None else arguments
    try:
        args = make_parser([word for word in words if word in NAMES][:1] or NAMES).parse_args(
            arguments
        )
    except PurevkError as error:  # a package that a subcommand needs is missing
        show_error(error)
        return 1
    except SystemExit as stop:  # argparse has printed what is wrong, or the help
        return stop.code if isinstance(stop.code, int) else 2
    command: Command = args.chosen
    try:
        return _perform(command, args)
    except BrokenPipeError:  # the reader of the output, such as `head`, has seen enough
        sys.stdout = open(os.devnull, "w")
        return 0


def _perform(command: Command, args: argparse.Namespace) -> int:
    try:
        data = _collect(command, args)
    except PurevkError as error:
        if args.traceback:
            raise
        if args.json:
            _print_json(
                {"command": command.name, "purevk": __version__, "error": error_data(error)}
            )
        else:
            sys.stdout.flush()
            show_error(error)
        return 1
    if args.json:
        _print_json({"command": command.name, "purevk": __version__, **data})
    else:
        command.show(data, Output())
    sys.stdout.flush()
    return 0 if data.get("ok", True) else 1


def _collect(command: Command, args: argparse.Namespace) -> dict[str, Any]:
    try:
        return command.collect(args)
    except OSError as error:
        if isinstance(error, PurevkError) or not error.filename:
            raise
        name = error.filename if isinstance(error.filename, str) else repr(error.filename)
        raise InputError(
            "a file cannot be opened",
            where=name,
            why=error.strerror or str(error),
            next="check the path",
        ) from error


def _print_json(data: dict[str, Any]) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=True))
