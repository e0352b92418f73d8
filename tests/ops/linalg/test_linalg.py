"""Products of vectors and matrices, distances, and recurrent layers against torch."""

from __future__ import annotations

import math

import pytest
import torch

from tests.ops.harness import Case, aten, check, program_of, tensor

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore::UserWarning")]


def test_products():
    a, v, w = tensor(5, 7), tensor(7), tensor(5)
    batch_a, batch_b = tensor(4, 5, 7), tensor(4, 7, 3)
    cases = [
        Case(torch.dot, (v, tensor(7, seed=1))),
        Case(torch.mv, (a, v)),
        Case(torch.outer, (v, w)),
        Case(torch.trace, (a,)),
    ]
    for kwargs in ({}, {"beta": 0.5, "alpha": -2.0}, {"beta": 0}):
        cases += [
            Case(torch.addmv, (w, a, v), kwargs),
            Case(torch.baddbmm, (tensor(4, 5, 3), batch_a, batch_b), kwargs),
        ]
        cases += [
            Case(torch.addbmm, (tensor(5, 3), batch_a, batch_b), kwargs),
            Case(torch.addr, (tensor(7, 5), v, w), kwargs),
        ]
    cases += [
        Case(torch.dot, (tensor(7, dtype=torch.int64), tensor(7, dtype=torch.int64, seed=1))),
        Case(torch.baddbmm, (tensor(1, 1, 3), batch_a, batch_b)),
    ]
    cases += [
        Case(torch.outer, (tensor(4, dtype=torch.float16), tensor(3, dtype=torch.float16))),
        Case(torch.trace, (tensor(4, 3, dtype=torch.int32),)),
    ]
    cases += [
        Case(torch.einsum, ("bij,bkj->bik", batch_a, tensor(4, 6, 7))),
        Case(torch.tensordot, (batch_a, batch_b, ([0, 2], [0, 1]))),
    ]
    for case in cases:
        case.atol = 1e-5 if case.atol is None else case.atol
    check(cases)


def test_cross_products():
    cases = [
        Case(torch.linalg.cross, (tensor(4, 3, 5), tensor(1, 3, 5, seed=1)), {"dim": 1}),
        Case(torch.cross, (tensor(4, 3), tensor(4, 3, seed=1))),
    ]
    cases += [
        Case(
            torch.linalg.cross,
            (tensor(2, 3, dtype=torch.int32), tensor(2, 3, dtype=torch.int32, seed=2)),
        )
    ]
    check(cases)


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 3.5, math.inf])
def test_distances(p):
    x, y = tensor(2, 7, 5), tensor(2, 4, 5, seed=1)
    cases = [
        Case(aten._cdist_forward.default, (x, y, p, None), atol=1e-5),
        Case(torch.cdist, (x, tensor(6, 5)), {"p": p}, atol=1e-5),
    ]
    x, y = tensor(3, 41, 24), tensor(3, 70, 24, seed=1)
    x[1, 2, 3] = 0.0 if p == math.inf else torch.nan  # which torch does not see among the largest
    cases += [
        Case(aten._cdist_forward.default, (x, y, p, 2), atol=1e-5),
        Case(aten._cdist_forward.default, (x[0, :, :7], y[0, :, :7], p, 2), atol=1e-5),
    ]
    cases += [
        Case(
            lambda x, y: aten._cdist_forward.default(x, y.mT, p, 2),
            (x[0], y[0].mT.contiguous()),
            atol=1e-5,
        )
    ]
    cases += [Case(aten._pdist_forward.default, (tensor(n, 5), p), atol=1e-5) for n in (2, 3, 41)]
    check(cases)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_layers(kind):
    torch.manual_seed(0)
    cases = []
    for kwargs in (
        {},
        {"num_layers": 2, "bidirectional": True},
        {"batch_first": True, "bias": False},
    ):
        layer = getattr(torch.nn, kind)(6, 5, **kwargs).eval()
        cases.append((layer, tensor(4, 3, 6)))
    cases.append((getattr(torch.nn, kind)(6, 5).eval(), tensor(4, 6)))
    if kind == "LSTM":
        cases.append((torch.nn.LSTM(6, 5, proj_size=3, num_layers=2).eval(), tensor(4, 3, 6)))
    for layer, x in cases:
        names, params = zip(*layer.named_parameters())

        def run(x, *params, layer=layer, names=names):
            return torch.func.functional_call(layer, dict(zip(names, params)), (x,))

        with torch.no_grad():
            check(Case(run, (x, *(p.detach() for p in params)), atol=1e-5, name=f"{layer}"))


def test_cells():
    x, h, c = tensor(3, 6), tensor(3, 5), tensor(3, 5, seed=1)
    cases = []
    for cell, gates in (
        (torch.lstm_cell, 4),
        (torch.gru_cell, 3),
        (torch.rnn_tanh_cell, 1),
        (torch.rnn_relu_cell, 1),
    ):
        params = [
            tensor(gates * 5, 6),
            tensor(gates * 5, 5),
            tensor(gates * 5),
            tensor(gates * 5, seed=1),
        ]
        state = (h, c) if gates == 4 else h
        cases += [
            Case(cell, (x, state, *params), atol=1e-5),
            Case(cell, (x, state, *params[:2]), atol=1e-5),
        ]
    check(cases)


def test_dynamic_sizes():
    def run(x):
        return torch.cdist(x, x * 2), torch.outer(x[0], x[1]), torch.addmv(x[:, 0], x, x[0])

    with program_of(run, (tensor(11, 13),), dynamic=True) as program:
        for size in [(11, 13), (5, 7), (2, 13)]:
            x = tensor(*size)
            for have, want in zip(program.forward(x), run(x)):
                torch.testing.assert_close(have, want, rtol=1e-5, atol=2e-5)
