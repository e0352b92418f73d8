"""Linear layers of which a router chooses some for each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from purevk.dtypes import DType
from purevk.ir import Value

if TYPE_CHECKING:
    from purevk.llm.network import Network


class Experts:
    """The experts of a layer, for tokens [1, S, K].

    One token has the weights of its experts gathered. Several are sorted by expert, and each expert
    is multiplied with its rows.

    Args:
        x: the tokens.
        chosen: int64 [1, S, experts of a token].
        count: experts that there are.
    """

    def __init__(self, net: Network, x: Value, chosen: Value, count: int) -> None:
        self._net, self._count = net, count
        _, self._length, width = x.type.dims
        self._used = int(chosen.type.dims[-1])
        # What sorts several is right for one too, if their number is not known yet.
        self._is_one = isinstance(self._length, int) and self._length == 1
        rows = net.op("view.default", x, (self._length, int(width)))
        self._chosen = net.op("view.default", chosen, (self._length * self._used,))
        if self._is_one:
            self._rows = net.op("expand.default", rows, (self._used, int(width)))
            return
        _, self._order = net.aten.sort.all(self._chosen, dim=-1)
        owner = net.op("floor_divide.default", self._order, net.integer(self._used))
        self._rows = net.op("index.Tensor", rows, (owner,))
        numbers = net.constant(np.arange(count), DType.int64)
        column = net.op("unsqueeze.default", self._chosen, 1)
        counts = net.op("sum.dim_IntList", net.op("eq.Tensor", column, numbers), (0,))
        self._ends = net.op("_to_copy.default", net.op("cumsum.default", counts, 0), DType.int32)

    def linear(self, name: str, rows: int, x: Value | None = None) -> Value:
        """x [tokens * chosen, K] times NAME.weight [experts, rows, K] of the expert of each, plus
        NAME.bias [experts, rows] if there is one. x None: the tokens."""
        net = self._net
        x = self._rows if x is None else x
        columns = int(x.type.dims[-1])
        bias = None
        if net.has(f"{name}.bias"):
            own = (
                self._chosen
                if self._is_one
                else net.op("index.Tensor", self._chosen, (self._order,))
            )
            bias = net.op("index.Tensor", net.vector(f"{name}.bias", self._count, rows), (own,))
        if self._is_one:
            weights = net.expert_weights(name, self._count, rows, columns, self._chosen)
            column = net.op("unsqueeze.default", x, 2)
            y = net.op("squeeze.dim", net.op("bmm.default", weights, column), 2)
        else:
            weights = net.expert_weights(name, self._count, rows, columns, None)
            weights = net.op("transpose.int", weights, 1, 2)
            y = net.op("_grouped_mm.default", x, weights, self._ends)
        return y if bias is None else net.add(y, bias)

    def mlp(
        self,
        name: str,
        weights: Value,
        width: int,
        gated: Callable[[Network, Value, Value], Value],
    ) -> Value:
        """The MLPs of the weights NAME_gate_exps, NAME_up_exps and NAME_down_exps, joined by weights
        [1, S, chosen]. Those of the first two may be joined in NAME_gate_up_exps.

        Args:
            gated: what an expert makes of its two projections.
        """
        net = self._net
        inner = net.dims(f"{name}_down_exps.weight")[-1]
        if net.has(f"{name}_gate_up_exps.weight"):
            gate, up = net.split(self.linear(f"{name}_gate_up_exps", 2 * inner), inner, inner)
        else:
            gate, up = (self.linear(f"{name}_{part}_exps", inner) for part in ("gate", "up"))
        return self.joined(self.linear(f"{name}_down_exps", width, gated(net, gate, up)), weights)

    def joined(self, y: Value, weights: Value) -> Value:
        """The sums of what the experts of each token give, [1, S, width], by weights [1, S, chosen]."""
        net, width = self._net, int(y.type.dims[-1])
        if not self._is_one:
            y = net.op("index_copy.default", net.op("zeros_like.default", y), 0, self._order, y)
        y = net.op("view.default", y, (1, self._length, self._used, width))
        factors = net.narrow(net.op("unsqueeze.default", weights, 3))
        return net.op("sum.dim_IntList", net.op("mul.Tensor", y, factors), (2,))
