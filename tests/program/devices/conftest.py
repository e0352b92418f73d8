"""Several contexts on one device, in place of several devices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from purevk import api
from purevk.graph.context import Context, default_context


@pytest.fixture(scope="package")
def contexts() -> Iterator[list[Context]]:
    with Context(api.open_device()) as other:
        yield [default_context(), other]


@pytest.fixture(scope="package")
def three(contexts: list[Context]) -> Iterator[list[Context]]:
    with Context(api.open_device()) as other:
        yield [*contexts, other]
