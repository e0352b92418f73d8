"""The loop over methods of a .pte file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from purevk.llm.decoding import Decoder
from purevk.llm.executorch.steps import tensor_input
from purevk.llm.pieces import Stats


class PteDecoder(Decoder):
    """The loop over a method that has a cache.

    Attributes:
        spreads: the method takes the positions of all tokens, not that of the first one.
    """

    spreads = False

    def _chunk(self, tokens: Sequence[int], position: int) -> Any:
        prompt = self.program.method("prompt")
        rows = len(tokens) if self.spreads else 1
        positions = range(position, position + rows)
        return prompt(self._typed(prompt, [tokens], 0), self._typed(prompt, positions))

    @staticmethod
    def _typed(method: Any, numbers: Any, at: int = -1) -> np.ndarray:
        """Numbers as an input of a method."""
        return np.array(numbers, tensor_input(method.graph, at).type.dtype.numpy)

    def _decode(self, position: int) -> Callable[[], Any]:
        decode = self.program.method("decode")
        return decode.start(self._typed(decode, [position]))

    def _restart(self) -> None:
        """The states of a recurrent model begin anew."""
        if self.is_recurrent:
            self.program.reset_state()


class CachelessDecoder(Decoder):
    """The loop over a method without a cache: each step computes the whole sequence."""

    def _prompt(self, prompt: Sequence[int], stats: Stats) -> Callable[[], Any]:
        self.tokens = list(prompt)
        return self._compute(self.tokens)

    def _decode(self, position: int) -> Callable[[], Any]:
        return self._compute([*self.tokens, self._token(self.program.state["token"])])

    def _compute(self, tokens: Sequence[int]) -> Callable[[], Any]:
        prompt = self.program.method("prompt")
        dtype = tensor_input(prompt.graph, 0).type.dtype
        return prompt.start(np.array([tokens], dtype.numpy))
