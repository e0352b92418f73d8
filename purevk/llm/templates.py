"""Chat templates. A template is code from a file: it runs in jinja2's sandbox, with limits on time, on
text and on numbers.

The time is compared at each line that runs, and in each loop and call: what ends the tracing of lines,
such as a recursion that is too deep, ends no limit. A line can do much, so each operation that makes or
compares texts and lists is metered too: no value has more than `_MOST_VALUE` bytes, and all of them
together no more than `_MOST_BYTES`.
"""

from __future__ import annotations

import contextvars
import datetime
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from purevk.errors import FileFormatError, InputError, PurevkError
from purevk.llm.arguments import not_installed

SECONDS = 2.0
MOST_TEXT = 1 << 22  # characters of a text, more than any context holds
_MOST_TEMPLATE = 1 << 18  # characters
_MOST_VALUE = 1 << 24  # bytes of a value, with all that it holds
_MOST_BYTES = 1 << 29  # of all values that a run makes or compares
_MOST_DEPTH = 200  # containers in one another: Python compares and hashes them by recursion
_MOST_NUMBER = 100_000  # as an argument of a call or a filter, such as a width
_MOST_SOUGHT = 100  # characters that a call strips from the ends of a text, or looks for from there
_MOST_INDENT = 1000
_REFUSED_METHODS = "decode encode expandtabs format format_map maketrans translate".split()
# What compares each character of a text with each one of an argument.
_BY_EACH_CHARACTER = "strip lstrip rstrip trim rfind rindex rpartition rsplit".split()
_FILTERS = """
    abs batch capitalize default d dictsort e escape first float groupby indent int items join last
    length count list lower map max min reject rejectattr replace reverse round safe select selectattr
    sort string sum title trim unique upper
""".split()


class _LimitError(BaseException):
    """A template has broken a limit. Tests of jinja2 catch each `Exception`."""


class _Meter:
    """What a run of a template may still use.

    Attributes:
        end: when it has to have ended, in seconds of `time.monotonic`.
        left: bytes of values.
        measured: containers, their bytes and their depth, by their ids.
    """

    def __init__(self) -> None:
        self.end, self.left = time.monotonic() + SECONDS, _MOST_BYTES
        self.measured: dict[int, tuple[Any, int, int]] = {}

    def check_time(self) -> None:
        if time.monotonic() > self.end:
            raise _LimitError(f"it takes more than {SECONDS} s")

    def check_size(self, nbytes: int) -> None:
        if nbytes > _MOST_VALUE:
            raise _LimitError(f"it makes a value of more than {_MOST_VALUE} bytes")

    def take(self, nbytes: int) -> None:
        self.check_time()
        self.check_size(nbytes)
        self.left -= nbytes
        if self.left < 0:
            raise _LimitError(f"it makes values of more than {_MOST_BYTES} bytes")


_meter: contextvars.ContextVar[_Meter] = contextvars.ContextVar("meter")


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
            raise not_installed("jinja2", "give the whole text to generate()") from None
        if len(text) > _MOST_TEMPLATE:
            raise self._damaged(f"it has {len(text)} characters")
        self._template = self._limited(lambda: environment.from_string(text))

    def render(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any] | None = None
    ) -> str:
        """The text of a conversation, up to where the assistant's next message begins.

        Raises:
            FileFormatError: the template fails, or breaks a limit.
            InputError: it refuses these messages.
        """
        given = {
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": True,
            **self._tokens,
            **(arguments or {}),
        }

        def render() -> str:
            for each in (*given["messages"], *given.values()):
                _nbytes(each)
            return _bounded(self._template.generate(given))

        return str(self._limited(render))

    def _limited(self, run: Callable[[], Any]) -> Any:
        """Runs code of the template for so long. Each line that runs compares the time."""
        meter = _Meter()

        def trace(frame: Any, event: str, argument: Any) -> Any:
            meter.check_time()
            return None if frame.f_globals is globals() else trace

        before, token = sys.gettrace(), _meter.set(meter)
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
            _meter.reset(token)

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
    if not isinstance(format, str) or len(format) > _MOST_INDENT:
        raise _LimitError("it formats the time by a long text")
    return datetime.datetime.now().strftime(format)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    options = {key: options[key] for key in ("ensure_ascii", "sort_keys") if key in options}
    if isinstance(indent, int) and indent > _MOST_INDENT:
        raise _LimitError(f"it indents by more than {_MOST_INDENT}")
    encoder = json.JSONEncoder(indent=indent, **{"ensure_ascii": False, **options})
    return _bounded(encoder.iterencode(value))


def _bounded(parts: Iterable[str]) -> str:
    """Texts as one, of at most `MOST_TEXT` characters."""
    texts, size = [], 0
    for text in parts:
        size += len(text)
        if size > MOST_TEXT:
            raise _LimitError(f"it makes a text of more than {MOST_TEXT} characters")
        texts.append(text)
    return "".join(texts)


# -- sizes of values -------------------------------------------------------------------------------
_EMPTY: dict[Any, Any] = {}
_VIEWS = (type(_EMPTY.keys()), type(_EMPTY.values()), type(_EMPTY.items()))
_CONTAINERS = (list, tuple, set, frozenset, *_VIEWS)
_SIZED = (str, bytes, int)


def _nbytes(value: Any) -> int:
    """The bytes of a value with all that it holds, as often as it holds it; more than `_MOST_VALUE` if
    it is larger. A template cannot change a container, so each is measured once."""
    if isinstance(value, _SIZED):
        return sys.getsizeof(value)
    if not isinstance(value, (dict, *_CONTAINERS)):
        return 8
    measured = _meter.get().measured
    if id(value) in measured:
        return measured[id(value)][1]
    total, deepest, waiting = 0, 0, [(value, 0)]
    while waiting and total <= _MOST_VALUE:
        each, depth = waiting.pop()
        deepest = max(deepest, depth)
        total += 8
        if isinstance(each, _SIZED):
            total += sys.getsizeof(each)
        elif id(each) in measured:
            total += measured[id(each)][1]
            deepest = max(deepest, depth + measured[id(each)][2])
        elif isinstance(each, dict):
            total += 16 * len(each)
            items = [] if total > _MOST_VALUE else [*each, *each.values()]
            waiting += [(item, depth + 1) for item in items]
        elif isinstance(each, _CONTAINERS):
            total += 8 * len(each)
            waiting += [] if total > _MOST_VALUE else [(item, depth + 1) for item in each]
    if deepest > _MOST_DEPTH:
        raise _LimitError(f"it nests more than {_MOST_DEPTH} values in one another")
    measured[id(value)] = value, total, deepest
    return total


def _checked(value: Any) -> Any:
    """A value that a template makes. Raises _LimitError if it is too large, or all are."""
    if isinstance(value, int) and value.bit_length() > 4096:
        raise _LimitError("it makes a number of more than 4096 bits")
    meter = _meter.get()
    nbytes = 0 if id(value) in meter.measured else _nbytes(value)
    meter.take(nbytes)
    return value


def _operand(value: Any) -> Any:
    """A value that a template reads. Raises _LimitError if it is too large."""
    meter = _meter.get()
    meter.check_time()
    meter.check_size(_nbytes(value))
    return value


def _shown(value: Any) -> Any:
    """A value that becomes a text."""
    if isinstance(value, str):
        return _operand(value)
    _meter.get().take(4 * _nbytes(value))  # escapes make texts longer
    return value


def _argument(value: Any) -> Any:
    """An argument of a call or a filter, of which iterators are checked as they are read."""
    kind = type(value)
    if isinstance(value, int) and abs(value) > _MOST_NUMBER:
        raise _LimitError(f"it uses a number above {_MOST_NUMBER}")
    if hasattr(kind, "__next__") and not hasattr(kind, "index0"):  # which `loop` has
        return map(_checked, value)
    return _operand(value)


def _timed(items: Any) -> Iterator[Any]:
    """What a loop runs over."""
    check_time = _meter.get().check_time
    for item in _argument(items):
        check_time()
        yield item


def _text_size(value: Any) -> int:
    """The most characters that the text of an argument has."""
    return len(value) if isinstance(value, str) else 4 * _nbytes(value)


def _check_growth(count: int, value: Any) -> None:
    """Refuses to put a text between or in place of so many pieces, if that makes it too long."""
    if count * _text_size(value) > 4 * MOST_TEXT:
        raise _LimitError("it joins, indents or replaces parts of a long text by long ones")


def _check_text(name: str, text: Any, args: list[Any]) -> list[Any]:
    """The arguments of a method of texts, or of the filter of the same name."""
    if name in _REFUSED_METHODS:
        raise _LimitError(f"it calls str.{name}")
    if name == "join":
        args[:1] = [[*arg] if isinstance(arg, Iterator) else arg for arg in args[:1]]
        if args and hasattr(args[0], "__len__"):
            _check_growth(len(args[0]), text)
    elif name == "replace":
        for each in args:
            _check_growth(_text_size(text), each)
    elif name == "indent":
        for each in args:
            if isinstance(each, int) and each > _MOST_INDENT:
                raise _LimitError(f"it indents by more than {_MOST_INDENT}")
            width = " " * each if isinstance(each, int) else each
            _check_growth(len(str(text).splitlines()), width)
    elif name in _BY_EACH_CHARACTER:
        if any(_text_size(arg) > _MOST_SOUGHT for arg in args if arg is not None):
            raise _LimitError(f"it calls {name} with more than {_MOST_SOUGHT} characters")
    elif name in ("int", "float"):
        if _text_size(text) > _MOST_INDENT:
            raise _LimitError("it reads a number from a long text")
    elif name == "sum" and not all(isinstance(arg, (str, int, float)) for arg in args):
        raise _LimitError("it adds lists")
    return args


def _product(left: Any, right: Any) -> Any:
    for value, count in ((left, right), (right, left)):
        if isinstance(value, (str, bytes, list, tuple)) and isinstance(count, int):
            one = 4 * len(value) if isinstance(value, (str, bytes)) else _nbytes(value)
            _meter.get().take(max(one * count, 0))
    return left * right


def _joined(parts: Any) -> str:
    """Texts as one."""
    texts = [*parts]
    _meter.get().take(sum(map(sys.getsizeof, texts)))
    return "".join(texts)


def _joined_texts(*parts: Any) -> str:
    return _joined(map(str, map(_shown, parts)))


def _environment() -> Any:
    """The sandbox, with what templates of transformers use."""
    from jinja2 import nodes
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace
    from jinja2.visitor import NodeTransformer

    meters = {each.__name__: each for each in (_checked, _operand, _timed, _joined_texts)}

    def metered(meter: Callable[..., Any], *values: Any) -> nodes.Expr:
        """A call of one of the meters in place of an expression."""
        function = nodes.EnvironmentAttribute(meter.__name__)
        return nodes.Call(function, [*values], [], None, None, lineno=values[0].lineno)

    class Meters(NodeTransformer):
        """Has all values be checked that are made or compared without a call."""

        def visit_List(self, node: Any) -> Any:
            self.generic_visit(node)
            return metered(_checked, node) if getattr(node, "ctx", "load") == "load" else node

        visit_Dict = visit_Tuple = visit_List

        def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
            self.generic_visit(node)
            return metered(_checked, node) if isinstance(node.arg, nodes.Slice) else node

        def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
            self.generic_visit(node)
            return metered(_joined_texts, *node.nodes)

        def visit_For(self, node: Any) -> Any:
            self.generic_visit(node)
            node.iter = metered(_timed, node.iter)
            return node

        def visit_Compare(self, node: Any) -> Any:
            self.generic_visit(node)
            for each in (node, *node.ops):
                each.expr = metered(_operand, each.expr)
            return node

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("+", "*", "**", "%"))
        concat = staticmethod(_joined)

        def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
            return super()._generate(Meters().visit(source), *args, **options)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "*":
                return _checked(_product(left, right))
            if operator == "+":
                return _checked(left + right)
            if operator == "%" and not isinstance(left, (str, bytes)):
                return left % right
            raise _LimitError(f"it uses the operator {operator}")

        def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            if any(function is meter for meter in meters.values()):
                return function(*args)
            arguments = [*map(_argument, args)]
            named = {  # jinja2 adds `_loop_vars` and `_block_vars`
                name: each if name.startswith("_") else _argument(each)
                for name, each in kwargs.items()
            }
            owner = getattr(function, "__self__", None)
            if isinstance(owner, (str, bytes)):
                arguments = _check_text(getattr(function, "__name__", ""), owner, arguments)
            return _checked(super().call(context, function, *arguments, **named))

        def wrap_str_format(self, value: Any) -> Any:
            if super().wrap_str_format(value) is not None:
                raise _LimitError("it calls str.format")
            return None

    made: Any = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], finalize=_shown
    )
    made.__dict__.update(meters)

    class ShownNamespace(Namespace):
        """Does not show what it holds, which may hold it."""

        def __repr__(self) -> str:
            return "<Namespace>"

    def limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter or a test with checked arguments and results, that says the same of itself to
        jinja2."""
        own = 1 if hasattr(function, "jinja_pass_arg") else 0

        def run(*args: Any, **kwargs: Any) -> Any:
            value, *rest = map(_argument, args[own:])
            named = {key: _argument(each) for key, each in kwargs.items()}
            if name == "join":  # the value is what the separator joins
                between = [*rest, *named.values(), ""][0]
                (value,) = _check_text(name, between, [value])
            else:
                _check_text(name, value, [*rest, *named.values()])
            return _checked(function(*args[:own], value, *rest, **named))

        run.__dict__.update(getattr(function, "__dict__", {}))
        return run

    made.filters = {name: limited(name, made.filters[name]) for name in _FILTERS}
    made.filters["tojson"] = limited("tojson", _to_json)
    tests: Mapping[str, Any] = made.tests
    made.tests = {name: limited("", test) for name, test in tests.items()}
    made.globals = {
        **{name: made.globals[name] for name in ("range", "dict", "cycler", "joiner")},
        "namespace": ShownNamespace,
        "raise_exception": _refuse,
        "strftime_now": _now,
    }
    return made
