"""Further encoders and encoder-decoders for text, tables and pages of transformers, small."""

from __future__ import annotations

from typing import Any

from tests.models.gallery.model import Model
from tests.models.gallery.small import boxes, fixed, ids, model, noise, part


def _text(name: str, about: str, kind: str = "", **options: Any) -> Model:
    return model(
        name, about, f"{kind or name.capitalize()}Model", {"input_ids": ids(1, 17)}, **options
    )


def _pair(name: str, about: str, kind: str = "", **options: Any) -> Model:
    inputs = {"input_ids": ids(1, 17), "decoder_input_ids": ids(1, 5)}
    constants = {"use_cache": False}
    kind = f"{kind or name.capitalize()}Model"
    return model(name, about, kind, inputs, constants=constants, **options)


def _page(name: str, about: str, kind: str, **options: Any) -> Model:
    return model(
        name, about, f"{kind}Model", {"input_ids": ids(1, 17), "bbox": boxes(17)}, **options
    )


# The result of Reformer in float64 is 0.016 from that in float32: hashes choose by small differences.
MODELS = (
    _text("big_bird", "2 layers, blocks of attention", "BigBird", attention_type="block_sparse", block_size=4,
          num_random_blocks=1),
    _text("camembert", "2 layers"),
    _text("canine", "characters, hashed embeddings", num_hash_buckets=64, downsampling_rate=4,
          local_transformer_stride=8, max_position_embeddings=64),
    _text("data2vec_text", "2 layers", "Data2VecText"),
    _text("deberta", "2 layers, relative positions", relative_attention=True, pos_att_type=["p2c", "c2p"],
          max_relative_positions=16),
    _text("ernie", "2 layers, task types"),
    _text("esm", "2 layers, proteins", position_embedding_type="rotary"),
    _text("eurobert", "2 layers, rotary, both ways", "EuroBert"),
    _text("fnet", "2 layers, Fourier transforms", "FNet"),
    _text("funnel", "pooled sequences", block_sizes=[1, 1], block_repeats=[1, 1], n_head=4, d_head=16, d_inner=128),
    _text("ibert", "2 layers, as float", "IBert"),
    _text("longformer", "2 layers, windows of 8"),
    _text("luke", "words and entities", entity_vocab_size=20, entity_emb_size=32),
    _text("markuplm", "2 layers, paths of a page", "MarkupLM", max_xpath_tag_unit_embeddings=20,
          max_xpath_subs_unit_embeddings=20, xpath_unit_hidden_size=8, tag_pad_id=19, subs_pad_id=19),
    _text("megatron_bert", "2 layers, norms first", "MegatronBert"),
    _text("mobilebert", "2 layers, bottlenecks", "MobileBert"),
    _text("mra", "2 layers, multi-resolution attention"),
    _text("nomic_bert", "2 layers, rotary, gated", "NomicBert"),
    _text("nystromformer", "2 layers, landmarks"),
    model("perceiver", "latents over tokens", "PerceiverModel", {"inputs": noise(1, 17, 64)}, d_model=64, d_latents=48,
        num_latents=8, num_self_attends_per_block=2,
          num_self_attention_heads=4, num_cross_attention_heads=4),
    _text("reformer", "local and hashed attention", hidden_size=64, attention_head_size=16, feed_forward_size=128,
          axial_pos_embds=False, attn_layers=["local", "lsh"], local_attn_chunk_length=8,
          lsh_attn_chunk_length=8, num_buckets=4, hash_seed=0, tolerance=0.05),
    _text("rembert", "2 layers", "RemBert", input_embedding_size=32, output_embedding_size=48),
    _text("roberta_prelayernorm", "2 layers, norms first", "RobertaPreLayerNorm"),
    _text("roformer", "2 layers, rotary", "RoFormer"),
    _text("splinter", "2 layers"),
    _text("squeezebert", "2 layers, grouped convolutions", "SqueezeBert", embedding_size=64),
    _text("xlm_roberta_xl", "2 layers, norms first", "XLMRobertaXL"),
    _text("xmod", "2 layers, adapters per language", default_language="en_XX"),
    _text("yoso", "2 layers, attention by hashes", use_expectation=True),
    model("tapas", "tables", "TapasModel", {
        "input_ids": ids(1, 17), "token_type_ids": fixed([[[0] * 7] * 5 + [[1, 1, 1, 0, 0, 0, 0]] * 6
                                                       + [[1, 2, 1, 0, 0, 0, 0]] * 6])}),
    _page("bros", "pages, relative boxes", "Bros"),
    _page("layoutlm", "pages: words and boxes", "LayoutLM", max_2d_position_embeddings=64),
    model("layoutlmv3", "pages: words, boxes and pixels", "LayoutLMv3Model", {
        "input_ids": ids(1, 17), "bbox": boxes(17), "pixel_values": lambda g: _image(g)}, input_size=64,
        coordinate_size=10, shape_size=12, max_2d_position_embeddings=64, rel_pos_bins=8, rel_2d_pos_bins=8),
    _page("lilt", "pages: two streams", "Lilt", hidden_size=96, max_2d_position_embeddings=64, channel_shrink_ratio=4),
    _pair("bigbird_pegasus", "blocks of attention", "BigBirdPegasus", attention_type="block_sparse", block_size=4,
          num_random_blocks=1),
    _pair("blenderbot", "norms first"),
    _pair("fsmt", "two vocabularies", "FSMT", src_vocab_size=120, tgt_vocab_size=120),
    _pair("led", "windows of 8", "LED", attention_window=8, max_encoder_position_embeddings=64,
          max_decoder_position_embeddings=64),
    _pair("longt5", "local attention and global tokens", "LongT5", local_radius=4, global_block_size=4,
          encoder_attention_type="transient-global"),
    _pair("m2m_100", "sinusoids", "M2M100"),
    _pair("marian", "sinusoids"),
    _pair("mbart", "norms first", "MBart"),
    _pair("mt5", "gated", "MT5"),
    _pair("mvp", "prompts", use_prompt=True, prompt_length=4, prompt_mid_dim=32),
    _pair("pegasus_x", "blocks and global tokens", "PegasusX", block_size=8, num_global_tokens=4),
    _pair("plbart", "programs", "PLBart"),
    _pair("prophetnet", "n-gram streams", "ProphetNet"),
    _pair("t5gemma", "two Gemma stacks", "T5Gemma", encoder=part("T5GemmaModuleConfig"),
          decoder=part("T5GemmaModuleConfig")),
    _pair("umt5", "relative positions per layer", "UMT5"),
    _pair("nllb_moe", "experts", "NllbMoe", encoder_sparse_step=2, decoder_sparse_step=2, expert_capacity=32),
    _pair("switch_transformers", "experts", "SwitchTransformers", num_sparse_encoder_layers=1,
          num_sparse_decoder_layers=1, expert_capacity=32),
)  # fmt: skip


def _image(generator: Any) -> Any:
    import torch

    return torch.randn(1, 3, 64, 64, generator=generator)
