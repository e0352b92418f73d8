"""HTTP requests with limits, and answers. An error of a client is answered with 4xx and its text."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from purevk.errors import PurevkError
from purevk.integrations.worker import CLIENT_ERRORS

MAX_BODY = 64 << 20
"""Bytes of the largest body."""
MAX_WAITING = 256
"""Requests that a process has in work at a time."""
MAX_LISTS = 1 << 22
"""Lists and objects in the JSON of a body: an empty one takes 20 times the memory of its text."""
BODY_SECONDS = 30.0
"""Time in which a body must arrive."""
MAX_BODIES = 1 << 30
"""Bytes of all bodies that arrive or are in work in a process; at least one of the largest has room."""


class Gate:
    """Counts the requests in work: `with gate:`. Raises `HTTPException` 503 above the limit."""

    def __init__(self, limit: int = MAX_WAITING) -> None:
        self.limit, self.count = limit, 0

    def __enter__(self) -> None:
        if self.count >= self.limit:
            raise HTTPException(503, f"{self.limit} requests are in work; try again later")
        self.count += 1

    def __exit__(self, *exc: object) -> None:
        self.count -= 1


class Room:
    """Counts the bytes of bodies that arrive and are in work.

    Args:
        limit: bytes.
    """

    def __init__(self, limit: int = MAX_BODIES) -> None:
        self.limit, self.used = limit, 0

    @contextlib.asynccontextmanager
    async def body(self, request: Request, max_body: int = MAX_BODY) -> AsyncIterator[bytes]:
        """The body of a request, until it is answered.

        Raises:
            HTTPException: it is larger than `max_body` (413), does not arrive in time (408), or the
                bodies of other requests leave no room (503).
        """
        body = bytearray()

        async def read() -> None:
            async for chunk in request.stream():
                if len(body) + len(chunk) > max_body:
                    raise HTTPException(413, f"the body has more than {max_body} bytes")
                if self.used + len(chunk) > max(self.limit, max_body):
                    raise HTTPException(503, "other requests need the memory; try again later")
                self.used += len(chunk)
                body.extend(chunk)

        try:
            try:
                await asyncio.wait_for(read(), BODY_SECONDS)
            except asyncio.TimeoutError:
                raise HTTPException(408, f"it did not arrive in {BODY_SECONDS:g} s") from None
            yield bytes(body)
        finally:
            self.used -= len(body)


room = Room()  # of this process


class Limits:
    """ASGI middleware: `app.add_middleware(Limits, max_body=..., max_waiting=...)`. Requests of GET
    and HEAD, such as probes, always pass.

    Args:
        max_body: bytes of the largest body; larger ones are answered with 413.
        max_waiting: requests in work at a time; further ones are answered with 503.
    """

    def __init__(self, app: Any, max_body: int = MAX_BODY, max_waiting: int = MAX_WAITING) -> None:
        self.app, self.max_body, self.gate = app, max_body, Gate(max_waiting)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self.app(scope, receive, send)
            return
        messages: list[Any] = []

        async def replay() -> Any:
            return messages.pop() if messages else await receive()

        try:
            async with room.body(Request(scope, receive), self.max_body) as body:
                _check_lists(_json_part(body, Headers(scope=scope)))
                messages.append({"type": "http.request", "body": body, "more_body": False})
                with self.gate:
                    await self.app(scope, replay, send)
        except HTTPException as error:
            await error_response(error)(scope, receive, send)


@contextlib.asynccontextmanager
async def json_of(request: Request) -> AsyncIterator[Any]:
    """What the JSON of a request holds, until it is answered.

    Raises:
        HTTPException: what `Room.body` raises; or it is no JSON, or nested too deeply (400), or it has
            more than `MAX_LISTS` lists and objects (413).
    """
    async with room.body(request) as body:
        _check_lists(body)
        try:
            values = json.loads(body)
        except RecursionError:
            raise HTTPException(400, "the body is no JSON: it is nested too deeply") from None
        except ValueError as error:
            raise HTTPException(400, f"the body is no JSON: {error}") from None
        yield values


def _check_lists(text: bytes) -> None:
    """Raises `HTTPException` 413 for JSON of more than `MAX_LISTS` lists and objects."""
    if text.count(b"[") + text.count(b"{") > MAX_LISTS:
        raise HTTPException(413, f"the body has more than {MAX_LISTS} lists and objects")


def _json_part(body: bytes, headers: Headers) -> bytes:
    """What is JSON in a request of the Open Inference Protocol: binary tensors may follow it."""
    length = headers.get("inference-header-content-length", "")
    return body[: int(length)] if length.isdecimal() and len(length) < 12 else body


def answer(result: Mapping[str, np.ndarray] | PurevkError) -> Response:
    """The outputs of a sample as JSON, by name; or its error: 400 if the client can correct it,
    else 500. NaN and infinity are written as Python's `json` writes them."""
    if isinstance(result, PurevkError):
        return _error(400 if isinstance(result, CLIENT_ERRORS) else 500, str(result))
    text = json.dumps({name: values.tolist() for name, values in result.items()})
    return Response(text, media_type="application/json")


def error_response(error: HTTPException) -> Response:
    """An error as JSON."""
    return _error(error.status_code, str(error.detail))


def _error(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status)
