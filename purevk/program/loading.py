"""`purevk.load`: a program from a file, on one device or on several."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

from purevk import progress as progress_bars
from purevk.api import check_fork
from purevk.errors import InputError
from purevk.graph.context import Context
from purevk.graph.devices import choose_context
from purevk.program.options import Bounds, Compile, Options, Round
from purevk.program.program import Program

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from purevk.program.devices.replicas import Replicas
    from purevk.program.devices.stages import StagedProgram

    DataFiles: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
    Devices: TypeAlias = (
        list[Context | int | str] | list[int] | list[str] | tuple[Context | int | str, ...]
    )

ROOM = 0.8
"""How much of the free memory of a device the weights and states of a model may take for a copy of
it on each device."""

_log = logging.getLogger("purevk")


@overload
def load(
    file: str | os.PathLike[str] | bytes,
    data_files: DataFiles = ...,
    *,
    context: Context | None = ...,
    check: bool = ...,
    device: Context | int | str | None = ...,
    **options: Unpack[Options],
) -> Program: ...


@overload
def load(
    file: str | os.PathLike[str] | bytes,
    data_files: DataFiles = ...,
    *,
    check: bool = ...,
    device: Devices,
    split: Literal["batch"],
    **options: Unpack[Options],
) -> Replicas: ...


@overload
def load(
    file: str | os.PathLike[str] | bytes,
    data_files: DataFiles = ...,
    *,
    check: bool = ...,
    device: Devices,
    split: Literal["layers"],
    **options: Unpack[Options],
) -> StagedProgram: ...


@overload
def load(
    file: str | os.PathLike[str] | bytes,
    data_files: DataFiles = ...,
    *,
    check: bool = ...,
    device: Devices,
    split: str | None = ...,
    **options: Unpack[Options],
) -> Replicas | StagedProgram: ...


def load(
    file: str | os.PathLike[str] | bytes,
    data_files: DataFiles = (),
    *,
    context: Context | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    bounds: Bounds = "exported",
    check: bool = True,
    compile: Compile = "allowed",
    round: Round = "fused",
    device: Context | int | str | Sequence[Context | int | str] | None = None,
    split: str | None = None,
) -> Program | Replicas | StagedProgram:
    """Loads a .pte or .ptn file of ExecuTorch, a .pvk file that `Program.save` wrote, or a .pt2 file of
    `torch.export.save`, and makes it ready to run. The content of a file tells its kind. A file with
    the suffix of another kind is refused.

    Args:
        file: path, or the file's bytes.
        data_files: .ptd files with weights that are not in the program, or one such file.
        context: device to run on, as a context; None: that of `device`. Only then, and if `file` is
            a path, the program can be pickled.
        progress: called with (phase, done, total) during long work; None: a progress bar on a
            terminal.
        bounds: what happens to sizes outside of the exported bounds. "exported": the call raises
            SizeConstraintError; sizes for which the exporter stated no bound may grow. "grow": the
            method is lowered again for them, and the log says so; the model must not decide
            anything by these sizes. "strict": as "exported", and memory is planned once: a size
            without a bound is refused.
        check: compare the tensors of .pvk and .ptn files with their checksums, about a second for each GB.
        compile: "never": a kernel that is not in the cache raises KernelNotCachedError, at load and
            at calls. `purevk warmup` fills the cache. PUREVK_CACHE=only=1 does the same for all
            programs.
        round: when values of float16 and bfloat16 are rounded. "fused": sums, products and other
            float arithmetic that one kernel computes keep float32 between operators, as torch's
            inductor does; what is no float arithmetic (casts, comparisons, `floor`, indices) reads
            rounded values, and results of matmuls, convolutions and attention are rounded. "eager":
            after every operator, as eager torch does; chains of pointwise operators give its bits,
            and some passes that join operators do not run.
        device: device to run on: its index, a part of its name, its kind
            ("discrete", "integrated", "cpu"), or a context; None: the best one,
            or that of PUREVK_DEVICE. `purevk.devices()` lists them. A list of devices, such as
            [0, 1], uses all of them; see `split`.
        split: what several devices share. "batch": each has the whole model and takes a part of the
            batch of a call, see `Replicas`. "layers": each has a part of the layers, see
            `StagedProgram`. None: the batch, if it can be split and each device has room for the
            whole model; else the layers.

    Raises:
        KernelNotCachedError: see `compile`.
        FileFormatError: it is none of these files, or damaged; or it holds what could run code. For
            files of other formats, such as ONNX or safetensors, the error says what to do.
        UnsupportedProgramError: it holds a delegate of another backend; or it is a .pt2 file, and
            torch is not installed, or does not know an operator of it.
        InputError: `file` is neither a path nor bytes; or the model cannot be split as asked.
        DeviceError: there is no Vulkan device, or none that `device` names. The error lists those
            there are.
        ShaderCompilerError: kernels have to be compiled and there is no compiler.
    """
    from purevk.frontends.files import FileSource, open_file

    check_fork()
    weights: tuple[Any, ...] = (
        (data_files,)
        if isinstance(data_files, (str, bytes, bytearray, memoryview, os.PathLike))
        else tuple(data_files)
    )
    check_devices(device, context, split)
    if isinstance(device, Sequence) and not isinstance(device, (str, bytes)):
        options = {
            "progress": progress,
            "bounds": bounds,
            "check": check,
            "compile": compile,
            "round": round,
        }
        return _load_on_several(file, weights, _contexts(device), split, options)
    opened = open_file(file, weights, check)
    try:
        sources = {name: FileSource(opened, name) for name in opened.methods}
        shown = progress_bars.default() if progress is None else progress
        with progress_bars.closing(shown):
            program = Program(
                opened.label,
                sources,
                choose_context(device, context),
                shown,
                opened.close,
                bounds,
                compile=compile,
                round=round,
            )
    except BaseException:
        opened.close()
        raise
    files = (file, *weights)
    paths = [os.path.abspath(path) for path in files if isinstance(path, (str, os.PathLike))]
    if context is None and not isinstance(device, Context) and len(paths) == len(files):
        settings = (bounds, check, compile, round, device)
        program.origin = _load_again, (paths[0], tuple(paths[1:]), *settings)
    return program


def check_devices(
    device: Context | int | str | Sequence[Context | int | str] | None,
    context: Context | None,
    split: str | None,
) -> None:
    """Raises InputError if these arguments do not go together."""
    if isinstance(device, Sequence) and not isinstance(device, (str, bytes)):
        if context is not None:
            raise InputError("both device and context are given", next="leave one of them out")
    elif split is not None:
        raise InputError(
            f"split={split!r} goes with several devices", next="name them: device=[0, 1]"
        )


def _contexts(devices: Sequence[Context | int | str]) -> list[Context]:
    """A context on each device.

    Raises:
        InputError: there is no device, or one is named twice.
    """
    if not devices:
        raise InputError(
            "device=[] names no device", next="give one or more, such as device=[0, 1]"
        )
    contexts: list[Context] = []
    for device in devices:
        context = choose_context(device, None)
        if any(context_ is context for context_ in contexts):
            raise InputError(
                f"device={list(devices)!r} names a device twice",
                why=f"{context.device.name} takes one part",
                next="name each device once; purevk.devices() lists them",
            )
        contexts.append(context)
    return contexts


def _load_on_several(
    file: str | os.PathLike[str] | bytes,
    data_files: tuple[str | os.PathLike[str], ...],
    contexts: Sequence[Context],
    split: str | None,
    options: Mapping[str, Any],
) -> Replicas | StagedProgram:
    """`load` for several devices."""
    from purevk.frontends.files import open_file
    from purevk.program.devices.memory import free_bytes, weight_bytes
    from purevk.program.devices.replicas import Replicas, find_batch
    from purevk.program.devices.stages import StagedProgram

    if split not in (None, "batch", "layers"):
        raise InputError(
            f"split={split!r} is not known",
            why='"batch" or "layers" is accepted',
            next="leave split out: the batch is split where it can be, else the layers",
        )
    opened = open_file(file, data_files, options["check"])
    try:
        if split is None:
            try:
                for method in opened.methods:
                    find_batch(opened.graph(method), opened.label)
                fits = weight_bytes(opened) <= ROOM * min(map(free_bytes, contexts))
                split = "batch" if fits else "layers"
            except InputError as error:
                _log.info("%s: %s; splitting it by layers", opened.label, error.why)
                split = "layers"
        if split == "layers":
            shown = progress_bars.default() if options["progress"] is None else options["progress"]
            with progress_bars.closing(shown):
                arguments = (options[name] for name in ("bounds", "compile", "round"))
                return StagedProgram(opened, contexts, shown, *arguments)
    except BaseException:
        opened.close()
        raise
    opened.close()
    programs: list[Program] = []
    try:
        for context in contexts:
            programs.append(load(file, data_files, device=context, **options))
        return Replicas(programs)
    except BaseException:
        for program in programs:
            program.close()
        raise


def _load_again(
    file: str,
    data_files: tuple[str, ...],
    bounds: Bounds,
    check: bool,
    compile: Compile,
    round: Round,
    device: int | str | None,
) -> Program:
    return load(
        file, data_files, bounds=bounds, check=check, compile=compile, round=round, device=device
    )
