"""Complex numbers for tests."""

import torch

from tests.ops.harness import tensor


def numbers(*shape: int, seed: int = 0, double: bool = False) -> torch.Tensor:
    """Complex numbers with parts in [-3, 3]."""
    dtype = torch.float64 if double else torch.float32
    return torch.view_as_complex(tensor(*shape, 2, seed=seed).to(dtype)).clone()
