"""SmolLM3: Llama with layers that do not rotate."""

from __future__ import annotations

from purevk.llm.architectures.llama import Llama

_STEP = 4


class SmolLM3(Llama):
    """Every fourth layer has no positions (NoPE), unless the file says which ones."""

    def rotates(self, layer: int) -> bool:
        stated = self.file.metadata.get("rotating_layers")
        if stated is not None and layer < len(stated):
            return bool(stated[layer])
        return (layer + 1) % _STEP != 0
