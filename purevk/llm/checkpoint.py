"""Folders of transformers, with config.json and safetensors files, in the words of GGUF."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from purevk.errors import FileFormatError, UnsupportedProgramError
from purevk.frontends.reading import reading
from purevk.llm import files, packed
from purevk.llm.files import damaged
from purevk.llm.safetensors import MOST_TEXT, Computed, Stored, read_json, read_tensors, stacked
from purevk.llm.tokenizer.files import numbers_of, read_about
from purevk.paths import read_file

ARCHITECTURES = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3", "SmolLM3ForCausalLM": "smollm3", "Gemma3ForCausalLM": "gemma3",
    "Gemma2ForCausalLM": "gemma2", "Phi3ForCausalLM": "phi3", "Qwen3MoeForCausalLM": "qwen3moe",
    "GptOssForCausalLM": "gpt-oss", "Lfm2ForCausalLM": "lfm2", "Qwen3_5ForCausalLM": "qwen35",
    "Gemma4ForCausalLM": "gemma4", "Gemma4ForConditionalGeneration": "gemma4",
    "Qwen3_5ForConditionalGeneration": "qwen35", "Qwen3_5MoeForCausalLM": "qwen35moe",
    "Qwen3_5MoeForConditionalGeneration": "qwen35moe",
}  # fmt: skip
"""By the class of transformers that config.json names."""
_KEYS = {
    "num_hidden_layers": "block_count", "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length", "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count", "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count", "top_k_experts": "expert_used_count",
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "final_logit_softcapping": "final_logit_softcapping",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "query_pre_attn_scalar": "attention.scale_width", "conv_L_cache": "shortconv.l_cache",
    "norm_eps": "attention.layer_norm_rms_epsilon", "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size", "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank", "linear_value_head_dim": "ssm.value_size",
}  # fmt: skip
_ROTATION = {
    "rope_theta": "rope.freq_base", "factor": "rope.scaling.factor",
    "attention_factor": "rope.scaling.attn_factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow",
}  # fmt: skip
_PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output",
    "self_attn.out_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down",
    "input_layernorm": "attn_norm", "operator_norm": "attn_norm", "ffn_norm": "ffn_norm",
    "post_attention_layernorm": "ffn_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm", "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj", "conv.out_proj": "shortconv.out_proj",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out", "router.proj": "ffn_gate_inp",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2", "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm",
}  # fmt: skip
_NORM_AFTER_ATTENTION = ("gemma2", "gemma3", "gemma4", "gpt-oss", "qwen35", "qwen35moe")
"""Architectures whose `post_attention_layernorm` GGUF calls so too."""
_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
    "model.embedding_norm.weight": "token_embd_norm.weight", "lm_head.weight": "output.weight",
}  # fmt: skip
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_MOST_OF_HEAD = 1 << 16  # head_dim, of which memory is taken before a tensor confirms it
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj")


class Folder(files.ModelFile):
    """A folder as transformers' `save_pretrained` writes it.

    Args:
        path: of the folder.

    Raises:
        FileFormatError: a file is damaged or missing.
        UnsupportedProgramError: the architecture or the quantization is not known.
        OSError: a file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.is_raw = True
        if not (path / "config.json").is_file():
            raise FileFormatError(
                "the folder has no config.json",
                where=self.name,
                next="give the folder that save_pretrained of transformers has written",
            )
        with files.close_on_error(self), reading(self.name):
            self._read(path)

    def _read(self, path: Path) -> None:
        config = read_json(path / "config.json")
        text = config.get("text_config")
        self._config = {**config, **text} if isinstance(text, dict) else config
        self._read_metadata(config, path)
        self.tensors = self._named(self._read_tensors(path))

    # -- config -----------------------------------------------------------------------------------
    def _read_metadata(self, config: Mapping[str, Any], path: Path) -> None:
        classes = config.get("architectures") or [None]
        name = ARCHITECTURES.get(str(classes[0]))
        if name is None:
            raise files.unknown_architecture(self.name, classes[0], ARCHITECTURES)
        found = {**self._config}
        if not found.get("use_sliding_window", True):
            found["sliding_window"] = None
        metadata: dict[str, Any] = {"general.architecture": name}
        metadata.update(
            {
                f"{name}.{key}": found[old]
                for old, key in _KEYS.items()
                if found.get(old) is not None
            }
        )
        rotation = dict(found.get("rope_parameters") or found.get("rope_scaling") or {})
        if isinstance(rotation.get("sliding_attention"), dict):
            local, rotation = rotation["sliding_attention"], rotation["full_attention"]
            metadata[f"{name}.rope.freq_base_swa"] = local["rope_theta"]
        elif "rope_local_base_freq" in found:
            metadata[f"{name}.rope.freq_base_swa"] = found["rope_local_base_freq"]
        for key in ("rope_theta", "original_max_position_embeddings"):
            if found.get(key) is not None:
                rotation.setdefault(key, found[key])
        metadata.update(
            {f"{name}.{key}": rotation[old] for old, key in _ROTATION.items() if rotation.get(old)}
        )
        kind = rotation.get("rope_type", rotation.get("type", "default"))
        if kind not in ("default", "llama3", "proportional"):
            metadata[f"{name}.rope.scaling.type"] = kind
        metadata["yarn_truncates"] = rotation.get("truncate", True)
        part = rotation.get("partial_rotary_factor", found.get("partial_rotary_factor"))
        if kind == "proportional":
            metadata["rotated_part"] = float(1 if part is None else part)
        elif part is not None:
            metadata[f"{name}.rope.dimension_count"] = int(self._head_width * part)
        self._rotation, self._kind = rotation, kind
        for key in ("layer_types", "norm_topk_prob", "no_rope_layers"):
            if found.get(key) is not None:
                metadata[_NAMES[key]] = found[key]
        self.metadata = metadata
        self._read_tokenizer(path)

    def _read_tokenizer(self, path: Path) -> None:
        """The tokenizer, the chat template and what ends an answer, if they are there."""
        if (path / "tokenizer.json").is_file():
            self.metadata["tokenizer.json"] = read_file(path / "tokenizer.json", MOST_TEXT).decode()
        ends = numbers_of(self._config.get("eos_token_id"))
        self.metadata |= {"tokenizer.ends": ends, **read_about(path)}

    @property
    def _head_width(self) -> int:
        config = self._config
        width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return int(width)

    # -- tensors ----------------------------------------------------------------------------------
    def _read_tensors(self, path: Path) -> dict[str, Stored]:
        names = ["model.safetensors"]
        index = path / "model.safetensors.index.json"
        if index.is_file():
            parts = read_json(index).get("weight_map")
            if not isinstance(parts, dict) or not all(isinstance(v, str) for v in parts.values()):
                raise damaged(str(index), "it has no weight_map")
            names = sorted(set(parts.values()))
        stored: dict[str, Stored] = {}
        there = {each.name for each in path.iterdir() if each.is_file()}
        for name in names:
            if name not in there:
                raise FileFormatError(
                    f"the file {name!r} is missing",
                    where=self.name,
                    next="copy all files of the model into one folder",
                )
            source, tensors = read_tensors(path / name)
            self.sources.append(source)
            stored.update(tensors)
        return stored

    def _named(self, stored: dict[str, Stored]) -> dict[str, files.Tensor]:
        """The tensors by the names of GGUF; what nobody asks for has none."""
        plain = {name.replace("language_model.", "", 1): each for name, each in stored.items()}
        plain = {name.replace("model.model.", "model.", 1): each for name, each in plain.items()}
        tensors: dict[str, files.Tensor] = {}
        experts: dict[str, dict[int, files.Tensor]] = {}
        architecture = self.metadata["general.architecture"]
        parts = dict(_PARTS)
        if architecture in _NORM_AFTER_ATTENTION:
            parts["post_attention_layernorm"] = "post_attention_norm"
        for name, tensor in [*plain.items(), *self._packed(plain).items()]:
            if name in _WHOLE:
                tensors[_WHOLE[name]] = tensor
                continue
            match = _LAYER.fullmatch(name)
            if match is None:
                tensors.update(_bare(name, tensor, architecture == "gpt-oss", plain))
                continue
            layer, part, kind = match.groups()
            expert = _EXPERT.fullmatch(part)
            if expert is not None:
                whole = f"blk.{layer}.ffn_{expert[2]}_exps.{kind}"
                experts.setdefault(whole, {})[int(expert[1])] = tensor
            elif part in parts:
                whole = f"blk.{layer}.{parts[part]}.{kind}"
                if "conv" in parts[part] and isinstance(tensor, Stored):
                    tensor = replace(tensor, dims=(tensor.dims[0], tensor.dims[-1]))
                tensors[whole] = tensor
        for name, numbered in experts.items():
            if sorted(numbered) != list(range(len(numbered))):
                raise damaged(self.name, f"{name} has the experts {sorted(numbered)[:20]}")
            tensors[name] = stacked(name, [numbered[number] for number in range(len(numbered))])
        tensors.update(self._factors())
        return tensors

    def _packed(self, stored: Mapping[str, Stored]) -> dict[str, files.Tensor]:
        """What quantization has packed, by the names of plain weights."""
        about = self._config.get("quantization_config") or {}
        method, bits = about.get("quant_method"), about.get("bits", 4)
        tensors: dict[str, files.Tensor] = {}
        for name, tensor in stored.items():
            if tensor.type.startswith("F8") and name.endswith(".weight"):
                scales = (stored.get(f"{name}_scale_inv"), stored.get(f"{name}_scale"))
                scale = next((each for each in scales if each is not None), None)
                tensors[name] = Stored(*(name, tensor.type, tensor.dims, tensor.data, scale))
            base, _, part = name.rpartition(".")
            if part == "_weight_qdata":
                tensors[f"{base}.weight"] = packed.of_torchao(base, stored)
            if part == "qweight":
                if method not in ("awq", "gptq") or bits not in (4, 8) or about.get("desc_act"):
                    raise UnsupportedProgramError(
                        f"the quantization {method!r} of {bits!r} bits is not known",
                        where=self.name,
                        why="AWQ and GPTQ of 4 and 8 bits, without desc_act, are",
                        next="dequantize the model with transformers, and save it again",
                    )
                plus = int(method == "gptq" and about.get("checkpoint_format") != "gptq_v2")
                weight = packed.of_words(base, stored, method == "awq", bits, plus)
                tensors[f"{base}.weight"] = weight
        return tensors

    def _factors(self) -> dict[str, files.Tensor]:
        """Factors of the rotation, as tensors that files of GGUF have."""
        rotation = self._rotation
        if self._kind == "longrope":
            return {
                f"rope_factors_{which}.weight": _constant(rotation[f"{which}_factor"])
                for which in ("long", "short")
            }
        if self._kind != "llama3":
            return {}
        width = self._head_width
        if not 0 < width <= _MOST_OF_HEAD:
            raise damaged(self.name, f"head_dim is {width}; at most {_MOST_OF_HEAD} are accepted")
        frequencies = float(rotation["rope_theta"]) ** (-np.arange(0, width, 2) / width)
        original = float(rotation["original_max_position_embeddings"])
        low, high = float(rotation["low_freq_factor"]), float(rotation["high_freq_factor"])
        factor = float(rotation["factor"])
        turns = original * frequencies / (2 * math.pi)
        mix = np.clip((turns - low) / (high - low), 0, 1)  # 0: slow ones, divided by the factor
        return {"rope_freqs.weight": _constant(1 / ((1 - mix) / factor + mix))}


_NAMES = {
    "layer_types": "layer_types", "norm_topk_prob": "normalizes_routes",
    "no_rope_layers": "rotating_layers",
}  # fmt: skip


def _constant(numbers: Any) -> Computed:
    array = np.asarray(numbers, np.float32).reshape(-1)
    return Computed("factors", array.shape, lambda: array)


_BARE = {
    "self_attn.sinks": "attn_sinks.weight", "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a", "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale",
}  # fmt: skip
_BARE_NAME = re.compile(r"model\.layers\.(\d+)\.((?:mlp\.)?experts\.(\w+)|(?:\w+\.)?\w+)")


def _bare(
    name: str, tensor: files.Tensor, is_oss: bool, stored: Mapping[str, Stored]
) -> dict[str, files.Tensor]:
    """Tensors whose names do not end in "weight" or "bias". Experts of gpt-oss are [experts, columns,
    rows], or blocks of MXFP4 [experts, rows, groups, 16]; rows of gate and up alternate."""
    match = _BARE_NAME.fullmatch(name)
    if match is None:
        return {}
    layer, part = f"blk.{match[1]}", match[3]
    if part is None:
        new = _BARE.get(match[2])
        if new == "ssm_a":
            tensor = Computed(name, tensor.dims, functools.partial(_negated_exp, tensor))
        return {f"{layer}.{new}": tensor} if new else {}
    if not is_oss:
        return {f"{layer}.ffn_{part.removesuffix('_proj')}_exps.weight": tensor}

    if part.endswith("_scales"):
        return {}

    def part_of(first: int, step: int) -> files.Tensor:
        if part.endswith("_blocks"):
            exponents = stored[f"{name.removesuffix('blocks')}scales"]
            return packed.Mxfp4(f"{name}.{first}", stored[name], exponents, first, step)

        def read() -> np.ndarray:
            return np.asarray(tensor.floats()[..., first::step].swapaxes(1, -1), np.float32)

        *outer, rows = tensor.dims
        dims = (outer[0], rows // step, *outer[1:])
        return Computed(name, dims, read)

    kind = "bias" if part.endswith("_bias") else "weight"
    if part.startswith("gate_up_proj"):
        return {
            f"{layer}.ffn_gate_exps.{kind}": part_of(0, 2),
            f"{layer}.ffn_up_exps.{kind}": part_of(1, 2),
        }
    return {f"{layer}.ffn_down_exps.{kind}": part_of(0, 1)}


def _negated_exp(tensor: files.Tensor) -> np.ndarray:
    return np.asarray(-np.exp(tensor.floats()), np.float32)
