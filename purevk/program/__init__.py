"""What a user holds: programs, their methods, arguments, state and submitted calls."""

from purevk.program.loading import load
from purevk.program.method import Method
from purevk.program.program import Program

__all__ = ["Method", "Program", "load"]
