"""A small program of a user. It passes `mypy --strict` against the installed package; it is not
run."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import purevk
from purevk.errors import DeviceError, InputError, PurevkError, UnsupportedOperatorError


def open_program(source: Path | Any, example: tuple[Any, ...]) -> purevk.Program:
    if isinstance(source, Path):
        return purevk.load(source)
    return purevk.compile(source, example)


def describe(program: purevk.Program) -> list[str]:
    lines = [program.name]
    for name, method in program.methods.items():
        checked: purevk.Method = method
        lines.append(f"{name}: {len(checked.graph.nodes)} nodes")
        lines += [f"  {node.op} {node.result.type.dtype.name}" for node in checked.graph.nodes]
    lines += [f"{name}: {array.dtype}" for name, array in program.state.items()]
    return lines


def weights_fit(path: Path, limit: int) -> bool:
    planned: purevk.PlannedProgram = purevk.plan(path)
    return planned.memory.weights <= limit


def main(path: Path, inputs: list[Any]) -> int:
    try:
        with open_program(path, ()) as program:
            print("\n".join(describe(program)))
            print(program.forward(*inputs))
            later: Future[Any] = program.submit(*inputs)
            print(later.result(timeout=60))
            program.save_state("states.npz")
            program.reset_state()
    except InputError as error:
        print(error.what, error.why, error.next, file=sys.stderr)
        return 2
    except (DeviceError, UnsupportedOperatorError) as error:
        print(f"{error.where}: {error}", file=sys.stderr)
        return 3
    except PurevkError as error:
        text: str = error.what
        print(text, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), []))
