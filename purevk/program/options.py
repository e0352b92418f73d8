"""Options that `purevk.load` and `purevk.compile` share."""

from __future__ import annotations

from typing import Literal

Bounds = Literal["exported", "grow", "strict"]
Compile = Literal["allowed", "never"]
