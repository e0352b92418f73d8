"""Limits of HTTP requests, without a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from purevk.errors import DeviceError, FallbackError, FileFormatError, InputError

pytest.importorskip("starlette", reason="scripts/engines.sh runs these tests with the engines")
from purevk.integrations import http


async def _call(
    app: Any, chunks: Sequence[bytes], method: str = "POST", headers: Sequence[Any] = ()
) -> tuple[int, bytes]:
    """The status and the body that an ASGI application answers."""
    messages = [{"type": "http.request", "body": each, "more_body": True} for each in chunks]
    messages[-1]["more_body"] = False
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0) if messages else await asyncio.sleep(60)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": "/", "query_string": b""}
    scope["headers"] = list(headers)
    await app(scope, receive, send)
    return sent[0]["status"], b"".join(each.get("body", b"") for each in sent)


async def _echo(scope: Any, receive: Any, send: Any) -> None:
    from starlette.requests import Request
    from starlette.responses import Response

    await asyncio.sleep(0.05)
    await Response(await Request(scope, receive).body())(scope, receive, send)


def test_large_bodies() -> None:
    app = http.Limits(_echo, max_body=100)
    for chunks in ([b""], [b"x"], [b"x" * 100], [b"x" * 50, b"", b"x" * 50]):
        assert asyncio.run(_call(app, chunks)) == (200, b"".join(chunks))
    code, text = asyncio.run(_call(app, [b"x" * 60, b"x" * 41]))
    assert code == 413 and b"more than 100 bytes" in text


def test_many_requests() -> None:
    """Those beyond the limit are refused; probes pass, and the next ones after it."""

    async def run() -> None:
        app = http.Limits(_echo, max_waiting=3)
        calls = [_call(app, [b"x"]) for _ in range(5)] + [_call(app, [b""], "GET")]
        codes = [code for code, _ in await asyncio.gather(*calls)]
        assert sorted(codes[:5]) == [200, 200, 200, 503, 503] and codes[5] == 200
        assert (await _call(app, [b"x"]))[0] == 200

    asyncio.run(run())


def test_a_body_that_does_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_SECONDS", 0.05)

    async def run() -> None:
        app = http.Limits(_echo, max_waiting=1)
        waiting = asyncio.create_task(_call_partly(app))
        await asyncio.sleep(0.01)
        assert (await _call(app, [b"x"]))[0] == 200  # it holds nothing that others need
        assert (await waiting)[0] == 408

    asyncio.run(run())


def test_bodies_that_arrive_have_a_limit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "room", http.Room(250))

    async def run() -> None:
        app = http.Limits(_echo, max_body=100, max_waiting=9)
        calls = [_call(app, [b"x" * 60, b"x" * 40]) for _ in range(5)]
        codes = [code for code, _ in await asyncio.gather(*calls)]
        assert sorted(codes) == [200, 200, 503, 503, 503]
        assert http.room.used == 0 and (await _call(app, [b"x" * 100]))[0] == 200

    asyncio.run(run())


def test_bodies_of_many_lists_and_wrong_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of 64 MB of empty lists took 2.3 GB. Texts of errors can be answers, whatever they have."""
    monkeypatch.setattr(http, "MAX_LISTS", 9)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        from starlette.exceptions import HTTPException
        from starlette.requests import Request

        try:
            async with http.json_of(Request(scope, receive)) as values:
                response = http.answer(InputError(f"no {values}"))
        except HTTPException as error:
            response = http.error_response(error)
        await response(scope, receive, send)

    for body, code, word in (
        (b"[[],[],[],[],[],[],[],[]]", 400, "no [["),
        (b"[" + b"[],{}," * 5 + b"1]", 413, "more than 9 lists"),
        (b"[" * 10, 413, "more than 9 lists"),
        (b'"\\ud800"', 400, "no \\ud800"),
        (b"9" * 5000, 400, "the body is no JSON"),
        (b"\xff", 400, "the body is no JSON"),
        (b"", 400, "the body is no JSON"),
    ):
        status, text = asyncio.run(_call(app, [body]))
        assert status == code and json.loads(text)["error"].startswith(("the body", "no"))
        assert word in json.loads(text)["error"]
    monkeypatch.setattr(http, "MAX_LISTS", 1 << 22)
    status, text = asyncio.run(_call(app, [b"[" * 100_000]))
    assert status == 400 and b"nested too deeply" in text


def test_lists_before_binary_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of tensors may be anything."""
    monkeypatch.setattr(http, "MAX_LISTS", 9)
    app = http.Limits(_echo)
    body = b"[[]]" + b"[" * 50
    assert asyncio.run(_call(app, [body]))[0] == 413
    for length, code in ((b"4", 200), (b"11", 200), (b"12", 413), (b"-4", 413), (b"9" * 5000, 413)):
        headers = [(b"inference-header-content-length", length)]
        assert asyncio.run(_call(app, [body], headers=headers))[0] == code


async def _call_partly(app: Any) -> tuple[int, Any]:
    sent: list[Any] = []

    async def receive() -> Any:
        if not sent:
            sent.append(None)
            return {"type": "http.request", "body": b"x", "more_body": True}
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        sent.append(message)

    await app({"type": "http", "method": "POST", "path": "/", "headers": []}, receive, send)
    return sent[1]["status"], sent


def test_answers() -> None:
    import numpy as np

    good = http.answer({"x": np.array([1.5, np.nan, np.inf], np.float32)})
    assert good.status_code == 200
    np.testing.assert_array_equal(json.loads(good.body)["x"], [1.5, np.nan, np.inf])
    for error, code in (
        (InputError("wrong"), 400),
        (FallbackError("an operator on the CPU refuses an element"), 400),
        (FileFormatError("a check of the program fails"), 400),
        (DeviceError("lost"), 500),
    ):
        bad = http.answer(error)
        assert bad.status_code == code and json.loads(bad.body)["error"] == error.what
