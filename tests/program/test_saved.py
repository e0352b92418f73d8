"""Saved programs: the same results from the file, on any device, for any sizes, without torch;
damage is named."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import purevk
from purevk.dtypes import DType
from purevk.errors import FileFormatError, InputError, UnsupportedProgramError
from purevk.frontends import saved
from purevk.graph.context import default_context
from purevk.ir import Graph, Node, TensorType, Value
from purevk.ir.serial import GraphReader, GraphWriter
from purevk.program import cpu_nodes
from tests.harness import DATA, NO_TORCH, python

pytestmark = pytest.mark.device
WHOLE = (
    "counter",
    "counter_portable",
    "dynamic_views",
    "gather",
    "linear_relu",
    "linear_relu_half",
    "topk",
)


def _inputs(method: Any, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    made = []
    for value in method.graph.inputs:
        shape = tuple(size if isinstance(size, int) else 8 for size in value.type.dims)
        kind = value.type.dtype.numpy
        made.append(
            random.standard_normal(shape).astype(kind)
            if kind.kind == "f"
            else random.integers(0, 2, shape).astype(kind)
        )
    return made


def _same(a: Any, b: Any) -> None:
    for x, y in zip(
        *(each if isinstance(each, tuple) else (each,) for each in (a, b)), strict=True
    ):
        np.testing.assert_array_equal(x, y)


def _description(data: bytes) -> dict[str, Any]:
    *_, start, length, _ = saved._HEADER.unpack_from(data)
    return json.loads(data[start : start + length])


@pytest.fixture
def linear(tmp_path: Path) -> Path:
    with purevk.load(DATA / "linear_relu.pte") as program:
        program.save(tmp_path / "linear.pvk")
    return tmp_path / "linear.pvk"


# -- there and back ------------------------------------------------------------------------------
@pytest.mark.parametrize("name", WHOLE)
def test_a_saved_program_gives_the_same(name: str, tmp_path: Path) -> None:
    with purevk.load(DATA / f"{name}.pte") as program:
        program.save(tmp_path / "a.pvk")
        with purevk.load(tmp_path / "a.pvk") as loaded:
            inputs = _inputs(program.method("forward"))
            for _ in range(2):  # the second call reads what the first left in states
                _same(program.forward(*inputs), loaded.forward(*inputs))
            assert loaded.memory == program.memory
            loaded.save(tmp_path / "b.pvk")
    first, second = (_description((tmp_path / name).read_bytes()) for name in ("a.pvk", "b.pvk"))
    assert first["methods"] == second["methods"] and first["tensors"] == second["tensors"]


def test_several_methods_share_their_weights(tmp_path: Path) -> None:
    with purevk.load(DATA / "two_methods.pte") as program:
        program.save(tmp_path / "a.pvk")
        with purevk.load(tmp_path / "a.pvk") as loaded:
            assert list(loaded.methods) == ["forward", "step"]
            for name, method in program.methods.items():
                inputs = _inputs(method)
                _same(method(*inputs), loaded.method(name)(*inputs))
            assert loaded.memory.weights == program.memory.weights


def test_tensors_are_mapped_and_not_copied(linear: Path) -> None:
    with saved.read_program(linear) as program:
        graph = program.graph("forward")
        whole = np.frombuffer(program.source.view, np.uint8)
        assert graph.constants
        for value, constant in graph.constants.items():
            data = np.frombuffer(constant.data, np.uint8)
            assert np.shares_memory(data, whole) and data.ctypes.data % 64 == 0
            # What reads elements gets a copy, which does not change with the file.
            array = constant.array(value.type)
            assert not np.shares_memory(array, whole) and array.tobytes() == data.tobytes()
        del whole, array, data, constant, graph


def test_dynamic_sizes_from_one_file(tmp_path: Path) -> None:
    """Within the bounds, above them, and sizes that break a guard, against eager torch."""
    torch = pytest.importorskip("torch")

    class Tower(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            z = torch.cat([self.linear(self.norm(x)), y], 1)
            heads = z.view(z.shape[0], z.shape[1], 2, 4).transpose(1, 2)
            mixed = torch.nn.functional.scaled_dot_product_attention(
                heads, heads, heads, is_causal=True
            )
            return mixed.transpose(1, 2).flatten(2) * z.shape[1] + torch.arange(z.shape[1])[:, None]

    torch.manual_seed(0)
    module = Tower().eval()
    batch, left, right = (
        torch.export.Dim(name, min=1, max=top) for name, top in (("b", 4), ("l", 8), ("r", 16))
    )
    example = (torch.randn(3, 4, 8), torch.randn(3, 6, 8))
    with purevk.compile(
        module, example, dynamic_shapes=({0: batch, 1: left}, {0: batch, 1: right})
    ) as program:
        program.save(tmp_path / "a.pvk")
    with purevk.load(tmp_path / "a.pvk", bounds="grow") as loaded:
        for b, m, n in ((3, 4, 6), (4, 8, 16), (1, 1, 1), (2, 1, 3), (5, 20, 2), (1, 9, 40)):
            x, y = torch.randn(b, m, 8), torch.randn(b, n, 8)
            with torch.no_grad():
                torch.testing.assert_close(loaded.forward(x, y), module(x, y), rtol=1e-4, atol=1e-4)
        assert len(loaded.method("forward").specializations) > 1


def test_buffers_start_over(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.full((3,), 5.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total.add_(x)
            return self.total * 2

    x = np.array([1, 2, 3], np.float32)
    with purevk.compile(Counter(), (torch.from_numpy(x),)) as program:
        program.forward(x)
        program.save(tmp_path / "a.pvk")
    with purevk.load(tmp_path / "a.pvk") as loaded:
        for count in (1, 2):
            np.testing.assert_array_equal(loaded.forward(x), 2 * (5 + count * x))


def test_whole_numbers_of_the_call(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Shift(torch.nn.Module):
        def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
            return torch.where(x > 1, x * n, float("-inf"))

    x = torch.arange(4.0)
    exported = torch.export.export(
        Shift(), (x, 3), dynamic_shapes={"x": None, "n": torch.export.Dim.DYNAMIC}, strict=False
    )
    with purevk.compile(exported) as program:
        program.save(tmp_path / "a.pvk")
    with purevk.load(tmp_path / "a.pvk") as loaded:
        for n in (3, -2):
            torch.testing.assert_close(loaded.forward(x, n), Shift()(x, n))


def test_a_quantized_model(tmp_path: Path) -> None:
    """Weights of 8 bits stay so in the file and on the device."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch.ao.quantization.fx._decomposed")
    ops = torch.ops.quantized_decomposed

    class Quantized(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.randint(-128, 128, (96, 64), dtype=torch.int8))
            self.register_buffer("scales", torch.rand(96) / 64)
            self.register_buffer("zeros", torch.zeros(96, dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = ops.dequantize_per_channel(
                self.weight, self.scales, self.zeros, 0, -128, 127, torch.int8
            )
            return torch.nn.functional.linear(x, weight)

    torch.manual_seed(0)
    module, x = Quantized(), torch.randn(3, 64)
    with purevk.compile(module, (x,)) as program:
        program.save(tmp_path / "a.pvk")
    assert (tmp_path / "a.pvk").stat().st_size < 96 * 64 + 8192
    with purevk.load(tmp_path / "a.pvk") as loaded:
        torch.testing.assert_close(loaded.forward(x), module(x), rtol=1e-4, atol=1e-4)
        assert loaded.memory.weights < 96 * 64 * 2


def test_loading_needs_no_torch(
    linear: Path, linear_input: np.ndarray, linear_output: np.ndarray, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", linear_input)
    source = (
        NO_TORCH
        + """
import json, numpy as np, purevk
y = purevk.load(sys.argv[1]).forward(np.load(sys.argv[2]))
print(json.dumps({"y": y.tolist(), "torch": "torch" in sys.modules}))
"""
    )
    said = python(source, linear, tmp_path / "x.npy")
    assert said["torch"] is False
    np.testing.assert_allclose(said["y"], linear_output, rtol=0, atol=1e-6)


def test_compiling_without_torch_says_so() -> None:
    source = (
        NO_TORCH
        + """
import json, purevk
try:
    purevk.compile(object(), ())
except purevk.PurevkError as error:
    print(json.dumps({"class": type(error).__name__, "text": str(error)}))
"""
    )
    said = python(source)
    assert said["class"] == "UnsupportedProgramError"
    assert "torch is not installed" in said["text"] and "install torch" in said["text"]


def test_the_file_is_known_by_what_it_holds(
    linear: Path, linear_input: np.ndarray, linear_output: np.ndarray
) -> None:
    renamed = linear.with_suffix(".model")  # no suffix of a format
    os.replace(linear, renamed)
    for file in (renamed, renamed.read_bytes()):
        with purevk.load(file) as program:
            np.testing.assert_allclose(
                program.forward(linear_input), linear_output, rtol=0, atol=1e-6
            )
    with pytest.raises(InputError, match="data files go with .pte"):
        purevk.load(renamed, [renamed])


# -- what cannot be saved, and damage ------------------------------------------------------------
def test_an_argument_without_a_form_is_refused() -> None:
    value = Value("x", TensorType(DType.float32, (2,)))
    node = Node("aten.relu.default", (value, object()), (Value("y", value.type),))
    with pytest.raises(UnsupportedProgramError, match="type object cannot be saved"):
        GraphWriter(lambda data: 0).method(
            Graph("forward", (value,), (node,), node.results), (), ()
        )


def test_every_kind_of_argument() -> None:
    x = Value("x", TensorType(DType.bfloat16, (2, 3)))
    inner = Graph("inner", (), (), (1,))
    args = (x, (x, (1, None)), True, 1 << 70, 0.1, float("inf"), "a'\n", DType.int8, 2 - 1j, inner)
    node = Node("aten.made.up", args, (Value("y", x.type),), "here", "alias")
    data = GraphWriter(lambda data: 0).method(
        Graph("forward", (x,), (node,), (node.result, None, 3)), (), ()
    )
    graph, _, _ = GraphReader(lambda number: memoryview(b"")).method(data)
    (read,) = graph.nodes
    assert (
        read.args[1:-1] == ((graph.inputs[0], (1, None)), *args[2:-1])
        and read.args[0] is graph.inputs[0]
    )
    assert (
        read.args[-1].name == "inner"
        and read.args[-1].outputs == (1,)
        and graph.outputs == (read.result, None, 3)
    )
    assert read.args[2] is True and (read.op, read.source, read.alias) == (node.op, "here", "alias")
    assert read.result.type == x.type


def test_a_refused_save_leaves_no_file(
    linear: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GraphWriter, "_bytes", lambda self, constant: self._arg(object()))
    with purevk.load(linear) as program, pytest.raises(UnsupportedProgramError):
        program.save(tmp_path / "other.pvk")
    assert os.listdir(tmp_path) == ["linear.pvk"]


def test_every_byte_is_covered(linear: Path) -> None:
    """A changed byte anywhere but in padding is found."""
    good = linear.read_bytes()
    with saved.read_program(good) as program:
        spans = [(0, 48), *((start, start + size) for start, size, _ in program._tensors)]
        spans.append((saved._HEADER.unpack_from(good)[4], len(good)))
    for start, end in spans:
        for at in range(start, end, 1 if end < 300 else 97):
            bad = bytearray(good)
            bad[at] ^= 0x10
            with pytest.raises(FileFormatError):
                if at < len(saved.MAGIC):
                    purevk.load(bytes(bad))  # taken for a .pte file, and refused as one
                saved.read_program(bytes(bad))


@pytest.mark.parametrize("size", [0, 5, 8, 20, 47, 48, 200, -1])
def test_a_truncated_file(linear: Path, size: int) -> None:
    linear.write_bytes(linear.read_bytes()[:size])
    with pytest.raises(FileFormatError):
        purevk.load(linear)


def test_another_version(linear: Path) -> None:
    data = bytearray(linear.read_bytes())
    data[8] = 9
    with pytest.raises(FileFormatError, match="version 9 of the format"):
        purevk.load(bytes(data))


def _with_description(data: bytes, change: Any) -> bytes:
    """The file with its description changed, under right checksums."""
    start, content = saved._HEADER.unpack_from(data)[4], _description(data)
    change(content)
    text = json.dumps(content).encode()
    head = saved._HEADER.pack(
        saved.MAGIC, saved.VERSION, 0, start + len(text), start, len(text), zlib.crc32(text)
    )
    return head + zlib.crc32(head).to_bytes(4, "little") + data[48:start] + text


CHANGES = {
    "no methods": lambda c: c.pop("methods"),
    "tensor outside": lambda c: c["tensors"].append([1 << 40, 4, 0]),
    "tensor that there is not": lambda c: c["methods"]["forward"]["graph"]["constants"][
        0
    ].__setitem__(1, 99),
    "negative tensor": lambda c: c["methods"]["forward"]["graph"]["constants"][0].__setitem__(
        1, -1
    ),
    "small tensor": lambda c: c["tensors"][0].__setitem__(1, 1),
    "unknown dtype": lambda c: c["methods"]["forward"]["values"][0].__setitem__(1, "float13"),
    "unknown symbol": lambda c: c["methods"]["forward"]["values"][0].__setitem__(
        2, [[[1, ["s9"]]]]
    ),
    "unknown kind": lambda c: c["methods"]["forward"]["graph"]["nodes"][0].__setitem__(
        1, [{"what": 1}]
    ),
    "use before definition": lambda c: c["methods"]["forward"]["graph"]["nodes"].reverse(),
    "no object": lambda c: c["methods"].__setitem__("forward", 3),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_description_that_makes_no_graph(linear: Path, change: str) -> None:
    with pytest.raises(FileFormatError):
        purevk.load(_with_description(linear.read_bytes(), CHANGES[change]), check=False)


def test_unchecked_tensors(linear: Path) -> None:
    data = bytearray(linear.read_bytes())
    data[64] ^= 1
    with pytest.raises(FileFormatError, match="checksum"):
        purevk.load(bytes(data))
    purevk.load(bytes(data), check=False).close()


def test_loading_while_the_interpreter_ends(linear: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No threads start any more then; checksums are compared all the same."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(saved, "_ZLIB_STEP", 1)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    monkeypatch.setattr(saved.os, "cpu_count", lambda: 4)
    saved.read_program(linear).close()
    data = bytearray(linear.read_bytes())
    data[64] ^= 1
    with pytest.raises(FileFormatError, match="checksum|damaged"):
        saved.read_program(bytes(data))


@pytest.mark.export
def test_a_program_that_only_torch_runs_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch = pytest.importorskip("torch")

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return torch.linalg.eigvals(x), y.topk(2).values

    dynamic = (None, {0: torch.export.Dim("n", min=2, max=1 << 20)})
    args = (torch.eye(3), torch.rand(9))
    context = default_context()
    traits = dataclasses.replace(context.traits, max_storage_range=1 << 21)
    monkeypatch.setattr(context, "traits", traits)
    with torch.no_grad(), purevk.compile(Module(), args, dynamic_shapes=dynamic) as program:
        assert "because of upper bounds" in caplog.text and "y.shape[0] <= 1048576" in caplog.text
        with pytest.warns(purevk.TorchNeededWarning, match="linalg_eig"):
            program.save(tmp_path / "x.pvk")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        purevk.load(tmp_path / "x.pvk").close()
    monkeypatch.setattr(cpu_nodes, "find_spec", lambda name: None)
    with pytest.warns(purevk.TorchNeededWarning, match=r"x\.pvk runs only where torch"):
        purevk.load(tmp_path / "x.pvk").close()
