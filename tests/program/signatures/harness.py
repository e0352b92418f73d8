"""Modules of a single function."""

from __future__ import annotations

from typing import Any

import torch


def module(function: Any, **attributes: Any) -> torch.nn.Module:
    """A module whose `forward` is a function of the module and its arguments."""

    class Made(torch.nn.Module):
        pass

    Made.forward = function
    made = Made()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made
