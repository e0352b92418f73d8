"""Linear algebra beyond matmul: distances, factorizations, singular values."""

from purevk.ops.linalg import cholesky, linalg, lu, qr, spectra, triangular  # noqa: F401
