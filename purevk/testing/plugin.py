"""The pytest plugin. pytest finds it by itself where purevk is installed.

- The fixture `purevk_device` is the device of the tests, a `Context` to pass as `device=`. Tests that
  use it are skipped, with the reason, where there is no such device.
- The marker `@pytest.mark.purevk("float16", ...)` skips a test, with the reason, where there is no
  device or it lacks one of these features.
- `--purevk-device` names the device, by index or by a part of its name. Tests fail if it is not
  there. Without a name they are skipped where there is no device at all; `--purevk-required` makes
  them fail then too, for machines that should have one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from purevk.graph.context import Context

_DEVICE = pytest.StashKey["tuple[Context | None, str]"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("purevk", "tests on a Vulkan device")
    group.addoption(
        "--purevk-device",
        metavar="DEVICE",
        help="the Vulkan device of the tests: its index, or a part of its name",
    )
    group.addoption(
        "--purevk-required",
        action="store_true",
        help="fail tests that need a Vulkan device where there is none, in place of skipping them",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "purevk(*features): needs a Vulkan device with these optional features; skipped without",
    )


def _device(config: pytest.Config) -> tuple[Context | None, str]:
    """The device of the tests; or None, and why there is none."""
    if _DEVICE not in config.stash:
        from purevk.errors import DeviceError
        from purevk.graph.devices import choose_context

        name = config.getoption("--purevk-device")
        chosen = int(name) if name is not None and name.isdigit() else name
        try:
            config.stash[_DEVICE] = choose_context(chosen, None), ""
        except DeviceError as error:
            config.stash[_DEVICE] = None, f"no Vulkan device: {error.what}"
    return config.stash[_DEVICE]


def _require(config: pytest.Config) -> Context:
    context, reason = _device(config)
    if context is not None:
        return context
    if config.getoption("--purevk-required") or config.getoption("--purevk-device") is not None:
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def purevk_device(pytestconfig: pytest.Config) -> Context:
    """The Vulkan device of the tests, to pass as `device=` to `purevk.load` and `purevk.compile`.
    `.device.name` is its name, `.traits.features` are its optional features."""
    return _require(pytestconfig)


@pytest.fixture(autouse=True)
def _purevk_marker(request: pytest.FixtureRequest) -> None:
    """Skips a test whose marker asks for what the device lacks, before its other fixtures."""
    marks = list(request.node.iter_markers("purevk"))
    if not marks:
        return
    from purevk.api.features import BY_NAME

    wanted = {name for mark in marks for name in mark.args}
    unknown = sorted(wanted - BY_NAME.keys())
    if unknown:
        pytest.fail(
            f"no feature is named {', '.join(unknown)}; the names are {', '.join(BY_NAME)}",
            pytrace=False,
        )
    context = _require(request.config)
    missing = sorted(wanted - context.traits.features)
    if missing:
        pytest.skip(f"{context.device.name} lacks {', '.join(missing)}")
