"""Discrete Fourier transforms."""

from purevk.ops.fft import operators, overlap, tables, transform  # noqa: F401
