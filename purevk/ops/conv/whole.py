"""Convolutions of integers: each invocation adds up an element of the result, in the dtype of the
tensors, so that sums wrap around as in torch."""

from __future__ import annotations

from dataclasses import replace

from purevk.ir import Node, Value
from purevk.ops.builder import Builder
from purevk.ops.fold import Fold, Loop, folded


def expand_whole(builder: Builder, node: Node) -> Value:
    """`aten.convolution` of integers, of one to three dims."""
    x, weight, bias = node.tensor("x"), node.tensor("weight"), node.optional_tensor("bias")
    count = weight.type.rank - 2
    stride, padding, dilation = (
        node.ints(name, count) for name in ("stride", "padding", "dilation")
    )
    batched = x.type.rank == count + 2
    channel = "i1" if batched else "i0"
    dims = range(count)
    at = "i0, " if batched else ""
    first = 2 if batched else 1
    kernel = "".join(f", k{d}" for d in dims)
    if node.bool("transposed"):
        group = f"{channel} / w_size_1"
        places = [
            f"int t{d} = i{first + d} + {padding[d]} - k{d} * {dilation[d]}, a{d} = t{d} / {stride[d]};"
            for d in dims
        ]
        inside = " && ".join(
            f"t{d} >= 0 && t{d} % {stride[d]} == 0 && a{d} < x_size_{first + d}" for d in dims
        )
        factor = f"W(from + c, {channel} % w_size_1{kernel})"
    else:
        group = f"{channel} / (w_size_0 / {node.int('groups')})"
        places = [
            f"int a{d} = i{first + d} * {stride[d]} - {padding[d]} + k{d} * {dilation[d]};"
            for d in dims
        ]
        inside = " && ".join(f"a{d} >= 0 && a{d} < x_size_{first + d}" for d in dims)
        factor = f"W({channel}, c{kernel})"
    element = f"X({at}from + c{''.join(f', a{d}' for d in dims)})"
    taps = [
        Loop(f"k{d}", "0", f"w_size_{d + 2}", weight.type.dims[d + 2], f"w_size_{d + 2}")
        for d in dims
    ]
    taps[-1] = replace(taps[-1], enter=f"{' '.join(places)} if (!({inside})) continue;")
    some = x.type.dims[first - 1] // node.int("groups")
    fold = Fold(
        (*taps, Loop("c", "0", "some", some, "some")),
        f"r += {element} * {factor};",
        start=f"r = {f'B({channel})' if bias is not None else 'T_R(0)'};",
        empty="r = T_R(0);",
        before=f"int from = {group} * some;",
    )
    inputs = {"X": x, "W": weight, **({} if bias is None else {"B": bias})}
    return folded(builder, fold, inputs, node.result.type, numbers={"some": some})[0]
