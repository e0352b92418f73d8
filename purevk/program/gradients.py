"""Results of calls whose inputs require gradients. purevk computes none, and says so where torch
asks for them, so that no gradient is silently missing. Imports torch."""

from __future__ import annotations

from typing import Any

import torch

from purevk.errors import UnsupportedProgramError


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Any, source: Any) -> Any:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise UnsupportedProgramError(
            "purevk computes no gradients",
            where="backward()",
            why="the result of a purevk program was made from a tensor that requires gradients",
            next="call the program under torch.no_grad(), or with x.detach()",
        )


def refuse_gradients(result: Any, source: Any) -> Any:
    """A result that requires gradients, as in eager torch. Asking for them raises.

    Args:
        source: the input that requires them.
    """
    if not result.is_floating_point():
        return result
    return _Refused.apply(result, source)  # type: ignore[no-untyped-call]
