"""Llama, and what has its layers: Mistral, SmolLM2, Qwen2, Qwen3."""

from __future__ import annotations

from purevk.llm.architectures.transformer import Transformer
from purevk.llm.files import ModelFile


class Llama(Transformer):
    """The layers of `Transformer`, without experts."""

    def __init__(self, file: ModelFile) -> None:
        super().__init__(file)
        self.check(self.integer("expert_count", 0) == 0, "experts")
        scaling = file.value(f"{self.name}.rope.scaling.type", str, "none")
        self.check(scaling != "longrope", "rotation scaling 'longrope'")
