"""Every shape function against torch, with known and with symbolic sizes. No device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import purevk.ops  # noqa: F401
from purevk.dtypes import DType
from purevk.ir import Dim, GuardLog, Symbol, TensorType, dims
from purevk.ops import registry
from tests.ops.harness import _plain
from tests.ops.samples import WITHOUT_SAMPLES, Call, calls, sampled

NAMES = [each.name for each in registry.definitions() if each.name.startswith("aten.")]


def full_args(call: Call) -> list[Any]:
    """The arguments in the order of the schema."""
    made = []
    for position, argument in enumerate(call.overload._schema.arguments):
        if position < len(call.args):
            made.append(call.args[position])
        else:
            made.append(
                call.kwargs.get(
                    argument.name, argument.default_value if argument.has_default_value() else None
                )
            )
    return made


def types_of(args: Any, symbolic: dict[int, Symbol] | None = None) -> Any:
    """Arguments with tensors as types; sizes above 1 as symbols, equal sizes as one symbol."""

    def size(n: int) -> Any:
        if symbolic is None or n < 2:
            return n
        return Dim.of(symbolic.setdefault(n, Symbol(f"n{n}", n, lower=1)))

    def visit(arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            return TensorType(DType.from_torch(arg.dtype), tuple(size(n) for n in arg.shape))
        if isinstance(arg, (list, tuple)):
            return tuple(visit(item) for item in arg)
        return _plain(arg)

    return tuple(visit(arg) for arg in args)


def infer(definition: registry.Operator, types: tuple) -> tuple[TensorType, ...]:
    made = definition.shape(**definition.bind(types[: len(definition.parameters)]))
    return () if made is None else made if isinstance(made, tuple) else (made,)


def results_of(made: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, torch.Tensor)]


def text(types: Any) -> list[str]:
    return [f"{t.dtype.name}{[int(n) for n in t.dims]}" for t in types]


def wanted(tensors: list[torch.Tensor]) -> list[str]:
    return [f"{DType.from_torch(t.dtype).name}{list(t.shape)}" for t in tensors]


@pytest.mark.parametrize("name", sampled())
def test_known_sizes(name):
    definition, wrong = registry.find(name), []
    found = calls()[name]
    for call in found:
        try:
            made = text(infer(definition, types_of(full_args(call))))
        except registry.ShapeError as error:
            if "known only at a call" in str(error):
                continue  # sizes that follow from the values
            made = [f"ShapeError: {error}"]
        except Exception as error:  # a failing shape function is a line of the report
            made = [f"{type(error).__name__}: {error}"]
        expected = wanted(results_of(call.results))
        if "_embedding_bag" in name:
            made, expected = (
                made[:1],
                expected[:1],
            )  # the rest, for the backward pass, depends on how the CPU went about it
        if made != expected:
            wrong.append(f"{call.key}: {made} != {wanted(results_of(call.results))}")
    assert not wrong, f"{len(wrong)} of {len(found)}:\n" + "\n".join(wrong[:20])


@pytest.mark.parametrize("name", sampled())
def test_symbolic_sizes(name):
    """The result's sizes as expressions give torch's at the bounds, and at smaller sizes that keep
    the guards."""
    definition, wrong = registry.find(name), []
    found = calls()[name]
    for call in found[:60]:
        symbols: dict[int, Symbol] = {}
        args = full_args(call)
        try:
            with GuardLog() as log:
                made = infer(definition, types_of(args, symbols))
        except registry.ShapeError:
            continue  # an open comparison went the other way than at these sizes
        except Exception as error:  # a failing shape function is a line of the report
            wrong.append(f"{call.key}: {type(error).__name__}: {error}")
            continue
        for shrink in (0, 1):
            env = {symbol: max(symbol.upper - shrink, 1) for symbol in symbols.values()}
            if not all(guard.holds(env) for guard in log.guards):
                continue
            known = [f"{t.dtype.name}{[dims.evaluate(n, env) for n in t.dims]}" for t in made]
            if (
                shrink and ("native_layer_norm" in name or "native_batch_norm" in name)
            ) or "_embedding_bag" in name:
                known = known[
                    :1
                ]  # what is for the backward pass has other types from the meta kernel than from the CPU's
            if shrink:
                meta = pytree.tree_map(
                    lambda leaf: _smaller(leaf, symbols, env), (call.args, call.kwargs)
                )
                try:
                    expected = results_of(call.overload(*meta[0], **meta[1]))[: len(known)]
                except Exception:  # torch refuses these sizes, or has no meta kernel
                    continue
            else:
                expected = results_of(call.results)[: len(known)]
            if known != wanted(expected):
                wrong.append(
                    f"{call.key} less {shrink}: {known} != {wanted(expected)}, from {made}"
                )
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong[:20])


def _smaller(leaf: Any, symbols: dict[int, Symbol], env: dict[Symbol, int]) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty(
        [env[symbols[n]] if n in symbols else n for n in leaf.shape],
        dtype=leaf.dtype,
        device="meta",
    )


# torch has only the operators that write into their argument.
IN_PLACE = ("aten.bernoulli.float", "aten.normal.default")
GONE = () if hasattr(torch.ops.aten, "cholesky") else ("aten.cholesky.default",)  # torch 2.15


def test_torchs_samples_call_most_operators():
    """Samples do not call three kinds of operators: those of linear algebra, whose samples take long
    and which have tests of their own, random ones of a form that only the device has, and those that
    torch decomposes before a dispatch mode sees them."""
    seen = [
        name
        for name in NAMES
        if name not in (*IN_PLACE, *GONE)
        and not registry.find(name).random
        and not _is_composite(name)
    ]
    missing = [name for name in seen if not calls().get(name)]
    assert len(missing) < len(seen) // 7, missing


def test_operators_without_samples_are_listed():
    """So that a new operator with samples is tested by them."""
    listed = WITHOUT_SAMPLES.read_text(encoding="utf-8").splitlines()
    assert listed == sorted(name for name in NAMES if not calls().get(name))


def _is_composite(name):
    _, op, overload = name.split(".")
    full = f"aten::{op}" if overload == "default" else f"aten::{op}.{overload}"
    return torch._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd")


def test_parameters_are_those_of_the_schema():
    """A definition takes the arguments of each of its overloads, in the order of the schema."""
    wrong = []
    for definition in registry.definitions():
        for name in (definition.name, *definition.names):
            space, op, *overload = name.split(".")
            if space != "aten":
                continue
            overload = overload[0]
            if name in (*IN_PLACE, *GONE):
                continue
            if name in ("aten.softmax.int", "aten.log_softmax.int", "aten._convolution.default"):
                continue  # more arguments than mean something here; a type in place of a flag
            schema = getattr(getattr(torch.ops.aten, op), overload)._schema
            required = [a.name for a in schema.arguments if not a.has_default_value()]
            parameters = list(definition.signature.parameters.values())
            if len(required) > len(parameters):
                wrong.append(
                    f"{name} needs {required}, the definition takes {definition.parameters}"
                )
            for argument, parameter in zip(schema.arguments, parameters):
                for word in (
                    "dtype",
                    "keepdim",
                    "dim",
                    "eps",
                    "groups",
                    "dilation",
                    "stride",
                    "padding",
                    "alpha",
                    "correction",
                    "descending",
                ):
                    if (argument.name == word) != (parameter.name == word) and {
                        argument.name,
                        parameter.name,
                    } - {"dims", word}:
                        wrong.append(
                            f"{name}: argument {argument.name} is the definition's {parameter.name}"
                        )
    assert not wrong, "\n".join(wrong)
