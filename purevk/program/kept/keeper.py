"""Plans of lowered methods, kept in the on-disk cache: a later load of the same file runs no pass and
lowers nothing.

An entry answers a question, which has all that lowering depends on besides the file: purevk's own
code, the device, what was measured on it, the environment variables, the sizes. The file is compared
by its bytes. Those of weights are left out, unless a decision was taken from their elements
(`ReadLog` notes these), or graphs are read from these bytes too. So no entry needs a file's name or
date, and a model that was trained further keeps its plan.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import logging
import pickle
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from purevk import knobs
from purevk.dtypes import DType
from purevk.errors import FileFormatError
from purevk.graph.context import Context
from purevk.ir import Constant, TensorType, Value
from purevk.ir.expected import Expected
from purevk.mapped import address_of, own
from purevk.program.kept.code import CODE, code_now
from purevk.program.kept.comparison import digest, without
from purevk.program.kept.pickles import UNREADABLE, Head, NotKept, Reader, Span, Writer
from purevk.program.leaves import ConstantKey, Leaves, StateKey
from purevk.schedule.plan import Lowered
from purevk.tuning import Choices

if TYPE_CHECKING:
    from purevk.frontends.files import FilePart
    from purevk.frontends.importer import InputSizes

FORMAT = 1
_MOST_COMPARED = 32 << 20  # bytes of files; comparing more takes longer than lowering
_HEAD = 4096  # first bytes of a file, which tell apart most files of one size
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
                    (len(file), hashlib.sha256(own(file[:_HEAD])).hexdigest())
                    for file in self.files
                ],
                "method": method,
                "sizes": plain(sizes),
                "expected": plain(expected or {}),
                "shares_weights": shares_weights,
            }
        except (TypeError, FileFormatError) as error:  # a file may have been cut short
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
            head = Reader(stream, self.bytes_of).load()
            if self._digest(head.skipped) != head.digest:
                return None
            leaves = [self._leaf(each) for each in head.leaves]
            lowered = Reader(stream, self.bytes_of, leaves).load()
        except UNREADABLE as error:
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
        if not self.context.cache.persistent or code_now() != CODE:
            return False  # purevk was changed on disk, and some of it may be imported already
        try:
            payload = self._pack(lowered)
            self._try(payload)
        except (NotKept, *UNREADABLE, pickle.PicklingError) as error:
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
        writer = Writer(body, self.span_of, leaves)
        writer.dump(dataclasses.replace(lowered, read=()))
        described = [self._described(value, writer) for value in leaves]
        spans = [self.span_of(data) for data in lowered.read if len(data)]
        skipped = []
        for number, part in enumerate(self.parts):
            own = [(first, size) for file, first, size in writer.ranges if file == number]
            read = [span[1:] for span in spans if span is not None and span[0] == number]
            skipped.append(without([*own, *part.tensors], [*read, *part.structure]))
        left_out = sum(size for ranges in skipped for _, size in ranges)
        compared = sum(map(len, self.files)) - left_out
        if compared > _MOST_COMPARED:
            raise NotKept(f"{compared} bytes of the file would have to be compared")
        head = io.BytesIO()
        Writer(head, self.span_of, {}).dump(Head(self._digest(skipped), skipped, described))
        return head.getvalue() + body.getvalue()

    def _described(self, value: Value, writer: Writer) -> tuple[Any, ...]:
        key = self.leaves.key(value)
        if isinstance(key, StateKey):
            return value.name, key.dtype, key.dims, key.name
        if isinstance(key, ConstantKey) and isinstance(key.address, int):
            span = writer.spans.get((key.address, key.nbytes))
            if span is not None:
                return value.name, key.dtype, key.dims, None, span
        raise NotKept(f"where {value.name} comes from is not known")

    def _digest(self, skipped: Sequence[Sequence[tuple[int, int]]]) -> str:
        """Of all bytes of the files but the skipped ones."""
        key = repr(skipped)
        if key not in self._digests:
            self._digests[key] = digest(self.files, skipped)
        return self._digests[key]

    def span_of(self, data: memoryview) -> Span | None:
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
        head = Reader(stream, self.bytes_of).load()
        Reader(stream, self.bytes_of, [Value("leaf", None)] * len(head.leaves)).load()  # type: ignore[arg-type]

    # -- reading ---------------------------------------------------------------------------------
    def _leaf(self, described: tuple[Any, ...]) -> Value:
        name, dtype, dims, state, *span = described
        if state is not None:
            return self.leaves.state(name, StateKey(state, dtype, dims))
        constant = Constant(self.bytes_of(span[0]))
        return self.leaves.constant(name, TensorType(dtype, dims), constant)

    def bytes_of(self, span: Span | bytes) -> memoryview:
        """The bytes that an entry names."""
        if isinstance(span, bytes):
            return memoryview(span)
        number, first, size = span
        found: memoryview = self.files[number][first : first + size]
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
