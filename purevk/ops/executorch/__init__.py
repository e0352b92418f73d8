"""Operators that only ExecuTorch defines: those of older releases, and training."""

from purevk.ops.executorch import legacy, training  # noqa: F401
