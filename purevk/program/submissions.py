"""Calls that run on a thread of their own, while the caller prepares the next ones."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from purevk.errors import PurevkError

_log = logging.getLogger("purevk")


class _Call(Future[Any]):
    """The future of a submitted call. Whatever a callback raises on the thread of the calls is logged:
    it must not end the thread, on which later calls wait."""

    worker: int | None = None

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        def guarded(future: Future[Any]) -> None:
            try:
                fn(future)
            except Exception:
                raise  # `Future` logs it
            except BaseException:
                if threading.get_ident() != self.worker:
                    raise
                _log.critical("a callback of a submitted call raised", exc_info=True)

        super().add_done_callback(guarded)


class Submissions:
    """The calls of one program that were submitted, run in their order by one thread.

    Args:
        limit: calls that may be unfinished; one more waits.
    """

    def __init__(self, limit: int) -> None:
        # Its thread holds nothing of this object between calls, and ends with it.
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="purevk")
        self._room = threading.Semaphore(max(limit, 1))
        self._order = threading.Lock()
        self._used = False  # whether a call was submitted since `settle`
        self._worker: int | None = None

    def submit(self, prepare: Callable[[], Any], call: Callable[[Any], Any]) -> Future[Any]:
        """Has `call(prepare())` run: `prepare` now, once there is room, `call` on the thread.

        Returns:
            A future of what `call` returns; errors of both come out of its `result()`.

        Raises:
            PurevkError: after `close`.
        """
        # A callback of a finished call does not wait: that would be for its own thread.
        acquired = self._room.acquire(blocking=threading.get_ident() != self._worker)
        future: _Call | None = None
        try:
            try:
                prepared = prepare()
            except Exception as error:
                failed: Future[Any] = Future()
                failed.set_exception(error)
                return failed
            submitted = _Call()
            try:
                with self._order:
                    self._threads.submit(self._run, submitted, call, prepared)
                    self._used = True
            except RuntimeError:
                raise PurevkError("the program is closed", next="load it again") from None
            future = submitted
        finally:
            if acquired and future is None:
                self._room.release()
        if acquired:
            future.add_done_callback(lambda _: self._room.release())
        return future

    def _run(self, future: _Call, call: Callable[[Any], Any], prepared: Any) -> None:
        self._worker = future.worker = threading.get_ident()
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = call(prepared)
        except BaseException as error:  # also SystemExit: it belongs to who asks for the result
            future.set_exception(error)
        else:
            future.set_result(result)

    def settle(self) -> None:
        """Waits until all calls submitted so far are finished. Does nothing on their own thread."""
        if not self._used or threading.get_ident() == self._worker:
            return
        with self._order:
            try:
                # One thread takes them in order. A call that was cancelled says nothing of those
                # before it.
                last = self._threads.submit(_nothing)
            except RuntimeError:
                return  # closed, which has waited
            self._used = False
        last.result()

    def close(self) -> None:
        """Waits for all calls and takes no more."""
        self._threads.shutdown(wait=threading.get_ident() != self._worker)


def _nothing() -> None:
    """What `settle` waits for."""
