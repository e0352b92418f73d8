"""Convolutions of floating point numbers."""

from purevk.ops.conv import choice, convolution, convolution_nd, nchw, nchw_tiles, shapes  # noqa: F401
