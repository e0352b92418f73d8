"""Serves a model over HTTP with the standard library alone. An example to start from.

    python serve.py model.pte --port 8000

GET /livez says whether the process answers, GET /readyz whether the model is loaded and has run.
POST /forward takes an .npz file with the inputs in order, and returns one with the outputs.
"""

from __future__ import annotations

import argparse
import io
import signal
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

import purevk

MAX_BYTES = 64 << 20  # of a request, also after unpacking


class Server(ThreadingHTTPServer):
    """An HTTP server, with a program once it is loaded."""

    daemon_threads = True
    program: purevk.Program | None = None
    failed = False

    def load(self, path: str) -> None:
        """Loads the program, and calls it once, so that the first request is fast. Ends the server
        if that fails."""
        try:
            program = purevk.load(path)
            program.forward(*[_example(spec) for spec in program.inputs])
            program.reset_state()
        except Exception as error:
            print(f"{path} cannot be served: {error}", flush=True)
            self.failed = True
            self.shutdown()
            return
        self.program = program
        print(f"{path} is ready on {program.device.name}", flush=True)


def _example(spec: Any) -> Any:
    """Zeros for an input, at the lower bounds of its sizes."""
    if spec.kind != "tensor":
        return spec.value if spec.kind == "fixed" else 0
    sizes = [size if isinstance(size, int) else max(size.lower, 1) for size in spec.sizes]
    return np.zeros(sizes, spec.dtype)


class Handler(BaseHTTPRequestHandler):
    """Answers a request."""

    server: Server

    def do_GET(self) -> None:
        ready = self.server.program is not None
        if self.path == "/livez":
            self._answer(200, b"alive\n")
        elif self.path == "/readyz":
            self._answer(200 if ready else 503, b"ready\n" if ready else b"loading\n")
        else:
            self._answer(404, b"not found\n")

    def do_POST(self) -> None:
        program = self.server.program
        length = self.headers.get("Content-Length", "")
        if self.path != "/forward":
            self._answer(404, b"not found\n")
        elif program is None:
            self._answer(503, b"loading\n")
        elif not length.isdecimal() or int(length) > MAX_BYTES:
            self._answer(413, f"a body of up to {MAX_BYTES} bytes is expected\n".encode())
        else:
            self._forward(program, self.rfile.read(int(length)))

    def _forward(self, program: purevk.Program, body: bytes) -> None:
        try:
            outputs = program.forward(*_read(body))
        except (purevk.InputError, purevk.SizeConstraintError, purevk.SignatureError) as error:
            self._answer(400, f"{error}\n".encode())
        except (ValueError, zipfile.BadZipFile, EOFError) as error:
            self._answer(400, f"no .npz file of tensors: {error}\n".encode())
        except purevk.PurevkError as error:
            print(error, flush=True)
            self._answer(500, f"{error.what}\n".encode())
        else:
            found = outputs if isinstance(outputs, (list, tuple)) else [outputs]
            file = io.BytesIO()
            np.savez(file, **{f"output_{at}": np.asarray(each) for at, each in enumerate(found)})
            self._answer(200, file.getvalue(), "application/octet-stream")

    def _answer(self, code: int, body: bytes, kind: str = "text/plain") -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _read(body: bytes) -> list[np.ndarray]:
    """The arrays of an .npz file, in order. Objects are not unpickled."""
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
        if sum(info.file_size for info in archive.infolist()) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes unpacked")
    with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
        return [arrays[name] for name in arrays.files]


def main() -> int:
    parser = argparse.ArgumentParser(description="Serves a model over HTTP.")
    parser.add_argument("model", help="a .pte or .pvk file")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any free port")
    args = parser.parse_args()
    server = Server((args.host, args.port), Handler)
    signal.signal(
        signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown, daemon=True).start()
    )
    print(f"listening on port {server.server_port}", flush=True)
    threading.Thread(target=server.load, args=(args.model,), daemon=True).start()
    server.serve_forever()
    if server.program is not None:
        server.program.close()
    return 1 if server.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
