"""llama.cpp with its Vulkan kernels, for `bench.decode`: the same Llama as a GGUF file.

The libraries are those of the wheel `cyllama-vulkan` (0.7.0: llama.cpp b11669), which are called
through ctypes: the wheel itself needs Python 3.12. The package `gguf` writes the file.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy

from bench.peers.base import Unavailable

_Array = numpy.ndarray
_ALL = 1 << 30  # layers on the GPU


class _ModelParams(ctypes.Structure):
    """The beginning of `llama_model_params`. Structures of this size are passed by their address, so
    the rest needs no names."""

    _fields_ = [
        ("devices", ctypes.c_void_p),
        ("overrides", ctypes.c_void_p),
        ("layers", ctypes.c_int32),
        ("rest", ctypes.c_char * 1004),
    ]


class _ContextParams(ctypes.Structure):
    """The beginning of `llama_context_params`."""

    _fields_ = [
        ("context", ctypes.c_uint32),
        ("batch", ctypes.c_uint32),
        ("micro_batch", ctypes.c_uint32),
        ("between", ctypes.c_int32 * 10),
        ("flash_attention", ctypes.c_int32),
        ("numbers", ctypes.c_int32 * 12),
        ("key_type", ctypes.c_int32),
        ("value_type", ctypes.c_int32),
        ("rest", ctypes.c_char * 912),
    ]


class _Batch(ctypes.Structure):
    """`llama_batch`."""

    _fields_ = [
        ("count", ctypes.c_int32),
        ("tokens", ctypes.c_void_p),
        ("embeddings", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("sequence_counts", ctypes.c_void_p),
        ("sequences", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
    ]


_Log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_POINTER = ctypes.c_void_p
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "llama_log_set": (None, [_Log, _POINTER]),
    "llama_backend_init": (None, []),
    "llama_model_default_params": (_ModelParams, []),
    "llama_context_default_params": (_ContextParams, []),
    "llama_model_load_from_file": (_POINTER, [ctypes.c_char_p, _ModelParams]),
    "llama_init_from_model": (_POINTER, [_POINTER, _ContextParams]),
    "llama_batch_get_one": (_Batch, [_POINTER, ctypes.c_int32]),
    "llama_decode": (ctypes.c_int32, [_POINTER, _Batch]),
    "llama_synchronize": (None, [_POINTER]),
    "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), [_POINTER, ctypes.c_int32]),
    "llama_get_memory": (_POINTER, [_POINTER]),
    "llama_memory_clear": (None, [_POINTER, ctypes.c_bool]),
    "llama_memory_seq_rm": (
        ctypes.c_bool,
        [_POINTER, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32],
    ),
    "llama_free": (None, [_POINTER]),
    "llama_model_free": (None, [_POINTER]),
}


@_Log
def _silent(level: int, text: bytes, data: Any) -> None:
    """Drops what llama.cpp logs."""


def _library(vulkan: bool) -> tuple[Any, str]:
    """The functions of llama.cpp, and the name of its Vulkan device; or those with the CPU alone.

    Raises:
        Unavailable: the wheel is not installed, or finds no device.
    """
    spec = importlib.util.find_spec("cyllama")
    if spec is None or spec.origin is None:
        raise Unavailable("cyllama-vulkan is not installed: pip install cyllama-vulkan==0.7.0 gguf")
    folder = Path(spec.origin).parent.parent / "cyllama_vulkan.libs"

    def opened(name: str) -> tuple[Path, Any]:
        found = sorted(folder.glob(f"lib{name}-[0-9a-f]*.so*"))
        if not found:
            raise Unavailable(f"cyllama has no lib{name}: the wheel is cyllama-vulkan==0.7.0")
        return found[0], ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_GLOBAL)

    _, base = opened("ggml-base")
    _, ggml = opened("ggml")
    _, llama = opened("llama")
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(llama, name)
        function.restype, function.argtypes = result, arguments
    llama.llama_log_set(_silent, None)
    ggml.ggml_backend_load.restype, ggml.ggml_backend_load.argtypes = _POINTER, [ctypes.c_char_p]
    loaded = {}
    for name in ("ggml-vulkan", "ggml-cpu")[not vulkan :]:
        path = next(iter(folder.glob(f"lib{name}-*.so*")), None)
        loaded[name] = path and ggml.ggml_backend_load(str(path).encode())
    if not all(loaded.values()):
        raise Unavailable("llama.cpp does not load its Vulkan library")
    if not vulkan:
        llama.llama_backend_init()
        return llama, "CPU"
    base.ggml_backend_reg_dev_count.argtypes = [_POINTER]
    base.ggml_backend_reg_dev_count.restype = ctypes.c_size_t
    base.ggml_backend_reg_dev_get.argtypes = [_POINTER, ctypes.c_size_t]
    base.ggml_backend_reg_dev_get.restype = _POINTER
    base.ggml_backend_dev_description.argtypes = [_POINTER]
    base.ggml_backend_dev_description.restype = ctypes.c_char_p
    if not base.ggml_backend_reg_dev_count(loaded["ggml-vulkan"]):
        raise Unavailable(
            "llama.cpp finds no Vulkan GPU; it takes a software device "
            "if the variable GGML_VK_VISIBLE_DEVICES is 0"
        )
    device = base.ggml_backend_reg_dev_get(loaded["ggml-vulkan"], 0)
    llama.llama_backend_init()
    return llama, base.ggml_backend_dev_description(device).decode()


class LlamaCpp:
    """A GGUF file on the first Vulkan device, or on the CPU.

    Args:
        path: of the file.
        rows: of the cache.
        vulkan: whether it runs on the Vulkan device.
        exact: the cache is of float32, and no products of float16 are computed.

    Attributes:
        device: its name.

    Raises:
        Unavailable: llama.cpp is not installed, finds no device, or does not load the file.
    """

    def __init__(self, path: Path, rows: int, *, vulkan: bool = True, exact: bool = False) -> None:
        self._llama, self.device = _library(vulkan)
        self._model = self._context = None
        params = self._llama.llama_model_default_params()
        params.layers = _ALL if vulkan else 0
        self._model = self._llama.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise Unavailable(f"llama.cpp does not load {path.name}")
        params = self._llama.llama_context_default_params()
        params.context = params.batch = rows
        params.micro_batch = min(512, rows)  # its default, and the best for prompts
        if exact:
            params.flash_attention = params.key_type = params.value_type = 0  # off, float32
        self._context = self._llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise Unavailable("llama.cpp makes no context")
        self._memory = self._llama.llama_get_memory(self._context)

    def run(self, tokens: Sequence[int], position: int) -> None:
        """Runs tokens from a position on, and waits. The cache up to the position is kept."""
        if not position:  # recurrent layers can be cleared, but not cut
            self._llama.llama_memory_clear(self._memory, False)
        elif not self._llama.llama_memory_seq_rm(self._memory, -1, position, -1):
            raise RuntimeError("llama.cpp keeps no part of its cache")
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        batch = self._llama.llama_batch_get_one(ctypes.addressof(array), len(tokens))
        status = self._llama.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode answered {status}")
        self._llama.llama_synchronize(self._context)

    def logits(self, vocab: int) -> _Array:
        """Those of the last token, float32 [vocab]."""
        pointer = self._llama.llama_get_logits_ith(self._context, -1)
        return numpy.ctypeslib.as_array(pointer, (vocab,)).copy()

    def close(self) -> None:
        """Frees the memory of the device."""
        if self._context:
            self._llama.llama_free(self._context)
        if self._model:
            self._llama.llama_model_free(self._model)
        self._context = self._model = None


# -- files ---------------------------------------------------------------------------------------
_NAMES = {
    "wq": "attn_q",
    "wk": "attn_k",
    "wv": "attn_v",
    "wo": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def write_gguf(model: Any, form: Any, path: Path) -> None:
    """Writes a `bench.decode.Llama`: halves as F16, weights of 4 bits in groups of 32 as Q4_0, which
    has the same numbers.

    Raises:
        Unavailable: gguf is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise Unavailable("gguf is not installed: pip install gguf") from error
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(form.rows)
    writer.add_embedding_length(form.width)
    writer.add_block_count(form.layers)
    writer.add_feed_forward_length(form.inner)
    writer.add_head_count(form.heads)
    writer.add_head_count_kv(form.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(form.width // form.heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(form.vocab)
    writer.add_tokenizer_model("no_vocab")
    for name, data, quantized in _tensors(model, form):
        kind = gguf.GGMLQuantizationType.Q4_0 if quantized else None
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(model: Any, form: Any) -> Iterator[tuple[str, _Array, bool]]:
    """Names, elements or blocks, and whether they are blocks."""
    yield "token_embd.weight", _half(model.embedding.weight), False
    yield "output_norm.weight", model.norm.weight.detach().float().numpy(), False
    yield "output.weight", *_matrix(model.head, 0)
    for number, layer in enumerate(model.layers):
        for norm, name in ((layer.norm1, "attn_norm"), (layer.norm2, "ffn_norm")):
            yield f"blk.{number}.{name}.weight", norm.weight.detach().float().numpy(), False
        for source, name in _NAMES.items():
            heads = {"wq": form.heads, "wk": form.kv_heads}.get(source, 0)
            yield f"blk.{number}.{name}.weight", *_matrix(getattr(layer, source), heads)


def _half(weight: Any) -> _Array:
    return weight.detach().half().numpy()


def _matrix(linear: Any, heads: int) -> tuple[_Array, bool]:
    """The weight of a linear layer; `heads`: its rows are those of heads that are rotated."""
    if not hasattr(linear, "scales"):
        return _pairs(_half(linear.weight), heads), False
    packed = _pairs(linear.weight.numpy(), heads)
    scales = _pairs(numpy.ascontiguousarray(_half(linear.scales).T), heads)
    values = numpy.stack((packed & 15, packed >> 4), -1).reshape(len(packed), -1, 2, 16)
    blocks = values[:, :, 0] | values[:, :, 1] << 4
    joined = numpy.concatenate((scales[..., None].view(numpy.uint8), blocks), -1)
    return joined.reshape(len(packed), -1), True


def _pairs(rows: _Array, heads: int) -> _Array:
    """Rows of heads that are rotated by halves, in the order in which llama.cpp rotates them: by
    neighbouring pairs."""
    if not heads:
        return rows
    split = rows.reshape(heads, 2, len(rows) // heads // 2, -1)
    return numpy.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)
