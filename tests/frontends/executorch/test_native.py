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

from tests.frontends.executorch.native_graphs import (  # noqa: E402
    argument,
    call,
    native_file,
    native_graph,
    tensor_argument,
    zipped,
)

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


class Layer(torch.nn.Module):
    """A layer of Llama with caches of 12 rows; x [1, T, 16] at `rows`."""

    def __init__(self) -> None:
        super().__init__()
        names = {"q": (16, 16), "k": (16, 8), "v": (16, 8), "o": (16, 16)}
        names |= {"up": (16, 24), "gate": (16, 24), "down": (24, 16)}
        for name, sizes in names.items():
            setattr(self, name, torch.nn.Linear(*sizes, bias=False))
        self.norms = torch.nn.ModuleList([torch.nn.RMSNorm(16), torch.nn.RMSNorm(16)])
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, 2, 12, 4), persistent=False)

    def forward(self, x: Any, rows: Any, cos: Any, sin: Any, mask: Any) -> Any:
        y, count = self.norms[0](x), x.shape[1]

        def heads(part: Any) -> Any:
            return part.view(1, count, -1, 4).transpose(1, 2)

        def rotated(part: Any) -> Any:
            first, second = part[..., :2], part[..., 2:]
            return part * cos + torch.cat((-second, first), -1) * sin

        self.keys.index_copy_(2, rows, rotated(heads(self.k(y))))
        self.values.index_copy_(2, rows, heads(self.v(y)))
        keys, values = (part.repeat_interleave(2, 1) for part in (self.keys, self.values))
        y = functional.scaled_dot_product_attention(rotated(heads(self.q(y))), keys, values, mask)
        x = x + self.o(y.transpose(1, 2).reshape(1, count, 16))
        y = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Decoder(torch.nn.Module):
    """Llama; rows [T], tokens [1, T]."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(20, 16)
        self.layers = torch.nn.ModuleList([Layer(), Layer()])
        self.norm, self.head = torch.nn.RMSNorm(16), torch.nn.Linear(16, 20, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("frequencies", torch.tensor([1.0, 0.01]))

    def forward(self, rows: Any, tokens: Any) -> Any:
        angles = rows.float()[:, None] * self.frequencies
        angles = torch.cat((angles, angles), -1)
        mask = torch.arange(12) <= rows[:, None]
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x, rows, angles.cos(), angles.sin(), mask)
        return self.head(self.norm(x))


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
def test_a_decoder_keeps_its_caches() -> None:
    """A prompt, single tokens, and a prompt from the start again. The writer states 2 tokens as the
    least."""
    torch.manual_seed(5)
    module, tokens = Decoder().eval(), torch.randint(20, (1, 12))
    several = torch.export.Dim("several", min=1, max=12)
    inputs = torch.arange(4), tokens[:, :4]
    with quiet():
        exported = torch.export.export(
            copy.deepcopy(module), inputs, dynamic_shapes=({0: several}, {1: several})
        )
        data = _saved(native.to_native(exported))
    with purevk.load(data, bounds="grow") as program:
        for start, end in ((0, 4), (4, 5), (5, 6), (6, 12), (0, 3), (3, 4)):
            call = torch.arange(start, end), tokens[:, start:end]
            want = module(*call).detach()
            torch.testing.assert_close(program.forward(*call), want, rtol=1e-4, atol=1e-5)
        with pytest.raises(InputError, match="is 13"):
            purevk.load(data).forward(torch.arange(13), torch.zeros(1, 13, dtype=torch.int64))


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


class Rows(torch.nn.Module):
    """Writes rows of a buffer, or only reads it; x [n, 3]."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("rows", torch.full((4, 3), 2.0 * persistent), persistent=persistent)
        self.writes = True

    def forward(self, x: Any, at: Any) -> Any:
        if self.writes:
            self.rows.index_copy_(0, at, x + x)
        return self.rows + x.sum() + at.sum()


@pytest.mark.device
@pytest.mark.parametrize("persistent", [False, True])
def test_methods_share_buffers(persistent: bool) -> None:
    """What a method writes, others see, also those that only read it."""
    torch.manual_seed(3)
    module, exported = Rows(persistent), {}
    with quiet():
        for name, count in (("prefill", 2), ("decode", 1), ("read", 1)):
            module.writes = name != "read"
            example = (torch.randn(count, 3), torch.arange(count))
            exported[name] = torch.export.export(copy.deepcopy(module), example)
        data = _saved(native.to_native(exported))
    with purevk.load(data) as program:
        for name, *rows in (
            ("read", 0),
            ("prefill", 1, 3),
            ("decode", 2),
            ("read", 0),
            ("decode", 3),
        ):
            x, at = torch.randn(len(rows), 3), torch.tensor(rows)
            module.writes = name != "read"
            torch.testing.assert_close(program.method(name)(x, at), module(x, at))
        assert list(program.state) == ["rows"]


def test_values_that_the_writer_lost() -> None:
    """A buffer that is not persistent is in the file without its values, also where it is constant."""

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.tensor(8.0), persistent=False)

        def forward(self, x: Any) -> Any:
            return x * self.scale

    with quiet():
        data = _saved(native.to_native(torch.export.export(Scaled(), (torch.ones(3),))))
    with pytest.raises(UnsupportedProgramError, match="no values of the buffer 'scale'"):
        open_file(data)


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
@pytest.mark.device
def test_a_choice_runs_one_of_two_graphs() -> None:
    def branch(op: str) -> Any:
        graph = native_graph(
            [call("y", f"torch.ops.aten.{op}.default", [tensor_argument("a")])], ["a"], ["y"]
        )
        return argument(schema.GraphArg(name=op, graph=graph))

    number = schema.FloatArg(value=0.0)
    nodes = [
        call("s", "torch.ops.aten.sum.default", [tensor_argument("x")]),
        call("p", "torch.ops.aten.gt.Scalar", [tensor_argument("s"), argument(number)]),
        call(
            "r",
            "torch.ops.higher_order.cond",
            [
                tensor_argument("p"),
                branch("relu"),
                branch("neg"),
                argument(schema.TensorListArg(["x"])),
            ],
        ),
    ]
    with purevk.load(native_file(native_graph(nodes, ["x"], ["r"]))) as program:
        for values in ([1.0, -2.0, 4.0], [1.0, -2.0, -4.0]):
            x = np.array(values, np.float32)
            expected = np.maximum(x, 0) if x.sum() > 0 else -x
            np.testing.assert_array_equal(program.forward(x), expected)


def _writes(read_later: str) -> bytes:
    """relu_ of a view of y, then a sum with another name."""
    written = argument(schema.TensorArg(name="v"), mutated=True)
    nodes = [
        call("y", "torch.ops.aten.neg.default", [tensor_argument("x")]),
        call("v", "torch.ops.aten.alias.default", [tensor_argument("y")], alias="y"),
        call("w", "torch.ops.aten.relu_.default", [written], alias="v"),
        call("r", "torch.ops.aten.add.Tensor", [tensor_argument("w"), tensor_argument(read_later)]),
    ]
    return native_file(native_graph(nodes, ["x"], ["r"], "y", "v", "w"))


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


@pytest.mark.parametrize("aliases", [["v"], ["w", "v"], ["y", "v", "w"]], ids=len)
def test_values_that_share_memory_with_later_ones(aliases: list[str]) -> None:
    """By their own name, or in a circle: the search for the owner of the memory would not end."""
    names = ["v", "w", "y"][: len(aliases)]
    written = argument(schema.TensorArg(name=names[-1]), mutated=True)
    nodes = [
        call(name, "torch.ops.aten.alias.default", [tensor_argument("x")], alias=alias)
        for name, alias in zip(names, aliases)
    ]
    nodes.append(call("r", "torch.ops.aten.relu_.default", [written], alias=names[-1]))
    data = native_file(native_graph(nodes, ["x"], ["r"], *names))
    with open_file(data) as file, pytest.raises(FileFormatError, match="not there yet"):
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
    return zipped(members)


def _first(header: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(value for key, value in header.items() if key != "__metadata__")
    return found


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda data: zipped(_members(data), zipfile.ZIP_DEFLATED), "compressed"),
        (lambda data: zipped({**_members(data), "data.pkl": b"\x80\x02."}), "holds 'data.pkl'"),
        (lambda data: zipped({**_members(data), ALIASES: b"[1"}), "aliases.json cannot be read"),
        (lambda data: zipped({**_members(data), ALIASES: b'{"a": "b"}'}), "cannot be read"),
        (lambda data: data.replace(b"cache", b"cashe"), "another checksum"),
        (lambda data: zipped({PROGRAM: _members(data)[PROGRAM]}), "there are no bytes"),
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
    with pytest.raises((FileFormatError, UnsupportedProgramError), match=text):
        open_file(change(SMALL.read_bytes()))


def test_another_version_is_refused() -> None:
    graph = native_graph([], ["x"], [])
    with pytest.raises(FileFormatError, match="version '2'"):
        open_file(native_file(graph, version="2"))


def test_tensors_in_another_order_of_dims_are_refused() -> None:
    """Dims of size 1 may stand anywhere."""
    for sizes, order, is_sound in (([2, 3], [1, 0], False), ([2, 1, 3], [1, 0, 2], True)):
        meta = schema.TensorMeta(
            dtype=schema.ScalarType.FLOAT, sizes=[schema.Dim(n, n) for n in sizes], dim_order=order
        )
        data = native_file(
            native_graph([], ["x"], ["x"]),
            tensors={"w": torch.ones(sizes)},
            constants=[schema.NamedTensorRef(name="w", data_key="w", meta=meta)],
        )
        if is_sound:
            open_file(data)
        else:
            with pytest.raises(FileFormatError, match=r"stored in the order \[1, 0\]"):
                open_file(data)


def test_graphs_are_not_nested_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("purevk.pte.native._MOST_NESTED", 3)
    graph = native_graph([], ["x"], [])
    for _ in range(5):
        inner = argument(schema.GraphArg(name="g", graph=graph))
        graph = native_graph([call("n", "torch.ops.higher_order.cond", [inner])], ["x"], [])
    with pytest.raises(FileFormatError, match="nested"):
        open_file(native_file(graph))


@pytest.mark.parametrize("name", ["cached", "quantized"])
def test_changed_bytes_raise_errors_of_purevk(name: str) -> None:
    """Of the graphs and the header of the tensors, under a checksum that is right."""
    members, draw = _members((SMALL.parent / f"{name}.ptn").read_bytes()), random.Random(7)
    refused = 0
    for number in range(300):
        name = (PROGRAM, PROGRAM, TENSORS)[number % 3]
        changed = bytearray(members[name])
        for _ in range(draw.randint(1, 4)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        try:
            with open_file(zipped({**members, name: bytes(changed)})) as file:
                file.graph(file.methods[0])
        except PurevkError:
            refused += 1
    assert refused > 50
