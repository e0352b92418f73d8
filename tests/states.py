"""States of programs that are on no device."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from purevk.dtypes import DType
from purevk.ir import TensorType, Value
from purevk.program.state import StateMapping


class States(StateMapping):
    """A mapping of states, (dtype, sizes) by name, whose uploads go nowhere."""

    def __init__(self, **types: tuple[str, tuple[int, ...]]) -> None:
        self._owner: Any = argparse.Namespace(held=contextlib.nullcontext, name="program")
        store = argparse.Namespace(upload=lambda items: None)
        self._programs: Any = [argparse.Namespace(states=store)]
        self._values = {
            name: Value(name, TensorType(DType[dtype], sizes))
            for name, (dtype, sizes) in types.items()
        }

    def _places(self) -> dict[str, list[tuple[int, Value]]]:
        return {name: [(0, value)] for name, value in self._values.items()}
