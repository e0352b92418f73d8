"""The compiler of this machine."""

from __future__ import annotations

import pytest

from purevk import shaderc
from purevk.errors import ShaderCompilerError


@pytest.fixture(scope="session")
def compiler() -> shaderc.Compiler:
    try:
        return shaderc.load()
    except ShaderCompilerError as error:
        pytest.skip(str(error))
