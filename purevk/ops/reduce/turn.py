"""How a norm of heads rotates these as it stores them: the macros, buffers and parameters of
`norm.comp` with TURNED."""

from __future__ import annotations

from dataclasses import dataclass

from purevk.dtypes import DType
from purevk.ir import Layout, Node, Size, TensorType
from purevk.lower.copies import dense_operand
from purevk.lower.lowering import Lowering, Operand
from purevk.ops.registry import ShapeError


@dataclass(frozen=True)
class Rows:
    """Where heads are stored: position s of a batch at position `index[s]` of `cache`.

    Attributes:
        cache: [B, T, H, D], the elements of a head one after the other.
        index: [S], dense.
    """

    cache: Operand
    index: Operand


@dataclass(frozen=True)
class Turn:
    """How heads [B, S, H, D] rotate that were normalized: element i and element D / 2 + i by the angles
    i of their position.

    Attributes:
        cos, sin: [S, D], dense. Both have one dtype.
        heads: H.
        rows: where they are stored; None: [B, S, H, D], dense.
    """

    cos: Operand
    sin: Operand
    heads: Size
    rows: Rows | None = None

    @property
    def aligned(self) -> list[Size]:
        """What is a multiple of 4 if four elements are read and written together."""
        steps = [] if self.rows is None else self.rows.cache.strides[:3]
        return [self.cos.offset, self.sin.offset, *steps]

    @property
    def macros(self) -> dict[str, int | str]:
        """Those of the template."""
        macros: dict[str, int | str] = {"TURNED": 1, "T_ANGLE": self.cos.dtype.glsl}
        if self.rows is not None:
            words = 2 if self.rows.index.dtype is DType.int64 else 1
            macros |= {"TURNED": 2, "INDEX_WORDS": words}
        return macros

    @property
    def buffers(self) -> dict[str, Operand]:
        """Those behind the result."""
        buffers = {"cos": self.cos, "sin": self.sin}
        return buffers if self.rows is None else {**buffers, "index": self.rows.index}

    @property
    def params(self) -> dict[str, Size]:
        """Those that other norms do not have, and `out_row`."""
        params: dict[str, Size] = {"heads": self.heads, "positions": self.cos.dims[0]}
        if self.rows is not None:
            cache = self.rows.cache
            params |= {
                "out_positions": cache.dims[1],
                "out_batch": cache.strides[0],
                "out_position": cache.strides[1],
                "out_row": cache.strides[2],
            }
        return params


def turn_of(lowering: Lowering, node: Node) -> Turn | None:
    """How a node of `purevk.norm` rotates its x [B, S, H, D], and where it stores the result."""
    if node.arg("cos") is None:
        return None
    _, positions, heads, width = node.tensor("x").type.dims
    require_angles(lowering, node, positions)
    rows, angles = None, list[Operand]()
    for name in ("cos", "sin"):
        table = dense_operand(lowering, node.tensor(name))
        layout = Layout(table.offset + node.size("start") * width, (width, 1))
        angles.append(Operand(table.storage, layout, TensorType(table.dtype, (positions, width))))
    if node.arg("state") is not None:
        cache = lowering.operand(node.tensor("state"))
        cache = cache if node.int("dim") == 1 else heads_last(cache)
        rows = Rows(cache, dense_operand(lowering, node.tensor("index")))
    cos, sin = angles
    return Turn(cos, sin, heads, rows)


def check_turn(
    x: TensorType,
    cos: TensorType,
    sin: TensorType | None,
    cache: TensorType | None,
    dim: int,
    index: TensorType | None,
) -> None:
    """Raises ShapeError unless heads can rotate by angles, and become positions of a cache."""
    if x.rank != 4 or cos.rank != 2 or cos.dims[1] != x.dims[3] or x.dims[3] % 2 or cos != sin:
        raise ShapeError(f"cannot rotate {x} by angles {cos} and {sin}")
    if cache is None or index is None:
        return
    batch, positions, heads, width = x.dims
    others = [cache.dims[d] for d in range(cache.rank) if d != dim]
    if others != [batch, heads, width] or dim not in (1, 2) or index.dims != (positions,):
        raise ShapeError(f"cannot write {x} to rows {index} of {cache}")


def require_angles(lowering: Lowering, node: Node, rows: Size) -> None:
    """Has it checked that `rows` rows from `start` on are in the tables `cos` and `sin` of a node."""
    start = node.size("start")
    lowering.require(
        start + rows,
        node.tensor("cos").type.dims[0],
        f"rows from {start} on of {node.source} are outside its table of angles",
        "{left} rows are needed, the table has {right}",
        "pass an earlier position, or export a longer table",
    )


def heads_last(cache: Operand) -> Operand:
    """A cache [B, G, T, D] as [B, T, G, D]."""
    order = (0, 2, 1, 3)
    strides, dims = (tuple(each[d] for d in order) for each in (cache.strides, cache.dims))
    return Operand(cache.storage, Layout(cache.offset, strides), cache.type.with_dims(dims))
