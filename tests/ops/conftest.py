"""What tests of several operator families share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from purevk.graph.context import Context, default_context
from purevk.tuning import DEFAULT


@pytest.fixture(params=["software", "gpu"])
def either_context(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Context]:
    """The default context, with the kernels of the device, and with those of a GPU without matrix
    cores."""
    context = default_context()
    if request.param == "gpu":
        traits = dataclasses.replace(
            context.traits, profile=DEFAULT, cores=4, max_texels=0, coopmat_shape=None
        )
        monkeypatch.setattr(context, "traits", traits)
    yield context
