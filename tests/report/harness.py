"""What tests of pages share: lowered methods, and a headless browser, which speaks the protocol of
DevTools through pipes."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from purevk.frontends.files import open_file
from purevk.graph.context import typical_traits
from purevk.report.contents import DeviceParts, MethodParts
from purevk.report.lowered import lower
from tests.harness import DATA

NO_DEVICE = DeviceParts("a typical desktop GPU", None, "", False, None)

# Runs a program whose descriptors 3 and 4 are the ones of these numbers: a browser reads from and writes
# to them.
_AS_3_AND_4 = """
import fcntl, os, sys
high = [fcntl.fcntl(int(each), fcntl.F_DUPFD, 20) for each in sys.argv[1:3]]
os.dup2(high[0], 3)
os.dup2(high[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def lowered(name: str) -> list[MethodParts]:
    """The methods of a committed program, for a typical GPU."""
    with open_file(DATA / f"{name}.pte") as opened:
        made = [(each, lower(opened, each, typical_traits())) for each in opened.methods]
    return [MethodParts(each, low.graph, low.plan, low.guards, {}) for each, low in made]


def find_browser() -> str | None:
    """The path of a browser, or None."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


class Browser:
    """A browser with one tab. A context manager."""

    def __init__(self, path: str) -> None:
        self._complaints: list[str] = []
        self._asked: dict[str, str] = {}
        self._numbers = itertools.count(1)
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        for_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
        ]
        options += [
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--remote-debugging-pipe",
        ]
        options.append(f"--user-data-dir={self._folder.name}")
        ends = (for_browser, from_browser)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _AS_3_AND_4, *map(str, ends), path, *options, "about:blank"],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(for_browser)
        os.close(from_browser)
        self._left = b""
        self._session: str | None = None
        (target,) = [
            each for each in self._ask("Target.getTargets")["targetInfos"] if each["type"] == "page"
        ]
        self._session = self._ask(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")

    @property
    def problems(self) -> list[str]:
        """What the console has complained of since the page was opened, and what the page asked for
        over the network, if its policy did not forbid it."""
        return [*self._complaints, *(f"asked for {url}" for url in self._asked.values())]

    # -- the protocol ----------------------------------------------------------------------------
    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            part = os.read(self._read, 1 << 20)
            assert part, "the browser has ended"
            self._left += part
        text, _, self._left = self._left.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event: str | None, params: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self._complaints.append(
                details.get("exception", {}).get("description", details["text"])
            )
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self._complaints.append(params["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(("file:", "data:", "about:")):
                self._asked[params["requestId"]] = url
        elif event == "Network.loadingFailed" and params.get("blockedReason"):
            self._asked.pop(params["requestId"], None)  # the console tells of it
        elif event == "Page.javascriptDialogOpening":
            self._complaints.append(f"dialog: {params['message']}")

    # -- pages -----------------------------------------------------------------------------------
    def open(self, path: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Opens a file, in a window of a size."""
        self._complaints.clear()
        self._asked.clear()
        self._ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])
        self._ask("Page.navigate", url=path.resolve().as_uri())
        self.run(
            "new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', done))"
        )
        self.settle()

    @contextlib.contextmanager
    def in_frame(self) -> Iterator[None]:
        """Within this, all is about the frame of the page. It has a process of its own."""
        page, self._session = self._session, None
        (target,) = [
            each
            for each in self._ask("Target.getTargets")["targetInfos"]
            if each["type"] == "iframe"
        ]
        self._session = self._ask(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )["sessionId"]
        for domain in ("Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")
        self.settle()
        try:
            yield
        finally:
            self._session = page

    def settle(self) -> None:
        """Waits until the page has drawn what was asked for."""
        self.run("new Promise(done => requestAnimationFrame(() => setTimeout(done, 60)))")

    def run(self, expression: str) -> Any:
        """The value of an expression of JavaScript; promises are waited for."""
        found = self._ask(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def click(self, selector: str) -> None:
        """Clicks the middle of the first element that matches, with the mouse."""
        box = self.run(
            "(e => { e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        self.mouse("mousePressed", *box)
        self.mouse("mouseReleased", *box)
        self.settle()

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """An event of the mouse at a point of the window."""
        held = (
            {"button": "left", "clickCount": 1} if kind in ("mousePressed", "mouseReleased") else {}
        )
        self._ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, **held, **more)

    def type(self, text: str) -> None:
        """Types into what has the focus."""
        self._ask("Input.insertText", text=text)
        self.settle()

    def screenshot(self, path: Path, whole: bool = False) -> None:
        """Writes a PNG of the window, or of the whole page."""
        found = self._ask(
            "Page.captureScreenshot", captureBeyondViewport=whole, **self._clip(whole)
        )
        path.write_bytes(base64.b64decode(found["data"]))

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self._ask("Page.getLayoutMetrics")["cssContentSize"]
        return {
            "clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        }

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._folder.cleanup()
