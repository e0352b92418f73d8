"""The arguments of `purevk.conv2d`, as its kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from purevk.ir import Node, Value
from purevk.ir import dims as _dims
from purevk.lower.expression import Expression
from purevk.ops.shapes import pair

Ints = Sequence[int] | int  # one number for each dim, or one for all


@dataclass(frozen=True)
class Window:
    """The window of a convolution or a pooling of images. Each pair is along y, then along x."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @classmethod
    def make(cls, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Window:
        """A window as torch writes it: one number stands for both dims."""
        return cls(_two(kernel), _two(stride), _two(padding), _two(dilation))

    @property
    def taps(self) -> int:
        """Elements of the kernel."""
        return self.kernel[0] * self.kernel[1]

    @property
    def span(self) -> tuple[int, int]:
        """Rows and columns of the input from the first to the last element of the window."""
        rows, columns = ((size - 1) * step + 1 for size, step in zip(self.kernel, self.dilation))
        return rows, columns

    @property
    def params(self) -> dict[str, int]:
        """The window as the templates declare it."""
        return {
            "KH": self.kernel[0],
            "KW": self.kernel[1],
            "stride_y": self.stride[0],
            "stride_x": self.stride[1],
            "pad_y": self.padding[0],
            "pad_x": self.padding[1],
            "dilation_y": self.dilation[0],
            "dilation_x": self.dilation[1],
        }


@dataclass(frozen=True)
class Conv2d:
    """The arguments of a `purevk.conv2d` node.

    Attributes:
        x: images [B, C, H, W].
        weight: [kernel rows, kernel columns, input channels of a group, output channels].
        bias: one number for each output channel.
        epilogue: a pointwise program on the result; `extras` are its other inputs.
        spread: rows and columns of the block of pixels that an output of the convolution becomes.
            Only 1 x 1 windows have another than (1, 1).
    """

    x: Value
    weight: Value
    bias: Value | None
    window: Window
    groups: int
    epilogue: Expression | None
    extras: tuple[Value, ...]
    spread: tuple[int, int]

    @classmethod
    def of(cls, node: Node) -> Conv2d:
        weight = node.tensor("weight")
        height, width = weight.type.dims[:2]
        return cls(
            node.tensor("x"),
            weight,
            node.optional_tensor("bias"),
            Window.make(
                (_dims.specialize(height), _dims.specialize(width)),
                node.ints("stride", 2),
                node.ints("padding", 2),
                node.ints("dilation", 2),
            ),
            node.int("groups"),
            node.optional_attribute("epilogue", Expression),
            node.tensors("extras"),
            _two(node.ints("spread")),
        )

    @property
    def column_loads(self) -> int:
        """Elements of one input channel that a column of outputs reads at least: those of one
        output, rows that dilation skips included."""
        return self.window.span[0] * self.window.kernel[1]

    @property
    def is_matmul(self) -> bool:
        """Whether the convolution is a matmul of pixels and channels."""
        window = self.window
        one = window.kernel == window.stride == (1, 1)
        return one and window.padding == (0, 0) and self.groups == 1


def _two(numbers: Ints) -> tuple[int, int]:
    y, x = pair(numbers)
    return y, x
