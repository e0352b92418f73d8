"""Programs in other processes and copies, and what a closed program or a wrong context says."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import purevk
from purevk import knobs
from purevk.graph.context import Context
from tests.harness import DATA, python

pytestmark = pytest.mark.device
LINEAR, COUNTER = DATA / "linear_relu.pte", DATA / "counter_portable.pte"


@pytest.mark.parametrize(
    "again",
    [lambda program: pickle.loads(pickle.dumps(program)), copy.deepcopy, copy.copy],
    ids=["pickle", "deepcopy", "copy"],
)
def test_a_program_of_a_path(again: Callable[[Any], Any], linear_input: np.ndarray) -> None:
    with purevk.load(str(LINEAR), bounds="strict") as program, again(program) as other:
        assert other.bounds == "strict" and other.name == program.name
        np.testing.assert_array_equal(other.forward(linear_input), program.forward(linear_input))


def test_states_go_along() -> None:
    with purevk.load(COUNTER) as program:
        arguments = [np.ones(each.sizes, each.dtype) for each in program.inputs]
        program.forward(*arguments)
        with pickle.loads(pickle.dumps(program)) as other:
            assert list(other.state) == list(program.state) and len(other.state) > 0
            for name, array in program.state.items():
                np.testing.assert_array_equal(other.state[name], array)
            program.reset_state()
            assert any(np.any(array != program.state[name]) for name, array in other.state.items())


def test_another_process_loads_it_again(linear_input: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", linear_input)
    with purevk.load(LINEAR) as program:
        (tmp_path / "program.pickle").write_bytes(pickle.dumps(program))
        wanted = program.forward(linear_input)
    source = """
import json, pickle, sys, numpy as np
with open(sys.argv[1], "rb") as file:
    program = pickle.load(file)
print(json.dumps({"y": program.forward(np.load(sys.argv[2])).tolist()}))
"""
    said = python(source, tmp_path / "program.pickle", tmp_path / "x.npy")
    np.testing.assert_allclose(said["y"], wanted, rtol=1e-6)


def test_other_programs_cannot_be_pickled(context: Context) -> None:
    for given in ({"context": context}, {}):
        file = LINEAR if given else LINEAR.read_bytes()
        with purevk.load(file, **given) as program:
            with pytest.raises(purevk.PurevkError, match="cannot be pickled or copied") as raised:
                pickle.dumps(program)
            assert "program.save(path)" in raised.value.next


def test_a_closed_program_says_so(context: Context) -> None:
    program = purevk.load(LINEAR, context=context)
    program.close()
    for call in (program.report, program.graph, lambda: pickle.dumps(program)):
        with pytest.raises(purevk.PurevkError, match="the program is closed"):
            call()


def test_a_context_is_no_text() -> None:
    with pytest.raises(purevk.InputError, match="the context is 'cuda:0'") as raised:
        purevk.load(LINEAR, context="cuda:0")  # type: ignore[arg-type]
    assert "PUREVK_DEVICE" in raised.value.next


def test_numbers_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("-3", "2.5", "many"):
        monkeypatch.setenv("PUREVK_COMPILE_THREADS", text)
        with pytest.raises(purevk.PurevkError, match=rf"PUREVK_COMPILE_THREADS='{text}'") as raised:
            knobs.COMPILE_THREADS()
        assert "0 or more" in raised.value.why
