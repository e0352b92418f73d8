"""The operators: one row each, one file a family. Importing this package registers them all."""

from purevk.ops import pointwise, pointwise_kernel, views  # noqa: F401
