"""GGUF files, with their tokenizers and chat templates, folders of transformers, files of tokenizers, and
saved conversations: sound ones, and what is done with changed ones. Beside whole GGUF files there is one
as JSON, whose changes reach each value; a folder is a JSON of its files."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import math
import struct
import tempfile
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np

_TEMPLATE = [
    "{%- set ns = namespace(text='', tools=false) -%}", "{% for message in messages %}",
    "{% if message.role == 'system' %}", "{{ message['content'] | trim }}", "{% else %}",
    "<|im_start|>{{ message.role ~ '\n' + message.content }}<|im_end|>", "{% endif %}",
    "{% set ns.text = ns.text ~ message.content.split('a')[-1].strip('\n') %}", "{% endfor %}",
    "{% macro line(x) %}{{ x | tojson(indent=2) }}{% endmacro %}", "{{ line(messages) }}",
    "{% set block %}{{ ns.text }}{% endset %}", "{{ block * 3 }}{{ messages[::-1] | length }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(', ') }}",
    "{% if add_generation_prompt is defined and add_generation_prompt %}<|im_start|>{% endif %}",
    "{{ raise_exception('no') if messages | length > 9 }}{{ strftime_now('%d') | length }}",
    "{% for a in range(9) %}{% set ns.text = ns.text ~ ns.text %}{% endfor %}",
    "{{ ns.text.replace('a', 'bc') | upper | indent(3) }}{{ [ns.text] * 7 == [block] * 7 }}",
]  # fmt: skip
_TOKENS = ["a", "b", "c", "ab", "\u0120", "1", "<|im_start|>", "<|im_end|>"]
_WIDTH, _INNER = 32, 64
_MATRICES = {
    "attn_q": (_WIDTH, _WIDTH), "attn_k": (_WIDTH, _WIDTH), "attn_v": (_WIDTH, _WIDTH),
    "attn_output": (_WIDTH, _WIDTH), "ffn_gate": (_INNER, _WIDTH), "ffn_up": (_INNER, _WIDTH),
    "ffn_down": (_WIDTH, _INNER),
}  # fmt: skip
_NBYTES = {0: 4, 1: 2, 8: 34 / 32}  # of an element of F32, F16 and Q8_0
_TENSORS: list[Any] = [
    ["token_embd.weight", [len(_TOKENS), _WIDTH], 8], ["output_norm.weight", [_WIDTH], 0],
    ["rope_freqs.weight", [8], 0], ["blk.0.attn_norm.weight", [_WIDTH], 0],
    ["blk.0.ffn_norm.weight", [_WIDTH], 1],
    *([f"blk.0.{name}.weight", [*sizes], 8] for name, sizes in _MATRICES.items()),
]  # fmt: skip
_MODEL = {
    "metadata": {
        "general.architecture": "llama", "general.alignment": 32, "llama.context_length": 64,
        "llama.embedding_length": _WIDTH, "llama.block_count": 1, "llama.feed_forward_length": _INNER,
        "llama.attention.head_count": 2, "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 16, "llama.attention.value_length": 16,
        "llama.rope.dimension_count": 16, "llama.rope.freq_base": 10000.0,
        "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "split.count": 1, "split.tensors.count": 12,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": _TOKENS, "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.token_type": [1, 1, 1, 1, 1, 1, 3, 3], "tokenizer.ggml.bos_token_id": 6,
        "tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.add_bos_token": True,
    },
    "tensors": _TENSORS, "template": _TEMPLATE,
    "messages": [{"role": "system", "content": "b"}, {"role": "user", "content": "ab 1\n"}],
}  # fmt: skip
MODEL = json.dumps(_MODEL).encode()
# -- folders of transformers, and files of tokenizers ------------------------------------------
_LAYER = "model.layers.0."
_SHAPES = {
    "model.embed_tokens.weight": [9, _WIDTH], "model.norm.weight": [_WIDTH],
    f"{_LAYER}input_layernorm.weight": [_WIDTH], f"{_LAYER}post_attention_layernorm.weight": [_WIDTH],
    **{f"{_LAYER}self_attn.{name}_proj.weight": [_WIDTH, _WIDTH] for name in "qkvo"},
    f"{_LAYER}mlp.gate_proj.weight": [_INNER, _WIDTH], f"{_LAYER}mlp.up_proj.weight": [_INNER, _WIDTH],
    f"{_LAYER}mlp.down_proj.weight": [_WIDTH, _INNER],
}  # fmt: skip
_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4, "F8_E4M3": 1}


def _header() -> dict[str, Any]:
    header, at = dict[str, Any](), 0
    for number, (name, shape) in enumerate(_SHAPES.items()):
        kind = ("F32", "F16", "BF16")[number % 3]
        end = at + int(np.prod(shape)) * _BYTES[kind]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, end]}
        at = end
    return {"__metadata__": {"format": "pt"}, **header}


_VOCAB = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4, "c": 5, "ab": 6, "\u0120": 7, "1": 8}
_SPECIAL = [
    {"id": at, "content": text, "special": True, "single_word": False, "lstrip": False,
     "rstrip": False, "normalized": False}
    for text, at in [*_VOCAB.items()][:3]
]  # fmt: skip
_SPLIT = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True, "trim_offsets": True}
_FOLDER = {
    "config.json": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 9,
        "hidden_size": _WIDTH, "intermediate_size": _INNER, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
        "eos_token_id": [2, 1], "quantization_config": None,
    },
    "generation_config.json": {"eos_token_id": [2]},
    "tokenizer_config.json": {"chat_template": "{{ messages[0].content }}", "bos_token": "<s>",
                              "eos_token": {"content": "</s>"}},
    "tokenizer.json": {
        "version": "1.0", "added_tokens": _SPECIAL, "pre_tokenizer": _SPLIT, "decoder": _SPLIT,
        "normalizer": None, "post_processor": None, "truncation": None, "padding": None,
        "model": {"type": "BPE", "vocab": _VOCAB, "merges": [["a", "b"]], "byte_fallback": False},
    },
    "model.safetensors": _header(),
    "model.safetensors.index.json": {"weight_map": dict.fromkeys(_SHAPES, "model.safetensors")},
    "messages": [{"role": "user", "content": "ab 1"}],
}  # fmt: skip
FOLDER = json.dumps(_FOLDER).encode()


def _field(number: int, value: int | bytes) -> bytes:
    """A field of protobuf, below 128 each."""
    if isinstance(value, int):
        return bytes([number << 3, value])
    return bytes([number << 3 | 2, len(value)]) + value


def _sentencepiece() -> bytes:
    pieces = [*((text, 3) for text in ("<s>", "</s>")), *((text, 1) for text in ("a", "b", "ab"))]
    pieces += [(f"<0x{byte:02X}>", 6) for byte in range(256)]
    stored = [
        _field(1, _field(1, text.encode()) + b"\x15" + struct.pack("<f", -at) + _field(3, kind))
        for at, (text, kind) in enumerate([("<unk>", 2), *pieces])
    ]
    return b"".join(stored) + _field(2, _field(3, 2)) + _field(3, _field(3, 1) + _field(4, 0))


def _tiktoken() -> bytes:
    tokens = [*(bytes([byte]) for byte in range(256)), b"ab", b"abc", b"ab1"]
    return b"".join(b64encode(token) + f" {at}\n".encode() for at, token in enumerate(tokens))


TOKENIZERS = {"sentencepiece": _sentencepiece(), "tiktoken": _tiktoken()}


def _write_folder(data: bytes, folder: Path) -> Any:
    """Writes the files that JSON describes; gives what it has as messages."""
    content = json.loads(data)
    content = content if isinstance(content, dict) else {}
    for name, file in content.items():
        if name not in (*_FOLDER, "chat_template.jinja"):
            continue
        text = file if isinstance(file, str) else json.dumps(file)
        written = text.encode("utf-8", "surrogatepass")
        if name == "model.safetensors":
            written = struct.pack("<Q", len(written)) + written + bytes(1 << 15)
        (folder / name).write_bytes(written)
    return content.get("messages")


def saved_model() -> bytes:
    """What `Model.save` writes of `MODEL`."""
    from purevk.dtypes import DType
    from purevk.llm import loading, saved
    from purevk.llm.decoding import prompt_lengths
    from purevk.llm.sources import BuiltGraph

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        path.write_bytes(gguf(MODEL))
        with contextlib.closing(loading.open_model(path)) as file:
            architecture, rows = loading._architecture(file, 24, clamps=False)
            prompts = prompt_lengths(20, is_gpu=False)
            build = functools.partial(
                loading._step_graph, file, architecture, rows, DType.float32, "float32"
            )
            sources = {
                name: BuiltGraph(functools.partial(build, name, length), name)
                for name, length in [("decode", None), *prompts.items()]
            }
            metadata = {key: file.metadata[key] for key in file.metadata if "tokenizer" in key}
            lists = {
                key: each.tolist() for key, each in metadata.items() if hasattr(each, "tolist")
            }
            about = saved.Description(
                rows, architecture.vocab, prompts, DType.float32, False, 1, 1, {**metadata, **lists}
            )
            saved.write(Path(folder) / "model.pvk", "model", sources, about)
        return (Path(folder) / "model.pvk").read_bytes()


def read_saved(file: Any) -> None:
    """Compares the methods of a saved model with what it says of them, and uses its tokenizer."""
    from purevk.llm import saved

    stated = file.content.about.get(saved.KEY)
    about = saved.Description.read(file.name, stated, file.methods)
    for method in ("decode", *about.prompts):
        about.check(file.graph(method), method, file.name)
    _use_tokenizer(saved.SavedFile(file.name, about.metadata), _MODEL["messages"])


def read_folder(data: bytes) -> None:
    """Does with the files of a folder what needs no device."""
    import purevk.llm
    from purevk.llm.checkpoint import Folder

    with tempfile.TemporaryDirectory() as name:
        messages = _write_folder(data, Path(name))
        with contextlib.closing(Folder(Path(name))) as model:
            _use_tokenizer(model, messages)
        purevk.llm.plan(name, context=8)


def read_tokenizer(data: bytes) -> None:
    """Uses the file of a tokenizer."""
    from purevk.llm.saved import SavedFile
    from purevk.llm.tokenizer import files

    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "tokenizer.model"
        path.write_bytes(data)
        _use_tokenizer(SavedFile("tokenizer", files.read_tokenizer(path)), None)


def is_model(file: Any) -> bool:
    """Whether the methods of a .pte file say how it is called as a language model."""
    return "get_max_seq_len" in file.methods


def read_pte(file: Any) -> None:
    """Finds the methods that a loop over tokens calls, and plans them."""
    from purevk.frontends.reading import reading
    from purevk.graph.context import typical_traits
    from purevk.llm.executorch.loading import PteFile, step_sources
    from purevk.passes.pipeline import optimize
    from purevk.schedule.planning import make_plan

    for name, source in step_sources(file, PteFile(file, None)).items():
        with reading(name):
            make_plan(optimize(source.graph, typical_traits()), typical_traits())


def answer_by_pte(data: bytes) -> None:
    """Continues two tokens on the device."""
    import purevk.llm

    with tempfile.NamedTemporaryFile(suffix=".pte") as file:
        file.write(data)
        file.flush()
        with purevk.llm.load(file.name) as model:
            model.generate([3, 5], max_tokens=3).tokens()


def _use_tokenizer(model: Any, messages: Any) -> None:
    from purevk.llm import arguments
    from purevk.llm.templates import Template
    from purevk.llm.tokenizer import tokenizer_of

    tokenizer = tokenizer_of(model, 1 << 20)
    text = "<s>ab 1\u00e9\n"
    if isinstance(tokenizer.template, str):
        tokens = {"bos_token": tokenizer.bos, "eos_token": tokenizer.eos}
        text = Template(tokenizer.template, "here", tokens).render(arguments.messages(messages))
    tokenizer.decode(tokenizer.encode(text[:9999]))


_CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
_ANSWERS = [
    {"role": "assistant", "content": None, "tool_calls": [_CALL]}, {"role": "tool", "content": "1"},
    {"role": "assistant", "content": "ab"},
]  # fmt: skip
_MESSAGES = [*_MODEL["messages"], *_ANSWERS]
SESSION = json.dumps({"format": "purevk session", "messages": _MESSAGES}).encode()


def has_packages() -> bool:
    return all(map(importlib.util.find_spec, ("tokenizers", "jinja2")))


def gguf(data: bytes) -> bytes:
    """The GGUF file that JSON describes, as far as such a file can hold it."""
    content = json.loads(data)
    content = content if isinstance(content, dict) else {}
    metadata = content.get("metadata")
    metadata = {**metadata} if isinstance(metadata, dict) else {}
    if "template" in content:
        parts = content["template"]
        joined = "".join(map(str, parts)) if isinstance(parts, list) else parts
        metadata["tokenizer.chat_template"] = joined
    tensors, at = b"", 0
    listed = [each for each in _list(content.get("tensors")) if len(_list(each)) == 3]
    for name, sizes, kind in listed:
        dims = [_integer(size, 64) for size in _list(sizes)]
        kind = _integer(kind, 32)
        tensors += _text(name) + struct.pack("<I", len(dims))
        tensors += struct.pack(f"<{len(dims)}Q", *dims[::-1]) + struct.pack("<IQ", kind, at)
        nbytes = min(math.prod(dims[:64]), 1 << 20) * _NBYTES.get(kind, 4)
        at += -(-min(int(nbytes), 1 << 20) // 32) * 32
    pairs = b"".join(_text(key) + _value(each) for key, each in metadata.items())
    head = b"GGUF" + struct.pack("<IQQ", 3, len(listed), len(metadata)) + pairs + tensors
    weights = np.random.default_rng(0).integers(0, 60, min(at, 1 << 22) + 64, np.uint8)
    return head + bytes(-len(head) % 32) + weights.tobytes()


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _integer(value: Any, bits: int) -> int:
    return int(value) % (1 << bits) if isinstance(value, int) else 7


def _text(value: Any) -> bytes:
    data = str(value).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _value(value: Any, nested: bool = False) -> bytes:
    """A value with its type; without it if it is an element of an array."""
    if isinstance(value, bool):
        kind, data = 7, bytes([value])
    elif isinstance(value, int):
        kind, data = 11, struct.pack("<q", (value + (1 << 63)) % (1 << 64) - (1 << 63))
    elif isinstance(value, float):
        kind, data = 12, struct.pack("<d", value)
    elif isinstance(value, list):
        kinds = {type(each) for each in value}
        uniform = value if len(kinds) == 1 and kinds <= {int, float, bool} else [*map(str, value)]
        items = [_value(each) for each in uniform] or [_value("")]
        data = items[0][:4] + struct.pack("<Q", len(uniform))
        kind, data = 9, data + b"".join(each[4:] for each in items[: len(uniform)])
    else:
        kind, data = 8, _text(value)
    return struct.pack("<I", kind) + data


def read_gguf(data: bytes) -> None:
    """Does with a file, or with its description in JSON, what needs no device."""
    import purevk.llm
    from purevk.llm.gguf import GgufFile

    content, messages = {}, _MODEL["messages"]
    if data.startswith(b"{"):
        content = json.loads(data)
        data, messages = gguf(data), content.get("messages")
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(data)
        file.flush()
        with GgufFile(file.name) as model:
            model.value("tokenizer.chat_template", str)
            _use_tokenizer(model, messages)
        purevk.llm.plan(Path(file.name), context=8)


def read_session(data: bytes) -> None:
    """Goes on with a saved conversation."""
    from purevk.llm.session import Session

    class Model:
        context = 64

        def chat(self, messages: Any, **options: Any) -> Any:
            raise NotImplementedError

        def count_tokens(self, messages: Any) -> int:
            return len(messages)

        def cut_text(self, text: str, tokens: int) -> str:
            return text[:-tokens]

    session = Session(Model(), None, "error", {})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "session.json"
        path.write_bytes(data)
        session.load(path)
        if session.messages[-1]["role"] == "assistant":
            session.rewind(tokens=1)
        session.save(path)
        session.load(path)
