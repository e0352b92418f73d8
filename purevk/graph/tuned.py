"""The kernels that were measured on a device, in the cache: one entry for each device, driver and
version of purevk."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from purevk import knobs
from purevk.graph.kernels import KernelStore
from purevk.tuning.choices import Answers, Choices


def entry_name() -> str:
    """The name of the entry in the cache, beside the key of the device and driver."""
    from purevk import __version__

    return f"choices of purevk {__version__}"


def read_answers(kernels: KernelStore) -> Answers:
    """What is known of a device. A damaged entry counts as none."""
    if not knobs.TUNED():
        return {}
    return _checked(kernels.cache.get_tuning(kernels.device_key, entry_name()))


def measured_choices(kernels: KernelStore) -> Choices:
    """The choices of a device. They keep no reference to it: the memory of choosers outlives it."""
    held = weakref.ref(kernels)

    def read() -> Answers:
        store = held()
        return {} if store is None else read_answers(store)

    return Choices(read)


def keep_answers(kernels: KernelStore, changes: Mapping[str, str | None]) -> None:
    """Keeps answers, and forgets those of None. Others stay."""
    known = _checked(kernels.cache.get_tuning(kernels.device_key, entry_name()))
    merged = {**known, **changes}
    kept = {question: answer for question, answer in merged.items() if answer is not None}
    kernels.cache.put_tuning(kernels.device_key, entry_name(), kept)


def _checked(value: Any) -> Answers:
    if not isinstance(value, dict):
        return {}
    return {question: answer for question, answer in value.items() if isinstance(answer, str)}
