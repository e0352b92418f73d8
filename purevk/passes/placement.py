"""Which nodes run on the device and which on the CPU."""

from __future__ import annotations

from purevk.dtypes import DType
from purevk.errors import PurevkError
from purevk.ir import Graph, Node, Value
from purevk.ir.host import HOST, SEED
from purevk.ops import registry
from purevk.ops.complex.split import NoKernelError, is_complex, rule_of
from purevk.ops.complex.views import AS_COMPLEX, AS_REAL
from purevk.passes.complex import split_complex
from purevk.passes.expand import expand_rewrites
from purevk.passes.fusion.pointwise import fuse_pointwise, to_programs
from purevk.tuning import DeviceTraits

# Features that a kernel needs to read and write elements of a type. float32 takes the place of half
# precision (`widen.py`).
_NEEDS = {
    DType.bool: ("storage_8bit", "int8"),
    DType.uint8: ("storage_8bit", "int8"),
    DType.int8: ("storage_8bit", "int8"),
    **{dtype: ("storage_8bit", "int8") for dtype in DType if dtype.is_float8},
    DType.int16: ("storage_16bit", "int16"),
    DType.complex32: ("storage_16bit",),
    DType.int64: ("int64",),
    DType.float64: ("float64",),
    DType.complex128: ("float64",),
}
_OPTIONAL_TYPES = {name for names in _NEEDS.values() for name in names} - {"float64"}


# Operators that take a large weight in parts.
_SPLIT = {
    "aten.linear.default", "aten.embedding.default", "aten._weight_int8pack_mm.default", "et_vk.linear_qcs4w.default",
    "et_vk.linear_q4gsw.default", "et_vk.linear_dq8ca_q4gsw.default", "et_vk.linear_q8ta_q8csw.default",
    "et_vk.q8ta_linear.default", "et_vk.embedding_q4gsw.default", "quantized_decomposed.embedding_byte.default",
    "quantized_decomposed.embedding_4bit.default", "quantized_decomposed.embedding_2bit.default",
    "aten._grouped_mm.default",
}  # fmt: skip


MOST_WINDOWS = 12  # of the operands of a kernel: devices have few bindings


def refusal(node: Node, traits: DeviceTraits) -> str | None:
    """Why a node cannot run on the device; None if it can."""
    if node.op == HOST:
        return node.str("reason")
    if node.op == SEED:
        return None
    definition = registry.find(node.op)
    if definition is None or definition.form is None:
        return "no kernel"
    for value in (*node.inputs, *node.results):
        if value.type.dtype.is_float8 and not registry.is_view(node):
            return f"no kernel for {value.type.dtype.name}"
        missing = [name for name in _NEEDS.get(value.type.dtype, ()) if name not in traits.features]
        if missing:
            return f"{value.type.dtype.name} needs the device feature {', '.join(missing)}"
    large = too_large(node, traits)
    if large is not None and not _runs_in_parts(node, traits):
        return f"{large.type} is larger than the {traits.max_storage_range} bytes that one binding spans"
    if is_complex(node):
        rule = rule_of(node)
        if rule is None:
            return "no kernel for complex numbers"
        return None if rule.refuse is None else rule.refuse(node)
    form = definition.form
    if isinstance(form, registry.Kernel) and registry.expansion(node) is not None:
        return None
    if isinstance(form, (registry.Kernel, registry.Rewrite)) and form.supports is not None:
        return form.supports(node, traits)
    return None


def too_large(node: Node, traits: DeviceTraits) -> Value | None:
    """An operand or a result of a node that one binding cannot span, at the bounds of its sizes."""
    if node.op in _SPLIT or registry.is_view(node):
        return None
    for value in (*node.inputs, *node.results):
        if value.type.nbytes > traits.max_storage_range:
            return value
    return None


def outgrows(node: Node, traits: DeviceTraits) -> bool:
    """Whether a node has sizes that vary, and at their bounds a tensor that one binding cannot span. A
    view of such a tensor is bound with all of it."""
    if all(value.type.is_static for value in (*node.inputs, *node.results)):
        return False
    viewed = node.inputs if registry.is_view(node) else ()
    return too_large(node, traits) is not None or any(
        value.type.nbytes > traits.max_storage_range for value in viewed
    )


def _runs_in_parts(node: Node, traits: DeviceTraits) -> bool:
    """Whether what a node becomes binds a part of a large tensor at a time."""
    alone = Graph("", tuple(dict.fromkeys(node.inputs)), (node,), ())
    try:
        if is_complex(node):
            alone = split_complex(alone, traits)
        inside = expand_rewrites(alone, traits)
    except PurevkError:
        return False
    return all(_fits(inner, traits) for inner in inside.nodes)


def _fits(node: Node, traits: DeviceTraits) -> bool:
    """Whether bindings span the tensors of a node, or the parts in which its kernel takes them."""
    definition = registry.find(node.op)
    form = None if definition is None else definition.form
    if isinstance(form, registry.Pointwise) or too_large(node, traits) is None:
        return True
    if not isinstance(form, registry.Kernel):
        return False
    if form.windows is None or not form.windows(node):
        return form.any_size
    limit = traits.max_storage_range
    large = [x.type.nbytes for x in dict.fromkeys(node.inputs) if x.type.nbytes > limit]
    return sum(-(-nbytes // limit) for nbytes in large) <= MOST_WINDOWS


def unbound(graph: Graph, traits: DeviceTraits) -> int:
    """How many nodes would need a binding that the device lacks. A front end's graph has some, which
    the CPU runs; passes must not add more."""
    return sum(
        not _fits(node, traits) and registry.expansion(node, traits) is None
        for node in graph.nodes
        if node.op != HOST
    )


def _refused_inside(graph: Graph, node: Node, traits: DeviceTraits) -> str | None:
    """Why what a node expands to cannot run on the device: asked of nodes of complex numbers or in
    double precision, for which fewer kernels are written, and where the device lacks some types."""
    inside = graph.with_nodes((node,), outputs=())
    if is_complex(node):
        try:
            inside = split_complex(inside, traits)
        except NoKernelError as error:
            return error.what
    elif registry.expansion(node) is None:
        return None
    elif all(value.type.dtype is not DType.float64 for value in (*node.inputs, *node.results)):
        return _types_inside(inside, traits)
    inside = expand_rewrites(inside, traits)
    reasons = (
        refusal(inner, traits)
        for inner in inside.nodes
        if inner.op not in (AS_REAL, AS_COMPLEX) or inner is node
    )
    return next((reason for reason in reasons if reason is not None), None)


def _types_inside(graph: Graph, traits: DeviceTraits) -> str | None:
    """Why a node cannot run on a device without some types: what it expands to has a tensor of one
    that no kernel keeps in registers. Those of bytes may be there as int32, those of int64 not."""
    if traits.has(*_OPTIONAL_TYPES):
        return None
    inside = expand_rewrites(graph, traits)
    for fuse in (to_programs, fuse_pointwise):
        missing = _missing_types(inside, traits)
        if DType.int64 in missing:
            return "int64 within it needs the device feature int64"
        if not missing:
            return None
        inside = fuse(inside, traits)
    missing = _missing_types(inside, traits)
    return f"{missing[0].name} within it needs {', '.join(_NEEDS[missing[0]])}" if missing else None


def _missing_types(graph: Graph, traits: DeviceTraits) -> list[DType]:
    values = (value for node in graph.nodes for value in (*node.inputs, *node.results))
    dtypes = dict.fromkeys(value.type.dtype for value in values)
    return [dtype for dtype in dtypes if not traits.has(*_NEEDS.get(dtype, ()))]


def assign_hosts(graph: Graph, traits: DeviceTraits) -> Graph:
    """Wraps each node that the device cannot run into a `purevk.host` node, whose first argument is
    the operator's name."""
    reasons = {
        node: None
        if registry.is_control(node)
        else refusal(node, traits) or _refused_inside(graph, node, traits)
        for node in graph.nodes
    }
    _stay_on_host(graph, reasons)
    return graph.with_nodes(
        node
        if (reason := reasons[node]) is None or node.op == HOST
        else Node(HOST, (name_for_cpu(node), reason, node.args), node.results, node.source)
        for node in graph.nodes
    )


def name_for_cpu(node: Node) -> str:
    """The operator as torch knows it: the overload that the file names, or the ATen operator that
    it stands for."""
    foreign = not node.alias.startswith("aten.") and node.op.startswith("aten.")
    return node.op if foreign or not node.alias else node.alias


def _stay_on_host(graph: Graph, reasons: dict[Node, str | None]) -> None:
    """Views between CPU nodes stay there: crossing over would only copy."""
    producers = graph.producers()
    users = graph.users()
    outputs = graph.output_values()
    for node in reversed(graph.nodes):
        if reasons[node] is not None or not registry.is_view(node):
            continue
        readers = [user for value in node.results for user in users.get(value, [])]
        makers = [producers.get(value) for value in node.inputs]
        if any(value in outputs for value in node.results) or not readers:
            continue
        if all(reasons[user] for user in readers) and all(
            maker is not None and reasons[maker] for maker in makers
        ):
            reasons[node] = "between nodes on the CPU"
