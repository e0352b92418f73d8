"""Modules of a single function."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def not_before(version: str, why: str) -> pytest.MarkDecorator:
    """Skips a test with releases of torch before a version, such as "2.10"."""
    have, needed = (tuple(map(int, v.split(".")[:2])) for v in (torch.__version__, version))
    return pytest.mark.skipif(have < needed, reason=why)


def module(function: Any, **attributes: Any) -> torch.nn.Module:
    """A module whose `forward` is a function of the module and its arguments."""

    class Made(torch.nn.Module):
        pass

    Made.forward = function
    made = Made()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made
