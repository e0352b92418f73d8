"""Quantized constants and operators of ExecuTorch's native backend, in hand-made files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import purevk
from purevk.errors import FileFormatError, UnsupportedProgramError
from purevk.frontends.files import open_file
from purevk.pte.blocks import BLOCK_TYPES
from tests.harness import ROOT

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")
primitives = pytest.importorskip("torchao.quantization.quant_primitives")
schema = pytest.importorskip("executorch.backends.native.serialization.schema")

from tests.frontends.executorch.native_graphs import (  # noqa: E402
    argument,
    call,
    native_file,
    native_graph,
    tensor_argument,
    tensor_meta,
)

functional = torch.nn.functional
NAMES = {torch.float32: "FLOAT", torch.float16: "HALF", torch.bfloat16: "BFLOAT16"}
CODES = {**NAMES, torch.int8: "CHAR", torch.int32: "INT"}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def affine(
    rows: int, columns: int, bits: int, group: int, scale_dtype: Any, zero_dtype: Any = None
) -> tuple[dict[str, Any], Any, Any]:
    """The tensors of a weight that torchao quantizes, how they are stored, and what they stand for."""
    block = (1, group or columns)
    least, most = -(1 << bits - 1), (1 << bits - 1) - 1
    generator = np.random.default_rng(rows + columns + bits)
    weight = torch.from_numpy(generator.normal(size=(rows, columns)).astype(np.float32))
    kind = "ASYMMETRIC" if zero_dtype else "SYMMETRIC"
    mapping = primitives.MappingType[kind]
    scale, zero = primitives.choose_qparams_affine(
        weight, mapping, block, torch.int8, least, most, scale_dtype=scale_dtype
    )
    zero = zero.to(zero_dtype or torch.int8)
    form = (block, scale, zero, torch.int8)
    values = primitives.quantize_affine(weight, *form, least, most)
    meant = primitives.dequantize_affine(values, *form, least, most, output_dtype=torch.float32)
    stored = (values.to(torch.int16) - least).to(torch.uint8)
    if bits == 4:
        stored = stored[:, ::2] | stored[:, 1::2] << 4
    scheme = schema.AffineGroup(
        scale_data_key="w.scale",
        scale_dtype=schema.ScalarType[CODES[scale_dtype]],
        quant_min=least,
        quant_max=most,
        group_size=group,
        zero_point_data_key="w.zero" if zero_dtype else None,
        zero_point_dtype=schema.ScalarType[CODES[zero_dtype or torch.int8]],
    )
    tensors = {"w": stored, "w.scale": scale}
    return (tensors | {"w.zero": zero} if zero_dtype else tensors), scheme, meant


def blocks(kind: str, rows: int, columns: int) -> tuple[dict[str, Any], Any, Any]:
    """As `affine`, of random blocks of GGUF."""
    (type,) = (each for each in BLOCK_TYPES.values() if each.name == kind.upper())
    code = gguf.GGMLQuantizationType[kind.upper()]
    generator = np.random.default_rng(5)
    stored = generator.integers(0, 256, (rows, columns // type.elements, type.nbytes), np.uint8)
    scales = {"q6_k": (208,), "q4_k": (0, 2), "q5_k": (0, 2), "q8_0": (0,)}[kind]
    for at in scales:
        half = generator.uniform(1e-4, 1e-3, stored.shape[:2]).astype(np.float16)
        stored[..., at : at + 2] = half[..., None].view(np.uint8)
    stored = stored.reshape(rows, -1)
    meant = torch.from_numpy(gguf.dequantize(stored, code))
    scheme = schema.PackedQuant(codec=f"gguf:{kind}")
    return {"w": torch.from_numpy(stored)}, scheme, meant


def packed_file(op: str, weight: tuple[dict[str, Any], Any, Any], x: Any, dtype: Any) -> bytes:
    """A file of one operator: "linear" with a bias, "embedding", or "add"."""
    tensors, scheme, meant = weight
    rows, columns = meant.shape
    ones = [argument(schema.IntArg(value=1))]
    names, target, more = {
        "linear": (["x", "w", "b"], "linear.default", []),
        "embedding": (["w", "x"], "embedding.default", ones),
        "add": (["x", "w"], "add.Tensor", ones),
    }[op]
    node = call("y", f"torch.ops.aten.{target}", [*map(tensor_argument, names), *more])
    dims = list(x.shape) if op == "add" else [(1, 9), *x.shape[1:]]
    result = {"linear": [*dims[:-1], rows], "embedding": [*dims, columns], "add": dims}[op]
    metas = {
        "x": tensor_meta("LONG" if op == "embedding" else NAMES[dtype], dims),
        "y": tensor_meta(NAMES[dtype], result),
    }
    refs = {"w": tensor_meta("BYTE", (rows, columns), scheme)}
    if op == "linear":
        refs["b"] = tensor_meta(NAMES[dtype], [rows])
        tensors = {**tensors, "b": bias(rows).to(dtype)}
    constants = [schema.NamedTensorRef(name=key, data_key=key, meta=refs[key]) for key in refs]
    graph = native_graph([node], ["x"], ["y"], metas=metas)
    return native_file(graph, tensors=tensors, constants=constants)


def bias(rows: int) -> Any:
    return torch.linspace(-1, 1, rows)


def eager(op: str, x: Any, meant: Any, dtype: Any) -> Any:
    weight = meant.to(dtype)
    if op == "linear":
        return functional.linear(x, weight, bias(len(weight)).to(dtype))
    return functional.embedding(x, weight) if op == "embedding" else x + weight


WEIGHTS = {
    "int4": (4, 32, torch.float32),
    "int4-rows": (4, 0, torch.float16),
    "int4-small-groups": (4, 4, torch.float32),
    "int4-zeros": (4, 8, torch.float16, torch.int8),
    "int4-bfloat16-scales": (4, 16, torch.bfloat16, torch.int32),
    "int8": (8, 0, torch.float32),
    "int8-zeros": (8, 32, torch.float32, torch.int8),
}


KINDS = ("q4_k", "q5_k", "q6_k", "q8_0")
CASES = [
    *((name, op, torch.float32) for name in (*WEIGHTS, *KINDS) for op in ("linear", "embedding")),
    *((name, "add", torch.float32) for name in ("int4-zeros", "int8", "q6_k")),
    *((name, "linear", torch.float16) for name in ("int4-rows", "int8-zeros", "q4_k")),
    *(("int4-zeros", op, torch.bfloat16) for op in ("linear", "embedding", "add")),
]


@pytest.mark.device
@pytest.mark.parametrize("name, op, dtype", CASES)
def test_quantized_constants(name: str, op: str, dtype: Any) -> None:
    """Three sizes of a call, where there are several."""
    columns = 64 if name in WEIGHTS else 512
    weight = affine(24, columns, *WEIGHTS[name]) if name in WEIGHTS else blocks(name, 24, columns)
    with purevk.load(packed_file(op, weight, sample(op, 2, columns, dtype), dtype)) as program:
        for count in (1, 2, 7):
            x = sample(op, count, columns, dtype)
            want = eager(op, x.double() if op == "linear" else x, weight[2], want_dtype(op, dtype))
            have = torch.as_tensor(program.forward(x))
            assert have.dtype == dtype
            scale = want.abs().max().item()
            torch.testing.assert_close(
                have.double(), want.double(), rtol=0, atol=TOLERANCE[dtype] * scale
            )


def want_dtype(op: str, dtype: Any) -> Any:
    return torch.float64 if op == "linear" else dtype


def sample(op: str, count: int, columns: int, dtype: Any) -> Any:
    torch.manual_seed(count)
    if op == "embedding":
        return torch.randint(24, (count, 3))
    return torch.randn(24 if op == "add" else count, columns).to(dtype)


def two_weights() -> tuple[bytes, Any, Any]:
    """A file with a linear layer and an embedding, as tests/data has it; and both weights."""
    linear, table = affine(8, 32, 4, 16, torch.float16, torch.int8), blocks("q4_k", 4, 256)
    nodes = [
        call(
            *("y", "torch.ops.aten.linear.default"),
            [*map(tensor_argument, "xw"), argument(schema.NoneArg())],
        ),
        call("e", "torch.ops.aten.embedding.default", [*map(tensor_argument, "ti")]),
    ]
    metas = {
        "x": tensor_meta("FLOAT", [(1, 9), 32]),
        "i": tensor_meta("LONG", [(1, 9)]),
        "y": tensor_meta("FLOAT", [(1, 9), 8]),
        "e": tensor_meta("FLOAT", [(1, 9), 256]),
    }
    sizes = {"w": ((8, 32), linear[1]), "t": ((4, 256), table[1])}
    constants = [
        schema.NamedTensorRef(name=key, data_key=key, meta=tensor_meta("BYTE", *sizes[key]))
        for key in sizes
    ]
    graph = native_graph(nodes, ["x", "i"], ["y", "e"], metas=metas)
    tensors = {**linear[0], "t": table[0]["w"]}
    return native_file(graph, tensors=tensors, constants=constants), linear[2], table[2]


@pytest.mark.device
def test_a_program_is_saved_with_its_quantized_constants(tmp_path: Path) -> None:
    """The file that the fuzzer changes, and what is saved of it."""
    _, weight, table = two_weights()
    with purevk.load(ROOT / "tests" / "data" / "ptn" / "quantized.ptn") as program:
        program.save(tmp_path / "model.pvk")
        for present in (program, purevk.load(tmp_path / "model.pvk")):
            x, index = torch.randn(3, 32), torch.tensor([1, 3, 0])
            y, rows = present.forward(x, index)
            torch.testing.assert_close(y, x @ weight.T, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(rows, table[index], rtol=1e-5, atol=1e-6)


def test_values_of_4_bits_are_slices_of_the_file() -> None:
    """Bytes, scales and nothing else: what the kernels read is what is stored."""
    data = packed_file(
        "linear", affine(24, 64, 4, 32, torch.float32), torch.ones(2, 64), torch.float32
    )
    with open_file(data) as file:
        graph = file.graph("forward")
        assert sorted(constant.nbytes for constant in graph.constants.values()) == [96, 192, 768]
        assert [node.op for node in graph.nodes] == ["purevk.quantized_linear"]


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"codec": "mxfp4"}, UnsupportedProgramError, "packed as 'mxfp4'"),
        ({"codec": "gguf:f16"}, UnsupportedProgramError, "packed as 'gguf:f16'"),
        ({"codec": "gguf:q4_k"}, FileFormatError, "other bytes"),
        ({"quant_min": -2, "quant_max": 1}, UnsupportedProgramError, "values from -2 to 1"),
        ({"quant_min": 0, "quant_max": 14}, UnsupportedProgramError, "values from 0 to 14"),
        ({"quant_min": 7, "quant_max": -8}, UnsupportedProgramError, "values from 7 to -8"),
        ({"quant_min": -128, "quant_max": 127}, FileFormatError, "other bytes"),
        ({"group_size": 48}, FileFormatError, "other bytes"),
        ({"group_size": -32}, FileFormatError, "other bytes"),
        ({"group_size": 16}, FileFormatError, "groups of 16"),
        ({"scale_data_key": "absent"}, FileFormatError, "lacks its scale"),
        ({"scale_dtype": 5}, FileFormatError, "lacks its scale"),
        ({"zero_point_data_key": "w"}, FileFormatError, "lacks its zero_point"),
    ],
    ids=lambda value: ",".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_what_is_refused(change: dict[str, Any], error: type[Exception], text: str) -> None:
    tensors, scheme, meant = affine(24, 64, 4, 32, torch.float32)
    if "codec" in change:
        scheme = schema.PackedQuant(**change)
    else:
        scheme = schema.AffineGroup(**{**vars(scheme), **change})
    data = packed_file("linear", (tensors, scheme, meant), torch.ones(2, 64), torch.float32)
    with pytest.raises(error, match=text):
        open_file(data)


def test_a_quantized_result_is_refused() -> None:
    _, scheme, _ = affine(24, 64, 4, 32, torch.float32)
    metas = {"y": tensor_meta("BYTE", [3], scheme)}
    node = call("y", "torch.ops.aten.relu.default", [tensor_argument("x")])
    with pytest.raises(UnsupportedProgramError, match="'y' is quantized"):
        open_file(native_file(native_graph([node], ["x"], ["y"], metas=metas)))


@pytest.mark.device
def test_the_rotation_of_the_native_backend() -> None:
    """`native::rope`, as the graphs of later releases of executorch name it."""
    glm = pytest.importorskip("transformers.models.glm.modeling_glm")
    arguments = [
        *map(tensor_argument, ("x", "at", "f")),
        argument(schema.BoolArg(value=True)),
        argument(schema.FloatArg(value=0.5)),
    ]
    metas = {
        "x": tensor_meta("FLOAT", [(1, 4), 2, (1, 9), 8]),
        "y": tensor_meta("FLOAT", [(1, 4), 2, (1, 9), 8]),
        "at": tensor_meta("LONG", [1, (1, 9)]),
    }
    frequencies = torch.tensor([1.0, 0.1, 0.01])
    constants = [
        schema.NamedTensorRef(name="f", data_key="f", meta=tensor_meta("FLOAT", [3])),
    ]
    node = call("y", "torch.ops.native.rope.default", arguments)
    graph = native_graph([node], ["x", "at"], ["y"], metas=metas)
    with purevk.load(
        native_file(graph, tensors={"f": frequencies}, constants=constants)
    ) as program:
        for batch, rows in ((1, 9), (3, 4), (2, 1)):
            x, at = torch.randn(batch, 2, rows, 8), torch.arange(rows)[None] + 3
            angles = (at[..., None] * frequencies).repeat(1, 1, 2)
            cos, sin = angles.cos() * 0.5, angles.sin() * 0.5
            want = glm.apply_rotary_pos_emb(x, x, cos, sin)[0]
            torch.testing.assert_close(torch.as_tensor(program.forward(x, at)), want)
