"""Names from an ETRecord, which executorch writes beside a .pte file.

Of a delegate, the record has the modules and lines of all nodes together. VulkanPartitioner numbers
them anew, so that the debug handles of the single nodes are those of others. But a node that reads
a parameter is known by its content: the record has the parameters, and the delegate has them as
constants. What two parameters have in common, such as zeros, tells nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from purevk import pte
from purevk.dtypes import DType
from purevk.errors import FileFormatError, UnsupportedProgramError
from purevk.frontends.source_lines import line_of
from purevk.frontends.torch.nodes import is_dense
from purevk.mapped import own
from purevk.pte import types as P
from purevk.pte import vkgraph as vk
from purevk.pte.source import open_program
from purevk.report.etdump import Place, places_of

_MOST = 4  # lines of a delegate that are listed
_PREPACK = "et_vk.prepack.default"
_EDGE = "edge_dialect_exported_program"
_HANDLES = "debug_handle_map"
_NORM = "_native_batch_norm_legit_no_training.default"


class Origin(NamedTuple):
    """What an ETRecord knows of a node: the path of its module, and the line in the user's code."""

    path: str
    line: str


class Parameter(NamedTuple):
    """A parameter or buffer, with the nodes that read it."""

    name: str
    origins: tuple[Origin, ...]


@dataclass(frozen=True)
class EtRecord:
    """What an ETRecord knows of a method.

    Attributes:
        instructions: by the number of an instruction; of a delegate, what is known of all its nodes.
        parameters: by content, see `_content`; None for what several of them have.
    """

    instructions: Mapping[int, list[Origin]]
    parameters: Mapping[bytes, Parameter | None]


class _Node(NamedTuple):
    """A node of the record. `args` are names of tensors, numbers, lists and None."""

    target: str
    args: list[Any]
    origin: Origin
    handles: list[int]


class _Program(NamedTuple):
    """A program of the record.

    Attributes:
        nodes: by the name of their first result.
        targets: the parameters and buffers by the names of the inputs that they are.
        tensors: these, and constants, of torch.
    """

    nodes: Mapping[str, _Node]
    targets: Mapping[str, str]
    tensors: Mapping[str, Any]

    def users(self, name: str) -> list[_Node]:
        return [node for node in self.nodes.values() if name in _flat(node.args)]


def read_etrecord(path: Path, method: str) -> EtRecord:
    """What an ETRecord knows of a method. Of the pickles in it, only tensors are read.

    Raises:
        UnsupportedProgramError: torch is not installed.
        FileFormatError: the file is no ETRecord.
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise UnsupportedProgramError(
            "torch is not installed",
            why="an ETRecord has tensors of torch",
            next="pip install torch",
        ) from error
    stream = open_program(path)
    try:
        with stream, zipfile.ZipFile(stream) as archive:
            if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                raise ValueError("it is compressed, which executorch does not do")
            program = _read_program(archive, method)
            handle_map = (
                json.loads(archive.read(_HANDLES)) if _HANDLES in archive.namelist() else None
            )
        origins: dict[int, list[Origin]] = {}
        for node in () if program is None else program.nodes.values():
            for handle in node.handles:
                if node.origin not in origins.setdefault(handle, []):
                    origins[handle].append(node.origin)
        found: dict[int, list[Origin]] = {}
        for at, handles in ((handle_map or {}).get(method) or {}).items():
            mine = found.setdefault(int(at), [])
            for handle in _handles(handles):
                mine += [each for each in origins.get(handle, ()) if each not in mine]
        return EtRecord(found, {} if program is None else _parameters(program))
    except Exception as error:  # torch raises errors of many classes, and zipfile OSErrors
        raise FileFormatError(
            "this is no ETRecord",
            where=str(path),
            why=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
            next="write it with generate_etrecord, or to_edge_transform_and_lower(..., generate_etrecord=True)",
        ) from error


def _read_program(archive: zipfile.ZipFile, method: str) -> _Program | None:
    """The program of a method in the form that executorch lowers, if the record has it."""
    names = [
        name
        for name in archive.namelist()
        if name == _EDGE or name.startswith(f"{_EDGE}/")
        if not name.endswith(("_state_dict", "_constants", "_example_inputs"))
    ]
    if len(names) > 1:
        names = [name for name in names if name == f"{_EDGE}/{method}"]
    if not names:
        return None
    module = json.loads(archive.read(names[0]))["graph_module"]
    nodes: dict[str, _Node] = {}
    for node in module["graph"]["nodes"]:
        known = node.get("metadata") or {}
        stack = (known.get("nn_module_stack") or ",").split(";")[-1]
        nodes[_name_of(node["outputs"][0]) if node["outputs"] else f"#{len(nodes)}"] = _Node(
            str(node["target"]),
            [_value(each["arg"]) for each in node["inputs"]],
            Origin(stack.split(",")[1], line_of(str(known.get("stack_trace") or ""))),
            [int(each) for each in re.findall(r"\d+", str(known.get("debug_handle") or ""))],
        )
    targets = {}
    for spec in module["signature"]["input_specs"]:
        for kind in ("parameter", "buffer"):
            if kind in spec:
                targets[spec[kind]["arg"]["name"]] = spec[kind][f"{kind}_name"]
    tensors = {
        **_tensors(archive.read(f"{names[0]}_constants")),
        **_tensors(archive.read(f"{names[0]}_state_dict")),
    }
    return _Program(nodes, targets, tensors)


def _value(argument: Any) -> Any:
    """An argument of a node: the name of a tensor, or what it is."""
    (kind, value), *_ = argument.items()
    if kind == "as_none":
        return None
    if isinstance(value, list):
        return [
            each["name"] if isinstance(each, dict) and "name" in each else each for each in value
        ]
    return _name_of(argument) if kind == "as_tensor" else value


def _name_of(argument: Any) -> str:
    (value, *_) = argument.values()
    first = value[0] if isinstance(value, list) else value
    return str(first["name"]) if isinstance(first, dict) and "name" in first else str(first)


def _flat(args: Iterable[Any]) -> Iterator[Any]:
    for arg in args:
        yield from _flat(arg) if isinstance(arg, list) else (arg,)


def _tensors(data: bytes) -> dict[str, Any]:
    """Tensors of torch.save by name. No other classes are made and no code runs."""
    import torch

    from purevk.frontends.torch.archive.members import unpickled

    found = unpickled(data) if data else {}
    return {
        name: each
        for name, each in found.items()
        if isinstance(each, torch.Tensor) and is_dense(each)
        # A view with strides of 0 may be of any size.
        if each.numel() * each.element_size() <= each.untyped_storage().nbytes()
    }


def known_nodes(
    record: EtRecord, program: pte.Program, method: str
) -> dict[Place, tuple[Parameter, ...]]:
    """The nodes of delegates that read parameters which the record has, with these."""
    plan = program.method(method)
    found: dict[Place, list[Parameter]] = {}
    for at, call in enumerate(plan.chains[0].instructions):
        if not isinstance(call, P.DelegateCall):
            continue
        delegate = plan.delegates[call.delegate_index]
        if delegate.id != P.VULKAN_BACKEND:
            continue
        graph = program.vulkan_graph(delegate)
        packed: dict[int, int] = {}  # what a node has only packed, and its source
        for node in graph.chain:
            *inputs, output = node.args
            if node.name == _PREPACK:
                packed[output] = packed.get(inputs[0], inputs[0])
                continue
            mine = found.setdefault(Place(at, node.node_id), [])
            for number in inputs:
                parameter = _read(record, program, graph, packed.get(number, number))
                if parameter is not None and parameter not in mine:
                    mine.append(parameter)
    return {place: tuple(each) for place, each in found.items() if each}


def lines_of(
    source: str,
    calls: dict[int, int],
    record: EtRecord,
    known: Mapping[Place, tuple[Parameter, ...]],
) -> str:
    """The modules and lines of a node as text: "layers.0.fc, model.py:12, in forward". Where nothing
    is known of the node itself, those of the delegate that it is in."""
    places = places_of(source, calls)
    origins = [
        origin
        for place in places
        for parameter in known.get(place, ())
        for origin in parameter.origins
    ] or [origin for place in places for origin in record.instructions.get(place.instruction, ())]
    unique = list(dict.fromkeys(", ".join(filter(None, origin)) for origin in origins))
    more = f"; {len(unique) - _MOST} more" if len(unique) > _MOST else ""
    return "; ".join(unique[:_MOST]) + more


def parameters_of(
    source: str, calls: dict[int, int], known: Mapping[Place, tuple[Parameter, ...]]
) -> list[str]:
    """The names of the parameters that a node reads, as far as they are known."""
    names = [each.name for place in places_of(source, calls) for each in known.get(place, ())]
    return list(dict.fromkeys(names))


# -- the record ----------------------------------------------------------------------------------
def _parameters(program: _Program) -> dict[bytes, Parameter | None]:
    """The parameters and buffers of a program by content, also as a convolution has them once the
    batch norm that follows is part of it."""
    found: dict[bytes, Parameter | None] = {}

    def add(tensor: Any, parameter: Parameter | None) -> None:
        for content in _contents(tensor):
            same = found.get(content, parameter)
            found[content] = parameter if same == parameter else None

    named = set()
    for name, target in program.targets.items():
        if target in program.tensors:
            named.add(target)
            add(program.tensors[target], Parameter(target, _origins(program.users(name))))
    for node in program.nodes.values():
        if _NORM in node.target:
            for tensor, parameter in _folded(node, program):
                add(tensor, parameter)
    for name, tensor in program.tensors.items():
        if name not in named:  # a constant of the graph, or another name of a parameter
            add(tensor, None)
    return found


def _folded(norm: _Node, program: _Program) -> Iterator[tuple[Any, Parameter]]:
    """The weight and bias of a convolution with the batch norm that follows, as torch folds them."""
    import torch
    from torch.nn.utils.fusion import fuse_conv_bn_weights

    name, gamma, beta, mean, variance, _, epsilon = norm.args
    source = program.nodes.get(name)
    if source is None or "convolution.default" not in source.target:
        return
    if len(program.users(name)) != 1:
        return
    inputs = [source.args[1], source.args[2], mean, variance, gamma, beta]
    names: list[Any] = [None if each is None else program.targets.get(each) for each in inputs]
    tensors = program.tensors
    if any(each is not None and name not in tensors for each, name in zip(inputs, names)):
        return
    parts: list[Any] = [None if name is None else tensors[name] for name in names]
    with torch.no_grad():
        weight, bias, mean, variance, gamma, beta = parts
        folded = fuse_conv_bn_weights(
            weight, bias, mean, variance, epsilon, gamma, beta, source.args[6]
        )
    origins = _origins([source, norm])
    for tensor, name in zip(folded, (names[0], names[1] or names[5])):
        yield tensor.detach(), Parameter(f"{name}, with batch norm", origins)


def _origins(nodes: Iterable[_Node]) -> tuple[Origin, ...]:
    return tuple(dict.fromkeys(node.origin for node in nodes))


def _handles(value: Any) -> Iterator[int]:
    """The debug handles of a node: one, several, or none."""
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _handles(each)
    elif isinstance(value, int) and value:
        yield value


# -- contents ------------------------------------------------------------------------------------
def _contents(tensor: Any) -> Iterator[bytes]:
    """The content of a tensor of torch, and that of its transpose."""
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return
    dtype = DType.from_torch(tensor.dtype)
    forms = [tensor, tensor.T] if tensor.dim() == 2 else [tensor]
    for form in forms:
        data = form.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        content = None if dtype is None else _content(dtype, memoryview(data))
        if content is not None:
            yield content


def _read(
    record: EtRecord, program: pte.Program, graph: vk.VkGraph, number: int
) -> Parameter | None:
    """The parameter that a value of a delegate is, if it is known."""
    value = graph.values[number]
    if not isinstance(value, vk.VkTensor) or not value.is_constant or value.dtype is None:
        return None
    content = _content(value.dtype, program.vulkan_constant(graph, value.constant_id))
    return None if content is None else record.parameters.get(content)


def _content(dtype: DType, data: memoryview) -> bytes | None:
    """A digest of what a tensor holds. None: too little to tell it from others, such as zeros."""
    data = own(data)
    first = bytes(data[: dtype.itemsize])
    if not (dtype.is_float or dtype in (DType.int8, DType.uint8)):
        return None  # indices and masks, which graphs make themselves too
    if bytes(data) == first * (len(data) // dtype.itemsize):
        return None
    return hashlib.blake2b(data, key=dtype.name.encode(), digest_size=16).digest()
