"""Submissions that several threads see, or that fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from purevk import api
from purevk.errors import DeviceLostError
from tests.api.stand_in import DEVICE_LOST, VulkanStandIn

pytestmark = pytest.mark.device


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> VulkanStandIn:
    return VulkanStandIn(monkeypatch)


@pytest.fixture
def device(stand_in: VulkanStandIn) -> Iterator[api.Device]:
    with api.open_device() as made:
        yield made
    assert stand_in.faults == []


def submitted(device: api.Device) -> api.Submission:
    commands = api.CommandPool(device).buffer()
    commands.begin()
    commands.end()
    return device.queue.submit(commands)


def test_a_fence_is_not_reset_while_another_thread_asks(device: api.Device) -> None:
    """Else what it is told may be of the next submission, which then counts as finished."""
    state = device.queue.state
    ask, reset = state.functions.vkGetFenceStatus, state.functions.vkResetFences
    order: list[str] = []
    threads: list[threading.Thread] = []
    submission = submitted(device)

    def asked(*args: Any) -> int:
        threads.append(threading.Thread(target=submission.wait))
        threads[-1].start()
        threads[-1].join(0.2)  # it is to wait for this question
        order.append("asked")
        return int(ask(*args))

    def resets(*args: Any) -> int:
        order.append("reset")
        return int(reset(*args))

    state.functions.vkGetFenceStatus, state.functions.vkResetFences = asked, resets
    state.unfinished()
    threads[0].join()
    assert order == ["asked", "reset"]
    assert state.pending == {} and len(state.free) == 1


def test_threads_that_wait_for_one_submission(device: api.Device) -> None:
    """The last of them resets the fence."""
    state = device.queue.state
    submission = submitted(device)
    fence = submission._hold(state)
    submission.wait()
    state.unfinished()
    assert submission._fence is fence and state.pending
    submission._let_go(state)
    assert state.unfinished() == [] and not state.pending


def test_a_lost_submission_is_never_waited_for_in_vain(
    device: api.Device, stand_in: VulkanStandIn
) -> None:
    """Another thread asks first, and is told that the device is lost. There are no results."""
    submission = submitted(device)
    stand_in.fail(0, DEVICE_LOST)
    assert device.queue.state.unfinished() == []  # nothing is in use
    assert device.lost
    for wait in (submission.wait, submission.done):
        with pytest.raises(DeviceLostError):
            wait()
