"""What a generation is asked for, and its figures."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, fields


@dataclass(kw_only=True, repr=False)
class GenerationConfig:
    """How a runner generates text.

    Attributes:
        echo: the callback gets the prompt first.
        max_new_tokens: the most tokens; -1: until the cache is full.
        warming: nothing is printed.
        seq_len: the most tokens, those in the cache included; -1: until the cache is full.
        temperature: 0 takes the most likely token. Otherwise, one of the most likely tokens that
            have a probability of 0.9 together, as ExecuTorch does.
        num_bos, num_eos: tokens that begin or end a sequence, put around the prompt.
    """

    echo: bool = True
    max_new_tokens: int = -1
    warming: bool = False
    seq_len: int = -1
    temperature: float = 0.8
    num_bos: int = 0
    num_eos: int = 0

    def resolve_max_new_tokens(self, max_context_len: int, num_tokens_occupied: int) -> int:
        """The most tokens that are generated.

        Args:
            max_context_len: tokens that the cache holds.
            num_tokens_occupied: those of them that are in use.
        """
        limit = max_context_len if self.seq_len == -1 else min(self.seq_len, max_context_len)
        left = limit - num_tokens_occupied
        return max(left if self.max_new_tokens == -1 else min(left, self.max_new_tokens), 0)

    def __repr__(self) -> str:
        return (
            f"<GenerationConfig max_new_tokens={self.max_new_tokens} seq_len={self.seq_len}"
            f" temperature={self.temperature:f} echo={self.echo} warming={self.warming}>"
        )


@dataclass(repr=False)
class Stats:
    """Figures of a generation. Times are in ms of the clock `time.time`.

    Attributes:
        model_load_start_ms, model_load_end_ms: around loading.
        inference_start_ms, inference_end_ms: around the generation.
        token_encode_end_ms: the tokenizer was done.
        model_execution_start_ms, model_execution_end_ms: around the last wait for the device.
        prompt_eval_end_ms, first_token_ms: when the first token was there.
        aggregate_sampling_time_ms: only what the caller measures: tokens are chosen on the device,
            and that is a part of the execution.
        aggregate_model_execution_time_ms: waits for the device.
        num_prompt_tokens: of the prompt; of a multimodal one, all positions in use.
        num_generated_tokens: without the first one, as ExecuTorch counts.
    """

    SCALING_FACTOR_UNITS_PER_SECOND = 1000

    model_load_start_ms: int = 0
    model_load_end_ms: int = 0
    inference_start_ms: int = 0
    token_encode_end_ms: int = 0
    model_execution_start_ms: int = 0
    model_execution_end_ms: int = 0
    prompt_eval_end_ms: int = 0
    first_token_ms: int = 0
    inference_end_ms: int = 0
    aggregate_sampling_time_ms: int = 0
    aggregate_model_execution_time_ms: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    _sampling_start: int = 0

    def on_sampling_begin(self) -> None:
        """Notes when a token begins to be chosen."""
        self._sampling_start = now_ms()

    def on_sampling_end(self) -> None:
        """Adds the time since `on_sampling_begin` to `aggregate_sampling_time_ms`."""
        self.aggregate_sampling_time_ms += now_ms() - self._sampling_start
        self._sampling_start = 0

    def reset(self, all_stats: bool = False) -> None:
        """Sets all figures to 0, those of loading only if `all_stats`."""
        for field in fields(self):
            if all_stats or not field.name.startswith("model_load"):
                setattr(self, field.name, 0)

    def to_json_string(self) -> str:
        """The figures as JSON, with the keys of ExecuTorch."""
        second = self.SCALING_FACTOR_UNITS_PER_SECOND
        prompt = self.prompt_eval_end_ms - self.inference_start_ms
        decode = self.inference_end_ms - self.prompt_eval_end_ms
        data: dict[str, float] = {}
        if prompt > 0:
            data["prefill_token_per_sec"] = self.num_prompt_tokens / prompt * second
        if decode > 0:
            data["decode_token_per_sec"] = self.num_generated_tokens / decode * second
        data["prompt_tokens"] = self.num_prompt_tokens
        data["generated_tokens"] = self.num_generated_tokens
        data |= {
            name: getattr(self, name)
            for name in (
                "model_load_start_ms", "model_load_end_ms", "inference_start_ms",
                "inference_end_ms", "model_execution_start_ms", "model_execution_end_ms",
                "prompt_eval_end_ms", "first_token_ms", "aggregate_sampling_time_ms",
                "aggregate_model_execution_time_ms",
            )
        }  # fmt: skip
        data["SCALING_FACTOR_UNITS_PER_SECOND"] = second
        return json.dumps(data, separators=(",", ":"))

    def __repr__(self) -> str:
        took = self.inference_end_ms - self.inference_start_ms
        rate = self.num_generated_tokens * 1000 / took if took > 0 else 0.0
        return (
            f"<Stats num_prompt_tokens={self.num_prompt_tokens}"
            f" num_generated_tokens={self.num_generated_tokens} tokens_per_second={rate:f}>"
        )


def now_ms() -> int:
    """The time in ms."""
    return int(time.time() * 1000)
