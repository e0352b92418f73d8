"""Which weights that several methods share are in the order of fragments. Methods are lowered one by one,
so the answer depends on the weight, and not on the rows that a method multiplies by it."""

from __future__ import annotations

from purevk.ir import Graph, Value
from purevk.ir import dims as _dims
from purevk.ops.matmul.fragments import BLOCK, has_fragments
from purevk.ops.matmul.matmul import NAME as MATMUL
from purevk.passes.rewrite import changing, constants_of
from purevk.tuning import DeviceTraits

# Of the terms: tiles for each number of rows take such a multiple. With fewer, how a weight is dense
# depends on the rows (`prefers_columns`), so that methods would make two copies of it.
_TERMS, _LEAST_TERMS = 64, 512


def are_shared(graph: Graph) -> bool:
    """Whether other methods or sub-graphs may read the weights of a graph with other numbers of rows. A
    model with states has, or may get, a method for prompts and one for tokens."""
    return graph.shares_weights or bool(graph.states) or len(list(graph.nested())) > 1


class BlockWeights:
    """The weights of a graph that are in the order of fragments, if other methods share them.

    All others stay in rows. So does a weight that anything but a matmul reads, such as an embedding
    that is tied to the head: the device would hold it twice.
    """

    def __init__(self, graph: Graph, traits: DeviceTraits) -> None:
        self._graph, self._traits = graph, traits
        self._made, self._users = graph.producers(), graph.users()
        self._outputs, self._written = graph.output_values(), changing(graph.nodes)
        self._constant = constants_of(graph) if are_shared(graph) else set()
        self._known: dict[Value, bool] = {}

    def takes(self, weight: Value) -> bool:
        """Whether a right operand [terms, columns] is in the order of fragments."""
        if weight not in self._known:
            self._known[weight] = self._fits(weight) and self._is_multiplied(weight)
        return self._known[weight]

    def _fits(self, weight: Value) -> bool:
        type = weight.type
        if weight not in self._constant or type.rank != 2 or not type.is_static:
            return False
        terms, columns = (_dims.specialize(size) for size in type.dims)
        return (
            terms % _TERMS == 0
            and terms >= _LEAST_TERMS
            and columns % (2 * BLOCK) == 0
            and has_fragments(self._traits, type.dtype)
        )

    def _is_multiplied(self, weight: Value) -> bool:
        """Whether matmuls alone read what a weight is made of."""
        origins, waiting = {weight}, [weight]
        while waiting:
            node = self._made.get(waiting.pop())
            new = (
                []
                if node is None
                else [operand for operand in node.inputs if operand not in origins]
            )
            origins.update(new)
            waiting += new
        reached, waiting = set(origins), list(origins)
        while waiting:
            value = waiting.pop()
            if value in self._outputs or value in self._written:
                return False
            for user in self._users.get(value, ()):
                if all(result in self._constant for result in user.results) and user.results:
                    new = [result for result in user.results if result not in reached]
                    reached.update(new)
                    waiting += new
                elif user.op != MATMUL or value is not user.tensor("b"):
                    return False
        return True
