"""The tree of errors."""

from __future__ import annotations

import inspect

import purevk
from purevk import errors

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if kind.__module__ == errors.__name__
]


def test_every_error_can_be_imported_from_the_package() -> None:
    for kind in KINDS:
        assert getattr(purevk, kind.__name__) is kind and kind.__name__ in purevk.__all__


def test_every_error_is_one_of_purevk() -> None:
    assert all(issubclass(kind, (errors.PurevkError, Warning)) for kind in KINDS)
    assert len(KINDS) > 10
