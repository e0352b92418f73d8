"""The sequences that the caches hold, in pages; and copies of the states of recurrent layers, from which
a sequence continues at an earlier token."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

import numpy as np

from purevk.ir import TensorType, Value
from purevk.program.program import Program
from purevk.program.variants.variant import GraphSource

STATE = "pages"
PAGE = 64  # tokens
_FEW_TOKENS = 16  # tokens that are rather computed again than kept in pages of their own
_PAGES_AHEAD = 3  # pages that a sequence gets before it needs them: each change of the table waits
MOST = 16
MOST_BYTES = 1 << 29
TAIL = 8  # tokens that a template puts before an answer, such as "<think>", and may leave out later


@dataclass(eq=False)
class _Sequence:
    """Tokens, and the pages that have their keys and values."""

    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


def common_tokens(ours: Tokens[int], theirs: Tokens[int]) -> int:
    """How many tokens two sequences have in common from the start."""
    pairs = enumerate(zip(ours, theirs))
    return next((at for at, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


class Pages:
    """The sequences whose keys and values are in the caches of a program. They share the pages of
    their common start. One of them is current: the state "pages" has the first row of each of its
    pages. The others stay until their pages are needed, the least recently used the shortest.

    Args:
        program: has the method "decode", whose caches are states [1, heads, rows, width]. Page n is
            rows PAGE * n to PAGE * (n + 1) - 1 of all of them.
        keeps_one: there is only one sequence.
    """

    def __init__(self, program: Program, keeps_one: bool = False) -> None:
        self._program, self._keeps_one = program, keeps_one
        self._sequences = [_Sequence()]  # the last one is the current one
        self._table, self._caches, self._count = self._states()
        self._users = [0] * self._count  # how many sequences have each page
        self._free = [*reversed(range(self._count))]
        self._is_stale = False  # whether the table is that of another sequence, until `reserve`

    def _states(self) -> tuple[Value, list[Value], int]:
        """The table, the caches and the number of pages."""
        graph = self._program.method("decode").graph
        named = {label.key: value for value, label in graph.labels.items()}
        caches = [value for _, value in sorted(named.items(), key=str) if value.type.rank == 4]
        return named[STATE], caches, int(named[STATE].type.dims[0])

    def switch_to(self, prompt: Tokens[int]) -> list[int]:
        """Makes the sequence current that has most in common with a prompt, and returns its tokens. If
        the prompt lacks more than a few of them, a new sequence of the common ones is current
        instead."""
        last = self._sequences[-1]
        lengths = [common_tokens(each.tokens, prompt) for each in self._sequences]
        common, number = max(zip(lengths, range(len(lengths))))
        base = sequence = self._sequences[number]
        if len(base.tokens) - common >= _FEW_TOKENS and not self._keeps_one:
            sequence = _Sequence(base.tokens[:common], base.pages[: pages_of(common)])
            for page in sequence.pages:
                self._users[page] += 1
        if sequence is not last:
            self._release(last, pages_of(len(last.tokens)))
            others = [each for each in self._sequences if each.tokens and each is not base]
            self._sequences = [*others, *dict.fromkeys((base, sequence))]
            self._is_stale = True
        return sequence.tokens

    def clear(self) -> list[int]:
        """Drops all sequences, and returns the tokens of an empty one."""
        for sequence in self._sequences:
            self._release(sequence, 0)
        self._sequences = [_Sequence()]
        return self._sequences[-1].tokens

    def reserve(self, length: int) -> None:
        """Gives the current sequence unshared pages for what follows its tokens, up to so many tokens.
        The least recently used sequences are dropped if there are no more pages."""
        sequence = self._sequences[-1]
        pages, filled = sequence.pages, pages_of(len(sequence.tokens))
        if any(self._users[page] > 1 for page in pages[filled:]):
            self._release(sequence, filled)
        has_part = len(sequence.tokens) % PAGE > 0
        is_shared = has_part and self._users[pages[filled - 1]] > 1
        if not is_shared and length <= len(pages) * PAGE:
            if self._is_stale:
                self._write_table()
            return
        if is_shared:
            shared = pages[filled - 1]
            self._release(sequence, filled - 1)
            pages.append(self._new_page())
            self._copy_page(shared, pages[-1])
        while len(pages) * PAGE < length:
            pages.append(self._new_page())
        ahead = min(_PAGES_AHEAD, len(self._free), self._count - len(pages))
        pages.extend(self._new_page() for _ in range(ahead))
        self._write_table()

    def _new_page(self) -> int:
        while not self._free:
            self._release(self._sequences.pop(0), 0)
        page = self._free.pop()
        self._users[page] = 1
        return page

    def _release(self, sequence: _Sequence, first: int) -> None:
        """Takes the pages from number `first` on away from a sequence."""
        for page in sequence.pages[first:]:
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)
        del sequence.pages[first:]

    def _write_table(self) -> None:
        pages = self._sequences[-1].pages
        table = np.zeros(self._count, np.int32)
        table[: len(pages)] = np.array(pages, np.int32) * PAGE
        with self._program.held():
            self._program.states.upload([(self._table, table.view(np.uint8).data)])
        self._is_stale = False

    def _copy_page(self, page: int, other: int) -> None:
        if page != other:
            with self._program.held():
                self._program.states.copy(
                    (cache, (head + page) * nbytes, cache, (head + other) * nbytes, nbytes)
                    for cache in self._caches
                    for head, nbytes in _heads(cache)
                )

    def enlarge(self, sources: Mapping[str, GraphSource], dropped: Collection[str]) -> None:
        """Replaces methods by those for larger caches, which then hold what the smaller ones do.

        Args:
            sources: of "decode", and of others, if there are any.
            dropped: names of methods that are not needed any more.
        """
        with self._program.held(), replacing(self._program, sources, dropped):
            table, caches, count = self._states()
            self._program.states.copy(
                (cache, head * size, larger, new_head * size, self._count * size)
                for cache, larger in zip(self._caches, caches)
                for (head, size), (new_head, _) in zip(_heads(cache), _heads(larger))
            )
        self._free = [*reversed(range(self._count, count)), *self._free]
        self._users += [0] * (count - self._count)
        self._table, self._caches, self._count = table, caches, count
        self._write_table()


@contextlib.contextmanager
def replacing(
    program: Program, sources: Mapping[str, GraphSource], dropped: Collection[str]
) -> Iterator[None]:
    """Replaces methods of a program by others of the same names, and drops those named by `dropped`.
    Within, the states of both are there, and may be copied. Afterwards, constants and states that no
    method has any more are released. After an error, the methods are those of before."""
    before = replaced = program.methods
    program.methods = {name: each for name, each in before.items() if name not in dropped}
    try:
        program.add_methods(sources)
        yield
    except BaseException:
        replaced, program.methods = program.methods, before
        raise
    finally:
        for method in replaced.values():
            if program.methods.get(method.name) is not method:
                method.close()
        executables = [each for each in program.executables if not each.closed]
        plans = [inner.plan for each in executables for inner in each.nested()]
        program.states.keep({state for plan in plans for state in plan.assignment.graph.states})
        program.release_unused()


def pages_of(tokens: int) -> int:
    """How many pages so many tokens have."""
    return -(-tokens // PAGE)


def _heads(cache: Value) -> Iterator[tuple[int, int]]:
    """The first page of each head of a cache, and the bytes of a page."""
    _, heads, rows, width = map(int, cache.type.dims)
    for head in range(heads):
        yield head * (rows // PAGE), PAGE * width * cache.type.dtype.itemsize


class Checkpoints:
    """Copies in memory of the host, by how many tokens the states had seen. All are of the sequence
    that is in the cache: attention has written over the rows of any other.

    Args:
        program: has the method "decode".
        is_cache: whether a state has a row for each position, and need not be copied; None: those
            of four dims have, see `Network`.

    Attributes:
        position: tokens that the states on the device have seen; None: a call was interrupted.
    """

    def __init__(
        self, program: Program, is_cache: Callable[[TensorType], bool] | None = None
    ) -> None:
        self.position: int | None = 0
        self._program = program
        self._is_cache = is_cache or (lambda state: state.rank == 4)
        self._copies: dict[int, list[tuple[Value, bytes]]] = {}

    def save(self) -> None:
        """Copies the states. The oldest copies are dropped if there are too many."""
        if not self.position or self.position in self._copies:
            return
        with self._program.held():
            states = [
                (value, max(value.type.nbytes, 4))
                for value, label in self._program.method("decode").graph.labels.items()
                if (label.key or label.name) not in ("logits", "token", STATE)
                and not self._is_cache(value.type)
            ]
            most = min(MOST, MOST_BYTES // max(sum(nbytes for _, nbytes in states), 1))
            while self._copies and len(self._copies) >= most:
                del self._copies[min(self._copies)]
            if most:
                with contextlib.suppress(MemoryError):  # then there is no copy
                    data = self._program.states.read_all(states)
                    copy = [(value, part) for (value, _), part in zip(states, data)]
                    self._copies[self.position] = copy

    def restore(self, position: int) -> int:
        """Has the states be those of the newest copy that has seen at most so many tokens, and returns
        how many. Later copies are dropped, as what they are of is written over. 0: there is none."""
        self._copies = {at: copy for at, copy in self._copies.items() if at <= position}
        if self.position == position:
            self.save()
            return position
        self.position = None
        newest = max(self._copies, default=0)
        if newest:
            with self._program.held():
                copy = self._copies[newest]
                self._program.states.upload([(value, memoryview(data)) for value, data in copy])
        self.position = newest
        return newest
