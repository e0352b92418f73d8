"""The compiler of this machine."""

from __future__ import annotations

import pytest

from purevk.errors import ShaderCompilerError
from purevk.shaders import shaderc


@pytest.fixture(scope="session")
def compiler() -> shaderc.Compiler:
    try:
        return shaderc.load()
    except ShaderCompilerError as error:
        pytest.skip(str(error))
