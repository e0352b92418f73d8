"""The command `purevk`. `commands.py` declares the subcommands. The work of each is in a file of its
own, which is imported when the command runs: --help needs no library."""

from __future__ import annotations

import argparse
import difflib
import importlib
import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from purevk import __version__
from purevk.cli.command import Command, CommandModule, option
from purevk.cli.commands import COMMANDS
from purevk.errors import InputError, PurevkError
from purevk.plain_text import json_text, printable


class _Parser(argparse.ArgumentParser):
    """Arguments may be names of files, as a shell completes them."""

    def _print_message(self, message: str, file: Any = None) -> None:
        super()._print_message(printable(message), file)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = _Parser(
        prog="purevk",
        description="Runs PyTorch models on any Vulkan device.",
        epilog=(
            "examples:\n"
            "  purevk doctor\n"
            "  purevk inspect model.pte\n"
            "  purevk run model.pte --input x.npy\n\n"
            "`purevk COMMAND --help` explains a command. docs/cli.md describes --json."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"purevk {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        sub = subparsers.add_parser(
            command.name,
            help=command.help,
            description=command.description or command.help,
            epilog=command.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(sub)
        common = sub.add_argument_group("output")
        option(common, "--json", "print one JSON object instead of tables")
        option(common, "--traceback", "show the Python traceback of an error")
        own = sub.add_argument_group("own operators")
        own.add_argument(
            "--import",
            dest="imports",
            metavar="MODULE",
            action="append",
            default=[],
            help="import this Python module before, such as one that registers operators; the"
            " current folder is searched first; may be repeated",
        )
        sub.set_defaults(chosen=command, parser=sub)
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
    _escape_what_streams_lack()
    try:
        args, unknown = make_parser().parse_known_args(arguments)
        wrong = _unknown(args, unknown) if unknown else args.chosen.check(args)
        if wrong:
            args.parser.error(wrong)
    except SystemExit as stop:  # argparse has printed what is wrong, or the help
        return stop.code if isinstance(stop.code, int) else 2
    command: Command = args.chosen
    try:
        return _perform(command, args)
    except BrokenPipeError:  # the reader of the output, such as `head`, has seen enough
        sys.stdout = open(os.devnull, "w")
        return 0


def _escape_what_streams_lack() -> None:
    """Has characters that the encoding of an output lacks be printed as escapes, as stderr does."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _unknown(args: argparse.Namespace, unknown: Sequence[str]) -> str:
    """What is wrong with arguments that the command does not have."""
    options = [argument for argument in unknown if argument.startswith("-")]
    if not options:
        return f"unknown arguments: {' '.join(unknown)}"
    option_names = [name for name in args.parser._option_string_actions if name.startswith("--")]
    name = options[0].partition("=")[0]
    if name in option_names:
        return f"{name} goes behind the command: purevk {args.command} {name}"
    near = difflib.get_close_matches(name, option_names, 1)
    return f"there is no {name}" + (f"; did you mean {near[0]}?" if near else "")


def _perform(command: Command, args: argparse.Namespace) -> int:
    from purevk.cli.output import Output, error_data, show_error, warning_text

    before = warnings.formatwarning
    warnings.formatwarning = warning_text
    try:
        _import(args.imports)
        module = command.load()
        data = _collect(module, args)
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
    finally:
        warnings.formatwarning = before
    if args.json:
        _print_json({"command": command.name, "purevk": __version__, **data})
    else:
        module.show(data, Output())
    sys.stdout.flush()
    return 0 if data.get("ok", True) else 1


def _import(names: Sequence[str]) -> None:
    """Imports the user's modules, as `python -m` would find them."""
    if names and "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for name in names:
        try:
            importlib.import_module(name)
        except PurevkError:
            raise
        except Exception as error:  # whatever the module raises
            raise InputError(
                "a module cannot be imported",
                where=f"--import {name}",
                why=f"{type(error).__name__}: {error}",
                next="give the name of a module in the current folder or on PYTHONPATH, without .py;"
                " --traceback shows where it fails",
            ) from error


def _collect(module: CommandModule, args: argparse.Namespace) -> dict[str, Any]:
    try:
        return module.collect(args)
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
    print(json_text(data))
