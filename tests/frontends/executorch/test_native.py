"""Files of ExecuTorch's native backend, written by `to_native`, beside eager torch; and damaged ones."""

from __future__ import annotations

import copy
import functools
import io
import json
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import purevk
from purevk.errors import FileFormatError, InputError, PurevkError, UnsupportedProgramError
from purevk.frontends.files import open_file
from purevk.pte.native import ALIASES, PROGRAM, TENSORS
from tests.harness import ROOT
from tests.models.messages import quiet

torch = pytest.importorskip("torch")
native = pytest.importorskip("executorch.exir.native")
schema = pytest.importorskip("executorch.backends.native.serialization.schema")
serialize = pytest.importorskip("executorch.backends.native.serialization.graph_serialize")

functional = torch.nn.functional
SMALL = ROOT / "tests" / "data" / "ptn" / "cached.ptn"


class Block(torch.nn.Module):
    """Attention and a feed-forward network; x [B, T, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)
        self.up = torch.nn.Linear(16, 16)
        self.up.weight = self.out.weight

    def forward(self, x: Any) -> Any:
        batch, rows, width = x.shape
        projected = self.project(x)

        def heads(at: int) -> Any:
            part = projected[..., at * 16 : (at + 1) * 16]
            return part.reshape(batch, rows, 4, 4).transpose(1, 2)

        y = functional.scaled_dot_product_attention(heads(0), heads(1), heads(2))
        x = x + self.out(y.transpose(1, 2).reshape(batch, rows, width))
        scaled = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)
        return x + functional.gelu(self.up(scaled))


class Cached(torch.nn.Module):
    """Buffers that are in the file and that are not; x [4], a row of the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.full((4,), 0.5))
        self.register_buffer("same", torch.full((4,), 0.5))
        self.register_buffer("other", torch.full((4,), 0.5))
        self.register_buffer("cache", torch.zeros(3, 4), persistent=False)

    def forward(self, x: Any, row: Any) -> Any:
        self.total.add_(x)
        self.cache.index_copy_(0, row, x[None])
        return self.total * 2 + self.same + self.other, self.cache + 1


class Sizes(torch.nn.Module):
    """Sizes without an upper bound; x [B, T, 8]."""

    def forward(self, x: Any) -> Any:
        return torch.relu(x).transpose(1, 2) * 2


def _image() -> Any:
    nn = torch.nn
    parts = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(8 * 16, 5))


_ROWS = torch.export.Dim("rows", max=32)
_OPEN = {"x": {1: torch.export.Dim.DYNAMIC}}
# The module, and the sizes of x of its calls; the first ones are exported.
MODELS: dict[str, tuple[Callable[[], Any], Any, list[tuple[int, ...]]]] = {
    "image": (_image, None, [(1, 3, 8, 8)]),
    "block": (Block, {"x": {1: _ROWS}}, [(2, 4, 16), (2, 32, 16), (2, 2, 16)]),
    "sizes": (Sizes, _OPEN, [(2, 4, 8), (2, 90, 8), (2, 3, 8)]),
}


@functools.cache
def written(name: str) -> tuple[Any, bytes]:
    """A module, and its file."""
    torch.manual_seed(3)
    if name == "cached":
        module, inputs, dynamic = Cached(), (torch.ones(4), torch.tensor([1])), None
    else:
        build, dynamic, sizes = MODELS[name]
        module, inputs = build(), (torch.randn(*sizes[0]),)
        if name == "image":
            dynamic = None
    with quiet():
        module = module.eval()
        if name == "image":
            exported = torch.export.export(module, inputs)
        else:
            exported = torch.export.export(module, inputs, dynamic_shapes=dynamic)
        return module, _saved(native.to_native(exported))


def _saved(manager: Any) -> bytes:
    stream = io.BytesIO()
    from executorch.exir._serialize import _ptn

    mutable = frozenset(
        each.data_key
        for method in serialize.deserialize_program(manager._ptg).methods
        for each in method.constants or []
        if each.mutated
    )
    owners, aliases = _ptn._dedup(manager._constants, mutable)
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr(PROGRAM, manager._ptg)
        if owners:
            with archive.open(TENSORS, "w") as member:
                _ptn._write_safetensors(member, owners)
        if aliases:
            archive.writestr(ALIASES, json.dumps(aliases))
    return stream.getvalue()


@pytest.mark.device
@pytest.mark.parametrize("name", MODELS)
def test_results_are_those_of_eager_torch(name: str) -> None:
    """Three calls of each size."""
    module, data = written(name)
    with purevk.load(data) as program:
        for sizes in MODELS[name][2]:
            for _ in range(3):
                x = torch.randn(*sizes)
                expected = module(x).detach().numpy()
                np.testing.assert_allclose(program.forward(x.numpy()), expected, 1e-4, 1e-5)


@pytest.mark.device
def test_buffers_keep_what_calls_write() -> None:
    """One that the file has begins with its bytes, another one with zeros; equal bytes of buffers that
    are written stay apart."""
    module, data = written("cached")
    module = copy.deepcopy(module)
    with purevk.load(data) as program:
        for row in (1, 0, 1):
            x = torch.randn(4)
            expected = [each.detach().numpy().copy() for each in module(x, torch.tensor([row]))]
            for have, want in zip(program.forward(x.numpy(), np.array([row])), expected):
                np.testing.assert_allclose(have, want, 1e-5, 1e-6)
    with open_file(data) as file:
        assert sorted(label.name for label in file.graph("forward").labels.values()) == [
            "cache",
            "total",
        ]


@pytest.mark.device
def test_methods_and_shared_weights() -> None:
    module = torch.nn.Linear(8, 4)
    with quiet():
        methods = {
            name: torch.export.export(module, (torch.randn(rows, 8),))
            for name, rows in (("prefill", 3), ("decode", 1))
        }
        data = _saved(native.to_native(methods))
    with purevk.load(data) as program:
        for name, rows in (("prefill", 3), ("decode", 1)):
            x = torch.randn(rows, 8)
            result = program.method(name)(x.numpy())
            np.testing.assert_allclose(result, module(x).detach().numpy(), 1e-5, 1e-6)


@pytest.mark.device
def test_sizes_beyond_the_bounds() -> None:
    _, data = written("block")
    with purevk.load(data) as program, pytest.raises(InputError, match="33"):
        program.forward(np.zeros((2, 33, 16), np.float32))


def test_tensors_are_slices_of_the_file(tmp_path: Path) -> None:
    _, data = written("block")
    path = tmp_path / "block.ptn"
    path.write_bytes(data)
    with open_file(path) as file:
        assert file.kind == "ptn"
        constants = file.graph("forward").constants.values()
        assert len({constant.memory for constant in constants}) == len(constants) == 6
    (tmp_path / "block.pte").write_bytes(data)
    with pytest.raises(FileFormatError, match="suffix"):
        open_file(tmp_path / "block.pte")


# -- graphs that the writer does not write today --------------------------------------------------
def _tensor(name: str) -> Any:
    return schema.NamedArgument(
        name="", arg=schema.Argument(value=schema.TensorArg(name=name)), mutated=False
    )


def _argument(value: Any, mutated: bool = False) -> Any:
    return schema.NamedArgument(name="", arg=schema.Argument(value=value), mutated=mutated)


def _node(name: str, target: str, inputs: list[Any], alias: str | None = None) -> Any:
    return schema.Node(
        name=name,
        op_kind=schema.OpKind.CALL_FUNCTION,
        target=target,
        inputs=inputs,
        outputs=[schema.Output(name=name, alias_of=alias)],
    )


def _file(graph: Any, version: str = "1", **more: Any) -> bytes:
    method = schema.Method(name="forward", graph=graph, **more)
    program = schema.Program(version=version, methods=[method])
    return _archive({PROGRAM: serialize._compile_to_bytes(program)})


def _archive(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return stream.getvalue()


def _graph(nodes: list[Any], inputs: list[str], outputs: list[str], *names: str) -> Any:
    meta = schema.TensorMeta(
        dtype=schema.ScalarType.FLOAT, sizes=[schema.Dim(min=3, max=3)], dim_order=[0]
    )
    values = [schema.TensorValue(name=name, meta=meta) for name in (*inputs, *outputs, *names)]
    return schema.Graph(nodes=nodes, inputs=inputs, outputs=outputs, tensor_values=values)


@pytest.mark.device
def test_a_choice_runs_one_of_two_graphs() -> None:
    def branch(op: str) -> Any:
        graph = _graph([_node("y", f"torch.ops.aten.{op}.default", [_tensor("a")])], ["a"], ["y"])
        return _argument(schema.GraphArg(name=op, graph=graph))

    number = schema.FloatArg(value=0.0)
    nodes = [
        _node("s", "torch.ops.aten.sum.default", [_tensor("x")]),
        _node("p", "torch.ops.aten.gt.Scalar", [_tensor("s"), _argument(number)]),
        _node(
            "r",
            "torch.ops.higher_order.cond",
            [_tensor("p"), branch("relu"), branch("neg"), _argument(schema.TensorListArg(["x"]))],
        ),
    ]
    with purevk.load(_file(_graph(nodes, ["x"], ["r"]))) as program:
        for values in ([1.0, -2.0, 4.0], [1.0, -2.0, -4.0]):
            x = np.array(values, np.float32)
            expected = np.maximum(x, 0) if x.sum() > 0 else -x
            np.testing.assert_array_equal(program.forward(x), expected)


def _writes(read_later: str) -> bytes:
    """relu_ of a view of y, then a sum with another name."""
    written = _argument(schema.TensorArg(name="v"), mutated=True)
    nodes = [
        _node("y", "torch.ops.aten.neg.default", [_tensor("x")]),
        _node("v", "torch.ops.aten.alias.default", [_tensor("y")], alias="y"),
        _node("w", "torch.ops.aten.relu_.default", [written], alias="v"),
        _node("r", "torch.ops.aten.add.Tensor", [_tensor("w"), _tensor(read_later)]),
    ]
    return _file(_graph(nodes, ["x"], ["r"], "y", "v", "w"))


@pytest.mark.device
@pytest.mark.parametrize("name", ["v", "w", "x"])
def test_writes_are_seen_by_later_nodes(name: str) -> None:
    x = np.array([1.0, -2.0, 4.0], np.float32)
    written = np.maximum(-x, 0)
    with purevk.load(_writes(name)) as program:
        np.testing.assert_array_equal(program.forward(x), written + (x if name == "x" else written))


def test_writes_that_another_name_would_have_to_see() -> None:
    with (
        open_file(_writes("y")) as file,
        pytest.raises(UnsupportedProgramError, match="y are read"),
    ):
        file.graph("forward")


# -- damaged files --------------------------------------------------------------------------------
def _members(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _header(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    members = _members(data)
    blob = members[TENSORS]
    (length,) = struct.unpack("<Q", blob[:8])
    header = json.loads(blob[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    members[TENSORS] = struct.pack("<Q", len(text)) + text + blob[8 + length :]
    return _archive(members)


def _first(header: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(value for key, value in header.items() if key != "__metadata__")
    return found


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda data: _archive(_members(data), zipfile.ZIP_DEFLATED), "compressed"),
        (lambda data: _archive({**_members(data), "data.pkl": b"\x80\x02."}), "holds 'data.pkl'"),
        (lambda data: _archive({**_members(data), ALIASES: b"[1"}), "aliases.json cannot be read"),
        (lambda data: _archive({**_members(data), ALIASES: b'{"a": "b"}'}), "cannot be read"),
        (lambda data: data.replace(b"cache", b"cashe"), "another checksum"),
        (lambda data: _archive({PROGRAM: _members(data)[PROGRAM]}), "there are no bytes"),
        (lambda data: _header(data, lambda h: _first(h).update(dtype="F8_E4M3")), "has the dtype"),
        (lambda data: _header(data, lambda h: _first(h).update(shape=[9])), "outside of its place"),
        (lambda data: _header(data, lambda h: _first(h).update(shape=[-1])), "cannot be read"),
        # to multiply them takes minutes
        (
            lambda data: _header(data, lambda h: _first(h).update(shape=[1 << 62] * 300_000)),
            "300000 dims",
        ),
        (lambda data: _header(data, lambda h: _first(h).update(shape=[10**4000])), "is no size"),
        (
            lambda data: _header(data, lambda h: _first(h).update(data_offsets=[0, 1 << 40])),
            "outside of its place",
        ),
    ],
)
def test_damaged_archives(change: Callable[[bytes], bytes], text: str) -> None:
    with pytest.raises(FileFormatError, match=text):
        open_file(change(SMALL.read_bytes()))


def test_another_version_is_refused() -> None:
    graph = _graph([], ["x"], [])
    with pytest.raises(FileFormatError, match="version '2'"):
        open_file(_file(graph, version="2"))


def test_graphs_are_not_nested_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("purevk.pte.native._MOST_NESTED", 3)
    graph = _graph([], ["x"], [])
    for _ in range(5):
        inner = _argument(schema.GraphArg(name="g", graph=graph))
        graph = _graph([_node("n", "torch.ops.higher_order.cond", [inner])], ["x"], [])
    with pytest.raises(FileFormatError, match="nested"):
        open_file(_file(graph))


def test_changed_bytes_raise_errors_of_purevk() -> None:
    """Of the graphs and the header of the tensors, under a checksum that is right."""
    members, draw = _members(SMALL.read_bytes()), random.Random(7)
    refused = 0
    for number in range(300):
        name = (PROGRAM, PROGRAM, TENSORS)[number % 3]
        changed = bytearray(members[name])
        for _ in range(draw.randint(1, 4)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        try:
            with open_file(_archive({**members, name: bytes(changed)})) as file:
                file.graph(file.methods[0])
        except PurevkError:
            refused += 1
    assert refused > 50
