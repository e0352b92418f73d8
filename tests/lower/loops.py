"""A device that ends loops: as old Mesa ends all loops of a shader together after 65,535 iterations,
but after as many as a template says that it has. Where it says too few, results are wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

from purevk.graph.context import Context
from purevk.lower import lowering
from purevk.shaders import shaderc

# Every loop but those that are unrolled.
LOOP = re.compile(r"\b(?<!UNROLL )(?<!\[\[unroll\]\] )(for|while)[ \t]*\(")
_LIMIT = "PUREVK_LOOPS"
_COUNTER = """
int pv_iterations = 0;
bool pv_goes_on() { return ++pv_iterations <= %s; }
"""


def counted(text: str, limit: str) -> str:
    """GLSL whose loops end, all together, after `limit` tests of their conditions."""
    made, position = [], 0
    while match := LOOP.search(text, position):
        depth, at, semicolons = 1, match.end(), []
        while depth:
            depth += {"(": 1, ")": -1}.get(text[at], 0)
            if text[at] == ";" and depth == 1:
                semicolons.append(at)
            at += 1
        start, end = (semicolons[0] + 1, semicolons[1]) if semicolons else (match.end(), at - 1)
        condition = text[start:end].strip() or "true"
        made += [text[position:start], f" pv_goes_on() && ({condition})"]
        position = end
    made.append(text[position:])
    whole = "".join(made)
    # Before the first function; extensions may follow.
    start = whole.index("\n", whole.index("#version")) + 1
    return whole[:start] + _COUNTER % limit + whole[start:]


@contextlib.contextmanager
def ends_loops(context: Context, max_iterations: int | None = None) -> Iterator[list[Any]]:
    """All kernels that are lowered end their loops after as many iterations as they say that they
    have. Yields a list of (template, iterations), which grows.

    Args:
        max_iterations: of the device's profile.
    """
    expand, check = shaderc.expand, lowering.Lowering._check_loops
    dispatch, traits = lowering.Lowering.dispatch, context.traits
    seen: list[tuple[str, int]] = []

    def instrumented(source: str, *, macros: Any = None, **options: Any) -> str:
        text = expand(source, macros=macros, **options)
        limit = (macros or {}).get(_LIMIT)
        return text if limit is None else counted(text, limit)

    def noted(self: Any, takes: Any, *args: Any) -> int:
        seen.append((takes.template, check(self, takes, *args)))
        return seen[-1][1]

    def limited(self: Any, *args: Any, **options: Any) -> None:
        dispatch(self, *args, **options)
        last = self.dispatches[-1]
        macros = tuple(sorted({**dict(last.kernel.macros), _LIMIT: str(seen[-1][1])}.items()))
        kernel = dataclasses.replace(last.kernel, macros=macros)
        self.dispatches[-1] = dataclasses.replace(last, kernel=kernel)

    profile = traits.profile
    if max_iterations is not None:
        profile = dataclasses.replace(profile, name="short loops", max_iterations=max_iterations)
    with (
        mock.patch.object(shaderc, "expand", instrumented),
        mock.patch.object(lowering.Lowering, "_check_loops", noted),
        mock.patch.object(lowering.Lowering, "dispatch", limited),
        mock.patch.object(context, "traits", dataclasses.replace(traits, profile=profile)),
    ):
        yield seen
