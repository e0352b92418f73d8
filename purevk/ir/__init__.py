"""The intermediate representation: sizes, types, graphs, their grammar and their printed form. No
Vulkan, no torch."""

from purevk.ir.arguments import Arg, Attribute, Scalar
from purevk.ir.dims import Dim, Size
from purevk.ir.graph import (
    BorrowedConstant,
    Constant,
    FixedInput,
    Graph,
    Input,
    Label,
    Node,
    ReadLog,
    Sealed,
    SymbolSource,
    dims_in,
    map_leaves,
    map_values,
    values_in,
)
from purevk.ir.guards import Guard, GuardLog
from purevk.ir.relations import Relation
from purevk.ir.signature import Parameter, Signature, StructureError, Tree
from purevk.ir.symbols import Bound, Symbol
from purevk.ir.types import Layout, TensorType, Value, contiguous_strides

__all__ = [
    "Arg",
    "Attribute",
    "BorrowedConstant",
    "Bound",
    "Constant",
    "Dim",
    "FixedInput",
    "Graph",
    "Guard",
    "GuardLog",
    "Input",
    "Label",
    "Layout",
    "Node",
    "Parameter",
    "ReadLog",
    "Relation",
    "Scalar",
    "Sealed",
    "Signature",
    "Size",
    "StructureError",
    "Symbol",
    "SymbolSource",
    "TensorType",
    "Tree",
    "Value",
    "contiguous_strides",
    "dims_in",
    "map_leaves",
    "map_values",
    "values_in",
]
