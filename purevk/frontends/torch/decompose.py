"""Which operators torch decomposes before an exported program is read, and what is corrected before."""

from __future__ import annotations

import operator
from typing import Any

from purevk.errors import PurevkError, UnsupportedProgramError
from purevk.frontends.torch import higher_order
from purevk.frontends.torch.written_views import replace_written_views
from purevk.ops import registry

PYTHON = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.neg: "neg", operator.floordiv: "//",
    operator.mod: "%", operator.eq: "==", operator.ne: "!=", operator.lt: "<", operator.le: "<=", operator.gt: ">",
    operator.ge: ">=", operator.truediv: "/", operator.pow: "**", operator.lshift: "<<", operator.rshift: ">>",
    operator.and_: "&", operator.or_: "|", operator.xor: "^", operator.abs: "abs", operator.not_: "not",
}  # fmt: skip
BATCH_NORM = "aten.batch_norm.default"
INSTANCE_NORM = "aten.instance_norm.default"
BATCH_NORM_INFERENCE = "aten._native_batch_norm_legit_no_training.default"


def decompositions(program: Any = None) -> Any:
    """The decompositions of torch for operators without a definition here, or that a program uses
    in a way that their definitions do not cover."""
    import torch

    # torch drops an assertion without a message, as it reads no result of it.
    torch.fx.node.has_side_effect(torch.ops.aten._assert_async.default)
    updating = program is not None and any(
        _updates_statistics(node) for node in program.graph.nodes
    )

    from purevk.frontends.torch import fast_paths

    aten = torch.ops.aten
    wheres = (aten.where.ScalarSelf, aten.where.ScalarOther)
    table = torch.export.default_decompositions()
    for target in [*table]:
        if isinstance(target, torch._ops.OpOverload):
            definition = registry.find(name_of(target))
            if (
                definition is not None
                and definition.form is not None
                and not (updating and definition.name == INSTANCE_NORM)
            ):
                del table[target]
    for target, written in fast_paths.table().items():
        table[target] = written
    for node in [] if program is None else program.graph.nodes:
        if node.target in wheres and any(_is_symbolic(arg) for arg in node.args):
            table[node.target] = fast_paths.where
    return table


def _is_symbolic(arg: Any) -> bool:
    """Whether an argument is a number that is known only at a call."""
    import torch

    value = getattr(arg, "meta", {}).get("val")
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _updates_statistics(node: Any) -> bool:
    """Whether a node is an instance norm that updates running statistics. Its schema does not say
    so."""
    import torch

    if not isinstance(node.target, torch._ops.OpOverload) or name_of(node.target) != INSTANCE_NORM:
        return False
    return node.args[3] is not None and bool(node.args[5])


def keep_checks() -> None:
    """Keeps the check of linear algebra in traced graphs. It has no result, and torch 2.11 removes it as
    dead code: singular matrices gave NaN."""
    import torch

    torch.fx.node.has_side_effect(torch.ops.aten._linalg_check_errors.default)


def decompose(program: Any) -> Any:
    """The program, without operators that have no definition here but a decomposition in torch.

    Raises:
        UnsupportedProgramError: torch cannot decompose it, or a tensor in it is sparse or nested.
    """
    _refuse_layouts(program)
    _replace_casts_of_truths(program)
    if is_decomposed(program):
        return program  # torch traces a program anew, which takes seconds for large models
    _refuse_resized(program)
    replace_written_views(program.graph_module)
    with higher_order.sub_graphs_may_write(program):
        try:
            decomposed = program.run_decompositions(decompositions(program))
            _replace_casts_of_truths(decomposed)
            return decomposed
        except PurevkError:
            raise
        except Exception as error:  # torch raises errors of many classes
            raise UnsupportedProgramError(
                "torch cannot decompose the exported program",
                where="purevk.compile",
                why=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
                next="run_decompositions() of the exported program fails too. Known causes: an input"
                " or a buffer that shares memory with another one and is written, an operator that"
                " changes the sizes of an input (resize_, transpose_), torch.func.grad",
            ) from error


def _replace_casts_of_truths(program: Any) -> None:
    """Writes `int(truth) == 1` as `truth`. torch 2.11 asserts a truth value in this form, which it can
    neither trace again nor save."""
    import torch
    from torch.fx.experimental import symbolic_shapes

    cast = vars(symbolic_shapes).get("cast_symbool_to_symint_guardless")
    for module in program.graph_module.modules():
        if cast is None or not isinstance(module, torch.fx.GraphModule):
            continue
        for node in [*module.graph.nodes]:
            operand = node.args[0] if node.args else None
            if node.target is not operator.eq or node.args[1] != 1:
                continue
            if isinstance(operand, torch.fx.Node) and operand.target is cast:
                node.replace_all_uses_with(operand.args[0])
                module.graph.erase_node(node)
                if not operand.users:
                    module.graph.erase_node(operand)


def _refuse_layouts(program: Any) -> None:
    """Refuses tensors that are not stored element by element, such as sparse ones."""
    import torch
    from torch.utils._pytree import tree_leaves

    for node in program.graph.nodes:
        for example in tree_leaves(node.meta.get("val")):
            if not isinstance(example, torch.Tensor) or example.layout is torch.strided:
                continue
            layout = str(example.layout).removeprefix("torch.")
            raise UnsupportedProgramError(
                f"a tensor has the layout {layout}",
                where=f"purevk.compile, {node.name}",
                why="the device computes with dense tensors alone",
                next="pass and store dense tensors: x.to_dense();"
                ' torch.compile(module, backend="purevk") runs the others in eager torch',
            )


def _refuse_resized(program: Any) -> None:
    """Refuses `out=` inputs and buffers of other sizes than the result: eager torch would resize
    them."""
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        for argument in schema.arguments if schema is not None else ():
            out = node.kwargs.get(argument.name) if argument.is_out else None
            result = node.meta.get("val")
            if out is None or out.op != "placeholder" or not hasattr(result, "shape"):
                continue
            before, after = out.meta["val"].shape, result.shape
            if len(before) != len(after) or any(
                isinstance(old, int) and isinstance(new, int) and old != new
                for old, new in zip(before, after)
            ):
                raise UnsupportedProgramError(
                    f"{name_of(node.target)} changes the sizes of {out.name}",
                    where="purevk.compile",
                    why=f"out= has sizes {list(before)}, and the result has sizes {list(after)}",
                    next="pass an out= with the sizes of the result, or return the result",
                )


def is_decomposed(program: Any) -> bool:
    """Whether `read_exported` takes every node of a program, and no node writes into a tensor that
    others read."""
    import torch

    for node in program.graph.nodes:
        if node.op != "call_function" or node.target in PYTHON or node.target is operator.getitem:
            continue
        if not isinstance(node.target, torch._ops.OpOverload):
            return False
        name = name_of(node.target)
        if name.startswith(("aten._assert", "aten.sym_")) or name in (
            "aten.item.default",
            "aten._local_scalar_dense.default",
        ):
            continue
        if (
            (node.target._schema.is_mutable and not _writes_alone(node))
            or (name == BATCH_NORM and node.args[5])
            or _updates_statistics(node)
        ):
            return False  # torch replaces these by operators that write into nothing
        definition = registry.find(out_of_place(node, node.target))
        if definition is None or definition.form is None:
            return False
    return True


def _writes_alone(node: Any) -> bool:
    """Whether an operator writes in place into a new tensor that nothing else reads."""
    import torch

    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema, source = node.target._schema, node.args[0] if node.args else None
    if [argument.is_write for argument in schema.arguments].count(
        True
    ) != 1 or not schema.arguments[0].is_write:
        return False
    if (
        not schema.name.endswith("_")
        or not isinstance(source, torch.fx.Node)
        or len(source.users) != 1
    ):
        return False
    made_by = source.target
    if source.op != "call_function" or not isinstance(made_by, torch._ops.OpOverload):
        return False
    return all(returned.alias_info is None for returned in made_by._schema.returns) or (
        made_by._schema.is_mutable and _writes_alone(source)
    )


def out_of_place(node: Any, target: Any) -> str:
    """The name of a node's operator. If it writes into a tensor that nothing else reads, the name of
    the operator that returns its result instead."""
    name = name_of(target)
    if not target._schema.is_mutable or not _writes_alone(node):
        return name
    space, base, overload = name.split(".")
    return f"{space}.{base.removesuffix('_')}.{overload}"


def name_of(target: Any) -> str:
    """The name of an overload of torch: "namespace.op.overload"."""
    return f"{target.namespace}.{target._opname}.{target._overloadname}"


def keep_earlier(program: Any) -> None:
    """Copies the earlier elements of replaced buffers that are results, or values of other buffers.

    `torch.export` writes the new elements into the tensor of the buffer, at the end of the graph.
    What still refers to this tensor then would see them.
    """
    import torch

    graph = program.graph_module.graph
    # Tracing names the copies that a module makes itself after the operator, without its overload.
    stores = [
        node
        for node in graph.nodes
        if node.target is torch.ops.aten.copy_.default and node.name.startswith("copy__default")
    ]
    if not stores:
        return
    buffers = {node.args[0] for node in stores}
    table: dict[Any, Any] = {}

    def earlier(node: Any) -> Any:
        if not isinstance(node, torch.fx.Node) or _viewed(node) not in buffers:
            return node
        if node not in table:
            with graph.inserting_before(stores[0]):
                table[node] = graph.call_function(torch.ops.aten.clone.default, (node,))
            table[node].meta = dict(node.meta)
        return table[node]

    for node in stores:
        node.args = (node.args[0], earlier(node.args[1]))
    output = graph.output_node()
    results = tuple(earlier(node) for node in output.args[0])
    for result, spec in zip(results, program.graph_signature.output_specs):
        if isinstance(result, torch.fx.Node):
            spec.arg.name = result.name
    output.args = (results,)
    program.graph_module.recompile()


def _viewed(node: Any) -> Any:
    """The node whose elements a node shows: itself, if it is no view."""
    import torch

    while isinstance(node.target, torch._ops.OpOverload):
        returns = node.target._schema.returns
        if not node.args or not returns or returns[0].alias_info is None:
            break
        node = node.args[0]
    return node
