"""The API of ExecuTorch's Python runtime, with its names: code written for `executorch.runtime`
runs on purevk.

from purevk import Runtime

program = Runtime.get().load_program("model.pte")
outputs = program.load_method("forward").execute([x])
"""

from __future__ import annotations

import enum
import math
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from purevk import program as _program
from purevk.errors import InputError, UnsupportedProgramError
from purevk.frontends.executorch.names import out_names
from purevk.frontends.files import ModelFile, open_file
from purevk.graph.context import Context
from purevk.ir import Value
from purevk.ir import dims as _dims
from purevk.ops import registry
from purevk.program.method import Method as _Method
from purevk.program.state import StateMapping
from purevk.pte import types as P
from purevk.pte.program import Program as PteProgram

_BACKEND = "VulkanBackend"
# ExecuTorch's names of element types, by its numbers.
_NAMES = {
    0: "Byte", 1: "Char", 2: "Short", 3: "Int", 4: "Long", 5: "Half", 6: "Float", 7: "Double", 8: "ComplexHalf",
    9: "ComplexFloat", 10: "ComplexDouble", 11: "Bool", 12: "QInt8", 13: "QUInt8", 14: "QInt32", 15: "BFloat16",
    16: "QUInt4x2", 17: "QUInt2x4", 22: "Bits16", 23: "Float8_e5m2", 24: "Float8_e4m3fn", 25: "Float8_e5m2fnuz",
    26: "Float8_e4m3fnuz", 27: "UInt16", 28: "UInt32", 29: "UInt64",
}  # fmt: skip


class _MethodNameError(InputError, KeyError):
    """There is no method of that name: in ExecuTorch a KeyError."""

    __str__ = InputError.__str__


class Verification(enum.Enum):
    """How ExecuTorch checks a program. purevk always checks all that a file says."""

    Minimal = 0
    InternalConsistency = 1


@dataclass(frozen=True)
class TensorInfo:
    """A tensor that a method takes or gives, at the upper bounds of its sizes."""

    _sizes: tuple[int, ...]
    _dtype: int
    _nbytes: int
    _planned: bool

    def sizes(self) -> tuple[int, ...]:
        """Its sizes; upper bounds of those that are dynamic."""
        return self._sizes

    def dtype(self) -> int:
        """The number of its element type in ExecuTorch (and of `torch.dtype` in torch's core): 6 is
        float32, 4 int64."""
        return self._dtype

    def nbytes(self) -> int:
        """Bytes at these sizes."""
        return self._nbytes

    def is_memory_planned(self) -> bool:
        """Whether the exporter's memory plan has it. purevk makes a memory plan of its own."""
        return self._planned

    def __repr__(self) -> str:
        dtype = _NAMES.get(self._dtype, str(self._dtype))
        planned = f"is_memory_planned={self._planned}, nbytes={self._nbytes}"
        return f"TensorInfo(sizes={list(self._sizes)}, dtype={dtype}, {planned})"


class MethodMeta:
    """What a method takes and gives, as its file says."""

    def __init__(
        self,
        name: str,
        inputs: Sequence[TensorInfo | None],
        outputs: Sequence[TensorInfo | None],
        attributes: Sequence[TensorInfo],
    ) -> None:
        self._name, self._inputs, self._outputs, self._attributes = (
            name,
            inputs,
            outputs,
            attributes,
        )

    def name(self) -> str:
        """The method's name."""
        return self._name

    def num_inputs(self) -> int:
        """Number of the inputs that a call passes, those that are no tensors included."""
        return len(self._inputs)

    def num_outputs(self) -> int:
        """Number of the outputs, those that are no tensors included."""
        return len(self._outputs)

    def num_attributes(self) -> int:
        """Number of the tensors of the file that have a name."""
        return len(self._attributes)

    def input_tensor_meta(self, index: int) -> TensorInfo:
        """An input. Raises IndexError if there is none of that number, or if it is no tensor."""
        return self._at("input", self._inputs, index)

    def output_tensor_meta(self, index: int) -> TensorInfo:
        """An output. Raises IndexError if there is none of that number, or if it is no tensor."""
        return self._at("output", self._outputs, index)

    def attribute_tensor_meta(self, index: int) -> TensorInfo:
        """A named tensor of the file. Raises IndexError if there is none of that number."""
        return self._at("attribute", self._attributes, index)

    def _at(self, kind: str, infos: Sequence[TensorInfo | None], index: int) -> TensorInfo:
        info = infos[index] if 0 <= index < len(infos) else None
        if info is None:
            raise IndexError(f"Cannot get {kind} tensor meta at {index}")
        return info

    def __repr__(self) -> str:
        shown = [
            f"num_{kind}s={len(infos)}, {kind}_tensor_meta={[str(info) for info in infos]}"
            for kind, infos in (("input", self._inputs), ("output", self._outputs))
        ]
        return f"MethodMeta(name={self._name!r}, {', '.join(shown)})"


class Method:
    """A method of a program, ready to run."""

    def __init__(self, method: _Method, metadata: MethodMeta) -> None:
        self._method, self._metadata = method, metadata

    def execute(self, inputs: Sequence[Any]) -> list[Any]:
        """Runs the method; see `purevk.Method.__call__`.

        Args:
            inputs: one value for each input.

        Returns:
            The outputs as a list: torch tensors if an input was one, else numpy arrays. They are
            the caller's.
        """
        if not isinstance(inputs, (list, tuple)):
            raise InputError(
                f"the inputs are a {type(inputs).__name__}",
                where=f"method {self._metadata.name()}",
                why="a list with one value for each input is expected",
                next="method.execute([x])",
            )
        return list(self._method.run_flat(inputs))

    __call__ = execute

    def check(self, inputs: Sequence[Any]) -> None:
        """Raises InputError if `execute` would for these inputs. Runs nothing."""
        self._method.check_flat(list(inputs))

    @property
    def metadata(self) -> MethodMeta:
        """What it takes and gives."""
        return self._metadata


class Program:
    """A program of a file. What a method needs is made ready when the first one is loaded.

    Methods share weights and states.
    """

    def __init__(self, file: Any, data_files: Sequence[Any], context: Context | None) -> None:
        self._file, self._data_files, self._context = file, data_files, context
        self._lock = threading.Lock()
        self._loaded: _program.Program | None = None
        self._methods: dict[str, Method] = {}
        with open_file(file) as opened:
            self._metadata = {name: _metadata(opened, name) for name in opened.methods}

    @property
    def method_names(self) -> set[str]:
        """The names of its methods."""
        return set(self._metadata)

    @property
    def ordered_names(self) -> tuple[str, ...]:
        """The names of its methods, in the order of the file."""
        return tuple(self._metadata)

    @property
    def state(self) -> StateMapping:
        """The mutable buffers of its methods, by name; see `purevk.Program.state`."""
        return self._opened().state

    def metadata(self, method_name: str) -> MethodMeta:
        """What a method takes and gives, without loading it. Raises InputError if there is none of
        that name."""
        self._check(method_name)
        return self._metadata[method_name]

    def load_method(self, name: str) -> Method:
        """A method, ready to run; the same one for the same name.

        Raises:
            InputError: there is none of that name. Further errors as of `purevk.load`.
        """
        self._check(name)
        program = self._opened()
        with self._lock:
            if name not in self._methods:
                self._methods[name] = Method(program.method(name), self._metadata[name])
            return self._methods[name]

    def _opened(self) -> _program.Program:
        with self._lock:
            if self._loaded is None:
                self._loaded = _program.load(self._file, self._data_files, context=self._context)
            return self._loaded

    def _check(self, name: str) -> None:
        if name not in self._metadata:
            raise _MethodNameError(
                f"there is no method {name!r}",
                why=f"methods: {', '.join(sorted(self._metadata))}",
                next="name one of these",
            )

    def write_etdump_result_to_file(self, etdump_path: str, debug_buffer_path: str) -> None:
        """Raises UnsupportedProgramError: purevk records no ETDump."""
        raise UnsupportedProgramError(
            "no ETDump was recorded", next="purevk bench --profile times each kernel"
        )


class BackendRegistry:
    """The backends whose delegates run here."""

    @property
    def registered_backend_names(self) -> list[str]:
        """Their names in files."""
        return [_BACKEND]

    def is_available(self, backend_name: str) -> bool:
        """Whether files with delegates of that backend run here."""
        return backend_name == _BACKEND


class OperatorRegistry:
    """The operators that have a definition in purevk; others run on the CPU through torch."""

    @property
    def operator_names(self) -> set[str]:
        """Their names, written as ExecuTorch does: "aten::add.Tensor", and of the variants that files
        of portable kernels have: "aten::add.out"."""
        names = {name for row in registry.definitions() for name in (row.name, *row.names)}
        names |= {out for name in names for out in out_names(name)}
        return {
            name.replace(".", "::", 1).removesuffix(".default")
            for name in names
            if not name.startswith("purevk.")
        }


class Runtime:
    """Loads programs. `Runtime.get()` gives the one for the best device, or that of PUREVK_DEVICE.

    Args:
        context: another device to run on.
    """

    _shared: Runtime | None = None

    def __init__(self, context: Context | None = None) -> None:
        self.backend_registry = BackendRegistry()
        self.operator_registry = OperatorRegistry()
        self._context = context

    @staticmethod
    def get() -> Runtime:
        """The runtime that all share."""
        if Runtime._shared is None:
            Runtime._shared = Runtime()
        return Runtime._shared

    def load_program(
        self,
        data: bytes | bytearray | BinaryIO | os.PathLike[str] | str,
        *,
        verification: Any = None,
        enable_etdump: bool = False,
        debug_buffer_size: int = 0,
        data_path: os.PathLike[str] | str | None = None,
    ) -> Program:
        """Reads a program; nothing is compiled before `Program.load_method`.

        Args:
            data: path of a .pte or .pvk file, its bytes, or a file that is open for reading bytes.
            verification: taken for compatibility; purevk always checks all that a file says.
            enable_etdump, debug_buffer_size: must be left out: purevk records no ETDump.
            data_path: path of a .ptd file with the weights that are not in the program.

        Raises:
            FileFormatError: it is no program, or damaged.
            UnsupportedProgramError: an ETDump is asked for.
        """
        if enable_etdump or debug_buffer_size:
            raise UnsupportedProgramError(
                "an ETDump cannot be recorded",
                next="leave enable_etdump out; purevk bench --profile times each kernel",
            )
        if isinstance(data, (bytes, bytearray)):
            file: Any = bytes(data)
        elif isinstance(data, (str, os.PathLike)):
            file = data
        elif hasattr(data, "read"):
            file = data.read()
        else:
            raise TypeError(
                f"data is {type(data).__name__}: a path, bytes or an open file is expected"
            )
        return Program(file, [] if data_path is None else [data_path], self._context)


def _metadata(opened: ModelFile, name: str) -> MethodMeta:
    if isinstance(opened.content, PteProgram):
        plan = opened.content.method(name)
        return MethodMeta(
            name,
            [_of_plan(plan.values[number]) for number in plan.inputs],
            [_of_plan(plan.values[number]) for number in plan.outputs],
            [
                info
                for value in plan.values
                if isinstance(value, P.Tensor) and value.name and (info := _of_plan(value))
            ],
        )
    graph = opened.graph(name)
    return MethodMeta(
        name,
        [_of_value(input_spec) for input_spec in graph.inputs],
        [_of_value(output_spec) for output_spec in graph.outputs],
        [],
    )


def _of_plan(value: Any) -> TensorInfo | None:
    if not isinstance(value, P.Tensor):
        return None
    planned = value.allocation is not None or value.data_index > 0
    return TensorInfo(tuple(value.sizes), value.scalar_type, value.nbytes, planned)


def _of_value(value: Any) -> TensorInfo | None:
    if not isinstance(value, Value):
        return None
    sizes = tuple(_dims.upper(size) for size in value.type.dims)
    return TensorInfo(
        sizes, value.type.dtype.value.pte, math.prod(sizes) * value.type.dtype.itemsize, True
    )
