"""The tables of `program.ptg` in .ptn files: `native_graph.fbs` of ExecuTorch, version 1."""

from __future__ import annotations

from purevk.pte import flatbuffer as fb
from purevk.pte.flatbuffer import (
    Many,
    One,
    Schema,
    Text,
    flag,
    i8,
    i32,
    i64,
    numbers,
)

AFFINE = Schema(
    "AffineGroup",
    scale_data_key=Text(),
    scale_dtype=i8(),
    quant_min=i32(),
    quant_max=i32(),
    group_size=i32(),
    zero_point_data_key=Text(),
    zero_point_dtype=i8(),
)
PACKED = Schema("PackedQuant", codec=Text())
QUANT = Schema("QuantSpec", scheme=fb.Union(AFFINE, PACKED))
DIM = Schema("Dim", min=i64(), max=fb.Scalar(i64().flags, -1))
META = Schema("TensorMeta", dtype=i8(), sizes=Many(DIM), dim_order=numbers(i32()), quant=One(QUANT))
TENSOR_VALUE = Schema("TensorValue", name=Text(), meta=One(META))

TENSOR = Schema("TensorArg", name=Text())
NONE = Schema("NoneArg")
INT = Schema("IntArg", value=i64(), ref=Text())
FLOAT = Schema("FloatArg", value=fb.f64(), ref=Text())
BOOL = Schema("BoolArg", value=flag(), ref=Text())
STRING = Schema("StringArg", value=Text())
DTYPE = Schema("ScalarTypeArg", value=i8())
INTS = Schema("IntListArg", values=numbers(i64()), refs=fb.Texts())
FLOATS = Schema("FloatListArg", values=numbers(fb.f64()))
BOOLS = Schema("BoolListArg", values=numbers(flag()))
TENSORS = Schema("TensorListArg", names=fb.Texts())
OPTIONAL = Schema("OptionalTensorListArg", names=fb.Texts(), has_value=numbers(flag()))
GRAPH = Schema("Graph")
SUB_GRAPH = Schema("GraphArg", name=Text(), graph=One(GRAPH))
ARGUMENT = Schema(
    "Argument",
    value=fb.Union(
        TENSOR,
        NONE,
        INT,
        FLOAT,
        BOOL,
        STRING,
        DTYPE,
        INTS,
        FLOATS,
        BOOLS,
        TENSORS,
        OPTIONAL,
        SUB_GRAPH,
    ),
)
NAMED_ARGUMENT = Schema("NamedArgument", name=Text(), arg=One(ARGUMENT), mutated=flag())
OUTPUT = Schema("Output", name=Text(), alias_of=Text(), kind=i8(), names=fb.Texts())
NODE = Schema(
    "Node",
    name=Text(),
    op_kind=i8(),
    target=Text(),
    inputs=Many(NAMED_ARGUMENT),
    outputs=Many(OUTPUT),
)
GRAPH.define(
    nodes=Many(NODE), inputs=fb.Texts(), outputs=fb.Texts(), tensor_values=Many(TENSOR_VALUE)
)
CONSTANT = Schema(
    "NamedTensorRef", name=Text(), data_key=Text(), meta=One(META), kind=i8(), mutated=flag()
)
OUTPUT_SPEC = Schema("OutputSpec", name=Text(), kind=i8(), target=Text())
BUFFER = Schema("MutableBufferSpec", name=Text(), fqn=Text())
METHOD = Schema(
    "Method",
    name=Text(),
    graph=One(GRAPH),
    constants=Many(CONSTANT),
    output_specs=Many(OUTPUT_SPEC),
    mutable_buffers=Many(BUFFER),
)
PROGRAM = Schema("Program", version=Text(), methods=Many(METHOD))
