"""Drawn modules, signatures and dynamic dims: each call gives what eager torch gives, or raises a
typed error.

`PUREVK_TEST_EXAMPLES=500` draws as many new examples for each slow test, other ones in each run.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

import purevk  # noqa: E402
from tests.program.signatures.drawn_models import (  # noqa: E402
    DECIDING,
    SIZES,
    Calls,
    Deciding,
    NestedCalls,
    Shapes,
    assert_no_difference,
    calls,
    cloned,
    nested_calls,
    outcome_of,
    shapes,
    tensor,
)

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore")]
SETTINGS = {
    "deadline": None,
    "database": None,
    "derandomize": True,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.generate],  # each example takes an export, so they are not made smaller
}
EXAMPLES = os.environ.get("PUREVK_TEST_EXAMPLES")
FEW = settings(max_examples=5, **SETTINGS)
MANY = settings(max_examples=int(EXAMPLES or 20), **{**SETTINGS, "derandomize": EXAMPLES is None})
OTHERS = st.lists(SIZES, min_size=3, max_size=5)


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """torch.export logs what it specializes on."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


# -- sizes ---------------------------------------------------------------------------------------
def _from_file(program: purevk.Program, folder: Path) -> purevk.Program:
    path = folder / "drawn.pvk"
    with program:
        program.save(path)
    return purevk.load(path)


def _again(exported: Any) -> Any:
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    return torch.export.load(file)


def _check_sizes(
    way: str, folder: Path, model: Deciding, shape: Shapes, others: list[tuple[int, int]]
) -> None:
    example = tensor(shape.sizes[0]), tensor(shape.sizes[1], 1)
    if outcome_of(lambda: model(*cloned(example))).error is not None:
        return
    if way == "dynamo":
        torch._dynamo.reset()
        _compare(torch.compile(model, backend="purevk"), model, None, shape, others, way)
        return
    try:
        exported = torch.export.export(model, example, dynamic_shapes=shape.spec)
    except Exception:  # of many classes: torch refuses the model or the dims
        return
    if way == "pt2":
        again = outcome_of(lambda: _again(exported))
        if again.error is not None:
            return  # torch itself cannot save the program
        exported = again.result
    makers: dict[str, Callable[[], purevk.Program]] = {
        "module": lambda: purevk.compile(model, example, shape.spec),
        "exported": lambda: purevk.compile(exported),
        "pvk": lambda: _from_file(purevk.compile(exported), folder),
        "pvk of a module": lambda: _from_file(purevk.compile(model, example, shape.spec), folder),
        "pt2": lambda: purevk.compile(exported),
    }
    made = outcome_of(makers[way])
    if made.error is not None:
        assert isinstance(made.error, purevk.PurevkError), (model, shape, made.error)
        return
    with made.result as program:
        _compare(program, model, exported, shape, others, way)


def _compare(
    call: Any, model: Any, exported: Any, shape: Shapes, others: list[tuple[int, int]], way: str
) -> None:
    declared = ("auto", "dynamic", "bounded auto", "named")
    for sizes in (shape.sizes, *others):
        args = tensor(sizes[0], 5), tensor(sizes[1], 7)
        wanted = outcome_of(lambda args=args: model(*cloned(args)))
        if exported is not None and way != "module" and min(sizes) < 2:
            # torch traces for sizes of 2 and more; smaller ones in bounds follow the trace.
            traced = outcome_of(lambda args=args: exported.module()(*cloned(args)))
            wanted = wanted if traced.error is not None else traced
        inside = all(
            low <= size and (high is None or size <= high)
            for size, (low, high) in zip(sizes, shape.bounds)
        )
        must_run = sizes == shape.sizes or (way == "module" and inside and shape.form in declared)
        # A loop over a rounded half of a half: torch's guards hold for the example alone, and
        # are refused, docs/limits.md.
        must_run = must_run and not {"round", "loop"} <= {part[0] for part in model.parts}
        got = outcome_of(lambda args=args: call(*cloned(args)))
        if way == "dynamo" and got.error is not None and wanted.error is not None:
            continue  # dynamo raises errors of its own for what eager torch refuses
        assert_no_difference(got, wanted, must_run and way != "dynamo", (model, shape, sizes))


def _sizes(way: str, folder: Path) -> Callable[[], None]:
    return given(DECIDING, shapes(), OTHERS)(
        lambda model, shape, others: _check_sizes(way, folder, model, shape, others)
    )


@pytest.mark.parametrize("way", ["module", "exported", "pvk", "pvk of a module", "pt2", "dynamo"])
def test_sizes(way: str, tmp_path: Path) -> None:
    few = settings(FEW, max_examples=2) if way == "dynamo" else FEW
    few(_sizes(way, tmp_path))()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["module", "exported", "pvk", "pvk of a module", "pt2", "dynamo"])
def test_many_sizes(way: str, tmp_path: Path) -> None:
    MANY(_sizes(way, tmp_path))()


# -- arguments -----------------------------------------------------------------------------------
def _check_arguments(way: str, folder: Path, drawn: Calls) -> None:
    model = drawn.model
    args, kwargs = drawn.example
    try:
        exported = torch.export.export(model, args, kwargs)
    except Exception:
        return
    made = outcome_of(
        lambda: (
            purevk.compile(model, args, kwargs=kwargs)
            if way == "module"
            else purevk.compile(exported)
            if way == "exported"
            else _from_file(purevk.compile(model, args, kwargs=kwargs), folder)
        )
    )
    if made.error is not None:
        # torch fails on a written tensor that is given twice.
        assert way == "exported", (drawn, made.error)
        assert isinstance(made.error, purevk.PurevkError), (drawn, made.error)
        return
    with made.result as program:
        for number, (args, kwargs) in enumerate((drawn.example, *drawn.others)):
            reference = exported.module() if way == "exported" and number else model
            theirs, ours = cloned((args, kwargs)), cloned((args, kwargs))
            wanted = outcome_of(lambda: reference(*theirs[0], **theirs[1]))
            if wanted.error is not None and reference is not model:
                # An exported program takes what torch refuses only where the module takes it.
                theirs = cloned((args, kwargs))
                wanted = outcome_of(lambda: model(*theirs[0], **theirs[1]))
            got = outcome_of(lambda: program(*ours[0], **ours[1]))
            what = (drawn, args, kwargs)
            assert_no_difference(got, wanted, number == 0, what)
            if got.error is None:
                assert_no_difference(
                    outcome_of(lambda: ours), outcome_of(lambda: theirs), True, what
                )


@pytest.mark.slow
@pytest.mark.parametrize("way", ["module", "exported", "pvk"])
def test_arguments(way: str, tmp_path: Path) -> None:
    FEW(given(calls())(lambda drawn: _check_arguments(way, tmp_path, drawn)))()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["module", "exported", "pvk"])
def test_many_arguments(way: str, tmp_path: Path) -> None:
    MANY(given(calls())(lambda drawn: _check_arguments(way, tmp_path, drawn)))()


# -- nested inputs of dynamic sizes --------------------------------------------------------------
def _as_pte(exported: Any) -> purevk.Program:
    """An exported program through executorch's flow."""
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    from purevk.export import PurevkPartitioner

    edge = to_edge_transform_and_lower(
        exported,
        partitioner=[PurevkPartitioner()],
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    return purevk.load(edge.to_executorch().buffer)


def _check_nested(way: str, folder: Path, drawn: NestedCalls) -> None:
    model, (args, kwargs) = drawn.model, cloned(drawn.example)
    if outcome_of(lambda: model(*cloned(args), **cloned(kwargs))).error is not None:
        return
    if way == "dynamo":
        torch._dynamo.reset()
        _compare_nested(torch.compile(model, backend="purevk"), None, drawn, way)
        return
    try:
        exported = torch.export.export(model, args, kwargs, dynamic_shapes=drawn.spec)
    except Exception:  # of many classes: torch refuses the model or the dims
        return
    if way == "pt2" and outcome_of(lambda: _again(exported)).error is not None:
        return  # torch itself cannot save the program
    makers: dict[str, Callable[[], purevk.Program]] = {
        "module": lambda: purevk.compile(model, args, drawn.spec, kwargs=kwargs),
        "exported": lambda: purevk.compile(exported),
        "pvk": lambda: _from_file(purevk.compile(exported), folder),
        "pt2": lambda: purevk.compile(_again(exported)),
        "pte": lambda: _as_pte(exported),
    }
    made = outcome_of(makers[way])
    if made.error is not None:
        assert isinstance(made.error, purevk.PurevkError) or way == "pte", (drawn, made.error)
        return
    with made.result as program:
        _compare_nested(program, exported, drawn, way)


def _compare_nested(call: Any, exported: Any, drawn: NestedCalls, way: str) -> None:
    for number, (args, kwargs) in enumerate((drawn.example, *drawn.others)):
        theirs, ours = cloned((args, kwargs)), cloned((args, kwargs))
        wanted = outcome_of(lambda: drawn.model(*theirs[0], **theirs[1]))
        sizes = [x.shape[0] for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if exported is not None and way != "module" and min(sizes) < 2:
            traced = cloned((args, kwargs))
            other = outcome_of(lambda: exported.module()(*traced[0], **traced[1]))
            if other.error is None:
                wanted, theirs = other, traced
        got = outcome_of(lambda: call(*ours[0], **ours[1]))
        what = (drawn, way, sizes)
        if way == "dynamo" and got.error is not None and wanted.error is not None:
            continue  # dynamo raises errors of its own for what eager torch refuses
        if way in ("pvk", "pte"):  # classes come as dicts from a file
            wanted.result, got.result = tree_leaves(wanted.result), tree_leaves(got.result)
        assert_no_difference(got, wanted, number == 0 and way in ("module", "exported"), what)
        if got.error is None:
            same = outcome_of(lambda: tree_leaves(ours)), outcome_of(lambda: tree_leaves(theirs))
            assert_no_difference(*same, True, what)


NESTED_WAYS = ["module", "exported", "pvk", "pt2", "dynamo", "pte"]


@pytest.mark.parametrize("way", ["module"])
def test_nested(way: str, tmp_path: Path) -> None:
    few = settings(FEW, max_examples=2)
    few(given(nested_calls())(lambda drawn: _check_nested(way, tmp_path, drawn)))()


@pytest.mark.slow
@pytest.mark.parametrize("way", NESTED_WAYS)
def test_many_nested(way: str, tmp_path: Path) -> None:
    if way == "pte":
        pytest.importorskip("executorch")
    MANY(given(nested_calls())(lambda drawn: _check_nested(way, tmp_path, drawn)))()
