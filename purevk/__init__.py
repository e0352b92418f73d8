"""purevk: runs PyTorch models on any Vulkan device.

program = purevk.load("model.pte")
y = program.forward(x)
"""

from typing import TYPE_CHECKING

from purevk.errors import (
    DeviceError,
    DeviceLostError,
    DifferenceError,
    FallbackError,
    FileFormatError,
    GraphError,
    InputError,
    KernelInterfaceError,
    KernelNotCachedError,
    OutOfDeviceMemoryError,
    OutputError,
    PurevkError,
    ShaderCompilerError,
    ShapeError,
    SignatureError,
    SizeConstraintError,
    StaleStateError,
    TorchNeededWarning,
    UnsupportedOperatorError,
    UnsupportedProgramError,
    ValidationError,
)

if TYPE_CHECKING:
    from purevk import ops
    from purevk.generators import manual_seed
    from purevk.graph.devices import DeviceInfo, devices
    from purevk.program import Program, load
    from purevk.program.compile import compile
    from purevk.program.devices.replicas import Replicas
    from purevk.program.devices.stages import StagedProgram
    from purevk.program.method import Method
    from purevk.program.plan import PlannedProgram, plan
    from purevk.runtime import Runtime

__version__ = "0.2.0"

__all__ = [
    "DeviceError",
    "DeviceInfo",
    "DeviceLostError",
    "DifferenceError",
    "FallbackError",
    "FileFormatError",
    "GraphError",
    "InputError",
    "KernelInterfaceError",
    "KernelNotCachedError",
    "Method",
    "OutOfDeviceMemoryError",
    "OutputError",
    "PlannedProgram",
    "Program",
    "PurevkError",
    "Replicas",
    "Runtime",
    "ShaderCompilerError",
    "ShapeError",
    "SignatureError",
    "SizeConstraintError",
    "StagedProgram",
    "StaleStateError",
    "TorchNeededWarning",
    "UnsupportedOperatorError",
    "UnsupportedProgramError",
    "ValidationError",
    "compile",
    "devices",
    "load",
    "manual_seed",
    "ops",
    "plan",
]

_HOMES = {
    "DeviceInfo": "graph.devices",
    "Method": "program.method",
    "PlannedProgram": "program.plan",
    "Program": "program.program",
    "Replicas": "program.devices.replicas",
    "Runtime": "runtime",
    "StagedProgram": "program.devices.stages",
    "compile": "program.compile",
    "devices": "graph.devices",
    "load": "program.loading",
    "manual_seed": "generators",
    "ops": "ops",
    "plan": "program.plan",
}


if not TYPE_CHECKING:  # a type checker knows the names from the imports above

    def __getattr__(name):
        """Imports what is asked for: `import purevk` alone loads neither numpy nor Vulkan."""
        if name in _HOMES:
            import importlib

            home = importlib.import_module(f"purevk.{_HOMES[name]}")
            return home if name == "ops" else getattr(home, name)
        raise AttributeError(f"module 'purevk' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
