"""Convolutions of floating point numbers."""

from purevk.ops.conv import (  # noqa: F401
    arguments,
    choice,
    convolution,
    convolution_nd,
    fragments,
    nchw,
    nchw_tiles,
    operators,
    shapes,
    winograd,
)
