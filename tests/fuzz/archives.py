"""Archives of torch, folders of kernels, modules of operators and arrays: sound ones, and what is done
with changed ones. Archives stand for folders."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import socket
import sys
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from purevk import cli, whole_file
from purevk.cli.inputs import make_inputs
from purevk.frontends.files import open_file
from purevk.graph import kernel_files
from purevk.graph.context import typical_traits
from purevk.ops import extension, unregister, unregister_executor
from purevk.ops.executors import executors
from purevk.passes.pipeline import optimize
from purevk.shaders.cache_entry import CacheKey
from purevk.shaders.source import CompileJob
from tests.fuzz.mutations import MARK, NODE
from tests.harness import DATA
from tests.pickles import members, older, packed

_MODULE = '''
import purevk
from purevk.ops import register_executor, register_kernel, register_pointwise

@register_executor("fuzz.cpu", tensors="numpy")
def on_the_cpu(x, y, slope):
    return x / (1 + y * slope)

register_pointwise("fuzz.gate", "x * pv_sigmoid(y * ACC(slope))", "x, y, slope=1.0", compute="float32")
register_kernel(
    "fuzz.row", """#version 450
#extension GL_GOOGLE_include_directive : enable
#include "kernel.glslh"
void main() { if (INDEX < COUNT) WRITE_OUT(INDEX, scale * READ_X(INDEX)); }
""",
    shape=lambda x, scale: x.with_dims(x.dims[:-1]), params=lambda x, scale: {"scale": float(scale)},
)
'''
IMPORT = json.dumps({"name": "purevk_fuzz_module", "text": _MODULE}).encode()


@cache
def of_torch() -> dict[str, bytes]:
    """A .pt2 file in the layouts of three versions of torch, and an ETRecord of its program, by
    kind. Takes seconds."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))
            self.register_buffer("small", torch.full((2,), 0.5, dtype=torch.bfloat16))
            self.register_buffer("count", torch.zeros(1))
            self.constant = torch.arange(4.0).reshape(2, 2)[:, 0]

        def forward(self, x: Any, *, name: Any) -> Any:
            self.count.add_(1)
            y = torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x + 1, (x,))
            return {"y": [y * self.weight + self.constant, name * self.small]}

    sizes = {"x": {0: torch.export.Dim("n", min=2, max=64)}, "name": None}
    program = torch.export.export(
        Model(), (torch.ones(3, 2),), {"name": torch.ones(2)}, dynamic_shapes=sizes
    )
    data = io.BytesIO()
    torch.export.save(program, data)
    made = dict(
        zip(("pt2", "pt2 of 2.8", "pt2 of 2.7"), (data.getvalue(), *older(data.getvalue())))
    )
    contents = json.loads(members(data.getvalue())["archive/models/model.json"])
    for number, node in enumerate(contents["graph_module"]["graph"]["nodes"]):
        node["metadata"]["debug_handle"] = str(number + 1)
    edge = "edge_dialect_exported_program"
    record = {"debug_handle_map": json.dumps({"forward": {"0": [1, 2], "1": [3, [4]]}}).encode()}
    record[edge] = json.dumps(contents).encode()
    for kind, tensors in (("state_dict", program.state_dict), ("constants", program.constants)):
        data = io.BytesIO()
        torch.save(dict(tensors), data)
        record[f"{edge}_{kind}"] = data.getvalue()
    return {**made, "etrecord": packed(record)}


def arrays() -> dict[str, bytes]:
    """Files of arrays, as `--input` takes them."""
    single, plain, small = io.BytesIO(), io.BytesIO(), io.BytesIO()
    x, y = np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((500,), np.int64)
    np.save(single, x)
    np.savez(plain, x=x, y=y)
    np.savez_compressed(small, x=x, y=y)
    return {"npy": single.getvalue(), "npz": plain.getvalue(), "packed npz": small.getvalue()}


def read_array(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".npy" if data[:1] == b"\x93" else ".npz") as file:
        file.write(data)
        file.flush()
        args = argparse.Namespace(input=[file.name], size=[], seed=0)
        make_inputs(replace(_graph(), inputs=2 * _graph().inputs), args, "fuzz")


# -- folders -------------------------------------------------------------------------------------
@cache
def _kernels() -> tuple[dict[CacheKey, bytes], dict[CacheKey, Any]]:
    """What begins as SPIR-V, and jobs for it."""
    jobs = {}
    for number in range(2):
        text = f"#version 450\nlayout(local_size_x = {1 + number}) in;\nvoid main() {{}}\n"
        job = CompileJob(text, f"fuzz/{number}.comp", {"N": str(number)})
        jobs[CacheKey.of(job)] = job
    spirv = {key: b"\x03\x02\x23\x07" + bytes(range(at, 64 + at)) for at, key in enumerate(jobs)}
    return spirv, {key: (lambda job=job: job) for key, job in jobs.items()}


@cache
def _graph() -> Any:
    with open_file((DATA / "linear_relu_inline.pte").read_bytes()) as file:
        return file.graph("forward")


@cache
def kernel_folder(start: str = "") -> bytes:
    """What PUREVK_DUMP writes of a graph and two kernels: the files whose names begin with `start`."""
    with tempfile.TemporaryDirectory() as name:
        _dump(name)
        paths = sorted(Path(name).glob(f"{start}*"))
        return packed({path.name: path.read_bytes() for path in paths})


def _dump(folder: str) -> None:
    spirv, jobs = _kernels()
    with mock.patch.dict(os.environ, {"PUREVK_DUMP": folder}):
        optimize(_graph(), typical_traits())
        kernel_files.dump(Path(folder), jobs)
        kernel_files.dump_spirv(Path(folder), spirv)


def write_dump(data: bytes) -> None:
    """Writes kernels and graphs into a folder. In one that others may write, links are not followed."""
    with (
        _folder(data) as folder,
        mock.patch.object(whole_file, "WAIT_S", 0.01),
        mock.patch.object(os, "fsync"),
    ):
        outside, shared = folder.parent / "outside", zlib.crc32(data) % 2
        folder.chmod(0o777 if shared else 0o700)
        try:
            _dump(str(folder))
        finally:
            assert not shared or outside.read_bytes() == b"untouched"


def read_override(data: bytes) -> None:
    """Takes changed kernels from a folder."""
    with _folder(data) as folder, mock.patch.dict(os.environ, {"PUREVK_OVERRIDE": str(folder)}):
        try:
            kernel_files.overridden(*_kernels())
        finally:
            kernel_files._used.clear()


@contextlib.contextmanager
def _folder(data: bytes) -> Iterator[Path]:
    """A folder with the members of an archive. What begins with `NODE` becomes a node of that name."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "folder"
        folder.mkdir()
        (folder.parent / "outside").write_bytes(b"untouched")
        for member, content in members(data).items():
            path = folder / (member.replace("/", "_").strip(".") or "x")
            if content.startswith(NODE):
                _make_node(path, content[len(NODE) :].decode("latin-1"))
            else:
                path.write_bytes(content)
        yield folder


def _make_node(path: Path, text: str) -> None:
    kind, _, target = text.replace("\0", "").partition(" ")
    if path.exists() or path.is_symlink():
        return
    if kind == "link":
        path.symlink_to({"outside": "../outside", "itself": path.name}.get(target, target))
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "hole":
        with open(path, "wb") as file:
            file.truncate(1 << 40)
    else:
        with socket.socket(socket.AF_UNIX) as each, contextlib.suppress(OSError):
            each.bind(str(path))  # a path of 108 characters at most


# -- modules -------------------------------------------------------------------------------------
def import_module(data: bytes) -> None:
    """`--import` of a module, and takes its operators away."""
    content = json.loads(data)
    name, text = (content.get(key) if isinstance(content, dict) else "" for key in ("name", "text"))
    if "**9" in str(text) or MARK in str(text):
        return  # a module is code
    before, found = set(sys.modules), {each.name for each in executors()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "purevk_fuzz_module.py"
        path.write_text(str(text), encoding="utf-8", errors="surrogatepass")
        with (
            mock.patch.object(sys, "path", [folder, *sys.path]),
            mock.patch.object(sys, "dont_write_bytecode", True),
        ):
            try:
                cli._import([str(name)])
            finally:
                for module in set(sys.modules) - before:
                    if module.startswith("purevk_fuzz"):
                        del sys.modules[module]
                for operator in list(extension._own):
                    unregister(operator)
                for executor in {each.name for each in executors()} - found:
                    unregister_executor(executor)
