"""What a user holds: programs, their methods, arguments, state and submitted calls."""

from purevk.program.method import Method
from purevk.program.program import Program, load

__all__ = ["Method", "Program", "load"]
