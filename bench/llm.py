"""Language models beside llama.cpp's Vulkan, on the same file: `python bench/llm.py --out FILE.json`.

For each shape and type of weights, a GGUF file with random blocks is written, without a vocabulary.
Both engines load it, with a cache in float16 of 4096 + 256 tokens, and take turns:

- decoding at depths: seconds a token of a greedy generation. purevk's are those of
  `Model.generate`, which gives each token to the host. llama.cpp's are `llama_decode` and
  `llama_synchronize`, without the choice of a token;
- prompts: the seconds until the first token, or until the logits are there.

purevk's tokens are also measured between timestamps of the device; the difference is what the host
costs. Logits of both engines after the longest prompt are compared. `--model FILE` measures a file
instead. `--tiny` takes a shape that a software device runs in seconds. llama.cpp takes a software
device only if the variable GGML_VK_VISIBLE_DEVICES is 0.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.peers.base import Unavailable
from bench.peers.llama_cpp import LlamaCpp
from bench.timing import error_of, interleave, machine, of_timestamps, of_wall


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama, of one query head of 64 or 128 columns for each row of `heads`."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int


SHAPES = {
    "tiny": Shape(2, 256, 4, 2, 512, 512),
    "1b": Shape(16, 2048, 32, 8, 8192, 32000),
    "8b": Shape(32, 4096, 32, 8, 14336, 128256),
}
BLOCKS = {"Q4_0": (18, {0: 4.6}), "Q8_0": (34, {0: 74.0}), "Q4_K": (144, {0: 170.0, 2: 20.0})}
"""Bytes of a block, and for each float16 scale in it, by its first byte, the spread of what it
multiplies: its value makes weights as large as those of a trained model."""


@dataclass
class Row:
    """Figures of a case in milliseconds: a token, or a prompt.

    Attributes:
        device: purevk's between timestamps of the device; None for prompts.
        error: of purevk's logits, relative to llama.cpp's largest; None: not compared.
    """

    file: str
    case: str
    purevk: float = 0.0
    llama_cpp: float | None = None
    device: float | None = None
    dispatches: int | None = None
    error: float | None = None
    why: str = field(default="")


# -- files ---------------------------------------------------------------------------------------
def write_file(path: Path, shape: Shape, kind: str, context: int) -> None:
    """Writes a GGUF file of a shape with random blocks of a type."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.width // shape.heads)
    writer.add_rope_freq_base(500000.0)
    writer.add_vocab_size(shape.vocab)
    writer.add_tokenizer_model("no_vocab")
    for name, data, type in _tensors(shape, kind):
        writer.add_tensor(name, data, raw_dtype=type and gguf.GGMLQuantizationType[type])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(shape: Shape, kind: str) -> Iterator[tuple[str, numpy.ndarray, str | None]]:
    """Names, elements or blocks, and the type of blocks."""
    generator = numpy.random.default_rng(1)
    keys = shape.width // shape.heads * shape.kv_heads
    layer = {
        "attn_q": (shape.width, shape.width),
        "attn_k": (keys, shape.width),
        "attn_v": (keys, shape.width),
        "attn_output": (shape.width, shape.width),
        "ffn_gate": (shape.inner, shape.width),
        "ffn_up": (shape.inner, shape.width),
        "ffn_down": (shape.width, shape.inner),
    }
    norm = numpy.ones(shape.width, numpy.float32)
    table = generator.standard_normal((shape.vocab, shape.width), numpy.float32)
    yield "token_embd.weight", table.astype(numpy.float16), None
    yield "output_norm.weight", norm, None
    yield "output.weight", _blocks(generator, kind, shape.vocab, shape.width), kind
    matrices = {name: _blocks(generator, kind, *sizes) for name, sizes in layer.items()}
    for number in range(shape.layers):
        yield f"blk.{number}.attn_norm.weight", norm, None
        yield f"blk.{number}.ffn_norm.weight", norm, None
        for name, blocks in matrices.items():  # numpy.roll: layers differ
            yield f"blk.{number}.{name}.weight", numpy.roll(blocks, number, 0), kind


def _blocks(generator: Any, kind: str, rows: int, columns: int) -> numpy.ndarray:
    nbytes, scales = BLOCKS[kind]
    count = rows * columns // (256 if kind.endswith("_K") else 32)
    blocks = numpy.frombuffer(generator.bytes(count * nbytes), numpy.uint8).reshape(count, nbytes)
    blocks = blocks.copy()
    for at, spread in scales.items():
        numbers = generator.uniform(0.5, 1.5, count) / (spread * columns**0.5)
        blocks[:, at : at + 2] = numbers.astype("<f2").view(numpy.uint8).reshape(count, 2)
    return blocks.reshape(rows, -1)


# -- measuring -----------------------------------------------------------------------------------
def measure(path: Path, options: argparse.Namespace) -> list[Row]:
    """All cases of a file."""
    import purevk.llm

    start = time.perf_counter()
    with purevk.llm.load(path, context=options.context) as model:
        rows = [Row(path.stem, f"decode at {depth}") for depth in options.depths]
        rows += [Row(path.stem, f"prompt of {length}") for length in options.prompts]
        next(iter(model.generate([1, 2, 3], max_tokens=2)))
        print(f"{path.stem}: the first token came {time.perf_counter() - start:.1f} s after load")
        try:
            peer = LlamaCpp(path, options.context)
        except Unavailable as error:
            peer = None
            for row in rows:
                row.why = str(error)
        for row in rows:
            _measure_case(model, peer, row, options)
            print(json.dumps(asdict(row)))
        if peer is not None:
            peer.close()
    return rows


def _measure_case(model: Any, peer: LlamaCpp | None, row: Row, options: argparse.Namespace) -> None:
    size, generator = int(row.case.split()[-1]), numpy.random.default_rng(2)
    tokens = generator.integers(0, model.vocab, max(size, 1)).tolist()
    decodes = row.case.startswith("decode")

    def generate() -> list[float]:
        pieces = model.generate(tokens, max_tokens=options.tokens)
        pieces.tokens()
        return [1e3 / pieces.stats.rate]

    def answer() -> None:
        model.position = 0
        next(iter(model.generate(tokens, max_tokens=1)))

    samplers = {"purevk": generate if decodes else of_wall(answer, 1)}
    if peer is not None:
        calls = options.tokens if decodes else 1
        if decodes:
            peer.run(tokens, 0)

        def decode() -> list[float]:
            start = time.perf_counter()
            for number in range(calls):
                peer.run([1], size + number)
            return [1e3 * (time.perf_counter() - start) / calls]

        samplers["llama.cpp"] = decode if decodes else of_wall(lambda: peer.run(tokens, 0), 1)
    times = interleave(samplers, options.seconds, options.settle)
    row.purevk = statistics.median(times["purevk"])
    if peer is not None:
        row.llama_cpp = statistics.median(times["llama.cpp"])
    if decodes:
        executable = model.program.method("decode").executable
        row.dispatches = len(executable.plan.dispatches)
        sampler = of_timestamps(executable, [numpy.array([size])])
        row.device = statistics.median(interleave({"": sampler}, 0.5, options.settle)[""])
    elif peer is not None:
        row.error = error_of(model.logits, peer.logits(model.vocab))


def show(rows: list[Row]) -> None:
    """Prints a table in Markdown."""
    print("| file | case | llama.cpp | purevk | ratio | device | host | error |")
    print("|---|---|--:|--:|--:|--:|--:|--:|")
    for row in rows:
        ratio = f"{row.llama_cpp / row.purevk:.2f}" if row.llama_cpp else ""
        device = "" if row.device is None else f"{row.device:.3f}"
        host = "" if row.device is None else f"{row.purevk - row.device:.3f}"
        error = "" if row.error is None else f"{row.error:.1e}"
        peer = f"{row.llama_cpp:.3f}" if row.llama_cpp else row.why[:20]
        print(
            f"| {row.file} | {row.case} | {peer} | {row.purevk:.3f} | {ratio} | {device} | {host} "
            f"| {error} |"
        )


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints the table and writes JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--model", type=Path, action="append", help="a GGUF file, in place of shapes"
    )
    parser.add_argument("--shape", choices=tuple(SHAPES), action="append", help="default: 1b")
    parser.add_argument("--type", choices=tuple(BLOCKS), action="append", help="default: all")
    parser.add_argument("--tiny", action="store_true", help="the shape tiny, at small depths")
    parser.add_argument("--depths", type=int, nargs="*", default=[0, 1024, 4096])
    parser.add_argument("--prompts", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--tokens", type=int, default=64, help="of a generation")
    parser.add_argument("--context", type=int, default=4096 + 256, help="tokens of the cache")
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing each case")
    parser.add_argument("--settle", type=float, default=1.0, help="seconds of warming up")
    parser.add_argument("--out", type=Path, help="write all figures there, as JSON")
    options = parser.parse_args(arguments)
    os.environ.setdefault("PUREVK_PROGRESS", "0")
    if options.tiny:
        options.depths, options.prompts, options.context = [0, 40], [64], 128
        options.tokens = 8
    print(json.dumps(machine()))
    rows = []
    for path in options.model or ():
        rows += measure(path, options)
    shapes = options.shape or ([] if options.model else ["tiny" if options.tiny else "1b"])
    for shape in shapes:
        for kind in options.type or BLOCKS:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / f"{shape}-{kind}.gguf"
                write_file(path, SHAPES[shape], kind, options.context)
                rows += measure(path, options)
    show(rows)
    if options.out:
        options.out.write_text(
            json.dumps({"machine": machine(), "rows": [asdict(row) for row in rows]}, indent=1)
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
