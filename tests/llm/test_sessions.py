"""Conversations: several in the pages of one cache, and saved ones: damaged, and with what JSON can hold
that no text does."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import purevk.llm
from purevk.dtypes import DType
from purevk.errors import FileFormatError, InputError
from purevk.ir import Label, TensorType, Value
from purevk.llm import arguments
from purevk.llm.pieces import Pieces, Stats
from purevk.llm.sequences import PAGE, STATE, Pages, common_tokens
from purevk.llm.session import Session


def session() -> Session:
    model: Any = None  # is not asked
    return Session(model, None, "error", {})


class Counter:
    """A model whose tokens are characters."""

    def __init__(self, context: int) -> None:
        self.context, self.calls = context, 0

    def count_tokens(self, messages: list[dict[str, Any]], **options: Any) -> int:
        self.calls += 1
        return sum(len(each["content"]) for each in messages)

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> Pieces:
        return Pieces(iter(()), Stats())


@pytest.mark.parametrize("system", [None, "be brief"])
@pytest.mark.parametrize("length", [1, 3, 150])
def test_the_oldest_turns_are_forgotten(length: int, system: str | None) -> None:
    """So few as make room, with few counts of tokens: each renders the conversation."""
    model: Any = Counter(150)
    session = Session(model, system, "slide", {"max_tokens": 10})
    session.messages += [{"role": "user", "content": "x" * length}] * 1000
    list(session.send("last"))
    *kept, last, _answer = session.messages
    assert last["content"] == "last"
    room = 150 - 10 - len("last") - len(system or "")
    assert len(kept) - bool(system) == room // length
    assert model.calls <= 12


def test_surrogates_are_written_as_they_were_read(tmp_path: Path) -> None:
    """A saved conversation with one could not be saved again."""
    path = tmp_path / "session.json"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "a\ud800"}]}))
    first = session()
    first.load(path)
    first.save(path)
    second = session()
    second.load(path)
    assert second.messages == first.messages == [{"role": "user", "content": "a\ud800"}]


DAMAGED = [
    b"", b"[1]", b'"x"', b"[" * 100_000, b"\xff\xfe\x00", b'{"messages": 5}', b'{"messages": "user"}',
    b'{"messages": [null]}', b'{"messages": [{"role": ["user"], "content": "x"}]}',
    b'{"messages": {"role": "user"}}', b'{"messages": ' + b"9" * 100_000 + b"}", b'{"messages": []}',
]  # fmt: skip


@pytest.mark.parametrize("data", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_files(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "session.json"
    path.write_bytes(data)
    with pytest.raises((FileFormatError, InputError)):
        session().load(path)


@pytest.mark.parametrize("messages", [5, None, "x", {"role": "user"}, [5], []])
def test_what_is_no_conversation(messages: Any) -> None:
    with pytest.raises(InputError):
        arguments.messages(messages)


# -- pages -----------------------------------------------------------------------------------------
HEADS, WIDTH = 2, 3


class Device:
    """What `Pages` asks of a program. A cache has tokens in place of keys."""

    def __init__(self, pages: int) -> None:
        self.states = self.graph = self
        self.resize(pages)
        self.table = np.zeros(pages, np.int32)

    def resize(self, pages: int) -> None:
        table = Value(STATE, TensorType(DType.int32, (pages,)))
        cache = Value("keys", TensorType(DType.float32, (1, HEADS, pages * PAGE, WIDTH)))
        self.labels = {value: Label(value.name, value.name) for value in (table, cache)}
        self.bytes = {cache: np.zeros(cache.type.nbytes, np.uint8)}
        self.cache = cache

    @property
    def keys(self) -> np.ndarray:
        return self.bytes[self.cache].view(np.float32).reshape(self.cache.type.dims)

    def method(self, name: str) -> Device:
        return self

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def replacing(self, pages: Any, dropped: Any) -> Iterator[None]:
        old = self.bytes
        self.resize(pages)
        self.bytes.update(old)
        yield

    def upload(self, items: list[tuple[Value, memoryview]]) -> None:
        ((_, data),) = items
        self.table = np.frombuffer(data, np.int32).copy()

    def copy(self, items: Iterator[tuple[Value, int, Value, int, int]]) -> None:
        for source, start, target, to, nbytes in items:
            self.bytes[target][to : to + nbytes] = self.bytes[source][start : start + nbytes]

    def rows(self, first: int, last: int) -> np.ndarray:
        positions = np.arange(first, last)
        rows: np.ndarray = self.table[positions // PAGE] + positions % PAGE
        return rows


@pytest.mark.parametrize("seed", range(8))
def test_each_sequence_has_its_own_tokens(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that go on with one another, or part ways; steps that nobody waits for; cuts."""
    random = np.random.default_rng(seed)
    count = int(random.integers(2, 9))
    device: Any = Device(count)
    monkeypatch.setattr("purevk.llm.sequences.replacing", Device.replacing)
    pages = Pages(device)
    known: list[list[int]] = [[]]
    reused = 0
    for step in range(120):
        base = known[random.integers(len(known))]
        base = base[: random.integers(len(base) + 1)] if random.random() < 0.6 else base
        prompt = [*base, *random.integers(1, 999, random.integers(1, 90)).tolist()]
        prompt = prompt[-count * PAGE :]
        tokens = pages.switch_to(prompt[:-1])
        common = common_tokens(tokens, prompt[:-1])
        reused += common
        del tokens[common:]
        pages.reserve(len(prompt))
        while True:
            assert (
                device.keys[0, :, device.rows(0, common)] == np.array(prompt)[:common, None, None]
            ).all()
            device.keys[0, :, device.rows(common, len(prompt))] = np.array(prompt)[
                common:, None, None
            ]
            tokens += prompt[common:]
            common = len(tokens)
            if random.random() < 0.2 or common == count * PAGE:
                break
            pages.reserve(common + 1)
            device.keys[0, :, device.rows(common, common + 1)] = 0.5  # the step that runs ahead
            prompt = [*prompt, int(random.integers(1, 999))]
        known = [*known[-5:], list(tokens)]
        if random.random() < 0.1:
            del tokens[random.integers(len(tokens)) :]
        if step % 50 == 49:
            count += int(random.integers(1, 4))
            pages.enlarge(count, ())
    assert reused > 1000 and sum(pages._users) + len(pages._free) >= count


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("gguf")
    from tests.llm.harness import write_llama

    path = tmp_path_factory.mktemp("llm") / "tiny.gguf"
    write_llama(path, "Q4_1", table="Q8_0", vocabulary=True)
    return path


@pytest.mark.device
def test_sessions_keep_what_they_computed(path: Path) -> None:
    options: dict[str, Any] = {"system": "s" * 100, "max_tokens": 4}
    with (
        purevk.llm.load(path, context=640, dtype="float32") as model,
        purevk.llm.load(path, context=640, dtype="float32") as other,
    ):
        sessions = [model.session(**options) for _ in "ab"]
        lengths = [0, 0]
        for text in ("hi", "x" * 70, "ho"):
            for number, session in enumerate(sessions):
                pieces = session.send(text * (number + 1))
                answer = pieces.text()
                other.position = 0
                assert other.chat(session.messages[:-1], max_tokens=4).text() == answer
                shared = 100 if number else 0  # the first message is that of the other session
                assert pieces.stats.reused_tokens >= max(lengths[number] - 16, shared)
                lengths[number] = pieces.stats.prompt_tokens
        assert max(model.decoder.pages._users) == 2  # of the page of the system's message


@pytest.mark.device
@pytest.mark.parametrize(
    ("family", "cache"),
    [
        ("mistral", "auto"),
        ("llama3", "int8"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [("gemma2", "auto"), ("gemma4", "auto"), ("gpt-oss", "auto"),
                         ("qwen35", "auto"), ("llama3", "float8"), ("llama3", "float16")]
        ),
    ],
)  # fmt: skip
def test_logits_of_a_grown_cache_and_of_parted_sequences(
    family: str, cache: str, tmp_path: Path
) -> None:
    """They are those of transformers, or with packed caches near them."""
    pytest.importorskip("gguf")
    from tests.llm.families import PROMPT, expected, tiny

    module = tiny(family)
    module.save_pretrained(tmp_path)
    close = 2e-4 if cache == "auto" else 0.3
    one, two = PROMPT * 9, [*PROMPT, *PROMPT[::-1] * 8]
    with purevk.llm.load(tmp_path, context=250, dtype="float32", cache=cache) as model:

        def check(prompt: list[int], least: int) -> None:
            pieces = model.generate(prompt, max_tokens=1)
            assert pieces.tokens()
            assert pieces.stats.reused_tokens >= least * (not model.decoder.is_recurrent)
            np.testing.assert_allclose(model.logits, expected(module, prompt), atol=close)

        check(one, 0)
        check(two, 10)
        check([*one, 4], 90)
        program = model.program
        model.grow(300)
        check([*two, 4], 90)
        check([*one, 4] * 2, 91)
        assert model.program is program and model.position == 182
