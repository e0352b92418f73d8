"""Recognizes root mean square norms that are written out, as models of transformers do:
`weight * (x * rsqrt(mean(x^2) + eps))`, with quotients or powers in place of `rsqrt`, without a weight,
and with casts to float32 around it."""

from __future__ import annotations

from purevk.dtypes import DType
from purevk.ir import Graph, Node, Value
from purevk.ops.shapes import wrap
from purevk.passes.matching import Match, Matcher, Num, Pattern, Var, one_of, op
from purevk.passes.rewrite import Rewriter, changing, each_node
from purevk.tuning import DeviceTraits

_FLOATS = (DType.float32, DType.float16, DType.bfloat16)
# Of halves, squares overflow in eager torch: those norms stay as they are.
_COMPUTED = (DType.float32, DType.bfloat16)
_CAST, _MUL, _POW = "aten._to_copy.default", "aten.mul.Tensor", "aten.pow.Tensor_Tensor"


def _is_of_rows(mean: Node) -> bool:
    """Whether a mean is that of the last dim."""
    x = mean.tensor("x").type
    dims = [wrap(dim, x.rank) for dim in mean.optional_ints("dim") or ()]
    return dims == [x.rank - 1] and mean.result.type.dtype is x.dtype


def _maybe_cast(pattern: Pattern) -> Pattern:
    return one_of(pattern, op(_CAST, x=pattern))


_X = Var("x")
_SQUARE = one_of(op(_MUL, x=_X, y=_X), op(_POW, x=_X, y=2))
_MEAN = op("aten.mean.dim", x=_SQUARE, keepdim=True, when=_is_of_rows)
_SUM = op("aten.add.Tensor", x=_MEAN, y=Num("eps"), alpha=1)
_FACTOR = one_of(op("aten.rsqrt.default", x=_SUM), op(_POW, x=_SUM, y=-0.5))
_QUOTIENT = op("aten.div.Tensor", x=_X, y=op("aten.sqrt.default", x=_SUM))
_SCALED = _maybe_cast(one_of(op(_MUL, x=_X, y=_FACTOR, swap=True), _QUOTIENT))
_NORM = one_of(_SCALED, _maybe_cast(op(_MUL, x=Var("weight"), y=_SCALED, swap=True)))


def find_rms_norm(graph: Graph, traits: DeviceTraits) -> Graph:
    """Replaces a norm over the last dim, computed in float32 or bfloat16, by one node."""
    if all(node.op != "aten.mean.dim" for node in graph.nodes):
        return graph
    matcher, written = Matcher(graph), changing(graph.nodes)
    norms: dict[Value, tuple[Value, Match]] = {}
    inside: set[Node] = set()
    # From the end on: what a weight multiplies, and what is cast, is a norm too.
    for node in reversed(graph.nodes):
        if node in inside or len(node.results) != 1:
            continue
        match = matcher.match(_NORM, node.result)
        x = None if match is None else _normalized(matcher, match, node.result)
        if match is not None and x is not None and not written & {x, match.variables.get("weight")}:
            norms[node.result] = x, match
            inside.update(match.nodes)

    def visit(rewriter: Rewriter, node: Node) -> Value | None:
        if not node.results or node.results[0] not in norms:
            return None
        x, match = norms[node.results[0]]
        weight = rewriter.resolve(match.variables.get("weight"))
        dims = x.type.dims[-1:]
        return rewriter.aten.rms_norm(rewriter.resolve(x), dims, weight, match.number("eps"))

    return each_node(graph, visit) if norms else graph


def _normalized(matcher: Matcher, match: Match, result: Value) -> Value | None:
    """What a norm reads, or what this is a cast of, if it has the type of the result; None: the norm
    rounds its elements to another type on purpose, or no kernel takes it."""
    x, dtype = match.value("x"), result.type.dtype
    between = {x.type.dtype, *(node.result.type.dtype for node in match.nodes)}
    if x.type.dtype not in _COMPUTED or not between <= {DType.float32, dtype}:
        return None
    if x.type.dtype is not dtype:
        cast = matcher.producer(x, _CAST)
        x = x if cast is None else cast.tensor("x")
    weight = match.variables.get("weight")
    if isinstance(weight, Value):
        if weight.type.dtype not in _FLOATS or weight.type.dims != x.type.dims[-1:]:
            return None
    return x if x.type.dtype in _FLOATS and x.type == result.type else None
