"""GGUF files, with their tokenizers and chat templates, and saved conversations: sound ones, and what is
done with changed ones. Beside whole files there is one as JSON, whose changes reach each value."""

from __future__ import annotations

import importlib.util
import json
import struct
import tempfile
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
        nbytes = int(np.prod([float(size) for size in dims]) * _NBYTES.get(kind, 4))
        at += -(-min(nbytes, 1 << 20) // 32) * 32
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
    from purevk.llm.session import check_messages
    from purevk.llm.templates import Template
    from purevk.llm.tokenizer import tokenizer_of

    content, messages = {}, _MODEL["messages"]
    if data.startswith(b"{"):
        content = json.loads(data)
        data, messages = gguf(data), content.get("messages")
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(data)
        file.flush()
        with GgufFile(file.name) as model:
            tokenizer = tokenizer_of(model, 1 << 20)
            template = model.value("tokenizer.chat_template", str)
            tokens = {"bos_token": tokenizer.bos, "eos_token": tokenizer.eos}
            text = Template(template, "here", tokens).render(check_messages(messages))
            ids = tokenizer.encode(text[:9999])
            tokenizer.decode(ids)
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
