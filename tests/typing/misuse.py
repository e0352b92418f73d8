"""Mistakes that mypy has to see in a user's program: each line that ends in a comment has the error
of that code. It is not run."""

from __future__ import annotations

import purevk
from purevk.errors import PurevkError

purevk.lod("model.pte")  # attr-defined
purevk.load(3)  # call-overload
purevk.load("model.pte", bounds="grown")  # call-overload
purevk.compile(None, (), compile="newer")  # call-overload
program = purevk.load("model.pte")
program.forwrd()  # attr-defined
count: int = program.name  # assignment
for name, method in program.methods.items():
    name.nodes  # attr-defined
    method.submitted()  # attr-defined
try:
    program.close(True)  # call-arg
except PurevkError as error:
    error.because  # attr-defined
