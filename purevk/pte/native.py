"""Programs of ExecuTorch's native backend (.ptn): a zip archive of `program.ptg`, the graphs as a
flatbuffer, `program.safetensors`, their constants, and `aliases.json`, constants with equal bytes.

A graph is one of torch.fx: nodes in an order in which they can run, which name their values."""

from __future__ import annotations

import functools
import json
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, NoReturn

from purevk.dtypes import DType
from purevk.errors import FileFormatError, UnsupportedProgramError
from purevk.mapped import own, pieces
from purevk.pte import native_schema as fbs
from purevk.pte.blocks import BLOCK_TYPES, FORMS, BlockType
from purevk.pte.flatbuffer import Reader, Table
from purevk.pte.safetensors import StoredTensor, read_tensors
from purevk.pte.source import Source
from purevk.pte.values import MAX_RANK

PROGRAM, TENSORS, ALIASES = "program.ptg", "program.safetensors", "aliases.json"
_VERSION = "1"
_BYTE = DType.uint8
_MOST_NESTED = 16  # graphs inside of one another
_SAVE_AGAIN = "write it again with executorch: to_native(exported).save(path)"

_CALL, _PLACEHOLDER, _RESULT = range(3)  # kinds of nodes
_LIST = 1  # the kind of a result that is a list of tensors
USER_OUTPUT, BUFFER_MUTATION, INPUT_MUTATION = range(3)


class Ref(NamedTuple):
    """The value of a graph that an argument is, by its name."""

    name: str


class TensorMeta(NamedTuple):
    """The type of a tensor; each dim is its least and its largest size, None where there is none."""

    dtype: DType
    sizes: tuple[tuple[int, int | None], ...]


class Argument(NamedTuple):
    """An argument of an operator: a number, text, dtype, None, `Ref`, `NativeGraph` or a tuple of
    these; `mutated`: the operator writes it."""

    name: str
    value: Any
    mutated: bool


class Result(NamedTuple):
    """A result of a node: the name of a value, or the names of a list; and the argument whose memory
    it shares, or an empty text."""

    names: tuple[str, ...]
    is_list: bool
    alias_of: str


class NativeNode(NamedTuple):
    """A call of an operator, such as "aten.add.Tensor"."""

    name: str
    target: str
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]


class NativeGraph(NamedTuple):
    """Nodes, and the names of inputs and outputs; `types` are those of tensors."""

    nodes: tuple[NativeNode, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    types: Mapping[str, TensorMeta]


class Affine(NamedTuple):
    """Quantized values of 4 or 8 bits, stored without a sign, of 4 bits in the low nibble first. An
    element is (stored + least - zero) * scale; scales, and zeros unless they are 0, are those of groups
    along the last dim."""

    bits: int
    least: int
    group: int
    scales: StoredTensor
    zeros: StoredTensor | None


class Binding(NamedTuple):
    """An input of a method that is a constant or a buffer; `initial` is None for zeros, `packing` is
    how quantized elements are stored: with scales, or as blocks of GGUF."""

    key: str
    type: TensorMeta
    initial: StoredTensor | None
    mutated: bool
    packing: Affine | BlockType | None = None


class NativeMethod(NamedTuple):
    """A method: its graph, what its constants and buffers are by the names of inputs, and for each
    output its kind and what it is written to."""

    graph: NativeGraph
    bindings: Mapping[str, Binding]
    outputs: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class NativeProgram:
    """The methods of a .ptn file.

    Attributes:
        structure: (first byte, bytes) of all but the tensors. tensor_ranges: the same of the tensors.
    """

    methods: Mapping[str, NativeMethod]
    structure: list[tuple[int, int]]
    tensor_ranges: list[tuple[int, int]]


def read_native(source: Source, check: bool = True) -> NativeProgram:
    """Reads a .ptn file. Its tensors are not copied.

    Args:
        check: compare the tensors with their checksum, about a second for each GB.

    Raises:
        FileFormatError: it is damaged, of another version, or holds something else.
        UnsupportedProgramError: a constant is packed in a way that purevk does not read.
    """
    members = _members(source, check)
    view = source.view
    if PROGRAM not in members:
        _fail(source, f"there is no {PROGRAM}")
    start, size = members[PROGRAM]
    reader = Reader(view[start : start + size], f"{source.name}, {PROGRAM}")
    root = reader.root(fbs.PROGRAM, b"NPTG")
    if root["version"] != _VERSION:
        root.fail(
            f"the program has version {root['version']!r}",
            f"version {_VERSION!r} is read",
            "write it with a release of ExecuTorch that is supported, or upgrade purevk",
        )
    tensors: Mapping[str, StoredTensor] = {}
    data = (source.size, 0)
    if TENSORS in members:
        start, size = members[TENSORS]
        found = read_tensors(view[start : start + size], f"{source.name}, {TENSORS}")
        data = (start + found.start, size - found.start)
        tensors = {**found.by_name, **_aliased(source, members, found.by_name)}
    methods: dict[str, NativeMethod] = {}
    for row in root["methods"]:
        if row["name"] in methods:
            row.fail(f"there are two methods {row['name']!r}")
        methods[row["name"]] = _method(row, tensors)
    _check_lost_buffers(source, methods)
    end = sum(data)
    return NativeProgram(
        _with_shared_buffers(source, methods),
        [(0, data[0]), (end, source.size - end)],
        [data] if data[1] else [],
    )


def argument_names(value: Any) -> list[str]:
    """The names of the values in an argument."""
    if isinstance(value, Ref):
        return [value.name]
    return [name for item in value for name in argument_names(item)] if type(value) is tuple else []


def _uses(method: NativeMethod) -> tuple[set[str], set[str]]:
    """The keys of bindings that a method reads, and those that it writes."""
    roots = {name: binding.key for name, binding in method.bindings.items()}
    read = {roots[name] for name in method.graph.outputs if name in roots}
    written = {target for kind, target in method.outputs if kind == BUFFER_MUTATION}
    for node in method.graph.nodes:
        for argument in node.arguments:
            keys = {roots[name] for name in argument_names(argument.value) if name in roots}
            read |= keys
            written |= keys if argument.mutated else set()
        for result in node.results:
            if result.alias_of in roots:
                roots |= dict.fromkeys(result.names, roots[result.alias_of])
    return read, written


def _check_lost_buffers(source: Source, methods: Mapping[str, NativeMethod]) -> None:
    """Raises if a buffer without bytes is read and never written. `to_native` writes all buffers that
    are not persistent so, with the values of constants lost."""
    uses = list(map(_uses, methods.values()))
    read, written = (set().union(*keys) for keys in zip(*uses)) if uses else (set(), set())
    for method in methods.values():
        for binding in method.bindings.values():
            key = binding.key
            if binding.initial is None and key in read and key not in written:
                raise UnsupportedProgramError(
                    f"the file has no values of the buffer {key!r}",
                    where=source.name,
                    why="to_native writes none of buffers with persistent=False; that no method"
                    " writes this one shows that it was a constant",
                    next="set persistent=True, with register_buffer(name, value), and write the file again",
                )


def _with_shared_buffers(
    source: Source, methods: Mapping[str, NativeMethod]
) -> dict[str, NativeMethod]:
    """A tensor that a method writes is one tensor in all methods that name its key."""
    every = [binding for method in methods.values() for binding in method.bindings.values()]
    written = {each.key: each for each in every if each.mutated}
    for each in every:
        first = written.get(each.key, each)
        if (first.type, first.initial, first.packing) != (each.type, each.initial, each.packing):
            _fail(source, f"methods state {each.key!r} differently", f"{first.type}, {each.type}")

    def shared(method: NativeMethod) -> NativeMethod:
        return method._replace(
            bindings={
                name: each._replace(mutated=each.key in written)
                for name, each in method.bindings.items()
            }
        )

    return {name: shared(method) for name, method in methods.items()}


def _fail(source: Source, what: str, why: str = "") -> NoReturn:
    raise FileFormatError(what, where=source.name, why=why, next=_SAVE_AGAIN)


def _members(source: Source, check: bool) -> dict[str, tuple[int, int]]:
    """First byte and bytes of each member."""
    try:
        with zipfile.ZipFile(source.stream()) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError) as error:
        _fail(source, "the zip archive is damaged", str(error))
    members: dict[str, tuple[int, int]] = {}
    for info in infos:
        name = info.filename
        if name not in (PROGRAM, TENSORS, ALIASES) or name in members:
            _fail(source, f"the archive holds {name!r}", "it is not known, or there twice")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            _fail(source, f"{name!r} is compressed or encrypted", "plain members are read")
        header = source.slice(info.header_offset, 30, f"the header of {name!r}")
        start = info.header_offset + 30 + sum(struct.unpack_from("<HH", own(header), 26))
        data = source.slice(start, info.file_size, repr(name))
        if check or name != TENSORS:
            crc = functools.reduce(lambda crc, piece: zlib.crc32(piece, crc), pieces(data), 0)
            if crc != info.CRC:
                _fail(source, f"{name!r} has another checksum", "the file is damaged")
        members[name] = (start, info.file_size)
    return members


def _aliased(
    source: Source, members: Mapping[str, tuple[int, int]], tensors: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """The tensors that share the bytes of others, by their keys."""
    if ALIASES not in members:
        return {}
    start, size = members[ALIASES]
    try:
        aliases = json.loads(bytes(own(source.view[start : start + size])))
        if set(aliases) & set(tensors):
            raise ValueError("a tensor is an alias too")
        return {key: tensors[owner] for key, owner in aliases.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        _fail(source, f"{ALIASES} cannot be read", f"{type(error).__name__}: {error}")


def _method(row: Table, tensors: Mapping[str, StoredTensor]) -> NativeMethod:
    if row["graph"] is None:
        row.fail("there is no graph")
    graph = _graph(row["graph"], 0)
    bindings: dict[str, Binding] = {}
    constant: Table
    for constant in row["constants"]:
        key = constant["data_key"]
        type = _meta(constant, f"the constant {key!r}", stored=True)
        stored = tensors.get(key)
        if stored is None:
            constant.fail(f"there are no bytes for {key!r}")
        if constant["meta"]["quant"] is not None:
            packing = _packing(constant, type, stored, tensors)
            bindings[constant["name"]] = Binding(key, type, stored, False, packing)
            continue
        sizes = tuple((size, size) for size in stored.sizes)
        if (stored.dtype, sizes) != (type.dtype, type.sizes):
            constant.fail(
                f"{key!r} has other bytes than the graph states", f"{stored[:2]} and {type}"
            )
        bindings[constant["name"]] = Binding(key, type, stored, constant["mutated"])
    for buffer in row["mutable_buffers"]:
        if buffer["name"] not in graph.types:
            buffer.fail(f"the buffer {buffer['fqn']!r} has no type")
        type = graph.types[buffer["name"]]
        bindings[buffer["name"]] = Binding(buffer["fqn"], type, None, True)
    specs = {spec["name"]: (spec["kind"], spec["target"]) for spec in row["output_specs"]}
    outputs = tuple(specs.get(name, (USER_OUTPUT, "")) for name in graph.outputs)
    if any(kind not in (USER_OUTPUT, BUFFER_MUTATION, INPUT_MUTATION) for kind, _ in outputs):
        row.fail("an output is of an unknown kind")
    return NativeMethod(graph, bindings, outputs)


def _graph(row: Table, depth: int) -> NativeGraph:
    if depth > _MOST_NESTED:
        row.fail(f"graphs are nested more than {_MOST_NESTED} times")
    types = {each["name"]: _meta(each, repr(each["name"])) for each in row["tensor_values"]}
    nodes = []
    for each in row["nodes"]:
        if each["op_kind"] == _CALL:
            nodes.append(_node(each, depth))
        elif each["op_kind"] not in (_PLACEHOLDER, _RESULT):
            each.fail(f"a node of the unknown kind {each['op_kind']}")
    return NativeGraph(tuple(nodes), row["inputs"], row["outputs"], types)


def _packing(
    row: Table, type: TensorMeta, stored: StoredTensor, tensors: Mapping[str, StoredTensor]
) -> Affine | BlockType:
    """How a quantized constant is stored. Its type states the sizes of what it stands for."""
    what, sizes = f"the constant {row['data_key']!r}", [least for least, _ in type.sizes]
    scheme = row["meta"]["quant"].union("scheme")
    fixed = all(least == most for least, most in type.sizes)
    fixed = fixed and prod(sizes) > 0 and not row["mutated"]
    if not sizes or not fixed or (type.dtype, stored.dtype) != (_BYTE, _BYTE):
        row.fail(f"{what} cannot be quantized", f"{type}, stored as {stored.dtype.name}")
    packing: Affine | BlockType
    if scheme.schema is fbs.PACKED:
        packing = _block_type(row, what, scheme["codec"])
        is_whole = sizes[-1] % packing.elements == 0
        nbytes = prod(sizes) // packing.elements * packing.nbytes
    else:
        group, least = scheme["group_size"] or sizes[-1], scheme["quant_min"]
        bits = (scheme["quant_max"] - least).bit_length()
        is_whole = group > 0 and sizes[-1] % group == 0
        nbytes = prod(sizes) * bits // 8
        known = bits in (4, 8) and scheme["quant_max"] - least == (1 << bits) - 1
        if not known or sizes[-1] * bits % 8:
            _refuse(
                row, what, f"values from {least} to {scheme['quant_max']} in rows of {sizes[-1]}"
            )
    if not is_whole or len(stored.data) != nbytes:
        row.fail(f"{what} has other bytes than the graph states", f"{len(stored.data)} for {sizes}")
    if scheme.schema is fbs.PACKED:
        return packing

    def parameters(name: str) -> StoredTensor:
        found, dtype = tensors.get(scheme[f"{name}_data_key"]), scheme[f"{name}_dtype"]
        if found is None or found.dtype is not _dtype(scheme, dtype):
            row.fail(f"{what} lacks its {name}", f"{scheme[f'{name}_data_key']!r} in the tensors")
        if prod(found.sizes) != prod(sizes) // group:
            row.fail(f"{what} has a {name} of {found.sizes}", f"groups of {group} in {sizes}")
        return found

    zeros = parameters("zero_point") if scheme["zero_point_data_key"] else None
    scales = parameters("scale")
    if scales.dtype not in (DType.float32, DType.float16, DType.bfloat16):
        row.fail(f"{what} has a scale of {scales.dtype.name}")
    return Affine(bits, least, group, scales, zeros)


def _block_type(row: Table, what: str, codec: str) -> BlockType:
    space, _, name = codec.partition(":")
    for type in BLOCK_TYPES.values():
        if (space, name.upper()) == ("gguf", type.name) and type.name in FORMS:
            return type
    _refuse(row, what, f"packed as {codec!r}")


def _refuse(row: Table, what: str, form: str) -> NoReturn:
    types = ", ".join(f"gguf:{name.lower()}" for name in FORMS)
    raise UnsupportedProgramError(
        f"{what} is quantized: {form}",
        where=row.reader.where,
        why=f"known are whole bytes of values of 4 or 8 bits with scales, and {types}",
        next="export the model with another quantization, or without",
    )


def _meta(row: Table, what: str, stored: bool = False) -> TensorMeta:
    meta = row["meta"]
    if meta is None:
        row.fail(f"{what} has no type")
    if meta["quant"] is not None and not stored:
        raise UnsupportedProgramError(
            f"{what} is quantized",
            where=row.reader.where,
            why="constants may be quantized, not what is computed",
            next="export the model without quantization of activations",
        )
    dtype = _dtype(meta, meta["dtype"])
    if len(meta["sizes"]) > MAX_RANK:
        meta.fail(f"{what} has {len(meta['sizes'])} dims")
    sizes = tuple((dim["min"], None if dim["max"] < 0 else dim["max"]) for dim in meta["sizes"])
    # The order matters only where bytes are stored, and not of dims of size 1.
    order = [dim for dim in meta["dim_order"] if 0 <= dim < len(sizes) and sizes[dim] != (1, 1)]
    if stored and order != sorted(order):
        meta.fail(f"{what} is stored in the order {list(meta['dim_order'])} of dims")
    if any(least < 0 or (most is not None and most < least) for least, most in sizes):
        meta.fail(f"{what} has the sizes {sizes}")
    return TensorMeta(dtype, sizes)


def _dtype(row: Table, code: int) -> DType:
    dtype = DType.from_pte(code)
    if dtype is None:
        row.fail(f"the element type {code} is not known")
    return dtype


def _node(row: Table, depth: int) -> NativeNode:
    arguments = []
    for each in row["inputs"]:
        if each["arg"] is None:
            each.fail("an argument has no value")
        value = _argument(each["arg"].union("value"), depth)
        arguments.append(Argument(each["name"], value, each["mutated"]))
    results = tuple(
        Result(each["names"], True, each["alias_of"])
        if each["kind"] == _LIST
        else Result((each["name"],), False, each["alias_of"])
        for each in row["outputs"]
    )
    target = row["target"].removeprefix("torch.ops.")
    return NativeNode(row["name"], target, tuple(arguments), results)


def _argument(row: Table, depth: int) -> Any:
    schema = row.schema
    if schema is fbs.TENSOR:
        return Ref(row["name"])
    if schema is fbs.NONE:
        return None
    if schema in (fbs.INT, fbs.FLOAT, fbs.BOOL):
        return Ref(row["ref"]) if row["ref"] else row["value"]
    if schema in (fbs.STRING, fbs.FLOATS, fbs.BOOLS):
        return row["value"] if schema is fbs.STRING else row["values"]
    if schema is fbs.DTYPE:
        return _dtype(row, row["value"])
    if schema is fbs.SUB_GRAPH:
        if row["graph"] is None:
            row.fail("a sub-graph is empty")
        return _graph(row["graph"], depth + 1)
    if schema is fbs.TENSORS:
        return tuple(map(Ref, row["names"]))
    values = row["has_value"] if schema is fbs.OPTIONAL else row["values"]
    names = row["names"] if schema is fbs.OPTIONAL else row["refs"] or ("",) * len(values)
    if len(values) != len(names):
        row.fail(f"{len(values)} items and {len(names)} names")
    if schema is fbs.OPTIONAL:
        return tuple(Ref(name) if there else None for name, there in zip(names, values))
    return tuple(Ref(name) if name else value for name, value in zip(names, values))
