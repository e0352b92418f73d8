"""Language models: from a file to text.

model = purevk.llm.load("model.gguf")
for piece in model.generate("Once upon a time", max_tokens=60):
    print(piece.text, end="", flush=True)
"""

from purevk.llm.loading import load, plan
from purevk.llm.model import Model
from purevk.llm.pieces import Piece, Pieces, Stats, TokenLogprobs
from purevk.llm.plan import Plan

__all__ = ["Model", "Piece", "Pieces", "Plan", "Stats", "TokenLogprobs", "load", "plan"]
