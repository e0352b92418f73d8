"""Linear algebra beyond matmul: distances, factorizations, singular values and vectors."""

from purevk.ops.linalg import cholesky, jacobi, linalg, lu, qr, spectra, triangular  # noqa: F401
