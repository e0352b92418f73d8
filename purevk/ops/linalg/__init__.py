"""Linear algebra beyond matmul: distances, factorizations, singular values."""

from purevk.ops.linalg import factorize, linalg, spectra  # noqa: F401
