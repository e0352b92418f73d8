"""What the commands need to know of the machine: versions, the device, the compiler, the cache."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from typing import TYPE_CHECKING, Any

from purevk.errors import DeviceError, PurevkError, ShaderCompilerError

if TYPE_CHECKING:
    from purevk.graph.context import Context


def package_version(name: str) -> str | None:
    """The version of an installed distribution, without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Versions of purevk, Python, the system and important packages. None: it is not installed."""
    from purevk import __version__

    found: dict[str, str | None] = {
        "purevk": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    for name in ("numpy", "vulkan", "rich", "torch", "executorch"):
        found[name] = package_version(name)
    return found


def compiler() -> dict[str, Any]:
    """The GLSL compiler: "origin", "version", and "error" if there is none."""
    from purevk.cli.output import error_data
    from purevk.shaders import shaderc

    try:
        found = shaderc.load()
    except ShaderCompilerError as error:
        return {"origin": None, "version": None, "error": error_data(error)}
    return {"origin": found.origin, "version": found.version, "error": None}


def open_context(args: argparse.Namespace) -> Context:
    """A context on the device that the arguments name. The caller closes it."""
    from purevk import api
    from purevk.graph.context import Context

    return Context(api.open_device(args.device))


class Target:
    """The device that a model is lowered for. With `--no-device`, a typical one is assumed. A
    context manager.

    Attributes:
        traits: what the choice of kernels depends on.
        context: None without a device.
        unified: whether the host reads the device's memory at full speed.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        if args.no_device:
            from purevk.graph.context import typical_traits

            self.context, self.traits, self.unified = None, typical_traits(), False
            return
        try:
            self.context = open_context(args)
        except DeviceError as error:
            advice = (
                f"{error.next}; or look without a device: --no-device"
                if error.next
                else "add --no-device"
            )
            raise type(error)(error.what, where=error.where, why=error.why, next=advice) from error
        self.traits, self.unified = self.context.traits, self.context.device.is_unified

    def data(self) -> dict[str, str] | None:
        """Name, kind and driver of the device, or None."""
        return None if self.context is None else device_data(self.context.device)

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.context is not None:
            self.context.close()


def device_data(device: Any) -> dict[str, str]:
    """A device in a few words, for the reports of commands."""
    return {"name": device.name, "kind": device.kind, "driver": device.driver}


def device_line(data: dict[str, str] | None) -> str:
    """The same as one line."""
    return (
        "none; a typical desktop GPU is assumed"
        if data is None
        else f"{data['name']} ({data['kind']})"
    )


def describe_error(error: PurevkError) -> str:
    """An error as one line."""
    return f"{error.what}{f' ({error.why})' if error.why else ''}"
