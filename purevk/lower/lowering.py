"""From nodes to dispatches: what a kernel's `lower` function works with, and what it leaves behind.

Nothing here touches a device: a `Dispatch` names a template, its macros and constants, the bytes
that it reads and writes and the grid; sizes in it may be expressions over symbols.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from purevk.dtypes import DType
from purevk.errors import KernelInterfaceError, UnsupportedOperatorError
from purevk.ir import Layout, Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.declared import EpilogueMacros, Form, Tensor, fill
from purevk.lower.declared import Operand as Operand
from purevk.lower.loops import check_declared, check_loops, without_large_code
from purevk.shaders.code_size import loops_of_functions
from purevk.shaders.interface import KernelInterface
from purevk.shaders.templates import find_template, template_interface
from purevk.tuning import DeviceTraits

MAX_PUSH = 32  # 32-bit words: the 128 bytes that every device has
NOTE_WORDS = 64  # from one note of an index to the next: 256 bytes, as bindings are aligned
TEXEL_FORMATS = (
    "r32f",
    "rgba32f",
    "r16f",
    "rgba16f",
    "r8ui",
    "r16ui",
    "r32ui",
    "rgba16ui",
    "rgba32ui",
)
_MOST_DISPATCHES = 1 << 19
_TEXELS = {DType.float32: "32f", DType.float16: "16f", DType.bool: "8ui", DType.bfloat16: "16ui"}


@dataclass(frozen=True)
class KernelSpec:
    """What a pipeline is made of.

    Attributes:
        template: file of `glsl/`.
        macros: name and text, sorted.
        constants: specialization constants, by id, sorted.
        bindings: for each binding "storage", or "texel:" and a format.
        subgroup_size: the size that the kernel needs, or None.
    """

    template: str
    macros: tuple[tuple[str, str], ...]
    constants: tuple[tuple[int, int], ...]
    bindings: tuple[str, ...]
    subgroup_size: int | None = None


@dataclass(frozen=True)
class Binding:
    """One buffer of a dispatch: the whole storage of a value, from byte `offset` on.

    `kind` is "storage", "texel:" and a format, "flag", "flags" or "counters". A check of an index has a
    flag in the memory of the device beside its note `storage`, which the host reads. "flags" are those
    of all checks. "counters" are those of `Lowering.counters`.
    """

    storage: Value
    write: bool
    kind: str = "storage"
    offset: int = 0


@dataclass(frozen=True)
class Dispatch:
    """One kernel to run.

    Attributes:
        kernel: the pipeline.
        bindings: its buffers.
        push: 32-bit words of parameters. With `params_buffer` they go through a buffer that each
            call fills.
        grid: workgroups.
        label: the operator and its location in the source, for profiles.
        flops, nbytes: arithmetic and memory traffic, for profiles.
        external: it runs only in calls with tensors of another API on the device.
        repeat: how often it runs, each time after the one before. If it is not 1, the last word of
            `push` counts these iterations from 0.
    """

    kernel: KernelSpec
    bindings: tuple[Binding, ...]
    push: tuple[Size, ...]
    grid: tuple[Size, Size, Size]
    label: str
    params_buffer: bool = False
    flops: Size = 0
    nbytes: Size = 0
    external: bool = False
    repeat: Size = 1


FOUND = "{found}"


@dataclass(frozen=True)
class IndexCheck:
    """What a note of an index that is out of range is about.

    Attributes:
        op: the operator that takes the index.
        source: its location in the source.
        message: what the call raises, if it is no index: of an assertion of the model, "op" is "".
            `FOUND` in it stands for the number that a kernel has noted.
    """

    op: str
    source: str
    message: str = ""


@dataclass(frozen=True)
class Requirement:
    """What must hold at a call: `left <= right`. If not, `message` says what is wrong, `why` (with
    "{left}" and "{right}" for the numbers) in which way, and `next` what to do."""

    left: Size
    right: Size
    message: str
    why: str
    next: str


class BufferWindow(NamedTuple):
    """A part of a storage that is larger than one binding can span.

    Attributes:
        storage: the whole storage.
        first: the first byte of the part.
        nbytes: its bytes.
    """

    storage: Value
    first: int
    nbytes: int


@dataclass
class Lowering:
    """Collects the dispatches of one graph.

    Attributes:
        traits: the device.
        storages: the value whose bytes hold each value.
        layouts: the layout of each value in its storage.
        scratch: storages that kernels asked for, with their bytes.
        zeros: those of them that are 0 whenever a dispatch begins.
        requirements: what each call has to check.
        windows: values that name parts of storages too large for one binding.
        checks: storages of notes, in which kernels tell the host of an index that is out of range.
        states: storages that a dispatch must not write after such a note.
        in_parts: the dispatch is one of several parts, which one pipeline should serve.
        copies: operands that stand for values while a node is lowered.
        runs_once: the dispatches run once, when a program is loaded. Then a pipeline that serves
            many sizes is worth more than a fast one.
    """

    traits: DeviceTraits
    storages: Mapping[Value, Value]
    layouts: Mapping[Value, Layout]
    dispatches: list[Dispatch] = field(default_factory=list)
    scratch: dict[Value, int] = field(default_factory=dict)
    zeros: set[Value] = field(default_factory=set)
    requirements: list[Requirement] = field(default_factory=list)
    windows: dict[Value, BufferWindow] = field(default_factory=dict)
    checks: dict[Value, IndexCheck] = field(default_factory=dict)
    states: frozenset[Value] = frozenset()
    in_parts: bool = False
    copies: dict[Value, Operand] = field(default_factory=dict)
    node: Node | None = None
    runs_once: bool = False

    def require(self, left: Size, right: Size, message: str, why: str, next: str) -> None:
        """Has `left <= right` checked at every call, unless it is known; see `Requirement`."""
        if isinstance(left, int) and isinstance(right, int) and left <= right:
            return
        self.requirements.append(Requirement(left, right, message, why, next))

    def operand(self, value: Value) -> Operand:
        """A value with the storage and the layout that were assigned to it."""
        near = self.copies.get(value)
        if near is not None:
            return near
        operand = Operand(self.storages.get(value, value), self.layout(value), value.type)
        return self.window(operand) if self.is_large(operand) else operand

    def is_large(self, operand: Operand) -> bool:
        """Whether no binding spans the whole storage of an operand."""
        return operand.storage.type.nbytes > self.traits.max_storage_range

    def window(self, operand: Operand) -> Operand:
        """The operand in the part of its storage that it reaches, if one binding spans this part.
        Where it reaches is fixed then, with guards if it depends on sizes."""
        layout, item = operand.layout, operand.dtype.itemsize
        if any(isinstance(size, int) and size == 0 for size in operand.dims):
            return operand
        numbers = (layout.offset, *layout.strides)
        open_sizes = [size for size in (*operand.dims, *numbers) if not isinstance(size, int)]
        if any(_dims.upper(size) >= _dims.UNBOUNDED for size in open_sizes):
            return operand
        offset, *strides = map(_dims.specialize, numbers)
        low = high = offset
        for size, stride in zip(operand.dims, strides):
            reach = (_dims.upper(size) - 1) * stride
            low, high = low + min(reach, 0), high + max(reach, 0)
        first = low * item // 256 * 256
        whole = -(-operand.storage.type.nbytes // 4) * 4  # kernels may read whole words
        nbytes = min(-(-((high + 1) * item - first) // 256) * 256, whole - first)
        if nbytes > self.traits.max_storage_range or first % item:
            return operand
        window = self._named(BufferWindow(operand.storage, first, nbytes), operand.dtype)
        return Operand(window, Layout(offset - first // item, tuple(strides)), operand.type)

    def windows_of(self, operand: Operand) -> tuple[list[Value], int]:
        """Windows that span the whole storage of an operand one after the other, and the elements of
        each but the last."""
        item, dtype = operand.dtype.itemsize, operand.dtype
        whole = -(-operand.storage.type.nbytes // 4) * 4
        step = self.traits.max_storage_range // 256 * 256
        parts = [
            BufferWindow(operand.storage, first, min(step, whole - first))
            for first in range(0, whole, step)
        ]
        return [self._named(part, dtype) for part in parts], step // item

    def _named(self, part: BufferWindow, dtype: DType) -> Value:
        window = next((value for value, known in self.windows.items() if known == part), None)
        if window is None:
            name = f"{part.storage.name}_part{len(self.windows)}"
            window = Value(name, TensorType(dtype, (-(-part.nbytes // dtype.itemsize),)))
            self.windows[window] = part
        return window

    def _whole(self, storage: Value) -> Value:
        window = self.windows.get(storage)
        return storage if window is None else window.storage

    def layout(self, value: Value) -> Layout:
        layout = self.layouts.get(value)
        return Layout.dense(value.type.dims) if layout is None else layout

    def temporary(self, type: TensorType) -> Operand:
        """A dense tensor that lives from here to the end of this node."""
        value = Value(f"scratch_{len(self.scratch)}", type)
        self.scratch[value] = type.nbytes
        return Operand(value, Layout.dense(type.dims), type)

    def counters(self, type: TensorType) -> Operand:
        """A dense tensor that is 0 before each dispatch. A kernel that writes it sets it to 0 again."""
        operand = self.temporary(type)
        self.zeros.add(operand.storage)
        return operand

    def note(self, check: IndexCheck) -> Operand:
        """Four words for a kernel that checks an index; see `index/check.comp`. They are 0 unless
        it writes them."""
        type = TensorType(DType.int32, (4,))
        value = Value(f"note_{len(self.checks)}", type)
        self.checks[value] = check
        return Operand(value, Layout.dense(type.dims), type)

    def dispatch(
        self,
        template: str,
        tensors: Mapping[str, Tensor],
        params: Mapping[str, Size] | None = None,
        macros: Mapping[str, str | int] | None = None,
        *,
        form: Form | None = None,
        epilogue: EpilogueMacros | None = None,
        helpers: Mapping[str, str | int] | None = None,
        constants: Mapping[str, int] | None = None,
        local: int | None = None,
        specialize: Iterable[str] | bool = False,
        always: Iterable[str] = (),
        never: Collection[str] = (),
        grid: tuple[Size, Size, Size],
        subgroup_size: int | None = None,
        flops: Size = 0,
        nbytes: Size | None = None,
        label: str = "",
        external: bool = False,
        repeat: Size = 1,
    ) -> None:
        """Appends a dispatch. What the template declares of its tensors need not be passed:
        `declared.fill` says what.

        Args:
            tensors: operands of all buffers that the template declares for these macros, by name;
                None for one that is left out. (operand, mode) says how it is used, with no type
                filled in: "r", "w" or "rw", and ":" with a texel format for a uniform texel buffer.
            params: the other parameters that the template declares for these macros, by name.
            macros: those that the template declares, or some of them.
            form: the tile, whose macros and subgroup size are added.
            epilogue: its macros and buffers are added.
            helpers: further macros, which only the texts of `macros` name.
            constants: all other specialization constants that it declares, by name.
            local: the constant `local_size_x`.
            specialize: names of parameters that become specialization constants where they are
                known; the others are push constants. True: all. False: all if the profile specializes
                sizes (it saves a tenth to a quarter of the time of small kernels), else `always`.
            never: names of those that stay push constants in any case.
            external: see `Dispatch`.
            repeat: how often it runs. If it is not 1, the parameter `iteration`, which has the highest
                number, counts from 0.

        Raises:
            KernelInterfaceError: a name is unknown, missing or declared twice, or a mode is not as
                declared.
            UnsupportedOperatorError: the loops are longer than the device runs.
        """
        params, constants = dict(params or {}), dict(constants or {})
        text = {name: str(value) for name, value in (macros or {}).items()}
        if form is not None:
            text |= {name: str(value) for name, value in form.macros().items()}
            subgroup_size = form.subgroup
        if epilogue is not None:
            text |= epilogue.macros
            tensors = {**tensors, **epilogue.buffers}
        if local is not None:
            constants["local_size_x"] = local
        further = {name: str(value) for name, value in (helpers or {}).items()}
        interface = template_interface(template)
        interface.check_macros(text, further)
        text |= further
        buffers, takes = fill(self.texel, interface, tensors, text, params)
        if isinstance(specialize, bool):
            every = specialize or self.traits.profile.specialize_sizes
            specialize = params.keys() - takes.push_only if every else always
        specialize = set(specialize).difference(never)
        takes.check(
            params, constants, specialize, {name: mode for name, (_, mode) in buffers.items()}
        )
        double = any("double" in each for each in text.values())
        values = {
            **params,
            **constants,
            "workgroups": grid[0] * grid[1],
            "subgroup_size": subgroup_size or self.traits.subgroup_size,
            "functions": sum(
                loops_of_functions(each, text.get("ACC") in ("float", "double"), double)
                for each in text.values()
                if "(" in each
            ),
        }
        takes = without_large_code(interface, takes, text, values, self.traits.profile)
        if find_template(template) is None:
            check_declared(template, text.values())
        self._check_loops(takes, values)
        numbered = {takes.params[name]: size for name, size in params.items()}
        special = {takes.params[name] for name in specialize}
        fixed = {takes.constants[name]: value for name, value in constants.items()}
        if any("fn_" in value for value in text.values()):
            text["PV_FUNCTIONS"] = "1"
        if any("bf_" in value for value in text.values()):
            text["PV_BESSEL"] = "1"
        words: list[Size] = []
        for number, size in sorted(numbered.items(), key=lambda item: item[0]):
            if isinstance(size, int) and number in special:
                fixed[number] = size
            else:
                text[f"PUSH_{number}"] = "1"
                words += [0] * (number + 1 - len(words))
                words[number] = size
        bindings = []
        for slot in takes.buffers:
            operand, mode = buffers[slot]
            access, _, texel = mode.partition(":")
            storage = (
                operand.storage
                if isinstance(operand, Operand)
                else self.storages.get(operand, operand)
            )
            kind = "counters" if storage in self.zeros else "storage"
            bindings.append(Binding(storage, "w" in access, f"texel:{texel}" if texel else kind))
        # Parameters that follow a value (a position) rather than a size must not make a new
        # recording of each call.
        writes = [self._whole(binding.storage) for binding in bindings if binding.write]
        if self.checks and "GUARD" in interface.macros and not self.states.isdisjoint(writes):
            text |= {
                "GUARD": str(len(bindings)),
                "GUARD_FLAGS": str(len(self.checks)),
                "GUARD_STRIDE": str(NOTE_WORDS),
            }
            bindings.append(Binding(next(iter(self.checks)), False, "flags"))
        repeats = not isinstance(repeat, int) or repeat != 1
        last = len(words) - 1
        if repeats and (takes.params.get("iteration") != last or last >= MAX_PUSH):
            raise KernelInterfaceError(
                "a repeated dispatch has no parameter `iteration` as its last push constant",
                where=template,
            )
        by_value = not repeats and (
            len(words) > MAX_PUSH
            or any(not symbol.is_size for word in words for symbol in _dims.symbols(word))
        )
        if any(_dims.upper(size) > most for size, most in zip(grid, self.traits.max_workgroups)):
            text["LARGE_GRID"] = "1"
        if by_value:
            text["PARAMS_BUFFER"] = str(len(bindings))
        if nbytes is None:
            nbytes = sum(
                (
                    operand.type.numel * operand.dtype.itemsize
                    for operand, _ in buffers.values()
                    if isinstance(operand, Operand)
                ),
                0,
            )
        kernel = KernelSpec(
            template,
            tuple(sorted(text.items())),
            tuple(sorted(fixed.items())),
            tuple(binding.kind if ":" in binding.kind else "storage" for binding in bindings)
            + (("storage",) if by_value else ()),
            subgroup_size,
        )
        source = self.node.source if self.node else ""
        name = label or (self.node.op if self.node else template)
        self.dispatches.append(
            Dispatch(
                kernel,
                tuple(bindings),
                tuple(words),
                grid,
                f"{name} @ {source}",
                by_value,
                flops,
                nbytes,
                external,
                repeat,
            )
        )
        if len(self.dispatches) > _MOST_DISPATCHES:
            raise UnsupportedOperatorError(
                f"the graph takes more than {_MOST_DISPATCHES} dispatches", where=source
            )

    def _check_loops(self, takes: KernelInterface, values: Mapping[str, Size]) -> int:
        """Raises if a device would end the loops of a dispatch; see `check_loops`."""
        return check_loops(takes, values, self.traits.max_iterations, self.node, self.require)

    def texel(self, operand: Operand, vector: bool, bits: bool = False) -> str:
        """What to add to the mode of a binding that software devices read faster as a texel buffer,
        such as ":rgba32f"; "" for a storage buffer. The macro TEXEL_* of the operand is then 1.

        Args:
            vector: elements are read as vec4s.
            bits: the kernel reads bfloat16 as unsigned integers; TEXEL_* is 2 then.
        """
        form = _TEXELS.get(operand.dtype)
        if operand.dtype is DType.bfloat16 and not bits:
            form = None
        if (
            not self.traits.profile.prefers_texel_reads
            or form is None
            or (vector and operand.dtype is DType.bool)
        ):
            return ""
        texels = -(
            -_dims.upper(operand.storage.type.nbytes)
            // (operand.dtype.itemsize * (4 if vector else 1))
        )
        return f":{'rgba' if vector else 'r'}{form}" if texels <= self.traits.max_texels else ""

    def fixed(self, params: Iterable[str], others: Iterable[str] = ()) -> tuple[str, ...]:
        """Names of parameters to make constants of a pipeline: all of `params` if the profile
        specializes sizes (it saves a tenth to a quarter of the time of small kernels), otherwise
        `others`."""
        return tuple(params) if self.traits.profile.specialize_sizes else tuple(others)

    def items_per_thread(self, count: Size, many: int) -> int:
        """Items of `count` that an invocation takes, so that its loads overlap: `many` if the device
        gains by that and a workgroup is left for each multiprocessor; else 1."""
        least = self.traits.profile.min_invocations_per_core
        enough = _dims.upper(count) >= many * least * self.traits.processors
        return many if enough and self.traits.profile.overlaps_loads else 1

    def linear_grid(self, count: Size, per_group: int) -> tuple[Size, Size, Size]:
        """A grid of at least ceil(count / per_group) workgroups, spread over y where x does not
        suffice."""
        groups = _dims.ceil_div(count, per_group)
        limit = self.traits.max_workgroups[0]
        if _dims.upper(groups) <= limit:
            return (groups, 1, 1)
        rows = -(-_dims.upper(groups) // limit)
        return (_dims.ceil_div(groups, rows), rows, 1)
