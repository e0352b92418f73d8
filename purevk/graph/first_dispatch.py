"""Runs each pipeline once without work, so that a driver compiles now what it otherwise compiles at
the first dispatch, and keeps it in its own cache."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from purevk import api
from purevk.lower.lowering import KernelSpec

_BYTES = 256  # of the buffer that all bindings share
_BATCH = 64  # dispatches in a submission


def dispatch_each(
    device: api.Device,
    pipelines: Sequence[tuple[KernelSpec, api.ComputePipeline]],
    progress: Callable[[str, int, int], None] | None = None,
) -> None:
    """Dispatches each pipeline on a grid of no workgroups. No invocation runs, so the contents of
    the buffers do not matter.

    Args:
        progress: called with ("dispatch", done, total).
    """
    with contextlib.ExitStack() as stack:
        usage = int(api.Usage.STORAGE)
        if any(kind.startswith("texel") for spec, _ in pipelines for kind in spec.bindings):
            usage |= int(api.Usage.TEXEL)
        buffer = api.Buffer(device, _BYTES, usage=usage)
        stack.callback(buffer.destroy)
        arena = api.DescriptorArena(device)
        stack.callback(arena.destroy)
        pool = api.CommandPool(device)
        stack.callback(pool.destroy)
        views: dict[str, api.BufferView] = {}

        def bound(kind: str) -> api.BufferView | tuple[api.Buffer, int, int | None]:
            _, _, form = kind.partition(":")
            if not form:
                return buffer, 0, None
            if form not in views:
                views[form] = api.BufferView(buffer, form)
                stack.callback(views[form].destroy)
            return views[form]

        sets = arena.make(
            [(pipeline.layout, [bound(k) for k in spec.bindings]) for spec, pipeline in pipelines]
        )
        for first in range(0, len(pipelines), _BATCH):
            commands = pool.buffer()
            commands.begin()
            batch = pipelines[first : first + _BATCH]
            for (_, pipeline), descriptors in zip(batch, sets[first:]):
                size = pipeline.layout.push_bytes
                commands.record_dispatch(pipeline, descriptors, bytes(size), size, 0)
                commands.barrier()  # all of them bind one buffer
            commands.end()
            device.queue.run(commands)
            if progress is not None:
                progress("dispatch", first + len(batch), len(pipelines))
