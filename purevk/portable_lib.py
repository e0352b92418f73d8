"""The names of `executorch.extension.pybindings.portable_lib`, which ExecuTorch's Python users call:
code written for that module runs on purevk.

from purevk.portable_lib import _load_for_executorch

module = _load_for_executorch("model.pte")
outputs = module.forward([x])

Results are torch tensors where torch is imported, else numpy arrays. There are no ETDumps.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from purevk.errors import DifferenceError, InputError
from purevk.pte.bundled import BundledProgram
from purevk.runtime import Method, MethodMeta, Program, Runtime, TensorInfo, Verification

__all__ = [
    "BundledModule",
    "ExecuTorchMethod",
    "ExecuTorchModule",
    "ExecuTorchProgram",
    "MethodMeta",
    "TensorInfo",
    "Verification",
]


class ExecuTorchMethod:
    """A loaded method: `method([x])`, or `set_inputs`, `execute` and `get_outputs`."""

    def __init__(self, program: Program, name: str) -> None:
        self._program, self._method = program, program.load_method(name)
        self._inputs: list[Any] | None = None
        self._outputs: list[Any] | None = None

    def set_inputs(self, inputs: Sequence[Any]) -> None:
        """Takes the inputs of the next `execute`.

        Raises:
            InputError: they do not fit the method.
        """
        values = _listed(inputs)
        self._method.check(values)
        self._inputs = values

    def execute(self) -> None:
        """Runs the method with the inputs of `set_inputs`.

        Raises:
            InputError: no inputs were set.
        """
        if self._inputs is None:
            raise InputError("no inputs were set", next="method.set_inputs([x])")
        self._outputs = _run(self._method, self._inputs)

    def get_outputs(self, clone_outputs: bool = True) -> list[Any]:
        """The outputs of the last `execute`. They are the caller's, whatever `clone_outputs` says.

        Raises:
            InputError: the method has not run.
        """
        if self._outputs is None:
            raise InputError("the method has not run", next="method.execute()")
        return list(self._outputs)

    def call(self, inputs: Sequence[Any] = (), clone_outputs: bool = True) -> list[Any]:
        """Runs the method: `set_inputs`, `execute`, `get_outputs`. A tensor in place of a sequence
        is the only input."""
        self._inputs = _listed(inputs)
        self.execute()
        return self.get_outputs()

    __call__ = call

    def method_meta(self) -> MethodMeta:
        """What the method takes and gives."""
        return self._method.metadata

    def get_attribute(self, name: str) -> Any:
        """A copy of a mutable buffer, by its name in the file. Raises KeyError if there is none."""
        return _of_torch(self._program.state[name])


class _OfProgram:
    """What programs and modules have in common."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def method_meta(self, method_name: str) -> MethodMeta:
        """What a method takes and gives, without loading it."""
        return self._program.metadata(method_name)

    def has_etdump(self) -> bool:
        """False: purevk records none."""
        return False

    def write_etdump_result_to_file(self, path: str, debug_buffer_path: str | None = None) -> None:
        """Raises UnsupportedProgramError: purevk records no ETDump."""
        self._program.write_etdump_result_to_file(path, debug_buffer_path or "")


class ExecuTorchProgram(_OfProgram):
    """A program, whose methods are loaded one by one."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._names = program.ordered_names

    def num_methods(self) -> int:
        """Number of its methods."""
        return len(self._names)

    def get_method_name(self, method_index: int) -> str:
        """The name of a method, in the order of the file. Raises InputError if there is none of that
        number."""
        if not 0 <= method_index < len(self._names):
            raise InputError(
                f"there is no method {method_index}", why=f"{len(self._names)} methods"
            )
        return self._names[method_index]

    def load_method(self, method_name: str) -> ExecuTorchMethod:
        """A method, ready to run. Raises what `purevk.Runtime` raises."""
        return ExecuTorchMethod(self._program, method_name)


class ExecuTorchModule(_OfProgram):
    """A program that loads a method when it is first called."""

    def run_method(
        self, method_name: str, inputs: Sequence[Any] = (), clone_outputs: bool = True
    ) -> list[Any]:
        """Runs a method. A tensor in place of a sequence is the only input.

        Args:
            method_name: its name.
            inputs: one value for each input.
            clone_outputs: taken for compatibility; outputs are the caller's.
        """
        return _run(self._program.load_method(method_name), _listed(inputs))

    def forward(self, inputs: Sequence[Any] = (), clone_outputs: bool = True) -> list[Any]:
        """Runs the method "forward"."""
        return self.run_method("forward", inputs)

    __call__ = forward

    def plan_execute(self, method_name: str, clone_outputs: bool = True) -> list[Any]:
        """Runs a method that has no inputs."""
        return self.run_method(method_name)

    def method_names(self) -> list[str]:
        """The names of its methods."""
        return list(self._program.ordered_names)


class BundledModule:
    """A program with bundled inputs, and the results that they should give."""

    def __init__(self, data: bytes) -> None:
        self._bundled = BundledProgram(data)
        self.program = self._bundled.program
        self._module: ExecuTorchModule | None = None

    def verify_result_with_bundled_expected_output(
        self, method_name: str, testset_idx: int, rtol: float = 1e-5, atol: float = 1e-8
    ) -> list[Any]:
        """Runs a method with bundled inputs.

        Args:
            method_name: its name.
            testset_idx: the number of the case.
            rtol, atol: what results may differ by, times the size of the expected ones, and at all.

        Returns:
            The results.

        Raises:
            InputError: there is no such method or case.
            DifferenceError: a result is another one than the file expects.
        """
        inputs, wanted = self._bundled.case(method_name, testset_idx)
        if self._module is None:
            self._module = _load_for_executorch_from_buffer(self.program)
        results = self._module.run_method(method_name, inputs)
        where = f"case {testset_idx} of method {method_name}"
        if len(results) != len(wanted):
            raise DifferenceError(f"{len(results)} results in place of {len(wanted)}", where=where)
        for number, (one, two) in enumerate(zip(results, wanted, strict=True)):
            made, expected = _array(one), _array(two)
            if getattr(one, "dtype", None) != getattr(two, "dtype", None) or not (
                made.shape == expected.shape
                and np.allclose(made, expected, rtol=rtol, atol=atol, equal_nan=True)
            ):
                raise DifferenceError(f"result {number} is not the expected one", where=where)
        return results


def _load_program(
    path: str | os.PathLike[str],
    enable_etdump: bool = False,
    debug_buffer_size: int = 0,
    program_verification: Verification = Verification.Minimal,
    data_path: str | os.PathLike[str] | None = None,
) -> ExecuTorchProgram:
    """Reads a program from a file. See `purevk.Runtime.load_program`."""
    return ExecuTorchProgram(_program(path, data_path, enable_etdump, debug_buffer_size))


def _load_program_from_buffer(
    buffer: bytes,
    enable_etdump: bool = False,
    debug_buffer_size: int = 0,
    program_verification: Verification = Verification.Minimal,
    data_path: str | os.PathLike[str] | None = None,
) -> ExecuTorchProgram:
    """Reads a program from bytes."""
    return ExecuTorchProgram(_program(bytes(buffer), data_path, enable_etdump, debug_buffer_size))


def _load_for_executorch(
    program_path: str | os.PathLike[str],
    data_path: str | os.PathLike[str] | None = None,
    enable_etdump: bool = False,
    debug_buffer_size: int = 0,
    program_verification: Verification = Verification.InternalConsistency,
) -> ExecuTorchModule:
    """Reads a program from a file, with its weights in a .ptd file."""
    return ExecuTorchModule(_program(program_path, data_path, enable_etdump, debug_buffer_size))


def _load_for_executorch_from_buffer(
    buffer: bytes,
    data_map_buffer: bytes | None = None,
    enable_etdump: bool = False,
    debug_buffer_size: int = 0,
    program_verification: Verification = Verification.InternalConsistency,
) -> ExecuTorchModule:
    """Reads a program from bytes, with the bytes of a .ptd file."""
    return ExecuTorchModule(
        _program(bytes(buffer), data_map_buffer, enable_etdump, debug_buffer_size)
    )


def _load_bundled_program_from_buffer(buffer: bytes, non_const_pool_size: int = 0) -> BundledModule:
    """Reads a file with bundled inputs."""
    return BundledModule(bytes(buffer))


def _load_for_executorch_from_bundled_program(
    module: BundledModule,
    data_map_buffer: bytes | str | os.PathLike[str] | None = None,
    enable_etdump: bool = False,
    debug_buffer_size: int = 0,
) -> ExecuTorchModule:
    """The program of a file with bundled inputs, with the bytes or the path of a .ptd file."""
    return ExecuTorchModule(
        _program(module.program, data_map_buffer, enable_etdump, debug_buffer_size)
    )


def _get_operator_names() -> list[str]:
    """See `OperatorRegistry.operator_names`."""
    return sorted(Runtime.get().operator_registry.operator_names)


def _get_registered_backend_names() -> list[str]:
    """See `BackendRegistry.registered_backend_names`."""
    return Runtime.get().backend_registry.registered_backend_names


def _is_available(backend_name: str) -> bool:
    """See `BackendRegistry.is_available`."""
    return Runtime.get().backend_registry.is_available(backend_name)


def _threadpool_get_thread_count() -> int:
    """1: purevk has no pool of threads."""
    return 1


def _unsafe_reset_threadpool(num_threads: int) -> None:
    """Taken for compatibility: kernels run on the device."""


def _program(file: Any, data: Any, enable_etdump: bool, debug_buffer_size: int) -> Program:
    return Runtime.get().load_program(
        file, enable_etdump=enable_etdump, debug_buffer_size=debug_buffer_size, data_path=data
    )


def _listed(inputs: Any) -> list[Any]:
    """The inputs of a call. Something else than a sequence is the only one."""
    return list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]


def _run(method: Method, inputs: list[Any]) -> list[Any]:
    return [_of_torch(value) for value in method.execute(inputs)]


def _of_torch(value: Any) -> Any:
    """An array as a tensor, if torch is imported."""
    torch = sys.modules.get("torch")
    return torch.from_numpy(value) if torch and isinstance(value, np.ndarray) else value


def _array(value: Any) -> np.ndarray:
    """A tensor or a number for comparisons. numpy has no bfloat16."""
    if str(getattr(value, "dtype", "")) == "torch.bfloat16":
        value = value.float()
    return np.asarray(value)
