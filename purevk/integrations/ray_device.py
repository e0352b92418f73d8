"""The GPU that Ray assigned to a process."""

from __future__ import annotations

from ray import get_runtime_context

from purevk.errors import InputError


def assigned_device() -> int | None:
    """The device of the GPU that Ray assigned to this process. Ray counts GPUs as
    `purevk.devices()` does, if both see the same ones. None: Ray assigned none."""
    ids = get_runtime_context().get_accelerator_ids().get("GPU", [])
    if len(ids) > 1 or any(not each.isdecimal() for each in ids):
        raise InputError(f"Ray assigned the GPUs {ids}", next="ask for one, or name the device")
    return int(ids[0]) if ids else None
