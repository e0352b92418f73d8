"""An ExecuTorch program as plain frozen data: methods, their values and instructions, and where
their bytes are."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from purevk.closing import Closing
from purevk.errors import FileFormatError, UnsupportedProgramError
from purevk.pte.ptd import DataFile
from purevk.pte.source import Source
from purevk.pte.types import (
    VULKAN_BACKEND,
    DataLocation,
    Delegate,
    ExecutionPlan,
    Segment,
    Subsegments,
    Tensor,
)
from purevk.pte.vkgraph import VkGraph, graph_ranges, read_vulkan_graph


@dataclass(frozen=True)
class Program(Closing):
    """A parsed .pte file and the data files given with it.

    Data is handed out as read-only slices of the mapped files. Use `close()`, or a `with`
    statement, to let go of them; slices in use stay valid.
    """

    version: int
    plans: tuple[ExecutionPlan, ...]
    segments: tuple[Segment, ...]
    constants: Subsegments | None
    mutable_data: tuple[Subsegments, ...]
    named: Mapping[str, int]  # key -> index of the segment
    source: Source = field(repr=False)
    table_size: int  # bytes of the flatbuffer, with which the file begins
    data_files: tuple[DataFile, ...] = ()
    inline_constants: tuple[memoryview, ...] = field(
        default=(), repr=False
    )  # files before September 2024
    inline_delegates: tuple[memoryview, ...] = field(default=(), repr=False)

    @property
    def name(self) -> str:
        """The file's path."""
        return self.source.name

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods, in file order."""
        return tuple(plan.name for plan in self.plans)

    def method(self, name: str = "forward") -> ExecutionPlan:
        """The plan of method `name`. KeyError, naming those that exist, if there is none."""
        for plan in self.plans:
            if plan.name == name:
                return plan
        raise KeyError(
            f"{self.name} has no method {name!r}; it has {', '.join(map(repr, self.methods)) or 'none'}"
        )

    def segment(self, index: int) -> memoryview:
        """The bytes of segment `index`."""
        if not 0 <= index < len(self.segments):
            self._fail(
                f"there is no segment {index}", f"the file has {len(self.segments)} segments"
            )
        segment = self.segments[index]
        return self.source.slice(segment.offset, segment.size, f"segment {index}")

    def constant_data(self, index: int, nbytes: int | None = None) -> memoryview:
        """The bytes of constant `index` (`Tensor.data_index`): `nbytes` of them, or all up to the
        next constant.

        Raises:
            FileFormatError: there is no such constant, or it is shorter than `nbytes`.
        """
        if self.constants is not None:
            return self._subsegment(self.constants, index, nbytes, "constant")
        if not 0 < index < len(self.inline_constants):
            self._fail(
                f"there is no constant {index}",
                f"constants 1 to {len(self.inline_constants) - 1} exist",
            )
        return self._prefix(self.inline_constants[index], nbytes, f"constant {index}")

    def named_data(self, key: str) -> memoryview:
        """The bytes stored under `key`: in this file, else in the first data file that has the key.

        Raises:
            FileFormatError: no file has the key.
        """
        if key in self.named:
            return self.segment(self.named[key])
        for file in self.data_files:
            if key in file.entries:
                return file.data(key)
        self._missing(key)

    def tensor_data(self, tensor: Tensor) -> memoryview | None:
        """The `tensor.nbytes` bytes of a constant, or of a mutable tensor's first value; None if
        the file has none.

        Raises:
            FileFormatError: the bytes are missing or too few, or a data file describes another
                tensor.
        """
        if tensor.external:
            return self._external(tensor)
        if not tensor.has_data:
            return None
        if tensor.allocation is None:
            return self.constant_data(tensor.data_index, tensor.nbytes)
        if tensor.mutable_segment >= len(self.mutable_data):
            self._fail(
                f"there is no mutable data segment {tensor.mutable_segment}",
                f"the file has {len(self.mutable_data)} of them",
            )
        items = self.mutable_data[tensor.mutable_segment]
        return self._subsegment(items, tensor.data_index, tensor.nbytes, "initial value")

    def delegate_data(self, delegate: Delegate) -> memoryview:
        """The blob of a delegate."""
        if delegate.location is DataLocation.SEGMENT:
            return self.segment(delegate.index)
        return self.inline_delegates[delegate.index]

    def vulkan_graph(self, delegate: Delegate) -> VkGraph:
        """The graph in the blob of a Vulkan delegate, parsed anew at each call.

        Raises:
            UnsupportedProgramError: the delegate is for another backend.
            FileFormatError: the blob is damaged.
        """
        if delegate.id != VULKAN_BACKEND:
            raise UnsupportedProgramError(
                f"the delegate is for {delegate.id or 'an unnamed backend'}",
                where=self.name,
                why=f"only {VULKAN_BACKEND} delegates hold a Vulkan graph",
                next="export the model with VulkanPartitioner alone",
            )
        where = f"{self.name}, delegate in {delegate.location.name.lower()} {delegate.index}"
        return read_vulkan_graph(self.delegate_data(delegate), where)

    def vulkan_constant(self, graph: VkGraph, index: int) -> memoryview:
        """The bytes of constant `index` of a graph, exactly as long as the graph says."""
        constant = graph.constants[index]
        if constant.named_key is None:
            return graph.region[constant.offset : constant.offset + constant.length]
        return self._prefix(
            self.named_data(constant.named_key),
            constant.length,
            f"named data {constant.named_key!r}",
        )

    @property
    def tensor_ranges(self) -> list[tuple[int, int]]:
        """(first byte, bytes) of the segments that are there for tensors."""
        tables = [items.segment_index for items in self.mutable_data]
        if self.constants is not None:
            tables.append(self.constants.segment_index)
        found = sorted({*self.named.values(), *tables})
        return [(self.segments[each].offset, self.segments[each].size) for each in found]

    @property
    def structure(self) -> list[tuple[int, int]]:
        """(first byte, bytes) of all that is no tensor: the flatbuffer, and of the blobs of delegates
        the headers and graphs. Tensors of a file that lies may be there too."""
        found = [(0, self.table_size)]
        for plan in self.plans:
            for delegate in plan.delegates:
                if delegate.location is DataLocation.SEGMENT:
                    segment = self.segments[delegate.index]
                    parts = graph_ranges(self.delegate_data(delegate))
                    found += [(segment.offset + first, size) for first, size in parts]
        return found

    def close(self) -> None:
        """Let go of the file and of the data files; slices handed out stay valid."""
        for source in (self.source, *(file.source for file in self.data_files)):
            source.close()

    def _subsegment(
        self, items: Subsegments, index: int, nbytes: int | None, what: str
    ) -> memoryview:
        if not 0 < index < len(items.offsets):
            self._fail(
                f"there is no {what} {index}", f"numbers 1 to {len(items.offsets) - 1} exist"
            )
        data, start = self.segment(items.segment_index), items.offsets[index]
        if nbytes is None:
            order = sorted(items.offsets)
            after = bisect_right(order, start)
            nbytes = (order[after] if after < len(order) else len(data)) - start
        if start + nbytes > len(data) or nbytes < 0:
            self._fail(
                f"{what} {index} lies outside its segment",
                f"bytes {start} to {start + nbytes} of {len(data)} in segment {items.segment_index}",
            )
        return data[start : start + nbytes]

    def _external(self, tensor: Tensor) -> memoryview:
        for file in self.data_files:
            entry = file.entries.get(tensor.name)
            if entry is None:
                continue
            layout = entry.layout
            if layout is not None:
                offered = (layout.scalar_type, layout.sizes, layout.dim_order)
                wanted = (tensor.scalar_type, tensor.sizes, tensor.dim_order)
                if offered != wanted:
                    raise FileFormatError(
                        f"{file.name} describes {tensor.name!r} as another tensor than the program does",
                        where=self.name,
                        why=f"(scalar type, sizes, dim order) is {offered} there and {wanted} in the program",
                        next="use the .ptd file that was exported together with the .pte file",
                    )
            return self._prefix(
                file.data(tensor.name), tensor.nbytes, f"external data {tensor.name!r}"
            )
        self._missing(tensor.name)

    def _prefix(self, data: memoryview, nbytes: int | None, what: str) -> memoryview:
        if nbytes is None or nbytes == len(data):
            return data
        if nbytes > len(data):
            self._fail(f"{what} is too short", f"{nbytes} bytes are needed, {len(data)} are there")
        return data[:nbytes]

    def _missing(self, key: str) -> NoReturn:
        files = ", ".join(file.name for file in self.data_files) or "no data file was given"
        raise FileFormatError(
            f"there is no data under the key {key!r}",
            where=self.name,
            why=f"not among the {len(self.named)} keys of the program, nor in: {files}",
            next="give the .ptd files that were exported with it: purevk.load(file, data_files=[...]), or"
            " --data FILE.ptd on the command line",
        )

    def _fail(self, what: str, why: str) -> NoReturn:
        raise FileFormatError(
            what, where=self.name, why=why, next="the file is damaged: copy or export it again"
        )
