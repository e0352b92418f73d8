"""Arguments of a `Model` and a `Session`, checked: another type raises `InputError`, which says the
argument, what it got, and what it may be."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from purevk.errors import InputError, UnsupportedProgramError

ROLES = ("system", "user", "assistant", "tool")


def refuse(name: str, value: object, expected: str) -> InputError:
    """The error for an argument that is not what is expected."""
    return InputError(f"{name}={_shown(value)} is not accepted", why=f"{expected} is expected")


def not_installed(package: str, otherwise: str = "") -> UnsupportedProgramError:
    """The error for a package that is missing; `otherwise`: what can be done without it."""
    return UnsupportedProgramError(
        f"the package {package} is not installed",
        next="pip install purevk[llm]" + (f", or {otherwise}" if otherwise else ""),
    )


def _shown(value: object) -> str:
    try:
        return repr(value)[:200]
    except ValueError:  # an integer of more digits than Python prints
        return f"an object of type {type(value).__name__}"


def whole(name: str, value: object, least: int, expected: str) -> int:
    """An integer that is no bool."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise refuse(name, value, expected)
    return value


def text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise refuse(name, value, "a text")
    return value


def texts(name: str, value: str | Iterable[str]) -> list[str]:
    """A text, or texts."""
    if isinstance(value, str):
        return [value]
    listed = list(value) if isinstance(value, Iterable) else [None]
    if not all(isinstance(each, str) for each in listed):
        raise refuse(name, value, "a text, or a list of texts,")
    return [str(each) for each in listed]


def mapping(name: str, value: Mapping[Any, Any] | None) -> dict[Any, Any]:
    """A mapping; an empty one for None."""
    if value is not None and not isinstance(value, Mapping):
        raise refuse(name, value, "a mapping or None")
    return dict(value or {})


def token_ids(prompt: Iterable[int], vocab: int) -> list[int]:
    """Token ids: integers of Python, numpy or torch."""
    try:
        tokens = [operator.index(token) for token in prompt]
    except (TypeError, ValueError, RuntimeError):  # of an array, or of a tensor, in it
        raise refuse("prompt", prompt, "a text, or integers,") from None
    for token in tokens:
        if not 0 <= token < vocab:
            raise InputError(
                f"there is no token {_shown(token)}", why=f"token ids are from 0 to {vocab - 1}"
            )
    return tokens


def template_args(value: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments of a chat template."""
    arguments = mapping("template_args", value)
    for name in arguments:
        if not isinstance(name, str) or name == "messages":
            raise refuse("template_args", value, 'a mapping of names, other than "messages",')
    return arguments


def tools(value: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools of a chat."""
    listed = list(value) if isinstance(value, Iterable) else [value]
    for tool in listed:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InputError(
                "this is no tool",
                where=_shown(tool),
                why='{"type": "function", "function": {"name": ...}} is expected',
            )
    return [dict(tool) for tool in listed]


def messages(value: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of messages."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise refuse("messages", value, "a text, or a list of messages,")
    if not value:
        raise InputError("there are no messages", next="give one message or more")
    return [message(each) for each in value]


def message(value: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a message."""
    fits = isinstance(value, Mapping) and value.get("role") in ROLES
    calls_only = fits and value.get("tool_calls") and value.get("content") is None
    if not fits or not (calls_only or isinstance(value.get("content"), str)):
        raise InputError(
            "this is no message",
            where=_shown(value),
            why=f'"role" (one of {", ".join(ROLES)}) and "content" (a text) are expected',
        )
    return dict(value)
