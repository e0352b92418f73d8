"""Vision-language and document models of transformers, small."""

from __future__ import annotations

from typing import Any

from tests.models.gallery.model import Model
from tests.models.gallery.small import boxes, fixed, ids, image, model, noise, ones, part, parts

_IMAGE = 110
"""The token that stands for a patch of an image."""


def _both(name: str, about: str, kind: str, length: int = 9, **options: Any) -> Model:
    inputs = {"input_ids": ids(1, length), "pixel_values": image(64)}
    return model(name, f"{about}, 64 pixels", kind, inputs, **options)


def _towers(name: str, about: str, family: str, **options: Any) -> Model:
    options.setdefault("text_config", parts(f"{family}TextConfig"))
    options.setdefault("vision_config", parts(f"{family}VisionConfig"))
    return _both(name, about, f"{family}Model", **options)


def _chat(name: str, about: str, kind: str, patches: int, **options: Any) -> Model:
    """A language model whose prompt has the patches of an image."""
    prompt = fixed([[3, 4, *[_IMAGE] * patches, 5, 6, 7]])
    options.setdefault("inputs", {"input_ids": prompt, "pixel_values": image(64)})
    inputs = options.pop("inputs")
    constants = {"use_cache": False, **options.pop("constants", {})}
    return model(name, about, kind, inputs, constants=constants, **options)


_LLAMA, _QWEN = part("LlamaConfig", vocab_size=120), part("Qwen2Config", vocab_size=120)
_QWEN_ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}


def _grid(patches: int, width: int) -> dict[str, Any]:
    """A prompt with a grid of 4 x 4 patches, merged by 2."""
    return {
        "input_ids": fixed([[3, 108, *[_IMAGE] * patches, 109, 6, 7]]),
        "pixel_values": noise(16, width),
        "image_grid_thw": fixed([[1, 4, 4]]),
        "mm_token_type_ids": fixed([[0, 0, *[1] * patches, 0, 0, 0]]),
    }


_TOKENS = {
    "image_token_id": _IMAGE,
    "video_token_id": 111,
    "vision_start_token_id": 108,
    "vision_end_token_id": 109,
}

MODELS = (
    _towers("altclip", "text and image, similarity", "AltCLIP", text_config=parts("AltCLIPTextConfig", project_dim=32)),
    _towers("chinese_clip", "text and image, similarity", "ChineseCLIP"),
    _towers("metaclip2", "text and image, similarity", "MetaClip2", text_config=parts("MetaClip2TextConfig",
            eos_token_id=2)),
    _towers("siglip_pair", "text and image, similarity", "Siglip"),
    _towers("groupvit", "text and image, grouped patches", "GroupViT", vision_config=parts(
        "GroupViTVisionConfig", depths=[1, 1], num_group_tokens=[6, 0], num_output_groups=[6, 4], hidden_size=64)),
    _towers("blip_itm", "text and image, similarity", "Blip"),
    _towers("bridgetower", "text and image, joined layer by layer", "BridgeTower", hidden_size=64,
            num_attention_heads=4, num_hidden_layers=2, text_config=parts("BridgeTowerTextConfig"),
            vision_config=parts("BridgeTowerVisionConfig")),
    model("siglip2", "image in patches, 16 of 16 pixels", "Siglip2VisionModel", {
        "pixel_values": noise(1, 16, 768), "pixel_attention_mask": ones(1, 16), "spatial_shapes": fixed([[4, 4]])},
        num_patches=16),
    model("x_clip", "text and video, 4 frames of 64 pixels", "XCLIPModel", {
        "input_ids": ids(1, 9), "pixel_values": noise(1, 4, 3, 64, 64)}, text_config=parts("XCLIPTextConfig"),
        vision_config=parts("XCLIPVisionConfig", mit_hidden_size=32, mit_intermediate_size=64,
        mit_num_attention_heads=4, num_frames=4), prompt_layers=1, prompt_num_attention_heads=4),
    _both("blip_caption", "captions", "BlipForConditionalGeneration", text_config=parts(
        "BlipTextConfig", encoder_hidden_size=64), vision_config=parts("BlipVisionConfig")),
    _both("flava", "text, image, and both", "FlavaModel", text_config=parts("FlavaTextConfig"),
          image_config=parts("FlavaImageConfig"), multimodal_config=parts("FlavaMultimodalConfig"), hidden_size=64),
    _both("git", "captions, one stack", "GitForCausalLM", vision_config=parts("GitVisionConfig"),
          constants={"use_cache": False}),
    _both("vilt", "one stack", "ViltModel", constants={"pixel_mask": None}),
    model("visual_bert", "text and regions", "VisualBertModel", {
        "input_ids": ids(1, 9), "visual_embeds": noise(1, 5, 48)}, visual_embedding_dim=48),
    model("lxmert", "text and regions, crossed", "LxmertModel", {
        "input_ids": ids(1, 9), "visual_feats": noise(1, 5, 48), "visual_pos": noise(1, 5, 4)}, l_layers=1, x_layers=1,
        r_layers=1, visual_feat_dim=48, num_qa_labels=7),
    _chat("blip2", "query tokens and OPT", "Blip2ForConditionalGeneration", 4, image_token_index=_IMAGE,
          num_query_tokens=4, vision_config=parts("Blip2VisionConfig"), qformer_config=parts(
          "Blip2QFormerConfig", encoder_hidden_size=64), text_config=part("OPTConfig", word_embed_proj_dim=64)),
    _chat("instructblip", "query tokens, instructions, OPT", "InstructBlipForConditionalGeneration", 4,
          inputs={"pixel_values": image(64), "qformer_input_ids": ids(1, 6), "input_ids": fixed([[3, *[_IMAGE] * 4,
        5]])},
          image_token_index=_IMAGE, num_query_tokens=4, vision_config=parts("InstructBlipVisionConfig"),
          qformer_config=parts("InstructBlipQFormerConfig", encoder_hidden_size=64), text_config=part(
          "OPTConfig", word_embed_proj_dim=64)),
    _chat("llava", "CLIP and Llama", "LlavaForConditionalGeneration", 16, image_token_index=_IMAGE,
          vision_config=part("CLIPVisionConfig"), text_config=_LLAMA),
    _chat("idefics3", "SigLIP, shuffled patches, Llama", "Idefics3ForConditionalGeneration", 4, inputs={
        "input_ids": fixed([[3, *[_IMAGE] * 4, 5]]), "pixel_values": noise(1, 1, 3, 64, 64)}, image_token_id=_IMAGE,
        vision_config=parts("Idefics3VisionConfig"), text_config=_LLAMA),
    _chat("smolvlm", "the same, smaller", "SmolVLMForConditionalGeneration", 4, inputs={
        "input_ids": fixed([[3, *[_IMAGE] * 4, 5]]), "pixel_values": noise(1, 1, 3, 64, 64)}, image_token_id=_IMAGE,
        vision_config=parts("SmolVLMVisionConfig"), text_config=_LLAMA),
    _chat("idefics2", "SigLIP, a resampler, Mistral", "Idefics2ForConditionalGeneration", 4, inputs={
        "input_ids": fixed([[3, *[_IMAGE] * 4, 5]]), "pixel_values": noise(1, 1, 3, 64, 64)}, image_token_id=_IMAGE,
        vision_config=parts("Idefics2VisionConfig"), perceiver_config=parts("Idefics2PerceiverConfig",
        resampler_n_latents=4, resampler_depth=1, resampler_n_heads=4, resampler_head_dim=16, hidden_size=64),
        text_config=part("MistralConfig", vocab_size=120)),
    _chat("idefics", "gated cross-attention", "IdeficsForVisionText2Text", 0, inputs={
        "input_ids": ids(1, 9), "pixel_values": noise(1, 1, 3, 64, 64), "image_attention_mask": ones(1, 9, 1)},
        vision_config=parts("IdeficsVisionConfig", embed_dim=64), additional_vocab_size=4),
    _chat("internvl", "InternViT, shuffled patches, Qwen2", "InternVLForConditionalGeneration", 4,
        image_token_id=_IMAGE,
          vision_config=part("InternVLVisionConfig", image_size=[64, 64], patch_size=[16, 16]), text_config=_QWEN),
    _chat("aya_vision", "SigLIP, shuffled patches, Cohere", "AyaVisionForConditionalGeneration", 4,
          image_token_index=_IMAGE, vision_config=part("SiglipVisionConfig"), text_config=part("Cohere2Config"),
          adapter_layer_norm_eps=1e-5),
    _chat("paligemma", "SigLIP and Gemma", "PaliGemmaForConditionalGeneration", 16, image_token_index=_IMAGE,
          vision_config=part("SiglipVisionConfig"), text_config=part("GemmaConfig"), projection_dim=64, hidden_size=64),
    _chat("gemma3_vision", "SigLIP and Gemma 3", "Gemma3ForConditionalGeneration", 4, inputs={
        "input_ids": fixed([[3, 108, *[_IMAGE] * 4, 109, 5]]), "pixel_values": image(64),
        "token_type_ids": fixed([[0, 0, 1, 1, 1, 1, 0, 0]])}, image_token_index=_IMAGE, image_token_id=_IMAGE,
        mm_tokens_per_image=4, boi_token_index=108, eoi_token_index=109, vision_config=part("SiglipVisionConfig"),
        text_config=part("Gemma3TextConfig", layer_types=["sliding_attention", "full_attention"])),
    _chat("florence2", "DaViT and BART", "Florence2ForConditionalGeneration", 5, inputs={
        "input_ids": fixed([[3, *[_IMAGE] * 5, 5]]), "pixel_values": image(64), "decoder_input_ids": ids(1, 4)},
        image_token_id=_IMAGE, vision_config=parts("Florence2VisionConfig", depths=[1, 1, 1, 1], patch_size=[7, 3, 3,
        3],
        embed_dim=[16, 32, 48, 64], num_heads=[2, 2, 4, 4], num_groups=[2, 2, 4, 4], window_size=4, projection_dim=64),
        text_config=part("BartConfig")),
    _chat("kosmos2", "text with boxes", "Kosmos2ForConditionalGeneration", 0, inputs={
        "input_ids": ids(1, 12), "pixel_values": image(64), "image_embeds_position_mask": fixed(
        [[0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0]])}, latent_query_num=4, vision_config=parts("Kosmos2VisionConfig"),
        text_config=parts("Kosmos2TextConfig", embed_dim=64, layers=2, attention_heads=4)),
    _chat("janus", "SigLIP and Llama", "JanusForConditionalGeneration", 16, image_token_id=_IMAGE,
          vision_config=parts("JanusVisionConfig", projection_dim=64), vq_config=parts("JanusVQVAEConfig",
        base_channels=32,
          channel_multiplier=[1, 1], embed_dim=8, num_embeddings=16, latent_channels=32, num_patches=4),
          text_config=_LLAMA),
    _chat("qwen2_vl", "rotary patches, merged by 2", "Qwen2VLForConditionalGeneration", 4, inputs=_grid(4, 1176),
          vision_config=parts("Qwen2VLVisionConfig", depth=2, embed_dim=32, num_heads=2, patch_size=14, hidden_size=64),
          text_config=parts("Qwen2VLTextConfig", rope_parameters=_QWEN_ROPE, head_dim=16), **_TOKENS),
    _chat("qwen2_5_vl", "windows of patches", "Qwen2_5_VLForConditionalGeneration", 4, inputs=_grid(4, 1176),
          vision_config=parts("Qwen2_5_VLVisionConfig", depth=2, hidden_size=32, num_heads=2, patch_size=14,
          out_hidden_size=64, intermediate_size=64, fullatt_block_indexes=[1]),
          text_config=parts("Qwen2_5_VLTextConfig", rope_parameters=_QWEN_ROPE), **_TOKENS),
    _chat("qwen3_vl", "features of several layers", "Qwen3VLForConditionalGeneration", 4, inputs=_grid(4, 1536),
          vision_config=parts("Qwen3VLVisionConfig", depth=3, hidden_size=32, num_heads=2, patch_size=16,
          out_hidden_size=64, intermediate_size=64, deepstack_visual_indexes=[0], num_position_embeddings=16),
          text_config=parts("Qwen3VLTextConfig", rope_parameters={**_QWEN_ROPE, "mrope_interleaved": True}), **_TOKENS),
    model("mllama_text", "cross-attention to images", "MllamaForCausalLM", {"input_ids": ids(1, 9)},
          constants={"use_cache": False}, num_hidden_layers=2, cross_attention_layers=[1]),
    model("pix2struct", "patches of a page", "Pix2StructForConditionalGeneration", {
        "flattened_patches": lambda g: _numbered(noise(1, 12, 768)(g)), "decoder_input_ids": ids(1, 5)},
        constants={"use_cache": False},
        text_config=parts("Pix2StructTextConfig", vocab_size=120), vision_config=parts("Pix2StructVisionConfig",
        patch_embed_hidden_size=768,
        seq_len=16)),
    model("donut", "pages: Swin encoder, 64 pixels", "DonutSwinModel", {"pixel_values": image(64)}, embed_dim=16,
          depths=[1, 1], num_heads=[2, 4], window_size=4, patch_size=4),
    model("trocr", "lines of text: ViT and decoder", "VisionEncoderDecoderModel", {
        "pixel_values": image(64), "decoder_input_ids": ids(1, 5)}, constants={"use_cache": False},
        encoder=parts("ViTConfig"), decoder=parts("TrOCRConfig", is_decoder=True, add_cross_attention=True,
        cross_attention_hidden_size=64)),
    model("mgp_str", "words of a scene, 32 x 128 pixels", "MgpstrForSceneTextRecognition", {
        "pixel_values": noise(1, 3, 32, 128)}, image_size=[32, 128], patch_size=8, max_token_length=6,
        num_character_labels=12, num_bpe_labels=20, num_wordpiece_labels=20, num_mid_layers=1),
    model("udop", "pages: words, boxes, pixels", "UdopForConditionalGeneration", {
        "input_ids": ids(1, 9), "bbox": lambda g: boxes(9)(g).float() / 64, "pixel_values": image(64),
        "decoder_input_ids": ids(1, 4)}, constants={"use_cache": False}, max_2d_position_embeddings=64),
    model("tvp", "moments of a video", "TvpModel", {"input_ids": ids(1, 6), "pixel_values": noise(1, 2, 3, 64, 64)},
          backbone_config=part("ResNetConfig", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1],
          layer_type="basic", out_features=["stage2"]), hidden_size=32, num_frames=2, max_img_size=64,
          visual_prompt_size=8, max_grid_row_position_embeddings=20, max_grid_col_position_embeddings=20),
)  # fmt: skip


def _numbered(patches: Any) -> Any:
    """Patches with their rows and columns, from 1, in front."""
    import torch

    at = torch.arange(patches.shape[1])
    return torch.cat([torch.stack([at // 4 + 1, at % 4 + 1], -1)[None].float(), patches], -1)
