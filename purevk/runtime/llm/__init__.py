"""The API of ExecuTorch's runner of language models, with its names: code written for
`executorch.extension.llm.runner` runs on purevk.

from purevk.runtime.llm import GenerationConfig, TextLLMRunner

runner = TextLLMRunner("model.pte", "tokenizer.json")
runner.generate("Once upon a time", GenerationConfig(max_new_tokens=60), print)
"""

from purevk.runtime.llm.config import GenerationConfig, Stats
from purevk.runtime.llm.inputs import (
    Audio,
    Image,
    MultimodalInput,
    RawAudio,
    make_audio_input,
    make_image_input,
    make_raw_audio_input,
    make_text_input,
    make_token_input,
)
from purevk.runtime.llm.multimodal import MultimodalRunner
from purevk.runtime.llm.text import TextLLMRunner

__all__ = [
    "Audio",
    "GenerationConfig",
    "Image",
    "MultimodalInput",
    "MultimodalRunner",
    "RawAudio",
    "Stats",
    "TextLLMRunner",
    "make_audio_input",
    "make_image_input",
    "make_raw_audio_input",
    "make_text_input",
    "make_token_input",
]
