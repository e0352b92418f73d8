"""Dispatches on a device: writes descriptor sets over the memory of the calls, records a command
buffer for each signature and replays it.

The dispatches of a program are cut into segments, one command buffer each, where the host has to
step in between.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from purevk import api
from purevk.api import vk
from purevk.errors import DeviceError
from purevk.graph.call_memory import CallMemory, Cut
from purevk.graph.context import Context
from purevk.graph.memory import BufferRange, DeviceStore
from purevk.graph.size_table import MIN_INT32, SegmentTables, int32_words
from purevk.ir import Symbol, Value
from purevk.ir import dims as _dims
from purevk.lower.lowering import MAX_PUSH, BufferWindow, Dispatch
from purevk.memory_planner import ALIGNMENT

RECORDINGS = 16  # recorded command buffers per segment; each input signature needs one

FIRST_WORKGROUP = (1000, 1001, 1002)  # constants of core/common.glslh
_RUNS, _QUERIES = 16, 4096  # runs, and timestamps, of one recording that is timed
_Owned = TypeVar("_Owned", bound=api.DeviceObject)


def parts_of_grid(
    grid: tuple[int, int, int], most: tuple[int, int, int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, int, int]]]:
    """The first workgroup and the size of each part of a grid, at most `most` along each axis."""
    for first in itertools.product(*map(range, (0, 0, 0), grid, most)):
        x, y, z = map(min, most, map(operator.sub, grid, first))
        yield first, (x, y, z)


class ComputeGraph:
    """Dispatches with their memory, ready to run.

    Args:
        context: the device.
        dispatches: all of them, in order.
        cuts: the segments.
        fixed: stores that hold weights and state.
        sizes: bytes of every storage that the dispatches name.
        windows: storages that are parts of others.
        external: whether another API gives the inputs and takes the outputs; see `CallMemory`.
        notes: storages of notes; see `CallMemory`.
    """

    def __init__(
        self,
        context: Context,
        dispatches: Sequence[Dispatch],
        cuts: Sequence[Cut],
        fixed: Sequence[DeviceStore],
        sizes: Mapping[Value, int],
        windows: Mapping[Value, BufferWindow] | None = None,
        external: bool = False,
        notes: Sequence[Value] = (),
    ) -> None:
        self._external = external
        self.context, self.device = context, context.device
        self.dispatches, self.cuts, self._sizes = tuple(dispatches), tuple(cuts), sizes
        self._owned: list[api.DeviceObject] = []
        self._words: memoryview | None = None  # of the parameters in a buffer
        self.memory = CallMemory(
            self.device, dispatches, cuts, fixed, sizes, windows or {}, external, notes
        )
        try:
            self._pipelines = [
                context.kernels.pipeline(dispatch.kernel) for dispatch in self.dispatches
            ]
            self._part_pipelines: dict[tuple[int, ...], api.ComputePipeline] = {}
            self._params = self._make_params()
            self._sets = self._make_sets()
            self._barriers = self._hazards()
            self._pool = self._own(api.CommandPool(self.device))
        except BaseException:
            self.close()
            raise
        self._tables = [
            SegmentTables(self.dispatches, self._params, self.memory.copies, cut)
            for cut in self.cuts
        ]
        self._recordings: list[
            collections.OrderedDict[tuple[int | None, ...], api.CommandBuffer]
        ] = [collections.OrderedDict() for _ in self.cuts]
        self.recorded = 0
        self._running: api.Submission | None = None

    def _own(self, item: _Owned) -> _Owned:
        self._owned.append(item)
        return item

    # -- descriptors and parameters ---------------------------------------------------------------
    def _make_params(self) -> dict[int, BufferRange]:
        step = max(ALIGNMENT, 4 * MAX_PUSH)
        wanted = [
            (n, -(-4 * len(d.push) // step) * step)
            for n, d in enumerate(self.dispatches)
            if d.params_buffer
        ]
        if not wanted:
            return {}
        buffer = self.memory.buffer(
            sum(nbytes for _, nbytes in wanted), api.MemoryKind.UPLOAD, "parameters"
        )
        spans, offset = {}, 0
        for number, nbytes in wanted:
            spans[number] = BufferRange(buffer, offset, nbytes)
            offset += nbytes
        return spans

    def _make_sets(self) -> list[Any]:
        items = []
        views: dict[tuple[object, ...], api.BufferView] = {}
        for number, (dispatch, pipeline) in enumerate(zip(self.dispatches, self._pipelines)):
            bindings: list[Any] = []
            for binding in dispatch.bindings:
                span = self.memory.range_of(binding)
                kind, _, form = binding.kind.partition(":")
                if kind == "texel":
                    bindings.append(self._view(views, span, binding.offset, form))
                    continue
                length = min(span.nbytes, self.device.limits.max_storage_buffer_range)
                bindings.append(
                    (span.buffer, span.offset + binding.offset, length - binding.offset)
                )
            if dispatch.params_buffer:
                span = self._params[number]
                bindings.append((span.buffer, span.offset, span.nbytes))
            items.append((pipeline.layout, bindings))
        arena = self._own(api.DescriptorArena(self.device))
        return arena.make(items)

    def _view(
        self,
        views: dict[tuple[object, ...], api.BufferView],
        span: BufferRange,
        skip: int,
        form: str,
    ) -> api.BufferView:
        """The bytes of a buffer range as whole texels. The last one may reach beyond the range."""
        _, size = api.texel_format(form)
        start = span.offset + skip
        count = min(-(-(span.nbytes - skip) // size), (span.buffer.nbytes - start) // size)
        key = (
            span.buffer.number,
            start,
            min(count, self.device.limits.max_texel_buffer_elements) * size,
            form,
        )
        if key not in views:
            views[key] = self._own(api.BufferView(span.buffer, form, start, key[2]))
        return views[key]

    def _hazards(self) -> list[bool]:
        """For each dispatch, whether a barrier must come before it. It must if the dispatch touches
        bytes that were written since the last barrier, or writes bytes that were read."""
        needed = []
        # First bytes and ends, by the numbers of buffers.
        written: dict[int, list[tuple[int, int]]] = {}
        touched: dict[int, list[tuple[int, int]]] = {}
        starts = {cut.first for cut in self.cuts}
        for step, dispatch in enumerate(self.dispatches):
            if step in starts:
                written, touched = {}, {}
            mine = []
            for binding in dispatch.bindings:
                span = self.memory.range_of(binding)
                bytes_ = span.offset, span.offset + span.nbytes
                mine.append((span.buffer.number, bytes_, binding.write))
            hit = any(
                first < end and start < last
                for buffer, (first, last), write in mine
                for start, end in (touched if write else written).get(buffer, ())
            )
            needed.append(hit)
            if hit:
                written, touched = {}, {}
            for buffer, bytes_, write in mine:
                touched.setdefault(buffer, []).append(bytes_)
                if write:
                    written.setdefault(buffer, []).append(bytes_)
        return needed

    def _parts(
        self, number: int, grid: tuple[int, int, int]
    ) -> list[tuple[api.ComputePipeline, tuple[int, int, int]]]:
        """The pipeline and the grid of each part of a dispatch whose grid exceeds the limits of the
        device. The first workgroups of a part are constants of its pipeline.

        Raises:
            DeviceError: the kernel was compiled for a device with larger limits.
        """
        parts, kernel = [], self.dispatches[number].kernel
        if ("LARGE_GRID", "1") not in kernel.macros:
            raise DeviceError(
                f"{kernel.template} cannot run a grid of {grid} workgroups in parts",
                where=self.dispatches[number].label,
                why=f"it was compiled without LARGE_GRID; {self.device.name} runs"
                f" {self.device.limits.max_workgroup_count} workgroups at most",
                next="load the program again on this device",
            )
        for first, size in parts_of_grid(grid, self.device.limits.max_workgroup_count):
            key = (number, *first)
            if key not in self._part_pipelines:
                constants = (*kernel.constants, *zip(FIRST_WORKGROUP, first))
                spec = dataclasses.replace(kernel, constants=constants)
                (self._part_pipelines[key],) = self.context.kernels.prepare([spec])
            parts.append((self._part_pipelines[key], size))
        return parts

    # -- running ----------------------------------------------------------------------------------
    def settle(self) -> None:
        """Waits for a segment that still runs: a call that was interrupted did not wait for it."""
        if self._running is not None:
            self._running.wait()
            self._running = None

    def submit(
        self,
        number: int,
        env: Mapping[Symbol, int],
        semaphores: tuple[tuple[api.TimelineSemaphore, int], tuple[api.TimelineSemaphore, int]]
        | None = None,
    ) -> api.Submission:
        """Starts segment `number` for values of the symbols. Wait for the result before reading
        downloads. `semaphores` are those of `Queue.submit`."""
        self.settle()
        if self._params:
            self._write_params(number, env)
        signature = tuple(map(env.get, self._tables[number].symbols))
        recordings = self._recordings[number]
        commands = recordings.get(signature)
        if commands is None:
            commands = self._record(number, env)
            recordings[signature] = commands
            while len(recordings) > RECORDINGS:
                recordings.popitem(last=False)[1].destroy()
        else:
            recordings.move_to_end(signature)
        self._running = self.device.queue.submit(commands, semaphores)
        return self._running

    def _write_params(self, number: int, env: Mapping[Symbol, int]) -> None:
        tables = self._tables[number]
        if not tables.params:
            return
        buffer = self._params[tables.params[0]].buffer
        words = self._words
        if words is None or not buffer.alive:
            words = self._words = buffer.view().cast("i")
        if not tables.filled:  # those that are the same at each call
            for offset, word in zip(
                tables.offsets, int32_words(tables.buffered.evaluate(env)).tolist()
            ):
                words[offset] = word
            tables.filled = True
        else:
            values, offsets = tables.buffered.values(env), tables.offsets
            if not MIN_INT32 <= min(values, default=0) <= max(values, default=0) <= ~MIN_INT32:
                int32_words(np.array(values, np.int64))  # raises
            for index, which in tables.buffered.varying:
                words[offsets[index]] = values[which]
        buffer.flush()

    def _record(
        self,
        number: int,
        env: Mapping[Symbol, int],
        queries: api.TimestampPool | None = None,
        runs: int = 1,
        single: bool = True,
    ) -> api.CommandBuffer:
        """Records a segment. With `queries`, it runs `runs` times, is timed, and downloads nothing.
        Timed are its dispatches, one by one if `single`, else together and as in a call."""
        self.recorded += 1
        commands = self._pool.buffer()
        cut, tables = self.cuts[number], self._tables[number]
        push = int32_words(tables.pushed.evaluate(env))
        pointer = vk.ffi.cast("char *", push.ctypes.data)
        grids = tables.grids.evaluate(env).tolist()
        repeats = tables.repeats.evaluate(env).tolist()
        commands.begin()
        if queries is not None:
            commands.reset_queries(queries)
        commands.barrier(
            api.Access.HOST | api.Access.COMPUTE | api.Access.TRANSFER, api.Access.COMPUTE
        )
        barriers, pipelines, sets = self._barriers, self._pipelines, self._sets
        record, barrier = commands.record_dispatch, commands.barrier
        dispatches, external = self.dispatches, self._external
        most_x, most_y, most_z = self.device.limits.max_workgroup_count
        for run in range(runs):
            query = run * (len(tables.spans) + 1) if single else run
            if queries is not None:
                barrier()
                commands.write_timestamp(queries, query)
            for at, (start, count) in enumerate(tables.spans):
                dispatch = cut.first + at
                if barriers[dispatch] or (queries is not None and single and at):
                    barrier()
                x, y, z = grids[3 * at : 3 * at + 3]
                parts = [(pipelines[dispatch], (x, y, z))]
                if x > most_x or y > most_y or z > most_z:
                    parts = self._parts(dispatch, (x, y, z))
                if x and y and z and (external or not dispatches[dispatch].external):
                    for iteration in range(repeats[at]):
                        if repeats[at] > 1:
                            push[(start + count) // 4 - 1] = iteration
                        if iteration:
                            barrier()
                        for pipeline, grid in parts:
                            record(pipeline, sets[dispatch], pointer + start, count, *grid)
                if queries is not None and single:
                    commands.write_timestamp(queries, query + at + 1)
        if queries is not None and not single:
            barrier()
            commands.write_timestamp(queries, runs)
        copies = [
            value for value in cut.downloads if value in self.memory.copies and queries is None
        ]
        if copies:
            commands.barrier(api.Access.COMPUTE, api.Access.TRANSFER)
            for value in copies:
                source, target = self.memory.ranges[value], self.memory.copies[value]
                commands.copy_buffer(
                    source.buffer,
                    target.buffer,
                    self._copied(value, env),
                    source.offset,
                    target.offset,
                )
        commands.barrier(api.Access.COMPUTE | api.Access.TRANSFER, api.Access.HOST)
        commands.end()
        return commands

    def _copied(self, value: Value, env: Mapping[Symbol, int]) -> int:
        """Bytes of a download that are used, if its sizes are known when it is recorded; else all."""
        count = value.type.numel
        if isinstance(count, int) or not _dims.symbols(count) <= env.keys():
            return self._sizes[value]
        nbytes = -(-_dims.evaluate(count, env) * value.type.dtype.itemsize // 4) * 4
        return min(max(nbytes, 4), self._sizes[value])

    def profile(self, number: int, env: Mapping[Symbol, int], runs: int = 5) -> list[float]:
        """Nanoseconds of each dispatch of a segment: the median of several runs. Each dispatch waits
        for the one before.

        Up to `_RUNS` runs follow one another without a pause, because an idle GPU lowers its clocks.
        """
        cut = self.cuts[number]
        self._write_params(number, env)
        count = cut.last - cut.first
        together = max(min(runs, _RUNS, _QUERIES // (count + 1)), 1)
        queries = api.TimestampPool(self.device, (count + 1) * together)
        try:
            commands = self._record(number, env, queries, together)
            times: list[np.ndarray] = []
            while len(times) < runs:
                self.device.queue.run(commands)
                times += list(np.diff(np.reshape(queries.read(), (together, count + 1)), axis=1))
            commands.destroy()
            return [float(median) for median in np.median(np.array(times), axis=0)]
        finally:
            queries.destroy()
            self.memory.take_note()  # indices that no call had

    def time_runs(self, number: int, env: Mapping[Symbol, int], runs: int) -> list[float]:
        """Nanoseconds that the device takes for each of several runs of a segment, one after the
        other without a pause. Dispatches overlap as in a call; downloads are not counted."""
        self.settle()
        self._write_params(number, env)
        queries = api.TimestampPool(self.device, runs + 1)
        try:
            commands = self._record(number, env, queries, runs, single=False)
            self.device.queue.run(commands)
            commands.destroy()
            return [float(each) for each in np.diff(queries.read())]
        finally:
            queries.destroy()
            self.memory.take_note()

    def close(self) -> None:
        """Destroys everything of this graph."""
        for recordings in getattr(self, "_recordings", []):
            for commands in recordings.values():
                commands.destroy()
            recordings.clear()
        while self._owned:
            self._owned.pop().destroy()
        self.memory.close()


class StartedCall:
    """A call that was submitted to the device.

    Args:
        submission: of the call.
        read: reads the outputs when the device has finished.
    """

    def __init__(self, submission: api.Submission, read: Callable[[], Sequence[Any]]) -> None:
        self._submission, self._read = submission, read
        self._lock = threading.Lock()
        self._outputs: Sequence[Any] | None = None

    def result(self) -> Sequence[Any]:
        """Waits for the device, and gives copies of the outputs.

        Raises:
            DeviceLostError: the device is lost, or the time is over.
        """
        with self._lock:
            if self._outputs is None:
                self._submission.wait()
                self._outputs = self._read()
        return self._outputs


class OverlappedCalls:
    """Calls of an executable, each of which is one submission.

    The device runs submissions in order, and each waits for what the one before wrote. Two memories
    for inputs, outputs and temporaries alternate, so two calls may be unfinished. A third waits for
    the first.

    Args:
        make: makes the dispatches with a memory of their own.
    """

    def __init__(self, make: Callable[[], ComputeGraph]) -> None:
        self.graphs: list[ComputeGraph] = []
        self._calls: list[StartedCall | None] = [None, None]
        self._next = 0
        try:
            for _ in self._calls:
                self.graphs.append(make())
        except BaseException:
            self.close()
            raise

    def start(
        self,
        env: Mapping[Symbol, int],
        write: Callable[[CallMemory], None],
        read: Callable[[], Sequence[Any]],
    ) -> StartedCall:
        """Submits a call.

        Args:
            env: the values of its symbols.
            write: copies the inputs to the memory of a graph.
            read: copies the outputs from there.
        """
        graph, earlier = self.graphs[self._next], self._calls[self._next]
        if earlier is not None:
            earlier.result()  # before its outputs are overwritten
        write(graph.memory)
        call = StartedCall(graph.submit(0, env), read)
        self._calls[self._next] = call
        self._next ^= 1
        return call

    def close(self) -> None:
        """Waits for the calls, whose results can be had afterwards, and releases their memory."""
        for call in filter(None, self._calls):
            with contextlib.suppress(DeviceError):  # as `result` raises it again
                call.result()
        for graph in self.graphs:
            graph.settle()  # a start that was interrupted
            graph.close()
        self.graphs, self._calls = [], [None, None]
