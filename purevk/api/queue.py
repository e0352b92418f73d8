"""The compute queue: submitting and waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from purevk import knobs
from purevk.api import vk
from purevk.errors import DeviceError, DeviceLostError

if TYPE_CHECKING:
    from purevk.api.commands import CommandBuffer
    from purevk.api.device import Device
    from purevk.api.semaphore import TimelineSemaphore

_TIMEOUT = vk.const("VK_TIMEOUT")
_LOST = vk.const("VK_ERROR_DEVICE_LOST")
_NOT_READY = vk.const("VK_NOT_READY")
_SLICE_NS = 100_000_000  # a wait returns to Python this often, so that Ctrl-C works
_SETTLE_S = 10.0
_POLL_S = 0.002  # a call polls this long before it sleeps: waking up costs tens of microseconds
_RETRY_S = 0.001  # between two waits that failed
_ALL_COMMANDS = 0x10000  # VK_PIPELINE_STAGE_ALL_COMMANDS_BIT


class _QueueState:
    """The queue and its fences, without a reference to the `Device`."""

    def __init__(self, device: Device) -> None:
        self.core, self.functions, self.handle = device.core, device.functions, device.handle
        queue = vk.ffi.new("VkQueue *")
        self.functions.vkGetDeviceQueue(self.handle, device.physical.queue_family, 0, queue)
        self.queue = queue[0]
        # On a software device, which computes on the same cores, polling would only take time from
        # it.
        self.poll = _POLL_S if device.kind != "cpu" else 0.0
        self.lock = threading.RLock()  # who destroys an object asks under it what is unfinished
        self.free: list[Any] = []  # fences as VkFence[1], unsignalled
        self.pending: dict[
            Any, Submission
        ] = {}  # held here, so that what they use stays until they have finished
        self.submitted = 0  # number of the newest submission
        self.leaving = False  # the interpreter exits

    def take_fence(self) -> Any:
        try:
            return self.free.pop()
        except IndexError:
            fence = vk.ffi.new("VkFence[]", 1)
            result = self.functions.vkCreateFence(
                self.handle, vk.struct("VkFenceCreateInfo"), vk.NULL, fence
            )
            vk.check(result, "vkCreateFence")
            return fence

    def check(self, result: int, call: str, name: str) -> None:
        """Raises the typed error of a failed call, and notes a lost device."""
        if result == _LOST:
            self.core.lost = True
        vk.check(result, call, where=name)

    def unfinished(self) -> list[int]:
        """The numbers of the submissions that the device may still work on. Does not wait. Those
        that have finished, and that nobody waits for, are pending no more."""
        status, handle = self.functions.vkGetFenceStatus, self.handle
        running = []
        with self.lock:  # no other thread may reset a fence meanwhile
            for fence, submission in list(self.pending.items()):
                result = status(handle, fence[0])
                if not result:
                    self._forget(submission, fence)
                elif result == _LOST:  # it ended without results: who waits for it gets the error
                    self.core.lost = True
                    submission._kept = None
                else:
                    running.append(submission.number)
        return running

    def finish(self, submission: Submission, fence: Any) -> bool:
        """Forgets a submission that has finished, unless somebody waits for its fence. False: it
        was forgotten before."""
        with self.lock:
            return self._forget(submission, fence)

    def _forget(self, submission: Submission, fence: Any) -> bool:
        if submission.waiting:
            return True
        if self.pending.get(fence) is not submission:
            return False
        del self.pending[fence]
        submission._fence = submission._kept = None
        if self.functions.vkResetFences(self.handle, 1, fence) == 0:
            self.free.append(fence)
        else:  # it may be signaled: the next who took it would not wait
            self.functions.vkDestroyFence(self.handle, fence[0], vk.NULL)
        return True

    def settle(self) -> bool:
        """Waits a bounded time for what is still running; False if it does not end (then nothing
        may be destroyed)."""
        end = time.monotonic() + _SETTLE_S
        for submission in list(self.pending.values()):
            fence = submission._hold(self)
            try:
                if fence is not None and not self._ends(fence, end):
                    return False
            finally:
                if fence is not None:
                    submission._let_go(self)
        return True

    def _ends(self, fence: Any, end: float) -> bool:
        """Waits for a fence until a time; whether the work has finished."""
        left = end - time.monotonic()
        while True:
            result = self.functions.vkWaitForFences(
                self.handle, 1, fence, 1, max(int(left * 1e9), 0)
            )
            left = end - time.monotonic()
            if _ended(result) or left <= 0:
                return _ended(result)
            if result != _TIMEOUT:
                time.sleep(_RETRY_S)  # the wait itself has failed

    def leave(self) -> bool:
        """Has nothing submitted any more, and waits as `settle` does. The interpreter exits."""
        with self.lock:
            self.leaving = True
        return self.settle()

    def close(self) -> None:
        for submission in self.pending.values():
            submission._fence = submission._kept = None
        for fence in [*self.free, *self.pending]:
            self.functions.vkDestroyFence(self.handle, fence[0], vk.NULL)
        self.free.clear()
        self.pending.clear()


class Submission:
    """Work given to the queue. `wait()` for it before reading what it wrote, and before recording
    its buffers again.

    Attributes:
        number: submissions of a queue are counted from 1.
        waiting: threads that wait for it.
    """

    __slots__ = ("_fence", "_kept", "_queue", "number", "waiting")

    def __init__(self, queue: Queue, fence: Any, kept: Any, number: int) -> None:
        self._queue, self._fence, self._kept, self.number = queue, fence, kept, number
        self.waiting = 0

    def done(self) -> bool:
        """Whether the device has finished; does not wait.

        Raises:
            DeviceLostError: the device is lost.
        """
        state = self._queue.state
        fence = self._hold(state)
        if fence is None:
            return True
        try:
            result = state.functions.vkGetFenceStatus(state.handle, fence[0])
            if result == _NOT_READY:
                return False
            state.check(result, "vkGetFenceStatus", self._queue.name)
        finally:
            self._let_go(state)
        self._finish(state, fence)
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the device has finished.

        Args:
            timeout: seconds; None reads PUREVK_TIMEOUT.

        Raises:
            DeviceLostError: the device is lost, or the time is over.
            ValidationError: the validation layer reported something.
        """
        state = self._queue.state
        fence = self._hold(state)
        if fence is None:
            return
        try:
            # Waking up a thread that sleeps takes longer than most calls do.
            if not (state.poll and self._poll(state, fence)):
                self._sleep(state, fence, timeout)
        finally:
            self._let_go(state)
        self._finish(state, fence)

    def _hold(self, state: _QueueState) -> Any:
        """The fence, which no other thread resets until `_let_go`. None if the work has finished."""
        with state.lock:
            if self._fence is not None:
                self.waiting += 1
            return self._fence

    def _let_go(self, state: _QueueState) -> None:
        with state.lock:
            self.waiting -= 1

    def _poll(self, state: _QueueState, fence: Any) -> bool:
        """Asks again and again for a while; whether the device has finished."""
        ask, handle, plain = state.functions.vkGetFenceStatus, state.handle, fence[0]
        end = time.perf_counter() + state.poll
        while (result := ask(handle, plain)) == _NOT_READY:
            if time.perf_counter() > end:
                return False
        state.check(result, "vkGetFenceStatus", self._queue.name)
        return True

    def _sleep(self, state: _QueueState, fence: Any, timeout: float | None) -> None:
        result = state.functions.vkWaitForFences(state.handle, 1, fence, 1, _SLICE_NS)
        if result == _TIMEOUT:
            limit = knobs.TIMEOUT() if timeout is None else timeout
            end = time.monotonic() + limit - _SLICE_NS / 1e9
            while result == _TIMEOUT:
                left = end - time.monotonic()
                if left <= 0:
                    raise DeviceLostError(
                        f"{self._queue.name} did not finish within {limit:g} s",
                        where="vkWaitForFences",
                        why="a kernel runs for too long, or the driver hangs",
                        next="raise PUREVK_TIMEOUT, or use smaller inputs",
                    )
                result = state.functions.vkWaitForFences(
                    state.handle, 1, fence, 1, int(min(_SLICE_NS, left * 1e9 + 1))
                )
        if result:
            state.check(result, "vkWaitForFences", self._queue.name)

    def _finish(self, state: _QueueState, fence: Any) -> None:
        if not state.finish(self, fence):
            return
        if state.core.deferred:
            state.core.collect()
        if state.core.messages:
            self._queue.check()


class Queue:
    """The device's compute queue. `submit` may be called from several threads.

    Submissions start in order but may overlap: a command buffer that reads what an earlier one
    wrote starts with a barrier, unless the host waited between them.
    """

    def __init__(self, device: Device) -> None:
        self.name = device.name
        self._instance = device.instance
        self.state = _QueueState(device)
        device.core.register("", self.state.close)

    def check(self) -> None:
        """Raises ValidationError if the validation layer said something."""
        self._instance.check()

    def submit(
        self,
        commands: CommandBuffer | Sequence[CommandBuffer],
        semaphores: tuple[tuple[TimelineSemaphore, int], tuple[TimelineSemaphore, int]]
        | None = None,
    ) -> Submission:
        """Gives one or several recorded command buffers to the device.

        Args:
            commands: the command buffers.
            semaphores: one with the value to wait for before they start, and one with the value to
                signal once they have finished.

        Raises:
            DeviceLostError, OutOfDeviceMemoryError: from the driver.
            ValidationError: the validation layer reported something.
        """
        state = self.state
        if state.core.handle is None:
            raise state.core.closed_error(self.name)
        if state.pending:
            state.unfinished()  # lets go of what a wait that failed, or that nobody made, has left
        kept: Any = commands
        if semaphores is not None:
            commands = (commands,) if not isinstance(commands, Sequence) else tuple(commands)
            info, kept = _ordered(commands, *semaphores)
        elif not isinstance(commands, Sequence):
            info = commands.submit_info
        else:
            handles = vk.ffi.new("VkCommandBuffer[]", [command.handle for command in commands])
            info = vk.struct(
                "VkSubmitInfo", commandBufferCount=len(handles), pCommandBuffers=handles
            )
            kept = tuple(commands)
        with state.lock:
            submission = None if state.leaving else self._submit(info, kept)
        if submission is None:
            time.sleep(_SETTLE_S)  # a daemon thread, which ends with the process before that
            raise DeviceError(f"{self.name} is closed", why="the interpreter exits")
        if state.core.messages:
            self.check()
        return submission

    def _submit(self, info: Any, commands: Any) -> Submission:
        state = self.state
        fence = state.take_fence()
        result = state.functions.vkQueueSubmit(state.queue, 1, info, fence[0])
        if result:
            state.free.append(fence)
            state.check(result, "vkQueueSubmit", self.name)
        state.submitted += 1
        submission = Submission(self, fence, commands, state.submitted)
        state.pending[fence] = submission
        return submission

    def run(
        self, commands: CommandBuffer | Sequence[CommandBuffer], timeout: float | None = None
    ) -> None:
        """Submits and waits."""
        self.submit(commands).wait(timeout)


def _ended(result: int) -> bool:
    """Whether the status of a fence, or a wait for it, says that the device works on it no more. A
    question that failed says nothing."""
    return result in (0, _LOST)


def _ordered(
    commands: Sequence[CommandBuffer],
    wait: tuple[TimelineSemaphore, int],
    signal: tuple[TimelineSemaphore, int],
) -> tuple[Any, Any]:
    """What `vkQueueSubmit` takes for command buffers between two values of semaphores, and what has
    to live as long as they run."""
    handles = vk.ffi.new("VkCommandBuffer[]", [command.handle for command in commands])
    before, after = (vk.ffi.new("VkSemaphore[]", [each.handle]) for each, _ in (wait, signal))
    old, new = (vk.ffi.new("uint64_t[]", [value]) for _, value in (wait, signal))
    stages = vk.ffi.new("uint32_t[]", [_ALL_COMMANDS])
    timeline = vk.struct(
        "VkTimelineSemaphoreSubmitInfo",
        waitSemaphoreValueCount=1,
        pWaitSemaphoreValues=old,
        signalSemaphoreValueCount=1,
        pSignalSemaphoreValues=new,
    )
    info = vk.struct(
        "VkSubmitInfo",
        timeline,
        waitSemaphoreCount=1,
        pWaitSemaphores=before,
        pWaitDstStageMask=stages,
        commandBufferCount=len(handles),
        pCommandBuffers=handles,
        signalSemaphoreCount=1,
        pSignalSemaphores=after,
    )
    return info, (commands, wait, signal, info, timeline, handles, before, after, old, new, stages)
