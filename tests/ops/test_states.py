"""States that are read and written in one call: each read sees what the writes before it left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from purevk.dtypes import DType
from purevk.ir import TensorType, Value
from purevk.program import Program
from tests.ops.harness import Recorder, aten, context, tensor

pytestmark = pytest.mark.device


def store(recorder: Recorder, state: Value, value: Value) -> None:
    recorder.importer.emit("purevk.store", (state, value), [], [], "store")


def clone(r: Recorder, x: Value) -> Value:
    return r.call(aten.clone.default, (x,), {})


def add(r: Recorder, x: Value, y: Any) -> Value:
    return r.call(aten.add.Tensor, (x, y), {})


def view(r: Recorder, x: Value, *sizes: int) -> Value:
    return r.call(aten.view.default, (x, list(sizes)), {})


def turned(r: Recorder, x: Value) -> Value:
    return r.call(aten.permute.default, (x, [1, 0]), {})


def linear(r: Recorder, x: Value, y: Value) -> Value:
    return r.call(aten.mm.default, (x, y), {})


W = tensor(4, 4, seed=9)
# (graph, what it means): a function of the importer, x and state, and one of tensors x and state
# that gives the outputs and the new state. x and the state are float32[4, 4].
FORMS: dict[str, tuple[Callable, Callable]] = {
    "old value returned": (
        lambda r, x, s: ((o := clone(r, s)), store(r, s, x), [o])[-1],
        lambda x, s: ([s], x),
    ),
    "state itself returned before": (
        lambda r, x, s: (store(r, s, x), [s])[-1],
        lambda x, s: ([x], x),
    ),
    "view of the old value": (
        lambda r, x, s: ((o := clone(r, view(r, s, 16))), store(r, s, x), [o])[-1],
        lambda x, s: ([s.reshape(16)], x),
    ),
    "sum after the write": (
        lambda r, x, s: ((o := clone(r, s)), store(r, s, x), [add(r, o, s)])[-1],
        lambda x, s: ([s + x], x),
    ),
    "old sum used after the write": (
        lambda r, x, s: ((o := add(r, s, 1)), store(r, s, x), [add(r, o, 2)])[-1],
        lambda x, s: ([s + 3], x),
    ),
    "old view used after the write": (
        lambda r, x, s: ((o := add(r, turned(r, s), 1)), store(r, s, x), [add(r, o, 2)])[-1],
        lambda x, s: ([s.t() + 3], x),
    ),
    "old matmul, epilogue after the write": (
        lambda r, x, s: ((o := linear(r, x, s)), store(r, s, x), [add(r, o, 2)])[-1],
        lambda x, s: ([x @ s + 2], x),
    ),
    "old matmul of a view, epilogue after": (
        lambda r, x, s: ((o := linear(r, x, turned(r, s))), store(r, s, x), [add(r, o, 2)])[-1],
        lambda x, s: ([x @ s.t() + 2], x),
    ),
    "epilogue that reads the new state": (
        lambda r, x, s: ((o := linear(r, x, x)), store(r, s, o), [add(r, o, s)])[-1],
        lambda x, s: ([x @ x * 2], x @ x),
    ),
    "equal reads around a write": (
        lambda r, x, s: ((a := add(r, s, 1)), store(r, s, x), [a, add(r, s, 1)])[-1],
        lambda x, s: ([s + 1, x + 1], x),
    ),
    "equal reads of a view around a write": (
        lambda r, x, s: (
            (a := add(r, turned(r, s), 1)),
            store(r, s, x),
            [a, add(r, turned(r, s), 1)],
        )[-1],
        lambda x, s: ([s.t() + 1, x.t() + 1], x),
    ),
    "updated twice": (
        lambda r, x, s: (store(r, s, add(r, s, x)), store(r, s, add(r, s, x)), [add(r, s, 0.5)])[
            -1
        ],
        lambda x, s: ([s + 2 * x + 0.5], s + 2 * x),
    ),
    "written with its own transpose": (
        lambda r, x, s: (store(r, s, turned(r, s)), [add(r, s, x)])[-1],
        lambda x, s: ([s.t() + x], s.t()),
    ),
    "swapped through a matmul": (
        lambda r, x, s: (store(r, s, linear(r, s, x)), [clone(r, s)])[-1],
        lambda x, s: ([s @ x], s @ x),
    ),
    "never read": (lambda r, x, s: (store(r, s, x), [add(r, x, 1)])[-1], lambda x, s: ([x + 1], x)),
    "x written and returned": (lambda r, x, s: (store(r, s, x), [x])[-1], lambda x, s: ([x], x)),
    "half of it": (
        lambda r, x, s: (
            (o := r.call(aten.slice.Tensor, (s, 0, 2, 4), {})),
            (n := add(r, o, 1)),
            store(r, s, x),
            [n],
        )[-1],
        lambda x, s: ([s[2:] + 1], x),
    ),
    "shifted": (
        lambda r, x, s: (
            store(
                r,
                s,
                r.call(
                    aten.cat.default,
                    (
                        [
                            r.call(aten.slice.Tensor, (s, 0, 1, 4), {}),
                            r.call(aten.slice.Tensor, (x, 0, 0, 1), {}),
                        ],
                    ),
                    {},
                ),
            ),
            [clone(r, s)],
        )[-1],
        lambda x, s: ([torch.cat([s[1:], x[:1]])], torch.cat([s[1:], x[:1]])),
    ),
    "two matmuls around a write": (
        lambda r, x, s: (
            (w := r.constant(W)),
            (v := r.constant(W + 1)),
            (a := linear(r, s, w)),
            store(r, s, x),
            [a, linear(r, s, v)],
        )[-1],
        lambda x, s: ([s @ W, x @ (W + 1)], x),
    ),
    "attention around a write": (
        lambda r, x, s: (
            (o := linear(r, x, turned(r, s))),
            store(r, s, x),
            [
                linear(
                    r,
                    r.call(
                        aten._softmax.default,
                        (r.call(aten.mul.Tensor, (o, 0.5), {}), -1, False),
                        {},
                    ),
                    s,
                )
            ],
        )[-1],
        lambda x, s: ([torch.softmax(x @ s.t() * 0.5, -1) @ x], x),
    ),
    "cast there and back": (
        lambda r, x, s: (
            (a := r.call(aten._to_copy.default, (s,), {"dtype": torch.float64})),
            store(r, s, x),
            [r.call(aten._to_copy.default, (a,), {"dtype": torch.float32})],
        )[-1],
        lambda x, s: ([s], x),
    ),
    "softmax on the way": (
        lambda r, x, s: (
            (o := r.call(aten._softmax.default, (s, -1, False), {})),
            store(r, s, add(r, s, x)),
            [add(r, o, s)],
        )[-1],
        lambda x, s: ([torch.softmax(s, -1) + s + x], s + x),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_state(name):
    graph, meaning = FORMS[name]
    recorder = Recorder()
    x = recorder.input(tensor(4, 4))
    state = recorder.importer.state(None, TensorType(DType.float32, (4, 4)))
    made = recorder.importer.finish(graph(recorder, x, state))
    with Program("test", {"forward": lambda sizes: made}, context()) as program:
        now = torch.zeros(4, 4)
        for call in range(3):
            given = tensor(4, 4, seed=call)
            wanted, now = meaning(given, now)
            have = program.forward(given)
            have = have if isinstance(have, tuple) else (have,)
            for a, b in zip(have, wanted):
                torch.testing.assert_close(
                    a, b, rtol=1e-5, atol=1e-4, msg=lambda text: f"{name}, call {call}: {text}"
                )
        program.reset_state()
        (wanted, _), have = meaning(given, torch.zeros(4, 4)), program.forward(given)
        torch.testing.assert_close(
            have[0] if isinstance(have, tuple) else have, wanted[0], rtol=1e-5, atol=1e-4
        )
