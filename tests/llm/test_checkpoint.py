"""Folders of safetensors files: tensors, quantization, tokenizers, and damaged files."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
torch = pytest.importorskip("torch")

import purevk.llm  # noqa: E402
from purevk.dtypes import DType  # noqa: E402
from purevk.errors import FileFormatError, PurevkError, UnsupportedProgramError  # noqa: E402
from purevk.llm.checkpoint import Folder  # noqa: E402
from purevk.llm.files import ModelFile  # noqa: E402
from purevk.llm.network import Network  # noqa: E402
from purevk.llm.safetensors import Computed, Stored, read_tensors  # noqa: E402
from purevk.llm.tokenizer import tokenizer_of  # noqa: E402
from purevk.pte import safetensors as tensor_files  # noqa: E402
from tests.llm.families import tiny  # noqa: E402


def test_shards_are_one_model(tmp_path: Path) -> None:
    reference = tiny("phi3")
    reference.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    folder = Folder(tmp_path)
    weight = reference.model.layers[3].self_attn.qkv_proj.weight
    assert (folder.tensors["blk.3.attn_qkv.weight"].floats() == weight.numpy()).all()
    folder.close()
    next(tmp_path.glob("*-00002-*")).unlink()
    with pytest.raises(FileFormatError, match="is missing"):
        Folder(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16,
                                   torch.float8_e4m3fn, torch.float8_e5m2], ids=str)  # fmt: skip
def test_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    x = bits.view(dtype) if dtype.itemsize == 1 else torch.randn(256).to(dtype)
    safetensors.save_file({"x": x.reshape(8, 32)}, tmp_path / "x.safetensors")
    _source, tensors = read_tensors(tmp_path / "x.safetensors")
    have, want = torch.from_numpy(tensors["x"].floats().copy()), x.float().reshape(8, 32)
    assert torch.equal(have.isnan(), want.isnan())
    assert torch.equal(have.nan_to_num(), want.nan_to_num())


def folder_of(tmp_path: Path, tensors: dict[str, Any], quantization: dict[str, Any]) -> Folder:
    """The first projection of a model is replaced by packed tensors."""
    tiny("mistral").save_pretrained(tmp_path)
    stored = safetensors.load_file(tmp_path / "model.safetensors")
    del stored["model.layers.0.self_attn.q_proj.weight"]
    stored.update({f"model.layers.0.self_attn.q_proj.{name}": t for name, t in tensors.items()})
    safetensors.save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = quantization
    (tmp_path / "config.json").write_text(json.dumps(config))
    return Folder(tmp_path)


@pytest.mark.parametrize("blocks", [(1, 1), (2, 2), (192, 1)], ids=str)
def test_float8_has_scales(blocks: tuple[int, int], tmp_path: Path) -> None:
    weight = torch.randn(192, 256).to(torch.float8_e4m3fn)
    scale = torch.rand(blocks)
    name = "weight_scale_inv" if blocks == (2, 2) else "weight_scale"
    folder = folder_of(tmp_path, {"weight": weight, name: scale}, {"quant_method": "fp8"})
    spread = scale.repeat_interleave(192 if blocks[0] == 1 else 128 if blocks[0] == 2 else 1, 0)
    spread = spread.repeat_interleave(128 if blocks[1] == 2 else 256, 1)[:192]
    have = folder.tensors["blk.0.attn_q.weight"].floats()
    assert (have == (weight.float() * spread).numpy()).all()


def float8(dims: tuple[int, ...], scale_dims: tuple[int, ...]) -> Stored:
    """Ones, with scales that count from 0."""
    scales = np.arange(np.prod(scale_dims), dtype=np.float32)
    scale = Stored("s", "F32", scale_dims, memoryview(scales.tobytes()))
    return Stored("w", "F8_E4M3", dims, memoryview(b"\x38" * int(np.prod(dims))), scale)


def test_one_block_of_columns_has_one_scale() -> None:
    have = float8((192, 100), (2, 1)).floats()
    assert (have == np.arange(2).repeat(128)[:192, None] * np.ones(100)).all()


@pytest.mark.parametrize("dims, scale_dims", [
    ((64, 64), (8000, 2)), ((64, 64), (8000,)), ((64,), (64,)), ((2, 8, 8), (2,)), ((64, 64), (0,)),
    ((1, 64), (1, 2)),
], ids=str)  # fmt: skip
def test_scales_of_other_tensors(dims: tuple[int, ...], scale_dims: tuple[int, ...]) -> None:
    """They were broadcast: a file of 64 MB made arrays of 8 GB."""
    with pytest.raises(FileFormatError, match="scales of"):
        float8(dims, scale_dims).floats()


def packed(integers: torch.Tensor, bits: int, order: list[int]) -> torch.Tensor:
    """Integers [rows, columns], those of a word in an order, as int32 [rows, words]."""
    count = 32 // bits
    words = torch.zeros(integers.shape[0], integers.shape[1] // count, dtype=torch.int64)
    for at, column in enumerate(order):
        words |= integers[:, column::count].long() << (bits * at)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


@pytest.mark.parametrize("method, bits", [("awq", 4), ("gptq", 4), ("gptq", 8)])
def test_packed_integers(method: str, bits: int, tmp_path: Path) -> None:
    rows, columns, group = 64, 64, 32
    torch.manual_seed(1)
    weight = torch.randint(0, 1 << bits, (columns, rows))
    zeros = torch.randint(1, 1 << bits, (columns // group, rows))
    scales = torch.rand(columns // group, rows).half()
    plain = list(range(32 // bits))
    order = [0, 2, 4, 6, 1, 3, 5, 7] if method == "awq" else plain
    if method == "awq":
        stored = packed(weight, bits, order)
    else:
        stored = packed(weight.T.contiguous(), bits, plain).T.contiguous()
    parts = {
        "qweight": stored,
        "qzeros": packed(zeros - int(method == "gptq"), bits, order),
        "scales": scales,
    }
    folder = folder_of(tmp_path, parts, {"quant_method": method, "bits": bits})
    tensor = folder.tensors["blk.0.attn_q.weight"]
    assert tensor.dims == (rows, columns) and tensor.form and tensor.form.group == group
    values, found = tensor.values(), tensor.parts()
    if bits == 4:
        unsigned = np.stack((values & 15, values >> 4), -1).reshape(rows, columns)
    else:
        unsigned = values.view(np.uint8) ^ 0x80
    have = unsigned * found["scales"].repeat(group, 1) + found["minimums"].repeat(group, 1)
    spread = [each.repeat_interleave(group, 0) for each in (scales.float(), zeros)]
    want = ((weight - spread[1]) * spread[0]).T.numpy()
    assert np.abs(have - want).max() <= 1e-5 * np.abs(want).max()


def test_unknown_quantization_is_refused(tmp_path: Path) -> None:
    tensors = {"qweight": torch.zeros(8, 64, dtype=torch.int32)}
    with pytest.raises(UnsupportedProgramError, match="'gptq' of 3 bits"):
        folder_of(tmp_path, tensors, {"quant_method": "gptq", "bits": 3})


def write_file(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[]",
        b"[" * 100_000,
        {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 800]}},
        {"x": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}},
        {"x": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}},
        {"x": {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]}},
        {"x": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}},
        {
            "x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "y": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        },
        b'{"x": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}, "x": {"dtype": "U8",'
        b' "shape": [0], "data_offsets": [0, 0]}}',
        {"x": 1},
        {"x": {"dtype": [], "shape": [2], "data_offsets": [0, 8]}},
    ],
    ids=lambda header: str(header)[:40],
)
def test_damaged_headers(header: Any, tmp_path: Path) -> None:
    with pytest.raises(PurevkError):
        read_tensors(write_file(tmp_path / "x.safetensors", header, bytes(8)))


def test_long_headers_are_refused() -> None:
    """JSON of a header takes many times its bytes."""
    data = bytearray(100_000_009)
    struct.pack_into("<Q", data, 0, len(data) - 8)
    with pytest.raises(FileFormatError, match="has 100000001 bytes"):
        tensor_files.read_tensors(memoryview(data), "x")


def test_cut_and_empty_files(tmp_path: Path) -> None:
    for data in (b"", b"1234567", struct.pack("<Q", 1 << 40), struct.pack("<Q", 50) + b"{}"):
        (tmp_path / "x.safetensors").write_bytes(data)
        with pytest.raises(FileFormatError):
            read_tensors(tmp_path / "x.safetensors")


def test_what_graphs_follow_from() -> None:
    """Metadata, types and sizes of tensors, and elements that become numbers of graphs."""

    def about(factor: float = 1, weight: float = 1, width: int = 4, **metadata: Any) -> str:
        file = ModelFile("")
        file.metadata = {"tokenizer.ends": [weight], "sizes": np.arange(3), **metadata}
        for name, number in (("rope_freqs.weight", factor), ("output.weight", weight)):
            read = functools.partial(np.full, width, number, np.float32)
            file.tensors[name] = Computed(name, (width,), read)
        return file.about

    assert about() == about(weight=2)
    others = [about(), about(factor=2), about(width=6), about(sizes=np.arange(4)), about(x=None)]
    assert len({*others}) == len(others)


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    with pytest.raises(UnsupportedProgramError, match="MambaForCausalLM"):
        Folder(tmp_path)


@pytest.mark.parametrize("width", [1 << 17, -2])
def test_wide_heads_are_refused(width: int, tmp_path: Path) -> None:
    """The factors of a rotation have no tensor that says how many there are."""
    write_file(tmp_path / "model.safetensors", {})
    rotation = {"rope_type": "llama3", "rope_theta": 1e4, "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0}  # fmt: skip
    config = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 1, "hidden_size": 64,
              "head_dim": width, "rope_scaling": rotation}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FileFormatError, match="head_dim"):
        Folder(tmp_path)


SIZES = {"max_position_embeddings": 4096, "head_dim": 2, "num_attention_heads": 1}


def plan_of(tmp_path: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Any:
    """Plans a model of one layer whose weights are zeros of F16."""
    header, end = {}, 0
    for name, dims in shapes.items():
        name = name if name in ("model.embed_tokens", "model.norm") else f"model.layers.0.{name}"
        start, end = end, end + 2 * math.prod(dims)
        header[f"{name}.weight"] = {"dtype": "F16", "shape": dims, "data_offsets": [start, end]}
    write_file(tmp_path / "model.safetensors", header, bytes(end))
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "num_hidden_layers": 1, **config}))
    return purevk.llm.plan(tmp_path)


def test_many_taps_are_refused(tmp_path: Path) -> None:
    """A convolution takes some nodes for each tap: 800 KB took 10 s."""

    def plan(taps: int) -> Any:
        config = {"architectures": ["Lfm2ForCausalLM"], "hidden_size": 4, "conv_L_cache": taps}
        return plan_of(tmp_path, config, {
            "model.embed_tokens": (8, 4), "operator_norm": (4,), "ffn_norm": (4,),
            "conv.conv": (4, 1, taps), "conv.in_proj": (12, 4), "conv.out_proj": (4, 4),
            "feed_forward.w1": (2, 4), "feed_forward.w3": (2, 4), "feed_forward.w2": (4, 2),
        })  # fmt: skip

    with pytest.raises(FileFormatError, match="50001 nodes"):
        plan(100_000)
    with pytest.raises(FileFormatError, match="token_embd_norm"):  # the last one is missing
        plan(3)


def test_wide_rotations_are_refused(tmp_path: Path) -> None:
    """Those of Gemma 4 are as wide as a weight. A megabyte of them had tables of 6 GB."""

    def plan(width: int) -> Any:
        config = {"architectures": ["Gemma4ForCausalLM"], "hidden_size": 2}
        norms = ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm"]
        norms += ["post_feedforward_layernorm"]
        return plan_of(tmp_path, config, {
            "model.embed_tokens": (8, 2), "model.norm": (2,), **dict.fromkeys(norms, (2,)),
            "self_attn.q_norm": (width,), "self_attn.k_norm": (width,),
            **{f"self_attn.{part}_proj": (width, 2) for part in "qkv"},
            "self_attn.o_proj": (2, width), "mlp.gate_proj": (2, 2), "mlp.up_proj": (2, 2),
            "mlp.down_proj": (2, 2),
        })  # fmt: skip

    assert plan(16).cache
    with pytest.raises(FileFormatError, match="rotation of 4098 elements"):
        plan(4098)


def test_rotations_are_few_and_finite(tmp_path: Path) -> None:
    tiny("mistral").save_pretrained(tmp_path)
    folder = Folder(tmp_path)
    net = Network("decode", folder, DType.float32, 8)
    net.positions = net.row_numbers
    for base in range(8):
        net.angles(np.array([1.0, base]))
    net.angles(np.array([1.0, 7.0]))
    with pytest.raises(FileFormatError, match="8 others"):
        net.angles(np.array([1.0, 8.0]))
    net._angles.clear()
    with pytest.raises(FileFormatError, match="no number"):
        net.angles(np.array([1.0, np.inf]))
    folder.close()


def test_weights_without_elements_are_refused(tmp_path: Path) -> None:
    """They state any number of experts, of which constants are made, and cost no byte."""
    config = {"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 0,
              "num_experts": 1 << 23, "num_experts_per_tok": 1}  # fmt: skip
    with pytest.raises(FileFormatError, match=r"token_embd.weight has sizes \[8, 0\]"):
        plan_of(tmp_path, config, {"model.embed_tokens": (8, 0)})


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("factor", [0, 1e308, 1e-320])
def test_factors_out_of_range_give_no_warning(factor: float, tmp_path: Path) -> None:
    """Warnings that are errors were raised as they are."""
    tiny("llama3").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"]["factor"] = factor
    (tmp_path / "config.json").write_text(json.dumps(config))
    with contextlib.suppress(FileFormatError):
        purevk.llm.plan(tmp_path)


def test_the_tokenizer_of_a_folder(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tiny("mistral").save_pretrained(tmp_path)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the sky is blue and the sea is too"] * 20, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    about = {"bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>", "chat_template": "x"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    have = tokenizer_of(Folder(tmp_path), 300)
    for text in ("the sky is 12 blue", "é漢🙂<|im_end|>the"):
        assert have.encode(text) == tokenizer.encode(text).ids
        assert have.decode(have.encode(text)) == text.replace("<|im_end|>", "")
    assert have.end_tokens == {1, 5} and have.bos == "<s>" and have.template == "x"
