"""Two or three contexts, in place of as many devices: on devices of one kind if this machine has so
many, else on one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import purevk
from purevk import api, knobs
from purevk.graph.context import Context, default_context


@pytest.fixture(scope="package")
def others() -> list[int]:
    """The devices with the name of the default one, by index, without that. None if PUREVK_DEVICE
    names the device of the tests."""
    if knobs.DEVICE():
        return []
    found = purevk.devices()
    (default,) = (each for each in found if each.default)
    return [each.index for each in found if each.name == default.name and each is not default]


def _open(others: list[int], number: int) -> Context:
    return Context(api.open_device(others[number] if number < len(others) else None))


@pytest.fixture(scope="package")
def contexts(others: list[int]) -> Iterator[list[Context]]:
    with _open(others, 0) as other:
        yield [default_context(), other]


@pytest.fixture(scope="package")
def three(contexts: list[Context], others: list[int]) -> Iterator[list[Context]]:
    with _open(others, 1) as other:
        yield [*contexts, other]
