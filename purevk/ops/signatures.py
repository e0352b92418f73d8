"""Parameters that the functions of an operator's definition get but do not read."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def signature(parameters: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Gives a function the parameters in a text, such as "x, dim: int = -1, out=None". The function
    itself takes those by name that it reads; others of its parameters keep their defaults.

    For a shape function, these are the parameters of the operator. Integers have their annotation,
    because files may state them as real numbers (`Operator.integers`).
    """
    made = _parsed(parameters)
    names = tuple(made.parameters)
    defaults = {
        name: parameter.default
        for name, parameter in made.parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        used = tuple(name for name in inspect.signature(function).parameters if name in names)

        @functools.wraps(function)
        def shape(*args: Any, **keywords: Any) -> T:
            arguments = {**defaults, **dict(zip(names, args)), **keywords}
            return function(**{name: arguments[name] for name in used})

        shape.__signature__ = made  # type: ignore[attr-defined]
        return shape

    return decorate


def _parsed(parameters: str) -> inspect.Signature:
    (function,) = ast.parse(f"def shape({parameters}): pass").body
    assert isinstance(function, ast.FunctionDef)
    args = function.args.args
    required = len(args) - len(function.args.defaults)
    return inspect.Signature(
        [
            inspect.Parameter(
                each.arg,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=inspect.Parameter.empty
                if number < required
                else ast.literal_eval(function.args.defaults[number - required]),
                annotation=inspect.Parameter.empty
                if each.annotation is None
                else ast.unparse(each.annotation),
            )
            for number, each in enumerate(args)
        ]
    )
