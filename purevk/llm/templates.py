"""Chat templates. A template is code from a file: it runs in jinja2's sandbox, with limits on time, on
text and on numbers."""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from purevk.errors import FileFormatError, InputError, PurevkError, UnsupportedProgramError

SECONDS = 2.0
MOST_TEXT = 1 << 22  # characters of a text, more than any context holds
_MOST_NUMBER = 100_000  # as an argument of a call or a filter, such as a width
_FILTERS = (
    "abs", "batch", "capitalize", "default", "d", "dictsort", "e", "escape", "first", "float",
    "groupby", "indent", "int", "items", "join", "last", "length", "count", "list", "lower", "map",
    "max", "min", "reject", "rejectattr", "replace", "reverse", "round", "safe", "select",
    "selectattr", "sort", "string", "sum", "title", "trim", "unique", "upper",
)  # fmt: skip


class _LimitError(Exception):
    """A template has broken a limit."""


class Template:
    """A chat template.

    Args:
        text: of the template.
        where: the file, for messages.
        tokens: texts of control tokens, such as `bos_token`, by name.

    Raises:
        UnsupportedProgramError: the package jinja2 is not installed.
        FileFormatError: the template is damaged.
    """

    def __init__(self, text: str, where: str, tokens: Mapping[str, str]) -> None:
        self._where, self._tokens = where, dict(tokens)
        try:
            environment = _environment()
        except ImportError:
            raise UnsupportedProgramError(
                "the package jinja2 is not installed",
                next="pip install purevk[llm], or give the whole text to generate()",
            ) from None
        if len(text) > MOST_TEXT:
            raise self._damaged(f"it has {len(text)} characters")
        self._template = self._limited(lambda: environment.from_string(text))

    def render(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
        """The text of a conversation, up to where the assistant's next message begins.

        Raises:
            FileFormatError: the template fails, or breaks a limit.
            InputError: it refuses these messages.
        """
        given = {
            "messages": [dict(each) for each in messages],
            "add_generation_prompt": True,
            **self._tokens,
            **arguments,
        }

        def render() -> str:
            parts, size = [], 0
            for part in self._template.generate(given):
                size += len(part)
                if size > MOST_TEXT:
                    raise _LimitError(f"it gives more than {MOST_TEXT} characters")
                parts.append(part)
            return "".join(parts)

        text: str = self._limited(render)
        return text

    def _limited(self, run: Callable[[], Any]) -> Any:
        """Runs code of the template for so long. Each line that runs compares the time."""
        end = time.monotonic() + SECONDS

        def trace(frame: Any, event: str, argument: Any) -> Any:
            if time.monotonic() > end:
                raise _LimitError(f"it takes more than {SECONDS} s")
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            return run()
        except PurevkError:
            raise
        except _LimitError as error:
            raise self._damaged(str(error)) from None
        except (Exception, RecursionError) as error:
            raise self._damaged(f"{type(error).__name__}: {error}") from None
        finally:
            sys.settrace(before)

    def _damaged(self, why: str) -> FileFormatError:
        return FileFormatError(
            "the chat template cannot be used",
            where=self._where,
            why=why,
            next="give the whole text to generate()",
        )


def _refuse(message: str) -> str:
    raise InputError("the chat template refuses the messages", why=str(message)[:1000])


def _now(format: str) -> str:
    return datetime.datetime.now().strftime(_checked(format))


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    options = {key: options[key] for key in ("ensure_ascii", "sort_keys") if key in options}
    options = {"ensure_ascii": False, **options}
    return json.dumps(value, indent=_checked(indent), **options)


def _checked(value: Any) -> Any:
    """An argument or a result that is not too large."""
    if isinstance(value, int) and abs(value) > _MOST_NUMBER:
        raise _LimitError(f"it uses a number above {_MOST_NUMBER}")
    if isinstance(value, (str, bytes, list, tuple)) and len(value) > MOST_TEXT:
        raise _LimitError(f"it makes a text or a list of more than {MOST_TEXT}")
    return value


def _check_replace(text: str, args: Sequence[Any]) -> None:
    """Refuses to replace parts of a text if that could make it too long."""
    if len(text) * max((len(each) for each in args if isinstance(each, str)), default=0) > 1 << 26:
        raise _LimitError("it replaces parts of a long text by long ones")


def _product(left: Any, right: Any) -> Any:
    for one, other in ((left, right), (right, left)):
        if isinstance(one, (str, bytes, list, tuple)) and isinstance(other, int):
            if len(one) * other > MOST_TEXT:
                raise _LimitError(f"it makes a text or a list of more than {MOST_TEXT}")
    return left * right


def _environment() -> Any:
    """The sandbox, with what templates of transformers use."""
    from jinja2 import nodes
    from jinja2.compiler import CodeGenerator, Frame
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generator(CodeGenerator):
        """Has texts be joined by the environment, which limits them."""

        def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
            self.write("environment.join_texts(")
            for each in node.nodes:
                self.visit(each, frame)
                self.write(", ")
            self.write(")")

    class Environment(ImmutableSandboxedEnvironment):
        code_generator_class = Generator
        intercepted_binops = frozenset(("+", "*", "**", "%"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "*":
                return _checked_text(_product(left, right))
            if operator == "+":
                return _checked_text(left + right)
            if operator == "%" and not isinstance(left, (str, bytes)):
                return left % right
            raise _LimitError(f"it uses the operator {operator}")

        def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            for each in (*args, *kwargs.values()):
                _checked(each)
            name = getattr(function, "__name__", "")
            owner = getattr(function, "__self__", None)
            if isinstance(owner, str) and name == "replace":
                _check_replace(owner, args)
            return _checked_text(super().call(context, function, *args, **kwargs))

        def wrap_str_format(self, value: Any) -> Any:
            if super().wrap_str_format(value) is not None:
                raise _LimitError("it calls str.format")
            return None

        @staticmethod
        def join_texts(*parts: Any) -> str:
            return str(_checked_text("".join(map(str, parts))))

    made = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])

    replace = made.filters["replace"]

    def limited(function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter with checked arguments and results, that says the same of itself to jinja2."""

        def run(*args: Any, **kwargs: Any) -> Any:
            for each in (*args, *kwargs.values()):
                _checked(each)
            if function is replace:
                _check_replace(str(args[1]), args[2:])
            return _checked_text(function(*args, **kwargs))

        run.__dict__.update(getattr(function, "__dict__", {}))
        return run

    made.filters = {name: limited(made.filters[name]) for name in _FILTERS}
    made.filters["tojson"] = limited(_to_json)
    made.globals = {
        **{name: made.globals[name] for name in ("range", "dict", "namespace", "cycler", "joiner")},
        "raise_exception": _refuse,
        "strftime_now": _now,
    }
    return made


def _checked_text(value: Any) -> Any:
    """A result whose text is not too long."""
    if isinstance(value, int) and value.bit_length() > 4096:
        raise _LimitError("it makes a number of more than 4096 bits")
    return value if isinstance(value, int) else _checked(value)
