"""Runs each pipeline once without work, so that a driver compiles now what it otherwise compiles at
the first dispatch, and keeps it in its own cache."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence

from purevk import api
from purevk.lower.lowering import KernelSpec

_BYTES = 256  # of the buffer that all bindings share
_BATCH = 64  # dispatches in a submission


class FirstDispatches:
    """Dispatches pipelines on grids of no workgroups, while the caller goes on. No invocation runs,
    so the contents of the buffers do not matter.

    Use it in a `with` statement: its end waits for the device.
    """

    def __init__(self, device: api.Device) -> None:
        self._device, self._stack = device, contextlib.ExitStack()
        self._submissions: list[api.Submission] = []
        self._views: dict[str, api.BufferView] = {}

    def __enter__(self) -> FirstDispatches:
        return self

    def __exit__(self, *error: object) -> None:
        with self._stack:
            for submission in self._submissions:
                submission.wait()

    @functools.cached_property
    def _memory(self) -> tuple[api.Buffer, api.DescriptorArena, api.CommandPool]:
        usage = int(api.Usage.STORAGE | api.Usage.TEXEL)
        made = (
            api.Buffer(self._device, _BYTES, usage=usage),
            api.DescriptorArena(self._device),
            api.CommandPool(self._device),
        )
        for each in made:
            self._stack.callback(each.destroy)
        return made

    def submit(self, pipelines: Sequence[tuple[KernelSpec, api.ComputePipeline]]) -> api.Submission:
        """Has the device dispatch each of some pipelines."""
        _, arena, pool = self._memory
        sets = arena.make(
            [
                (pipeline.layout, [self._bound(kind) for kind in spec.bindings])
                for spec, pipeline in pipelines
            ]
        )
        commands = pool.buffer()
        commands.begin()
        for (_, pipeline), descriptors in zip(pipelines, sets):
            size = pipeline.layout.push_bytes
            commands.record_dispatch(pipeline, descriptors, bytes(size), size, 0)
            commands.barrier()  # all of them bind one buffer
        commands.end()
        self._submissions.append(self._device.queue.submit(commands))
        return self._submissions[-1]

    def _bound(self, kind: str) -> api.BufferView | tuple[api.Buffer, int, int | None]:
        buffer = self._memory[0]
        _, _, form = kind.partition(":")
        if not form:
            return buffer, 0, None
        if form not in self._views:
            self._views[form] = api.BufferView(buffer, form)
            self._stack.callback(self._views[form].destroy)
        return self._views[form]


def dispatch_each(
    device: api.Device,
    pipelines: Sequence[tuple[KernelSpec, api.ComputePipeline]],
    progress: Callable[[str, int, int], None] | None = None,
) -> None:
    """Dispatches each pipeline once, and waits.

    Args:
        progress: called with ("dispatch", done, total).
    """
    with FirstDispatches(device) as dispatches:
        for first in range(0, len(pipelines), _BATCH):
            batch = pipelines[first : first + _BATCH]
            dispatches.submit(batch).wait()
            if progress is not None:
                progress("dispatch", first + len(batch), len(pipelines))
