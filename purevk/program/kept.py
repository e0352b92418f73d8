"""Plans of lowered methods, kept in the on-disk cache: a later load of the same file runs no pass and
lowers nothing.

An entry answers a question, which has all that lowering depends on besides the file: purevk's own
code, the device, what was measured on it, the environment variables, the sizes. The file is compared
by its bytes. Those of weights are left out, unless a decision was taken from their elements
(`ReadLog` notes these), or graphs are read from these bytes too. So no entry needs a file's name or
date, and a model that was trained further keeps its plan.

Entries are pickles, which are read with the classes of purevk's own graphs and plans alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import logging
import os
import pickle
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from purevk import knobs
from purevk.dtypes import DType
from purevk.graph.context import Context
from purevk.ir import Arg, Node, Sealed, TensorType, Value
from purevk.ir.expected import Expected
from purevk.program.leaves import ConstantKey, Leaves, StateKey, address_of
from purevk.schedule.plan import Lowered
from purevk.tuning import Choices

if TYPE_CHECKING:
    from purevk.frontends.files import FilePart
    from purevk.frontends.importer import InputSizes

FORMAT = 1
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_MOST_BYTES = 8 << 20  # of tensors that are not in the file, in an entry
_MOST_COMPARED = 32 << 20  # bytes of files; comparing more takes longer than lowering
_HEAD = 4096  # first bytes of a file, which tell apart most files of one size
_MODULES = ("purevk.ir.", "purevk.lower.", "purevk.ops.", "purevk.schedule.")
_FUNCTIONS = {("purevk.dtypes", "dtype_named"), ("purevk.ir.dims", "Dim")}
_log = logging.getLogger("purevk")
# Variables that change neither graphs nor plans, and what differs between machines.
_WITHOUT_EFFECT = (
    knobs.ASSERT_CACHED,
    knobs.CACHE,
    knobs.CACHE_DIR,
    knobs.CACHE_MAX_BYTES,
    knobs.CHECK,
    knobs.COMPILE_THREADS,
    knobs.DEVICE,
    knobs.EAGER_FALLBACK,
    knobs.KEEP_PLANS,
    knobs.POLL,
    knobs.PROGRESS,
    knobs.RECORDINGS,
    knobs.SEED,
    knobs.SHADERC,
    knobs.TIMEOUT,
    knobs.VALIDATION,
    knobs.VISIBLE_DEVICES,
)


class _NotKept(Exception):
    """Why a plan has no entry."""


# What wrong bytes raise while they are read.
_UNREADABLE = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class Keeper:
    """Finds and keeps the plans of the methods of one file, on one device.

    Args:
        context: the device.
        parts: the file, and its data files.
        leaves: of the program.
        digests: of parts of the files, as far as they are known.
        label: the file and the method, for lists of entries.
    """

    def __init__(
        self,
        context: Context,
        parts: Sequence[FilePart],
        leaves: Leaves,
        digests: dict[str, str],
        label: str = "",
    ) -> None:
        self.context, self.parts, self.leaves, self.label = context, parts, leaves, label
        self.files = [part.view for part in parts]
        self._digests = digests

    @staticmethod
    def of(context: Context, source: Any, leaves: Leaves) -> Keeper | None:
        """What keeps the plans of a source of graphs; None if they are not kept: it is no file, the
        cache is in memory alone, or what decides about the plans is not known to the cache."""
        parts = getattr(source, "parts", None)
        # To write each graph, or to verify it, means to make it. And whoever tries other kernels
        # than those that were measured wants to be asked.
        wanted = knobs.KEEP_PLANS() and not knobs.DUMP() and not knobs.VERIFY()
        if parts is None or not wanted or type(context.traits.choices) is not Choices:
            return None
        if context.cache.folder is None or _is_extended() or not CODE:
            return None
        return Keeper(context, parts, leaves, source.digests, source.label)

    def question(
        self,
        method: str,
        sizes: InputSizes | None,
        expected: Mapping[str, Expected] | None,
        shares_weights: bool,
    ) -> str | None:
        """The question that an entry answers, as JSON; None if what it depends on cannot be told."""
        variables = knobs.set_here()
        for knob in _WITHOUT_EFFECT:
            variables.pop(knob.name, None)
        try:
            asked = {
                "format": FORMAT,
                "code": CODE,
                "device": self.context.kernels.device_key,
                "traits": plain(self.context.traits),
                "answers": dict(self.context.traits.choices.answers),
                "variables": variables,
                # What is decided by fragments follows from the device, if they may be asked for.
                "fragments": hasattr(self.context.traits.fragment_order, "settled"),
                "files": [
                    (len(file), hashlib.sha256(file[:_HEAD]).hexdigest()) for file in self.files
                ],
                "method": method,
                "sizes": plain(sizes),
                "expected": plain(expected or {}),
                "shares_weights": shares_weights,
            }
        except TypeError as error:
            _log.debug("%s: its plan is not kept: %s", method, error)
            return None
        return json.dumps(asked, sort_keys=True)

    def find(self, question: str) -> Lowered | None:
        """The plan that was kept for a question, if the files have the bytes that it was made from."""
        cache = self.context.cache
        payload = cache.get_plan(question)
        if payload is None:
            return None
        try:
            stream = io.BytesIO(payload)
            head = _Reader(stream, self).load()
            if self._digest(head.skipped) != head.digest:
                return None
            leaves = [self._leaf(each) for each in head.leaves]
            lowered = _Reader(stream, self, leaves).load()
        except _UNREADABLE as error:
            _log.debug("a kept plan cannot be read: %r", error)
            cache.drop_plan(question)
            return None
        if not isinstance(lowered, Lowered):
            cache.drop_plan(question)
            return None
        _load_operators(lowered)
        return lowered

    def keep(self, question: str, lowered: Lowered) -> bool:
        """Keeps a plan; whether it could."""
        if not getattr(self.context.traits.fragment_order, "settled", True):
            return False  # it may be known the next time
        if not self.context.cache.persistent or _code_now() != CODE:
            return False  # purevk was changed on disk, and some of it may be imported already
        try:
            payload = self._pack(lowered)
            self._try(payload)
        except (_NotKept, *_UNREADABLE, pickle.PicklingError) as error:
            _log.debug("%s: its plan is not kept: %s", self.label, error)
            return False
        kernels = self.context.kernels
        self.context.cache.put_plan(question, payload, kernels.device_key, self.label)
        return True

    # -- writing ---------------------------------------------------------------------------------
    def _pack(self, lowered: Lowered) -> bytes:
        leaves: dict[Value, int] = {}
        for inner in lowered.imported.nested():
            for value in (*inner.constants, *inner.states):
                leaves.setdefault(value, len(leaves))
        body = io.BytesIO()
        writer = _Writer(body, self, leaves)
        writer.dump(dataclasses.replace(lowered, read=()))
        described = [self._described(value, writer) for value in leaves]
        spans = [self.span_of(data) for data in lowered.read if len(data)]
        skipped = []
        for number, part in enumerate(self.parts):
            own = [(first, size) for file, first, size in writer.ranges if file == number]
            read = [span[1:] for span in spans if span is not None and span[0] == number]
            skipped.append(_without([*own, *part.tensors], [*read, *part.structure]))
        left_out = sum(size for ranges in skipped for _, size in ranges)
        compared = sum(map(len, self.files)) - left_out
        if compared > _MOST_COMPARED:
            raise _NotKept(f"{compared} bytes of the file would have to be compared")
        head = io.BytesIO()
        _Writer(head, self, {}).dump(_Head(self._digest(skipped), skipped, described))
        return head.getvalue() + body.getvalue()

    def _described(self, value: Value, writer: _Writer) -> tuple[Any, ...]:
        key = self.leaves.key(value)
        if isinstance(key, StateKey):
            return value.name, key.dtype, key.dims, key.name
        if isinstance(key, ConstantKey):
            span = writer.spans.get((key.address, key.nbytes))
            if span is not None:
                return value.name, key.dtype, key.dims, None, span
        raise _NotKept(f"where {value.name} comes from is not known")

    def _digest(self, skipped: Sequence[Sequence[tuple[int, int]]]) -> str:
        """Of all bytes of the files but the skipped ones."""
        key = repr(skipped)
        if key not in self._digests:
            self._digests[key] = _digest(self.files, skipped)
        return self._digests[key]

    def span_of(self, data: memoryview) -> tuple[int, int, int] | None:
        """Which file has bytes, and where: its number, the first byte and how many."""
        address = address_of(data)
        for number, file in enumerate(self.files):
            first = address - address_of(file)
            if 0 <= first and first + len(data) <= len(file):
                return number, first, len(data)
        return None

    def _try(self, payload: bytes) -> None:
        """Reads an entry, before it is kept."""
        stream = io.BytesIO(payload)
        head = _Reader(stream, self).load()
        _Reader(stream, self, [Value("leaf", None)] * len(head.leaves)).load()  # type: ignore[arg-type]

    # -- reading ---------------------------------------------------------------------------------
    def _leaf(self, described: tuple[Any, ...]) -> Value:
        name, dtype, dims, state, *span = described
        if state is not None:
            return self.leaves.state(name, StateKey(state, dtype, dims))
        return self.leaves.constant(name, TensorType(dtype, dims), self.bytes_of(span[0]))

    def bytes_of(self, span: Any) -> memoryview:
        """The bytes that an entry names."""
        if isinstance(span, bytes):
            return memoryview(span)
        number, first, size = span
        found: memoryview = self.files[number][first : first + size]
        return found


class _Head(NamedTuple):
    """What comes before the plan in an entry.

    Attributes:
        digest: of all bytes of the files that are not skipped.
        skipped: for each file, (first byte, bytes) of what the plan does not depend on, sorted.
        leaves: name, dtype, sizes and key of the constants and states.
    """

    digest: str
    skipped: list[list[tuple[int, int]]]
    leaves: list[tuple[Any, ...]]


class _Writer(pickle.Pickler):
    """Writes graphs and plans. Values that methods share are numbers, and tensors in the files
    are ranges of these.

    Attributes:
        ranges: (file, first byte, bytes) of the tensors.
        spans: where tensors are, or their bytes, by address and length.
    """

    def __init__(self, stream: io.BytesIO, keeper: Keeper, leaves: Mapping[Value, int]) -> None:
        super().__init__(stream, protocol=5)
        self._keeper, self._leaves = keeper, leaves
        self._inline = 0
        self.ranges: list[tuple[int, int, int]] = []
        self.spans: dict[tuple[int, int], Any] = {}

    def reducer_override(self, each: Any) -> Any:
        """Nodes with arguments whose classes come with all operators are read without these."""
        if type(each) is not Node or each.graphs:
            return NotImplemented
        args = tuple(_seal(arg) if _of_operators(arg) else arg for arg in each.args)
        if all(one is two for one, two in zip(args, each.args)):
            return NotImplemented
        return _node, (each.op, args, each.results, each.source, each.alias, each.inputs)

    def persistent_id(self, each: Any) -> Any:
        kind = type(each)
        if kind is Value:
            return self._leaves.get(each)
        return self._span(each) if kind is memoryview else None

    def _span(self, data: memoryview) -> Any:
        span: Any = self._keeper.span_of(data) if len(data) else None
        if span is not None:
            self.ranges.append(span)
        else:
            self._inline += len(data)
            if self._inline > _MOST_BYTES:
                raise _NotKept(f"more than {_MOST_BYTES} bytes of its tensors are not in the file")
            span = bytes(data)
        self.spans[address_of(data), len(data)] = span
        return (span,)


class _Attribute(Sealed):
    """An argument of a class of the operators, as it was pickled."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> Any:
        return _Attribute, (self.data,)

    def open(self) -> Arg:
        made: Arg = _PlainReader(io.BytesIO(self.data)).load()
        return made


def _node(*parts: Any) -> Node:
    return Node.sealed(*parts)


def _of_operators(arg: Any) -> bool:
    return type(arg).__module__.startswith("purevk.ops.")


def _seal(arg: Any) -> Any:
    """The argument, sealed; or itself if there are tensors in it."""
    stream = io.BytesIO()
    try:
        _PlainWriter(stream, protocol=5).dump(arg)
    except _NotKept:
        return arg
    _PlainReader(io.BytesIO(stream.getvalue())).load()  # what cannot be read is not kept
    return _Attribute(stream.getvalue())


class _PlainWriter(pickle.Pickler):
    """Writes what has no tensors."""

    def persistent_id(self, each: Any) -> Any:
        if isinstance(each, (Value, memoryview)):
            raise _NotKept("a tensor")
        return None


class _PlainReader(pickle.Unpickler):
    """Reads objects of the classes that arguments have, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _FUNCTIONS:
            return super().find_class(module, name)
        if "." not in name and f"{module}.".startswith(_MODULES):
            found = super().find_class(module, name)
            if (
                isinstance(found, type)
                and found.__module__ == module
                and (dataclasses.is_dataclass(found) or hasattr(found, "_fields"))
            ):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a plan")


class _Reader(_PlainReader):
    """Reads what `_Writer` wrote."""

    def __init__(
        self, stream: io.BytesIO, keeper: Keeper, leaves: Sequence[Value] | None = None
    ) -> None:
        super().__init__(stream)
        self._keeper, self._leaves = keeper, leaves or ()

    def persistent_load(self, number: Any) -> Any:
        if isinstance(number, int):
            return self._leaves[number]
        return self._keeper.bytes_of(number[0])

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__:
            own = {"_Head": _Head, "_Attribute": _Attribute, "_node": _node}
            if name in own:
                return own[name]
        return super().find_class(module, name)


def _digest(files: Sequence[memoryview], skipped: Sequence[Sequence[tuple[int, int]]]) -> str:
    """The SHA-256 of the bytes of files without some ranges, which are sorted."""
    made = hashlib.sha256()
    for file, ranges in zip(files, skipped, strict=True):
        at = 0
        for first, size in ranges:
            made.update(file[at:first])
            at = max(at, first + size)
        made.update(file[at:])
        made.update(len(file).to_bytes(8, "little"))
    return made.hexdigest()


def _without(
    ranges: Iterable[tuple[int, int]], read: Iterable[Sequence[int]]
) -> list[tuple[int, int]]:
    """The bytes of ranges, (first byte, bytes), that were not read: as such ranges, sorted and
    apart."""
    ends = [(first, 1, 0) for first, size in ranges if size]
    ends += [(first + size, -1, 0) for first, size in ranges if size]
    for first, size in read:
        ends += [(first, 0, 1), (first + size, 0, -1)]
    found: list[tuple[int, int]] = []
    inside = taken = start = 0
    for at, change, change_taken in sorted(ends):
        if inside and not taken and at > start:
            if found and sum(found[-1]) == start:
                found[-1] = (found[-1][0], at - found[-1][0])
            else:
                found.append((start, at - start))
        inside, taken, start = inside + change, taken + change_taken, at
    return found


def plain(value: Any) -> Any:
    """A value as plain data for JSON that is the same in each process. Of dataclasses, fields that do
    not count when they are compared are left out.

    Raises:
        TypeError: it has no such form.
    """
    if isinstance(value, DType):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            each.name: plain(getattr(value, each.name))
            for each in dataclasses.fields(value)
            if each.compare
        }
    if isinstance(value, Mapping):
        return sorted([plain(key), plain(each)] for key, each in value.items())
    if isinstance(value, (set, frozenset)):
        return sorted(map(plain, value))
    if isinstance(value, (tuple, list)):
        return [plain(each) for each in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} has no plain form")


def code() -> str:
    """Names the code of purevk on disk: its version, and the sizes and dates of its files, by which
    Python too tells whether bytecode is that of a file. What an installer wrote about the files has
    their hashes. Without it, and where all files have one date, as those of builds that are the same
    each time, their contents count. Empty: there are no files, as in an archive."""
    from purevk import __version__

    found: list[tuple[str, int, int]] = []  # path within the package, size, date
    folders = [""]
    while folders:
        inside = folders.pop()
        with os.scandir(f"{_PACKAGE}{inside}") as entries:
            for entry in entries:
                if entry.name.endswith((".py", ".comp", ".glslh")):
                    about = entry.stat()
                    path = f"{inside}/{entry.name}"
                    found.append((path, about.st_size, int(about.st_mtime)))
                elif entry.name != "__pycache__" and entry.is_dir():
                    folders.append(f"{inside}/{entry.name}")
    if not found:
        return ""
    found.sort()
    made = hashlib.sha256(repr((__version__, sys.version, found)).encode())
    records = _records()
    for record in records:
        made.update(Path(record).read_bytes())
    if not records and len({date for _, _, date in found}) == 1:
        for path, _, _ in found:
            made.update(Path(f"{_PACKAGE}{path}").read_bytes())
    return made.hexdigest()


def _records() -> list[str]:
    """The lists of files, with their hashes, that an installer wrote beside the package."""
    beside = os.path.dirname(_PACKAGE)
    return sorted(
        path
        for name in os.listdir(beside)
        if name.startswith("purevk-") and name.endswith(".dist-info")
        if os.path.isfile(path := os.path.join(beside, name, "RECORD"))
    )


def _code_now() -> str:
    try:
        return code()
    except OSError:  # an archive, or an installer is at work
        return ""


CODE = _code_now()
"""The code of this process, which is on disk when it is imported."""


def _is_extended() -> bool:
    """Whether the user has registered or allowed operators."""
    executors = sys.modules.get("purevk.ops.executors")
    extension = sys.modules.get("purevk.ops.extension")
    return (executors is not None and executors.any_known()) or (
        extension is not None and extension.any_changed()
    )


def _load_operators(lowered: Lowered) -> None:
    """Imports the operators if a call reads arguments of nodes by name."""
    if any(not step.on_device for plan in lowered.plan.nested() for step in plan.steps):
        import purevk.ops  # noqa: F401
