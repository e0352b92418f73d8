from __future__ import annotations
from purevk.ir import Graph
def find_attention(graph: Graph) -> Graph:
    return graph
