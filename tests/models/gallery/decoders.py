"""Further decoders of transformers, small: attention, state spaces, mixtures of experts."""

from __future__ import annotations

from typing import Any

from tests.models.gallery.model import Model
from tests.models.gallery.small import ids, model


def _causal(name: str, about: str, kind: str = "", **options: Any) -> Model:
    kind = kind if kind.endswith("LMHeadModel") else f"{kind or name.capitalize()}ForCausalLM"
    return model(
        name, about, kind, {"input_ids": ids(1, 17)}, constants={"use_cache": False}, **options
    )


_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}

MODELS = (
    _causal("apertus", "2 layers, xIELU"),
    _causal("arcee", "2 layers, squared ReLU"),
    _causal("bert_decoder", "2 layers, causal", "BertLMHeadModel", is_decoder=True),
    _causal("biogpt", "2 layers", "BioGpt"),
    _causal("bitnet", "2 layers, norms inside the blocks", "BitNet"),
    _causal("clvp_decoder", "2 layers, decoder of speech codes", "Clvp"),
    _causal("codegen", "2 layers, rotation of pairs, attention beside the MLP", "CodeGen", rotary_dim=8),
    _causal("cohere", "2 layers, one norm, attention beside the MLP"),
    _causal("cohere2", "2 layers, a window of 8", "Cohere2"),
    _causal("ctrl", "2 layers, control codes", "CTRLLMHeadModel", dff=128),
    _causal("cwm", "2 layers, a window of 8"),
    _causal("diffllama", "2 layers, differences of attention", "DiffLlama"),
    _causal("doge", "2 layers, dynamic masks"),
    _causal("emu3", "2 layers, text part"),
    _causal("ernie4_5", "2 layers", "Ernie4_5"),
    _causal("exaone4", "2 layers, norms after the blocks", "Exaone4"),
    _causal("flaubert", "2 layers", "FlaubertWithLMHeadModel"),
    _causal("gemma3n", "2 layers, alternating updates, inputs per layer", "Gemma3n", num_kv_shared_layers=0,
            layer_types=["sliding_attention", "full_attention"], hidden_size_per_layer_input=16,
            vocab_size_per_layer_input=120, laurel_rank=8, intermediate_size=[128, 128],
            activation_sparsity_pattern=[0.95, 0.0], altup_num_inputs=2),
    _causal("glm", "2 layers, partial rotation"),
    _causal("glm4", "2 layers, four norms", "Glm4"),
    _causal("gpt", "2 layers, norms after the blocks", "OpenAIGPTLMHeadModel"),
    _causal("gpt_bigcode", "2 layers, one head of keys", "GPTBigCode"),
    _causal("gpt_neo", "2 layers, global and local attention", "GPTNeo",
            attention_types=[[["global", "local"], 1]], window_size=8),
    _causal("gpt_neox_japanese", "2 layers", "GPTNeoXJapanese"),
    _causal("gptj", "2 layers, rotation of pairs", "GPTJ", rotary_dim=8),
    _causal("granite", "2 layers, scaled sums"),
    _causal("helium", "2 layers"),
    _causal("hrm_text", "recurrent levels", "HrmText"),
    _causal("hunyuan", "2 layers, norms of queries and keys", "HunYuanDenseV1"),
    _causal("hyperclovax", "2 layers", "HyperCLOVAX"),
    _causal("jais2", "2 layers", "Jais2"),
    _causal("lfm2", "a short convolution and attention", "Lfm2", layer_types=["conv", "full_attention"]),
    _causal("minicpm3", "2 layers, latent attention", "MiniCPM3", num_key_value_heads=4),
    _causal("ministral", "2 layers, a window of 8"),
    _causal("modernbert_decoder", "2 layers", "ModernBertDecoder"),
    _causal("mpt", "2 layers, ALiBi"),
    _causal("nanochat", "2 layers, softcaps", "NanoChat"),
    _causal("nemotron", "2 layers, squared ReLU"),
    _causal("olmo", "2 layers, norms without weights"),
    _causal("olmo3", "2 layers, a window of 8", "Olmo3"),
    _causal("persimmon", "2 layers, partial rotation"),
    _causal("prophetnet_decoder", "2 layers, n-gram streams", "ProphetNet"),
    _causal("rembert_decoder", "2 layers", "RemBert", is_decoder=True, input_embedding_size=32,
            output_embedding_size=48),
    _causal("roformer_decoder", "2 layers, rotary", "RoFormer", is_decoder=True),
    _causal("seed_oss", "2 layers", "SeedOss"),
    _causal("stablelm", "2 layers, partial rotation", "StableLm"),
    _causal("starcoder2", "2 layers, a window of 8", "Starcoder2"),
    _causal("vaultgemma", "2 layers, softcaps", "VaultGemma"),
    _causal("xglm", "2 layers, sinusoids", "XGLM"),
    _causal("xlm", "2 layers", "XLMWithLMHeadModel"),
    _causal("xlnet", "2 layers, relative positions", "XLNetLMHeadModel", d_inner=128),
    # State spaces and linear attention
    _causal("bamba", "Mamba 2 and attention", attn_layer_indices=[1]),
    _causal("falcon_h1", "Mamba 2 beside attention", "FalconH1", mamba_d_ssm=128),
    _causal("falcon_mamba", "2 layers, norms of the scan's inputs", "FalconMamba"),
    _causal("mamba2", "2 layers, chunks of 8", "Mamba2", num_heads=8, head_dim=16, n_groups=2),
    _causal("olmo_hybrid", "delta rule and attention", "OlmoHybrid", **_LINEAR),
    _causal("qwen3_5", "gated delta rule and attention", "Qwen3_5", **_LINEAR),
    _causal("recurrent_gemma", "linear recurrences and a window of 8", "RecurrentGemma", num_hidden_layers=3,
            attention_window_size=8),
    _causal("xlstm", "2 layers, matrix memory", "xLSTM"),
    # Mixtures of experts
    _causal("afmoe", "experts, gated attention"),
    _causal("aria", "experts, text part", "AriaText"),
    _causal("deepseek_v2", "experts, latent attention", "DeepseekV2", num_key_value_heads=4),
    _causal("deepseek_v3", "experts, latent attention, groups", "DeepseekV3", head_dim=8, num_key_value_heads=4),
    _causal("dots1", "experts", "Dots1"),
    _causal("flex_olmo", "experts", "FlexOlmo"),
    _causal("glm4_moe", "experts", "Glm4Moe"),
    _causal("gpt_oss", "experts, attention with sinks", "GptOss"),
    _causal("granite_moe", "experts", "GraniteMoe"),
    _causal("granite_moe_hybrid", "Mamba 2, attention, experts", "GraniteMoeHybrid",
            layer_types=["mamba", "attention"]),
    _causal("jamba", "Mamba, attention, experts", attn_layer_offset=1, attn_layer_period=2,
            expert_layer_offset=1, expert_layer_period=2),
    _causal("jetmoe", "experts of attention too", "JetMoe"),
    _causal("lfm2_moe", "short convolutions, experts", "Lfm2Moe", layer_types=["conv", "full_attention"]),
    _causal("llama4", "experts, chunks of attention", "Llama4"),
    _causal("minimax", "lightning attention, experts", "MiniMax", block_size=8, **_LINEAR),
    _causal("mistral4", "experts, latent attention", "Mistral4", num_key_value_heads=4),
    _causal("mixtral", "experts"),
    _causal("nemotron_h", "Mamba 2, attention, experts", "NemotronH"),
    _causal("olmoe", "experts"),
    _causal("phimoe", "experts"),
    _causal("qwen2_moe", "experts, a shared one", "Qwen2Moe"),
    _causal("qwen3_moe", "experts", "Qwen3Moe"),
    _causal("qwen3_next", "gated delta rule, attention, experts", "Qwen3Next", **_LINEAR),
)  # fmt: skip
