"""Plans of lowered methods in the on-disk cache: a later load of the same file runs no pass and lowers
nothing.

The key of a plan has all that lowering depends on besides the file: purevk's own code, the device,
what was measured on it, the environment variables, the sizes. The file is compared by its bytes.
Those of weights are left out, unless a decision was taken from their elements (`ReadLog` notes
these), or graphs are read from these bytes too. So no entry needs a file's name or date, and a model
that was trained further keeps its plan.

A graph that is built, not read from bytes of a file, says itself what it follows from: a text in the
key. Its weights are `BorrowedConstant`s, which go by their names.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from purevk import knobs
from purevk.dtypes import DType
from purevk.errors import FileFormatError
from purevk.graph.context import Context
from purevk.ir import BorrowedConstant, Constant, Size, TensorType, Value
from purevk.ir.expected import Expected
from purevk.mapped import address_of, own
from purevk.program.leaves import ConstantKey, Leaves, StateKey
from purevk.program.plan_cache.code import CODE, code_now
from purevk.program.plan_cache.comparison import digest, without
from purevk.program.plan_cache.records import DAMAGED, NotCacheable, Reader, Span, Writer
from purevk.program.plan_cache.schema import Unreadable
from purevk.schedule.plan import Lowered
from purevk.tuning import Choices

if TYPE_CHECKING:
    from purevk.frontends.files import FilePart
    from purevk.frontends.importer import InputSizes

FORMAT = 2
_MOST_COMPARED = 32 << 20  # bytes of files; comparing more takes longer than lowering
_HEAD = 4096  # first bytes of a file, which tell apart most files of one size
_log = logging.getLogger("purevk")
# Variables that change neither graphs nor plans, and what differs between machines.
_WITHOUT_EFFECT = (
    knobs.CACHE,
    knobs.CHECK,
    knobs.COMPILE_THREADS,
    knobs.DEVICE,
    knobs.EAGER_FALLBACK,
    knobs.PROGRESS,
    knobs.SEED,
    knobs.SHADERC,
    knobs.TIMEOUT,
    knobs.VALIDATION,
    knobs.VISIBLE_DEVICES,
)


class PlanCache:
    """The plans of the methods of one file, on one device.

    Args:
        context: the device.
        parts: the file, and its data files.
        leaves: of the program.
        digests: of parts of the files, as far as they are known.
        label: the file and the method, for lists of entries.
        built: of a graph that is built, what it follows from.
        borrowed: gives a constant of such a graph by its name.
    """

    def __init__(
        self,
        context: Context,
        parts: Sequence[FilePart],
        leaves: Leaves,
        digests: dict[str, str],
        label: str = "",
        built: str = "",
        borrowed: Callable[[str], Constant] | None = None,
    ) -> None:
        self.context, self.parts, self.leaves, self.label = context, parts, leaves, label
        self.files = [part.view for part in parts]
        self._digests, self._built = digests, built
        self._borrowed = None if borrowed is None else functools.cache(borrowed)

    @staticmethod
    def of(context: Context, source: Any, leaves: Leaves) -> PlanCache | None:
        """The cache for the plans of a source of graphs. None if they are not cached: it is no file,
        the cache is only in memory, or what decides about the plans is not known to the cache."""
        parts = getattr(source, "parts", None)
        # To write each graph, or to verify it, means to make it. And whoever tries other kernels
        # than those that were measured wants to be asked.
        stores_plans = knobs.CACHE().plans and not knobs.DUMP() and not knobs.VERIFY()
        built: str = getattr(source, "built", "")
        if parts is None and not built:
            return None
        if not stores_plans or type(context.traits.choices) is not Choices:
            return None
        if context.cache.folder is None or _is_extended() or not CODE:
            return None
        if built:
            return PlanCache(context, (), leaves, {}, source.label, built, source.borrowed)
        assert parts is not None
        return PlanCache(context, parts, leaves, source.digests, source.label)

    def key(
        self,
        method: str,
        sizes: InputSizes | None,
        expected: Mapping[str, Expected] | None,
        shares_weights: bool,
        round: str = "fused",
    ) -> str | None:
        """The key of a plan, as JSON; None if what it depends on cannot be told."""
        variables = knobs.set_here()
        for knob in _WITHOUT_EFFECT:
            variables.pop(knob.name, None)
        try:
            parts = {
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
                "graph": self._built,
                "method": method,
                "sizes": plain(sizes),
                "expected": plain(expected or {}),
                "shares_weights": shares_weights,
                "round": round,
            }
        except (TypeError, FileFormatError) as error:  # a file may be cut short
            _log.debug("%s: its plan is not cached: %s", method, error)
            return None
        return json.dumps(parts, sort_keys=True)

    def get(self, key: str) -> Lowered | None:
        """The plan of a key, if the files have the bytes that it was made from."""
        cache = self.context.cache
        payload = cache.get_plan(key)
        if payload is None:
            return None
        try:
            reader = Reader(payload, self.files, self._leaf, self._borrowed)
            skipped = _ranges(reader.head["skipped"])
            if self._digest(skipped) != reader.head["digest"]:
                return None
            lowered = reader.root()
        except DAMAGED as error:
            _log.debug("a plan in the cache cannot be read: %r", error)
            cache.drop_plan(key)
            return None
        if not isinstance(lowered, Lowered):
            cache.drop_plan(key)
            return None
        _load_operators(lowered)
        return lowered

    def put(self, key: str, lowered: Lowered) -> bool:
        """Writes a plan into the cache; whether it could."""
        if not getattr(self.context.traits.fragment_order, "settled", True):
            return False  # it may be known the next time
        if not self.context.cache.persistent or code_now() != CODE:
            return False  # purevk was changed on disk, and some of it may be imported already
        try:
            payload = self._pack(lowered)
            Reader(
                payload,
                self.files,
                lambda name, dtype, dims, *_: Value(name, TensorType(dtype, dims)),
                self._borrowed,
            ).root()
        except (NotCacheable, *DAMAGED) as error:
            _log.debug("%s: its plan is not cached: %s", self.label, error)
            return False
        kernels = self.context.kernels
        self.context.cache.put_plan(key, payload, kernels.device_key, self.label)
        return True

    # -- writing ---------------------------------------------------------------------------------
    def _pack(self, lowered: Lowered) -> bytes:
        leaves: dict[Value, tuple[Any, ...]] = {}
        for inner in lowered.imported.nested():
            for value in (*inner.constants, *inner.states):
                if value not in leaves:
                    leaves[value] = self._described(value, inner.constants.get(value))
        writer = Writer(self._span_of, leaves, borrowed=self._borrowed is not None)

        def head() -> dict[str, Any]:
            skipped = self._skipped(lowered, writer.ranges)
            return {"digest": self._digest(skipped), "skipped": skipped}

        return writer.payload(dataclasses.replace(lowered, read=()), head)

    def _skipped(self, lowered: Lowered, ranges: Sequence[Span]) -> list[list[tuple[int, int]]]:
        """What a plan does not depend on, in each file: (first byte, bytes), sorted.

        Args:
            ranges: the tensors of the plan that are in the files.
        """
        if lowered.read is None:
            raise NotCacheable("elements of weights decided that are in no file as they are")
        spans = [self._span_of(data) for data in lowered.read if len(data)]
        skipped = []
        for number, part in enumerate(self.parts):
            own = [(first, size) for file, first, size in ranges if file == number]
            read = [span[1:] for span in spans if span is not None and span[0] == number]
            skipped.append(without([*own, *part.tensors], [*read, *part.structure]))
        left_out = sum(size for ranges in skipped for _, size in ranges)
        compared = sum(map(len, self.files)) - left_out
        if compared > _MOST_COMPARED:
            raise NotCacheable(f"{compared} bytes of the file would have to be compared")
        return skipped

    def _described(self, value: Value, constant: Constant | None) -> tuple[Any, ...]:
        """The fields of a leaf, see `Writer`."""
        leaf = self.leaves.key(value)
        if isinstance(leaf, StateKey):
            return value.name, leaf.dtype, leaf.dims, leaf.name, None
        if isinstance(leaf, ConstantKey) and constant is not None:
            name = ""
            if self._borrowed is not None and isinstance(constant, BorrowedConstant):
                name = constant.name
            return value.name, leaf.dtype, leaf.dims, None, name or constant.data
        raise NotCacheable(f"where {value.name} comes from is not known")

    def _digest(self, skipped: Sequence[Sequence[tuple[int, int]]]) -> str:
        """Of all bytes of the files but the skipped ones."""
        key = repr(skipped)
        if key not in self._digests:
            self._digests[key] = digest(self.files, skipped)
        return self._digests[key]

    def _span_of(self, data: memoryview) -> Span | None:
        """Which file has bytes, and where."""
        address = address_of(data)
        for number, file in enumerate(self.files):
            first = address - address_of(file)
            if 0 <= first and first + len(data) <= len(file):
                return number, first, len(data)
        return None

    # -- reading ---------------------------------------------------------------------------------
    def _leaf(
        self,
        name: str,
        dtype: DType,
        dims: tuple[Size, ...],
        state: str | tuple[str, str] | None,
        data: memoryview | str | None,
    ) -> Value:
        if state is not None:
            return self.leaves.state(name, StateKey(state, dtype, dims))
        if data is None:
            raise Unreadable(f"the constant {name} has no bytes")
        if isinstance(data, str):
            if self._borrowed is None:
                raise Unreadable(f"the constant {name} has no bytes")
            return self.leaves.constant(name, TensorType(dtype, dims), self._borrowed(data))
        return self.leaves.constant(name, TensorType(dtype, dims), Constant(data))


def _ranges(skipped: Any) -> list[list[tuple[int, int]]]:
    """The skipped bytes of each file, from JSON."""
    left_out = [[(first, size) for first, size in ranges] for ranges in skipped]
    if any(
        type(number) is not int or number < 0
        for ranges in left_out
        for range_ in ranges
        for number in range_
    ):
        raise Unreadable("skipped bytes are pairs of numbers")
    return left_out


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
            field.name: plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.compare
        }
    if isinstance(value, Mapping):
        return sorted([plain(key), plain(item)] for key, item in value.items())
    if isinstance(value, (set, frozenset)):
        return sorted(map(plain, value))
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
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
