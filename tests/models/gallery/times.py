"""Time series models of transformers, small."""

from __future__ import annotations

from typing import Any

from tests.models.gallery.model import Model
from tests.models.gallery.small import fixed, model, noise, ones

_LAGS = 4
_PAST, _FUTURE = 24 + _LAGS, 8


def _forecast(name: str, about: str, kind: str, **options: Any) -> Model:
    """Past values with two features of time, and the features of the future."""
    inputs = {
        "past_values": noise(1, _PAST),
        "past_time_features": noise(1, _PAST, 2),
        "past_observed_mask": ones(1, _PAST, dtype="float32"),
        "future_values": noise(1, _FUTURE),
        "future_time_features": noise(1, _FUTURE, 2),
    }
    return model(
        name,
        about,
        kind,
        inputs,
        constants={"use_cache": False},
        prediction_length=_FUTURE,
        context_length=24,
        lags_sequence=list(range(1, _LAGS + 1)),
        num_time_features=2,
        d_model=32,
        **options,
    )


MODELS = (
    _forecast("autoformer", "series decomposition, autocorrelation by Fourier transforms", "AutoformerModel",
              moving_average=5, label_length=4, autocorrelation_factor=1),
    _forecast("time_series_transformer", "lags, scaling", "TimeSeriesTransformerModel"),
    _forecast("informer_full", "full attention, distilled", "InformerModel", attention_type="full"),
    _forecast("informer", "sparse attention of sampled keys", "InformerModel", attention_type="prob",
        sampling_factor=20),
    model("timesfm", "decoder of patches", "TimesFmModel", {
        "past_values": noise(1, 64), "past_values_padding": fixed([[0] * 64]), "freq": fixed([[0]])}, patch_length=16,
        context_length=64, horizon_length=16, num_key_value_heads=4),
    model("patchtsmixer", "mixing of patches and channels", "PatchTSMixerForPrediction", {"past_values": noise(1, 48,
        3)},
          num_input_channels=3, context_length=48, patch_length=8, patch_stride=8, prediction_length=12, d_model=16,
          mode="mix_channel"),
    model("patchtst_masked", "reconstruction of patches", "PatchTSTForRegression", {"past_values": noise(1, 48, 3)},
          num_input_channels=3, context_length=48, patch_length=8, patch_stride=8, d_model=32, ffn_dim=64,
          use_cls_token=True, num_targets=2),
    model("decision_transformer", "returns, states and actions", "DecisionTransformerModel", {
        "states": noise(1, 6, 5), "actions": noise(1, 6, 3), "rewards": noise(1, 6, 1), "returns_to_go": noise(1, 6, 1),
        "timesteps": fixed([[0, 1, 2, 3, 4, 5]]), "attention_mask": ones(1, 6)}, state_dim=5, act_dim=3, max_ep_len=20),
)  # fmt: skip
