"""What definitions say of operators is true of what torch computes: whether they only move elements, and
of which rows of the operands a row of the result is computed. No device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import purevk.ops  # noqa: F401
from purevk.ir import Node
from purevk.ops import registry
from purevk.ops.facts import Moves
from tests.ops.harness import Recorder, tensor
from tests.ops.sample_cases import is_sound, spread
from tests.ops.samples import Call, calls, sampled

aten = torch.ops.aten
CASES = [
    (aten.linear.default, (tensor(2, 5, 3), tensor(7, 3), tensor(7)), {}, {0, 1}),
    (aten.mm.default, (tensor(5, 3), tensor(3, 7)), {}, {0}),
    (aten.matmul.default, (tensor(2, 5, 3), tensor(3, 7)), {}, {0, 1}),
    (aten.addmm.default, (tensor(7), tensor(5, 3), tensor(3, 7)), {}, {0}),
    (aten.addmm.default, (tensor(5, 7), tensor(5, 3), tensor(3, 7)), {"beta": 2}, {0}),
    (aten.layer_norm.default, (tensor(2, 5, 3), [3], tensor(3), tensor(3)), {}, {0, 1}),
    (aten.layer_norm.default, (tensor(2, 5, 3), [5, 3]), {}, {0}),
    (aten.native_layer_norm.default, (tensor(2, 5, 3), [3], None, None, 1e-5), {}, {0, 1}),
    (aten.rms_norm.default, (tensor(2, 5, 3), [3], tensor(3)), {}, {0, 1}),
    (aten._softmax.default, (tensor(2, 5, 3), 1, False), {}, {0, 2}),
    (aten.mean.dim, (tensor(2, 5, 3), [1]), {}, {0, 1}),
    (aten.mean.dim, (tensor(2, 5, 3), [-1], True), {}, {0, 1}),
    (aten.add.Tensor, (tensor(2, 5, 3), tensor(5, 1)), {}, {0, 1, 2}),
    (aten.where.self, (tensor(5, 3) > 0, tensor(2, 1, 3), tensor(1)), {}, {0, 1, 2}),
    (aten.permute.default, (tensor(2, 5, 3), [2, 0, -2]), {}, {0, 1, 2}),
    (aten.transpose.int, (tensor(2, 5, 3), -1, 0), {}, {0, 1, 2}),
    (aten.t.default, (tensor(5, 3),), {}, {0, 1}),
]  # fmt: skip


@pytest.mark.parametrize("overload, args, kwargs, dims", CASES, ids=[str(c[0]) for c in CASES])
def test_rows(overload: Any, args: tuple, kwargs: dict, dims: set[int]) -> None:
    call = Call(overload, args, kwargs, overload(*args, **kwargs))
    assert _rows_agree(call) == dims


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled())
def test_samples(name: str) -> None:
    """The calls of torch's own tests of operators."""
    for call in spread([call for call in calls().get(name, []) if is_sound(call)], 8):
        _rows_agree(call)
        _elements_move(call)


def _node(call: Call) -> Node:
    recorder = Recorder()
    args, kwargs = pytree.tree_map_only(torch.Tensor, recorder.input, (call.args, call.kwargs))
    recorder.call(call.overload, args, kwargs)
    return recorder.importer.nodes[-1]


def _rows_agree(call: Call) -> set[int]:
    """Compares the last row of the results along each dim with what torch computes of the rows that
    the definition states; gives the dims with such rows."""
    node, dims = _node(call), set()
    rule = registry.definition_of(node).rows
    results = [call.results] if isinstance(call.results, torch.Tensor) else [*call.results]
    for dim in range(results[0].dim()) if rule is not None else ():
        size = results[0].shape[dim]
        positions = rule(node, dim)
        if positions is None or size < 2:
            continue
        names = [each.name for each in call.overload._schema.arguments]
        args, kwargs = list(call.args), dict(call.kwargs)
        for position, operand_dim in positions.items():
            select = lambda x, dim=operand_dim: x.narrow(dim, x.shape[dim] - 1, 1)  # noqa: E731
            if position < len(args):
                args[position] = pytree.tree_map_only(torch.Tensor, select, args[position])
            else:
                kwargs[names[position]] = select(kwargs[names[position]])
        if "size" in registry.definition_of(node).parameters:
            args[1] = [1 if at == dim else n for at, n in enumerate(results[0].shape)]
        rows = call.overload(*args, **kwargs)
        for row, whole in zip([rows] if isinstance(rows, torch.Tensor) else rows, results):
            expected = whole.narrow(dim, size - 1, 1)
            torch.testing.assert_close(row, expected, equal_nan=True, msg=f"{call.key} {dim}")
        dims.add(dim)
    return dims


def _elements_move(call: Call) -> None:
    """Compares the elements of a result with those of the operands that they are from."""
    node = _node(call)
    moves = registry.movement(node)
    if moves is Moves.NO or not node.results:
        return
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    operands = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    for result in pytree.tree_leaves(call.results):
        first = operands[0]
        if moves is Moves.IN_ORDER:
            assert torch.equal(result.reshape(-1), first.reshape(-1)), call.key
        elif moves >= Moves.SOME:
            assert _elements(result) <= _elements(first), call.key
            assert moves is Moves.SOME or _elements(result) == _elements(first), call.key
        else:
            operand_elements = [_elements(x.to(result.dtype)) for x in operands]
            assert _elements(result) <= set().union(*operand_elements), call.key


def _elements(x: torch.Tensor) -> set[str]:
    return set(map(repr, x.reshape(-1).tolist()))
