"""The reader of GGUF files, against files of the package `gguf`, and against damaged ones."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")

import purevk.llm  # noqa: E402
from purevk.errors import (  # noqa: E402
    FileFormatError,
    InputError,
    PurevkError,
    UnsupportedProgramError,
)
from purevk.llm.architectures.llama import Llama  # noqa: E402
from purevk.llm.gguf import GgufFile  # noqa: E402
from purevk.llm.tokenizer import tokenizer_of  # noqa: E402
from tests.llm.harness import write_llama  # noqa: E402


def header(*, tensors: bytes = b"", pairs: bytes = b"", counts: tuple[int, int] = (0, 0)) -> bytes:
    """A file of version 3."""
    return b"GGUF" + struct.pack("<IQQ", 3, *counts) + pairs + tensors


def text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def tensor(name: bytes, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


def read(path: Path, data: bytes) -> GgufFile:
    path.write_bytes(data)
    return GgufFile(path)


def test_values_and_tensors(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    values = {"a.int": 7, "a.text": "é漢", "a.list": ["x", "", "y"], "a.numbers": [1, 2, 3]}
    for key, value in values.items():
        writer.add_key_value(
            key,
            value,
            {int: gguf.GGUFValueType.UINT32, str: gguf.GGUFValueType.STRING}.get(
                type(value), gguf.GGUFValueType.ARRAY
            ),
        )
    writer.add_bool("a.bool", True)
    numbers = np.arange(15, dtype=np.float32).reshape(3, 5)
    writer.add_tensor("one", numbers)
    writer.add_tensor("two", numbers[:1].astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile(tmp_path / "a.gguf") as file:
        for key, value in values.items():
            assert list(file.metadata[key]) == list(value) if isinstance(value, list) else value
        assert file.metadata["a.bool"] is True
        one, two = file.tensors["one"], file.tensors["two"]
        assert (one.dims, one.kind) == ((3, 5), "F32")
        assert bytes(one.data) == numbers.tobytes() and two.dims == (1, 5)


def test_split_files(tmp_path: Path) -> None:
    write_llama(tmp_path / "whole.gguf")
    write_llama(tmp_path / "part.gguf", split_max_tensors=8)
    parts = sorted(tmp_path.glob("part-*"))
    assert len(parts) > 2
    with GgufFile(tmp_path / "whole.gguf") as whole, GgufFile(parts[0]) as joint:
        assert joint.tensors.keys() == whole.tensors.keys()
        for name, each in whole.tensors.items():
            assert bytes(each.data) == bytes(joint.tensors[name].data)
    with pytest.raises(FileFormatError, match="not named as the first"):
        GgufFile(parts[1])
    parts[1].unlink()
    with pytest.raises(FileFormatError, match="part 2 of"):
        GgufFile(parts[0])


ARRAY = struct.pack("<II", 9, 9)
DAMAGED = {
    "no GGUF": b"PK\3\4" + bytes(100),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "room": header(counts=(1 << 60, 0)),
    "no room": header(counts=(0, 1 << 63)),
    "there is no room for": header(
        counts=(0, 1), pairs=text(b"k") + struct.pack("<IQ", 8, 1 << 50)
    ),
    "twice": header(counts=(0, 2), pairs=2 * (text(b"k") + struct.pack("<II", 4, 1))),
    "unknown type": header(counts=(0, 1), pairs=text(b"k") + struct.pack("<II", 99, 1)),
    "array of 2\\^56": header(counts=(0, 1), pairs=text(b"k") + struct.pack("<IIQ", 9, 4, 1 << 56)),
    "nested": header(
        counts=(0, 1),
        pairs=text(b"k") + struct.pack("<I", 9) + 9 * struct.pack("<IQ", 9, 1) + bytes(64),
    ),
    "UTF-8": header(counts=(0, 1), pairs=text(b"\xff\xfe") + struct.pack("<II", 4, 1)),
    "alignment": header(counts=(0, 1), pairs=text(b"general.alignment") + struct.pack("<II", 4, 3)),
    "dims": header(counts=(1, 0), tensors=tensor(b"t", ()) + bytes(64)),
    "sizes": header(counts=(1, 0), tensors=tensor(b"t", (0, 4)) + bytes(64)),
    "outside": header(counts=(1, 0), tensors=tensor(b"t", (1 << 39, 1 << 39)) + bytes(64)),
    "lies outside the file": header(counts=(1, 0), tensors=tensor(b"t", (4,), 0, 1 << 40)),
    "multiple of 32": header(counts=(1, 0), tensors=tensor(b"t", (4,), 0, 4) + bytes(99)),
    "stands there twice": header(counts=(2, 0), tensors=2 * tensor(b"t", (4,)) + bytes(99)),
}


@pytest.mark.parametrize("why", DAMAGED)
def test_damaged_files_are_refused(why: str, tmp_path: Path) -> None:
    with pytest.raises(FileFormatError) as raised:
        read(tmp_path / "a.gguf", DAMAGED[why])
    word = why.split("\\")[0].removeprefix("array of 2").removeprefix("nested")
    assert word in str(raised.value) or word in ("", "no room")


def test_unknown_types_are_refused_with_the_list(tmp_path: Path) -> None:
    data = header(counts=(1, 0), tensors=tensor(b"t", (4,), 16) + bytes(99))
    with pytest.raises(UnsupportedProgramError, match="type 16.*\n.*\n.*F32, F16, Q4_0"):
        read(tmp_path / "a.gguf", data)


def value(key: str, kind: int, data: bytes) -> bytes:
    return text(key.encode()) + struct.pack("<I", kind) + data


def array(key: str, *numbers: int) -> bytes:
    return value(key, 9, struct.pack(f"<IQ{len(numbers)}I", 4, len(numbers), *numbers))


def test_parts_state_their_numbers(tmp_path: Path) -> None:
    """Arrays in place of numbers raised a plain ValueError."""
    for key in ("split.tensors.count", "split.no"):
        for number in (1, 2):
            pairs = value("split.count", 4, struct.pack("<I", 2)) + array(key, 1, 2)
            path = tmp_path / f"a-0000{number}-of-00002.gguf"
            path.write_bytes(header(pairs=pairs, counts=(0, 2)))
        with pytest.raises(FileFormatError):
            GgufFile(tmp_path / "a-00001-of-00002.gguf")


def test_tensors_do_not_share_bytes(tmp_path: Path) -> None:
    """A small file could state any number of bytes."""
    tensors = b"".join(tensor(b"t%d" % number, (64, 64)) for number in range(9))
    with pytest.raises(FileFormatError, match="bytes of other tensors"):
        read(tmp_path / "a.gguf", header(counts=(9, 0), tensors=tensors) + bytes(64 * 64 * 4 + 64))


@pytest.mark.parametrize(
    ("key", "kind", "data", "word"),
    [
        ("llama.attention.key_length", 4, struct.pack("<I", 1 << 23), "width 8388608"),
        ("llama.rope.freq_base", 6, struct.pack("<f", -2.0), "freq_base"),
        ("llama.rope.scaling.factor", 6, struct.pack("<f", 0.0), "factor"),
        ("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", float("nan")), "epsilon"),
    ],
)
def test_sizes_that_no_model_has(
    key: str, kind: int, data: bytes, word: str, tmp_path: Path
) -> None:
    """A head of 2^23 had a table of 128 GB be computed."""
    names = ["embedding_length", "attention.head_count", "block_count", "feed_forward_length"]
    names += [
        "context_length",
        "attention.key_length",
        "rope.dimension_count",
        "attention.value_length",
    ]
    numbers = {f"llama.{name}": (4, struct.pack("<I", 4)) for name in names}
    if key.endswith("key_length"):
        numbers |= {f"llama.{name}": (kind, data) for name in names[-2:]}
    numbers[key] = kind, data
    pairs = value("general.architecture", 8, text(b"llama"))
    pairs += b"".join(value(name, *each) for name, each in numbers.items())
    with read(tmp_path / "a.gguf", header(pairs=pairs, counts=(0, 1 + len(numbers)))) as file:
        with pytest.raises(FileFormatError, match=word):
            Llama(file)


def test_factors_of_rotations_are_numbers_above_0(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write_llama(path, rotation_factors=True)
    data = path.read_bytes()
    with GgufFile(path) as file:
        factors = bytes(file.tensors["rope_freqs.weight"].data)
    path.write_bytes(data.replace(factors, bytes(len(factors))))
    with pytest.raises(FileFormatError, match="rope_freqs.weight is not above 0"):
        purevk.llm.plan(path)
    name = text(b"rope_freqs.weight") + struct.pack("<IQ", 1, len(factors) // 4)
    path.write_bytes(data.replace(name + struct.pack("<I", 0), name + struct.pack("<I", 1)))
    with pytest.raises(FileFormatError, match="rope_freqs.weight"):
        purevk.llm.plan(path)


@pytest.mark.parametrize("path", [5, b"a.gguf", "a\0b", None])
def test_what_is_no_path(path: object) -> None:
    with pytest.raises(InputError, match="no path"):
        purevk.llm.plan(path)


def test_types_of_tokens_are_numbers(tmp_path: Path) -> None:
    """A text in place of them raised a plain ValueError."""
    write_llama(tmp_path / "a.gguf", width=32, vocabulary=True)
    with GgufFile(tmp_path / "a.gguf") as file:
        with pytest.raises(InputError, match="surrogates"):
            tokenizer_of(file, 1 << 20).encode("a\ud800")
        for types in (["x"] * 268, "x", 5):
            file.metadata["tokenizer.ggml.token_type"] = types
            with pytest.raises(FileFormatError, match="token_type"):
                tokenizer_of(file, 1 << 20)


def test_grammars_of_a_hostile_vocabulary(tmp_path: Path) -> None:
    """llguidance panics at long tokens, which is no `Exception`."""
    pytest.importorskip("llguidance")
    from purevk.llm.grammar import checked_grammar, engine_of

    write_llama(tmp_path / "a.gguf", width=32, vocabulary=True)
    with GgufFile(tmp_path / "a.gguf") as file:
        assert engine_of(tokenizer_of(file, 1 << 20), 268)
        file.metadata["tokenizer.ggml.tokens"][0] = "a" * 100_000
        with pytest.raises(UnsupportedProgramError, match="does not accept the vocabulary"):
            engine_of(tokenizer_of(file, 1 << 20), 268)
    with pytest.raises(InputError, match="no grammar"):
        checked_grammar("\ud800", None)
    with pytest.raises(InputError, match="no JSON schema"):
        checked_grammar(None, "\ud800")
    rules = "start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(2700)) + 'r2700: "a"'
    parts = {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(2000)}
    schema = {"$ref": "#/$defs/a0", "$defs": {**parts, "a2000": {"type": "string"}}}
    for one in ((rules, None), (None, schema)):  # they ended the process
        with pytest.raises(InputError, match="500 are accepted"):
            checked_grammar(*one)
    with pytest.raises(InputError, match="131072 are accepted"):
        checked_grammar(f'start: "{"a" * (1 << 17)}"', None)


def test_files_with_random_damage_raise_typed_errors_only(tmp_path: Path) -> None:
    write_llama(tmp_path / "a.gguf", "Q8_0", width=32, vocabulary=True)
    data = (tmp_path / "a.gguf").read_bytes()
    with GgufFile(tmp_path / "a.gguf") as file:
        first = min(data.find(bytes(each.data[:64])) for each in file.tensors.values())
    generator = random.Random(0)
    refused = 0
    for _ in range(400):
        damaged = bytearray(data)
        for _ in range(generator.randint(1, 4)):
            at = generator.randrange(first)
            size = generator.choice((1, 1, 4, 8))
            damaged[at : at + size] = generator.choice(
                (generator.randbytes(size), b"\xff" * size, bytes(size))
            )
        if generator.random() < 0.2:
            del damaged[generator.randrange(first) :]
        try:
            with read(tmp_path / "b.gguf", bytes(damaged)) as file:
                Llama(file)
                tokenizer_of(file, 1 << 20).encode("hello 12")
        except PurevkError:
            refused += 1
    assert refused > 100
