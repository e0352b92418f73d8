"""Further speech and audio models of transformers, small: encoders, codecs, synthesis."""

from __future__ import annotations

from typing import Any

from tests.models.gallery.model import Model
from tests.models.gallery.small import fixed, ids, model, noise, ones, part, parts

_WAVE = {"conv_dim": [32] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}


def _wave(name: str, about: str, kind: str, samples: int = 1600, **options: Any) -> Model:
    inputs = {"input_values": noise(1, samples)}
    return model(name, f"{about}, {samples} samples", kind, inputs, **options)


def _frames(name: str, about: str, kind: str, frames: int, bins: int, **options: Any) -> Model:
    inputs = {"input_features": noise(1, frames, bins)}
    return model(name, f"{about}, {frames} frames of {bins} bins", kind, inputs, **options)


_SEW = {
    "conv_dim": [32] * 13,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "squeeze_factor": 2,
}
_DAC = {
    "encoder_hidden_size": 8,
    "downsampling_ratios": [2, 4],
    "decoder_hidden_size": 32,
    "n_codebooks": 3,
    "codebook_size": 32,
    "codebook_dim": 4,
    "upsampling_ratios": [4, 2],
    "hidden_size": 32,
}
_MIMI = {
    "hidden_size": 32,
    "num_filters": 4,
    "codebook_size": 32,
    "codebook_dim": 16,
    "num_quantizers": 4,
    "vector_quantization_hidden_dimension": 16,
    "upsample_groups": 32,
    "upsampling_ratios": [4, 2],
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_semantic_quantizers": 1,
}

MODELS = (
    _wave("data2vec_audio", "2 layers, five convolutions of positions", "Data2VecAudioModel", **_WAVE),
    _wave("sew", "squeezed sequences", "SEWModel", **_SEW),
    _wave("sew_d", "squeezed sequences, relative attention", "SEWDModel", **_SEW, max_position_embeddings=64),
    _wave("unispeech", "2 layers", "UniSpeechModel", **_WAVE),
    _wave("unispeech_sat", "2 layers", "UniSpeechSatModel", **_WAVE),
    _wave("wav2vec2_ctc", "letters, weights of all layers", "Wav2Vec2ForCTC", **_WAVE),
    _wave("wav2vec2_stable", "norms first, an adapter", "Wav2Vec2Model", **_WAVE, do_stable_layer_norm=True,
          feat_extract_norm="layer", add_adapter=True, output_hidden_size=48),
    _frames("wav2vec2_bert", "Conformer, relative keys", "Wav2Vec2BertModel", 32, 160, left_max_position_embeddings=8,
            right_max_position_embeddings=4),
    _frames("parakeet", "Fast Conformer, CTC", "ParakeetForCTC", 64, 80, encoder_config=part(
        "ParakeetEncoderConfig", subsampling_conv_channels=16, num_key_value_heads=4)),
    _frames("lasr", "Conformer, CTC", "LasrForCTC", 64, 80, encoder_config=part(
        "LasrEncoderConfig", subsampling_conv_channels=16, num_key_value_heads=4)),
    model("speech_to_text", "fbanks to text, 64 frames of 80 bins", "Speech2TextModel", {
        "input_features": noise(1, 64, 80), "decoder_input_ids": ids(1, 5)}, constants={"use_cache": False},
        conv_channels=32),
    model("moonshine", "speech to text, 4000 samples", "MoonshineModel", {
        "input_values": noise(1, 4000), "decoder_input_ids": ids(1, 5)}, constants={"use_cache": False},
        encoder_num_hidden_layers=2, decoder_num_hidden_layers=2, encoder_num_attention_heads=4,
        decoder_num_attention_heads=4, encoder_num_key_value_heads=4, decoder_num_key_value_heads=4),
    model("whisper", "encoder and decoder, 120 frames", "WhisperForConditionalGeneration", {
        "input_features": noise(1, 80, 120), "decoder_input_ids": ids(1, 5)}, constants={"use_cache": False}),
    model("speecht5_asr", "speech to text, 1600 samples", "SpeechT5ForSpeechToText", {
        "input_values": noise(1, 1600), "decoder_input_ids": ids(1, 5)}, constants={"use_cache": False}, **_WAVE),
    model("speecht5_tts", "text to spectrograms", "SpeechT5Model", {
        "input_values": ids(1, 9), "decoder_input_values": noise(1, 6, 20), "speaker_embeddings": noise(1, 16)},
        within=lambda inner: _speech_of_text(inner), num_mel_bins=20, speech_decoder_prenet_units=32,
        speaker_embedding_dim=16, **_WAVE),
    model("fastspeech2", "Conformer, text to spectrograms, 17 letters", "FastSpeech2ConformerModel", {
        "input_ids": ids(1, 17)}, vocab_size=120, hidden_size=48, num_mel_bins=20, encoder_num_attention_heads=2,
        decoder_num_attention_heads=2, encoder_layers=1, decoder_layers=1, encoder_linear_units=64,
        decoder_linear_units=64, duration_predictor_channels=32, energy_predictor_channels=32,
        pitch_predictor_channels=32, speech_decoder_postnet_units=32, pitch_predictor_layers=2),
    model("vits_encoder", "text encoder of VITS, windows of relative positions", "VitsModel", {
        "input_ids": ids(1, 17), "padding_mask": ones(1, 17, 1, dtype="float32")},
        within=lambda inner: inner.text_encoder, flow_size=32, num_attention_heads=2),
    model("vits_decoder", "vocoder of VITS", "VitsModel", {"spectrogram": noise(1, 32, 7)},
          within=lambda inner: inner.decoder, flow_size=32, num_attention_heads=2, upsample_initial_channel=32),
    model("vits_flow", "inverse flow of VITS", "VitsModel", {
        "inputs": noise(1, 32, 7), "padding_mask": ones(1, 1, 7, dtype="float32")},
        within=lambda inner: inner.flow, constants={"reverse": True}, flow_size=32, num_attention_heads=2),
    model("vits_durations", "stochastic durations of VITS, splines", "VitsModel", {
        "inputs": noise(1, 64, 7), "padding_mask": ones(1, 1, 7, dtype="float32")},
        within=lambda inner: inner.duration_predictor, constants={"reverse": True, "noise_scale": 0.0}, flow_size=32,
        num_attention_heads=2, duration_predictor_filter_channels=32),
    model("univnet", "vocoder, predicted kernels", "UnivNetModel", {
        "input_features": noise(1, 8, 20), "noise_sequence": noise(1, 8, 16)}, model_in_channels=16,
        model_hidden_channels=8, num_mel_bins=20, kernel_predictor_hidden_channels=16),
    model("dac", "codec: codes and wave, 640 samples", "DacModel", {"input_values": noise(1, 1, 640)}, **_DAC),
    model("mimi", "codec: codes and wave, 640 samples", "MimiModel", {"input_values": noise(1, 1, 640)}, **_MIMI),
    model("wav2vec2_bert_pair", "Conformer, 2 sounds of 24 frames", "Wav2Vec2BertModel", {
        "input_features": noise(2, 24, 160)}),
    model("clap", "sound and text, similarity", "ClapModel", {
        "input_ids": ids(1, 9), "input_features": noise(1, 1, 60, 16), "is_longer": fixed([[False]], "bool")},
        audio_config=parts("ClapAudioConfig", spec_size=32, num_mel_bins=16, depths=[1, 1], num_attention_heads=[2, 4],
        patch_size=4, window_size=4, patch_embeds_hidden_size=32, hidden_size=64, num_hidden_layers=2,
        projection_dim=32),
        text_config=parts("ClapTextConfig")),
    model("musicgen_decoder", "four streams of codes", "MusicgenForCausalLM", {"input_ids": ids(4, 9)},
          constants={"use_cache": False}, vocab_size=128),
    model("bark_semantic", "text to semantic codes", "BarkSemanticModel", {"input_ids": ids(1, 17)},
          constants={"use_cache": False}, input_vocab_size=130, output_vocab_size=130, block_size=32),
    model("bark_fine", "coarse codes to fine", "BarkFineModel", {"input_ids": ids(1, 17, 4)},
          constants={"codebook_idx": 2}, input_vocab_size=130, output_vocab_size=130, block_size=32, n_codes_total=4),
    model("seamless_speech", "Conformer of SeamlessM4T, 32 frames", "SeamlessM4TModel", {
        "input_features": noise(1, 32, 160)}, within=lambda inner: inner.speech_encoder,
        speech_encoder_layers=2, speech_encoder_attention_heads=4, speech_encoder_intermediate_size=64,
        speech_encoder_hidden_act="swish", num_adapter_layers=1, max_source_positions=64, t2u_vocab_size=40,
        vocoder_offset=4, unit_hifi_gan_vocab_size=40, t2u_encoder_layers=1, t2u_decoder_layers=1),
    model("pop2piano", "spectrograms to notes", "Pop2PianoForConditionalGeneration", {
        "inputs_embeds": noise(1, 12, 64), "decoder_input_ids": ids(1, 5)}, constants={"use_cache": False}),
)  # fmt: skip


def _speech_of_text(inner: Any) -> Any:
    """SpeechT5 with its parts for text and for spectrograms."""
    from tests.models.gallery.language import library
    from tests.models.gallery.small import small

    kind = library().SpeechT5ForTextToSpeech
    return kind(small(kind.config_class, **inner.config.to_diff_dict())).speecht5
