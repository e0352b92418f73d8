"""Threads for parts of one piece of work."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Pool(ThreadPoolExecutor):
    """A `ThreadPoolExecutor` that also takes work while the interpreter exits, when daemon threads
    may be in the middle of a call. Python starts no threads any more then, so the work is done in
    the thread that submits it."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        try:
            return super().submit(function, *args, **kwargs)
        except RuntimeError:
            future: Future[Any] = Future()
            try:
                future.set_result(function(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)
            return future
