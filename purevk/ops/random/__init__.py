"""Random numbers, distributions, sampling and dropout. docs/randomness.md says what users see."""

from purevk.ops.random import distributions, generator, sampling, tensors  # noqa: F401
