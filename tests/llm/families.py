"""Tiny models of each architecture: random configs of transformers, as folders and as GGUF files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
import transformers

from tests.llm.harness import CONTROL, TEMPLATE

PROMPT = [5, 17, 3, 88, 41, 9, 60, 11, 12, 77]
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
        "original_max_position_embeddings": 64}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
LONG = {"rope_type": "longrope", "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * n for n in range(8)],
        "long_factor": [2.0 + 0.5 * n for n in range(8)],
        "original_max_position_embeddings": 16}  # fmt: skip
GEMMA4 = {
    "sliding_window": 5,
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
}
DELTA = {"layer_types": ["linear_attention", "linear_attention", "full_attention"],
         "num_hidden_layers": 3, "head_dim": 16, "linear_conv_kernel_dim": 4,
         "linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_num_key_heads": 2,
         "linear_num_value_heads": 4}  # fmt: skip
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mistral": ("Mistral", "llama", {"sliding_window": 5}),
    "llama3": ("Llama", "llama", {"rope_parameters": LLAMA3}),
    "yarn": ("Qwen2", "qwen2", {"rope_parameters": YARN}),
    "smollm3": ("SmolLM3", "smollm3", {"no_rope_layer_interval": 4, "use_sliding_window": False}),
    "gemma3": ("Gemma3Text", "gemma3", {"sliding_window": 5, "head_dim": 32,
                                    "num_hidden_layers": 7, "query_pre_attn_scalar": 32}),
    "gemma2": ("Gemma2", "gemma2", {"sliding_window": 5, "head_dim": 32, "query_pre_attn_scalar": 32,
                                    "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
                                    "attn_implementation": "eager"}),
    "gemma4": ("Gemma4Text", "gemma4", {**GEMMA4, "num_hidden_layers": 6, "use_double_wide_mlp": True,
                                        "layer_types": ["sliding_attention", "full_attention"] * 3,
                                        "num_kv_shared_layers": 2, "final_logit_softcapping": 3.0}),
    "gemma4moe": ("Gemma4Text", "gemma4", {**GEMMA4, "num_hidden_layers": 2, "attention_k_eq_v": True,
                                           "num_global_key_value_heads": 1,
                                           "hidden_size_per_layer_input": 0,
                                           "enable_moe_block": True, "num_experts": 4,
                                           "top_k_experts": 2, "moe_intermediate_size": 32,
                                           "final_logit_softcapping": 30.0,
                                           "layer_types": ["sliding_attention", "full_attention"]}),
    "phi3": ("Phi3", "phi3", {}),
    "longrope": ("Phi3", "phi3", {"rope_parameters": LONG, "max_position_embeddings": 64,
                                  "original_max_position_embeddings": 16}),
    "qwen3moe": ("Qwen3Moe", "qwen3moe", {"num_experts": 8, "num_experts_per_tok": 3,
                                          "moe_intermediate_size": 32, "norm_topk_prob": True,
                                          "head_dim": 16}),
    "gpt-oss": ("GptOss", "gpt-oss", {"num_local_experts": 8, "num_experts_per_tok": 3,
                                      "head_dim": 16, "sliding_window": 5,
                                      "rope_parameters": {**YARN, "truncate": False}}),
    "lfm2": ("Lfm2", "lfm2", {"layer_types": ["conv", "full_attention", "conv", "conv"],
                              "block_auto_adjust_ff_dim": False}),
    "qwen35": ("Qwen3_5Text", "qwen35", DELTA),
    "qwen35moe": ("Qwen3_5MoeText", "qwen35moe", {**DELTA, "num_hidden_layers": 2, "num_experts": 4,
                                                  "layer_types": ["linear_attention", "full_attention"],
                                                  "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                                                  "shared_expert_intermediate_size": 48}),
}  # fmt: skip
"""transformers' name, that of GGUF, and what the config has besides `SIZES`."""


def expected(reference: Any, tokens: list[int]) -> np.ndarray:
    """Logits of transformers after tokens."""
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0, -1].float().numpy()


def tiny(family: str) -> Any:
    """A module with random weights."""
    name, _, options = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **options})
    torch.manual_seed(0)
    cls = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")
    model = cls(config).eval().requires_grad_(False)
    for key, weight in model.named_parameters():
        if weight.ndim == 1:
            weight.add_(torch.rand(weight.shape) * 0.4 - 0.2)
        else:
            weight.copy_(torch.randn(weight.shape) * (0.3 if "embed" in key else 0.12))
    for key, buffer in model.named_buffers():
        if key.endswith("layer_scalar"):
            buffer.mul_(0.7)
    return model


def write_gguf(model: Any, family: str, path: Path, drafts: int = 1) -> None:
    """Writes a file as llama.cpp's converter does, with tensors of F32 and without a vocabulary.

    Args:
        drafts: layers of Qwen3.5 that predict further tokens, and have no tensors here.
    """
    _, name, _ = FAMILIES[family]
    config = model.config
    config.allow_global_per_layer_attribute_access = True
    writer = gguf.GGUFWriter(path, name)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    if name == "gemma4":
        width = config.per_layer_config["full_attention"].head_dim
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    drafts *= name == "qwen35"
    writer.add_block_count(config.num_hidden_layers + drafts)
    if drafts:
        writer.add_nextn_predict_layers(drafts)
    inner, attends = config.intermediate_size, kv_heads
    if family == "lfm2":
        attends = [kv_heads * (each != "conv") for each in config.layer_types]
    if name == "gemma4":
        inner = [layer.mlp.gate_proj.out_features for layer in model.model.layers]
        widths = [layer.self_attn.head_dim for layer in model.model.layers]
        rows = [model.model.layers[n].self_attn.num_key_value_groups for n in range(len(widths))]
        attends = [heads // groups for groups in rows]
        writer.add_key_length_swa(min(widths))
        writer.add_value_length_swa(min(widths))
        writer.add_rope_dimension_count_swa(min(widths))
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(attends)
    writer.add_layer_norm_rms_eps(
        getattr(config, "rms_norm_eps", getattr(config, "norm_eps", 1e-5))
    )
    writer.add_key_length(width)
    writer.add_value_length(width)
    rotation = config.rope_parameters
    writer.add_rope_dimension_count(int(width * rotation.get("partial_rotary_factor", 1)))
    writer.add_rope_freq_base(rotation.get("full_attention", rotation)["rope_theta"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if family == "lfm2":
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if name == "gemma4":
        slides = [each == "sliding_attention" for each in config.layer_types]
        writer.add_sliding_window_pattern(slides)
        writer.add_shared_kv_layers(config.num_kv_shared_layers)
        writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
        factors = np.repeat(np.array([1, 1e30], np.float32), [width // 8, width // 2 - width // 8])
        writer.add_tensor("rope_freqs.weight", factors)
    if name.startswith("qwen35"):
        writer.add_rope_dimension_sections([1, 1, 0, 0])
        writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    if family in ("qwen3moe", "gpt-oss", "qwen35moe", "gemma4moe"):
        count = getattr(config, "num_local_experts", getattr(config, "num_experts", None))
        writer.add_expert_count(count)
        used = getattr(config, "top_k_experts", getattr(config, "num_experts_per_tok", None))
        writer.add_expert_used_count(used)
        inner = getattr(config, "moe_intermediate_size", config.intermediate_size)
        writer.add_expert_feed_forward_length(inner)
    if rotation.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rotation["factor"])
        writer.add_rope_scaling_orig_ctx_len(rotation["original_max_position_embeddings"])
    if rotation.get("rope_type") == "longrope":
        growth = config.max_position_embeddings / rotation["original_max_position_embeddings"]
        base = math.log(rotation["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(growth) / base))
        writer.add_rope_scaling_orig_ctx_len(rotation["original_max_position_embeddings"])
        for which in ("long", "short"):
            factors = np.array(rotation[f"{which}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{which}.weight", factors)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(_architecture(name), config.num_hidden_layers)
    for key, weight in _weights(model).items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = weight.numpy()
        if name in ("llama", "smollm3") and key.endswith(("q_proj.weight", "k_proj.weight")):
            count = heads if "q_proj" in key else kv_heads
            array = array.reshape(count, 2, width // 2, -1).swapaxes(1, 2).reshape(array.shape)
        if name in RAISED and key.endswith("norm.weight") and "linear_attn" not in key:
            array = array + 1
        if "linear_attn" in key:
            array = _tiled(array, key, config)
        new = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if "router." in key and key.endswith("scale"):
            part = "ffn_down_exps" if "per_expert" in key else "ffn_gate_inp"
            new = f"blk.{key.split('.')[2]}.{part}.scale"
        assert new is not None, key
        writer.add_tensor(new, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tokenizer(folder: Path) -> None:
    """Has a folder have a tokenizer of 96 characters and control tokens, and a chat template."""
    characters = [*CONTROL, "\n", *map(chr, range(32, 32 + 96 - len(CONTROL) - 1))]
    implementation = tokenizers.Tokenizer(
        tokenizers.models.BPE({each: number for number, each in enumerate(characters)}, [])
    )
    implementation.add_special_tokens(CONTROL)
    implementation.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


RAISED = ("gemma2", "gemma3", "qwen35", "qwen35moe")
"""Whose files have norms with the 1 that is added to their weights."""


def _tiled(array: np.ndarray, key: str, config: Any) -> np.ndarray:
    """A weight of linear attention as files have it: heads of values are in the order of the number
    among those of one key, then of the key."""
    keys, width = config.linear_num_key_heads, config.linear_value_head_dim
    count = config.linear_num_value_heads // keys

    def reordered(rows: np.ndarray, width: int) -> np.ndarray:
        heads = rows.reshape(keys, count, width, *rows.shape[1:])
        return heads.swapaxes(0, 1).reshape(rows.shape)

    part = key.split("linear_attn.")[1]
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        first = 2 * keys * config.linear_key_head_dim
        return np.concatenate((array[:first], reordered(array[first:], width))).squeeze()
    if part == "out_proj.weight":
        return reordered(array.T, width).T
    if part == "norm.weight":
        return array
    array = reordered(array, width if part == "in_proj_z.weight" else 1)
    return -np.exp(array) if part == "A_log" else array


def _architecture(name: str) -> Any:
    return next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)


def _weights(model: Any) -> dict[str, torch.Tensor]:
    """By the names of files: experts of transformers are joined in a module."""
    weights = {}
    for key, weight in model.state_dict().items():
        if model.config.model_type == "gpt_oss" and ".experts." in key:
            own = weight.swapaxes(1, 2) if weight.ndim == 3 else weight
            kind = "bias" if key.endswith("_bias") else "weight"
            new = key.removesuffix("_bias")
            if "gate_up" in key:
                weights[new.replace("gate_up_proj", f"gate_proj.{kind}")] = own[:, ::2]
                weights[new.replace("gate_up_proj", f"up_proj.{kind}")] = own[:, 1::2]
            else:
                weights[f"{new}.{kind}"] = own
        elif key.endswith("conv.conv.weight"):
            weights[key] = weight[:, 0]
        elif key.endswith("layer_scalar") or (
            ".experts." in key and "gemma4" in model.config.model_type
        ):
            weights[f"{key}.weight"] = weight
        elif key.endswith("dt_bias"):
            weights[key.replace("dt_bias", "dt_proj.bias")] = weight
        elif key.endswith("sinks"):
            weights[f"{key}.weight"] = weight
        elif key.endswith("experts.gate_up_proj"):
            gate, up = weight.chunk(2, 1)
            weights[key.replace("gate_up_proj", "gate_proj.weight")] = gate
            weights[key.replace("gate_up_proj", "up_proj.weight")] = up
        elif key.endswith("experts.down_proj"):
            weights[f"{key}.weight"] = weight
        else:
            weights[key] = weight
    return weights
