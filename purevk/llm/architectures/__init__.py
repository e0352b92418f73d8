"""How to build the graphs of language models: a class for each architecture."""

from __future__ import annotations

from collections.abc import Mapping

from purevk.llm.architectures.gemma import Gemma2, Gemma3
from purevk.llm.architectures.gemma4 import Gemma4
from purevk.llm.architectures.gpt_oss import GptOss
from purevk.llm.architectures.lfm2 import Lfm2
from purevk.llm.architectures.llama import Llama
from purevk.llm.architectures.phi3 import Phi3
from purevk.llm.architectures.qwen3moe import Qwen3Moe
from purevk.llm.architectures.qwen35 import Qwen35, Qwen35Moe
from purevk.llm.architectures.smollm3 import SmolLM3
from purevk.llm.architectures.transformer import Transformer

ARCHITECTURES: Mapping[str, type[Transformer]] = {
    "llama": Llama,
    "mistral3": Llama,
    "qwen2": Llama,
    "qwen3": Llama,
    "smollm3": SmolLM3,
    "gemma2": Gemma2,
    "gemma3": Gemma3,
    "gemma4": Gemma4,
    "phi3": Phi3,
    "qwen3moe": Qwen3Moe,
    "gpt-oss": GptOss,
    "lfm2": Lfm2,
    "qwen35": Qwen35,
    "qwen35moe": Qwen35Moe,
}
"""By the value of `general.architecture`."""
