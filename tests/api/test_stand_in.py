"""The stand-in for the driver notices what Vulkan forbids."""

from __future__ import annotations

import pytest

from purevk import api, knobs
from purevk.errors import OutOfDeviceMemoryError
from tests.api.stand_in import OUT_OF_HOST_MEMORY, VulkanStandIn

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(
        knobs.VALIDATION(), reason="the faults that these tests make end the validation layer"
    ),
]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> VulkanStandIn:
    return VulkanStandIn(monkeypatch)


def submitted(device: api.Device) -> tuple[api.CommandBuffer, api.Submission]:
    commands = api.CommandPool(device).buffer()
    commands.begin()
    commands.end()
    return commands, device.queue.submit(commands)


def test_what_is_sound_is_no_fault(stand_in: VulkanStandIn) -> None:
    with api.open_device() as device:
        buffer = api.Buffer(device, 64)
        commands, submission = submitted(device)
        assert stand_in.kinds()["Buffer"] == 1
        submission.wait()
        commands.begin()
        commands.end()
        buffer.destroy()
        assert "Buffer" not in stand_in.kinds()
    device.instance.close()
    assert (stand_in.live, stand_in.faults) == ({}, [])


def test_destroying_what_the_device_may_use(stand_in: VulkanStandIn) -> None:
    with api.open_device() as device:
        buffer = api.Buffer(device, 64)
        _, submission = submitted(device)
        _, destroy = device.core.objects.pop(buffer._number)
        destroy()
        assert "Buffer: destroyed while the device may use it" in stand_in.faults
        submission.wait()


def test_recording_what_the_device_may_use(stand_in: VulkanStandIn) -> None:
    with api.open_device() as device:
        commands, submission = submitted(device)
        commands.begin()
        assert stand_in.faults == ["a command buffer in use is recorded again"]
        submission.wait()
        commands.end()


def test_a_fence_that_was_not_reset(stand_in: VulkanStandIn) -> None:
    with api.open_device() as device:
        _, submission = submitted(device)
        fence = submission._fence
        submission.wait()
        device.queue.state.functions.vkResetFences = lambda *args: 0
        _, submission = submitted(device)
        assert submission._fence is fence
        submission.wait()
        submitted(device)[1].wait()
        assert stand_in.faults == ["a fence was given to the queue that is signaled or in use"]


def test_it_fails_one_call(stand_in: VulkanStandIn) -> None:
    with api.open_device() as device:
        stand_in.fail(0, OUT_OF_HOST_MEMORY)
        with pytest.raises(OutOfDeviceMemoryError, match="vkCreateBuffer"):
            api.Buffer(device, 64)
        assert stand_in.failed == "vkCreateBuffer"
        api.Buffer(device, 64).destroy()
        assert "Buffer" not in stand_in.kinds()
