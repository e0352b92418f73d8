"""Results from constants alone, which the lowerings of a program share on the device."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

from purevk.ir import Value
from purevk.lower.lowering import BufferWindow, Dispatch


class Contents:
    """Numbers for the contents of storages. Equal numbers mean the same kernels on the same
    constants.

    Attributes:
        made: a storage that is on the device, by the number of its content.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self.made: dict[int, Value] = {}

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def after(
        self,
        dispatches: Iterable[Dispatch],
        constants: Iterable[Value],
        windows: Mapping[Value, BufferWindow],
        sizes: Mapping[Value, int],
    ) -> dict[Value, int]:
        """The content of each storage after the dispatches.

        Args:
            constants: values whose bytes are known. They are equal if they are the same value.
            windows: storages that are parts of others.
            sizes: bytes of storages.
        """
        found = {value: self._number(("constant", value)) for value in constants}

        def content(storage: Value) -> int:
            if storage in windows:
                part = windows[storage]
                return self._number(("part", content(part.storage), part.first, part.nbytes))
            if storage not in found:
                found[storage] = self._number(("empty", sizes[storage]))
            return found[storage]

        for each in dispatches:
            bindings = tuple((content(b.storage), b.write, b.kind, b.offset) for b in each.bindings)
            run = each.push, each.grid, each.params_buffer, each.repeat
            step = self._number((each.kernel, *run, bindings))
            for number, binding in enumerate(each.bindings):
                if binding.write:
                    window = windows.get(binding.storage)
                    whole = binding.storage if window is None else window.storage
                    found[whole] = self._number(("result", step, number))
        return found
