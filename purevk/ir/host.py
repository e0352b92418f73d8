"""Nodes that the host runs: their operators have a schema, but no definition."""

from __future__ import annotations

from purevk.ir import schema
from purevk.ir.arguments import Arg

HOST = "purevk.host"  # runs an operator on the CPU
SEED = "purevk.seed"  # draws a seed at each run


def _host(name: str, reason: str, args: tuple[Arg, ...]) -> None:
    """The schema of `HOST`: the operator and its arguments, and why the device does not run it."""


def _seed(generator: int) -> None:
    """The schema of `SEED`: the number of a generator, see `purevk.generators`. The result is an
    int32[2]: the seed's lower and upper 32 bits."""


schema.declare(HOST, _host)
schema.declare(SEED, _seed)
