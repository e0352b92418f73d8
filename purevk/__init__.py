"""purevk: runs PyTorch models on any Vulkan device.

    program = purevk.load("model.pte")
    y = program.forward(x)
"""

from purevk.errors import PurevkError
from purevk.compiling import compile
from purevk.program import Method, Program, load

__version__ = "0.1.0"

__all__ = ["Method", "Program", "PurevkError", "compile", "load"]
