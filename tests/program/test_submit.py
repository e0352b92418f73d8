"""Calls that are submitted, and calls from several threads."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, TimeoutError, wait
from typing import Any

import numpy as np
import pytest

import purevk
from purevk.errors import FallbackError, InputError, PurevkError
from purevk.graph.context import Context
from tests.harness import DATA, in_threads

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.device
LINEAR = DATA / "linear_relu.pte"
COUNTER = DATA / "counter_portable.pte"


@pytest.fixture
def gate() -> Iterator[Callable[[Callable[[np.ndarray], Any]], purevk.Program]]:
    """Programs of one operator on the CPU, which does what a test says."""
    library = torch.library.Library("purevk_gate", "DEF")
    library.define("pass_(Tensor x) -> Tensor")
    torch.library.register_fake("purevk_gate::pass_", lambda x: torch.empty_like(x), lib=library)
    programs: list[purevk.Program] = []

    class Model(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.ops.purevk_gate.pass_(x + 1) * 2

    def make(function: Callable[[np.ndarray], Any]) -> purevk.Program:
        purevk.ops.register_executor("purevk_gate.pass_")(function)
        programs.append(purevk.compile(Model(), (torch.zeros(4),)))
        return programs[-1]

    yield make
    for program in programs:
        program.close()
    purevk.ops.unregister_executor("purevk_gate.pass_")
    library._destroy()


def test_results_in_order_of_copied_inputs(linear_input: np.ndarray) -> None:
    with purevk.load(LINEAR) as program:
        scales = [1.0, -2.0, 0.25, 3.0, -1.0]
        expected = [program.forward(linear_input * np.float32(scale)) for scale in scales]
        x = np.empty_like(linear_input)
        handles = []
        for scale in scales:
            np.multiply(linear_input, np.float32(scale), out=x)
            handles.append(program.submit(x))
        x[:] = np.nan
        for handle, wanted in zip(handles, expected):
            np.testing.assert_array_equal(handle.result(60), wanted)
            assert handle.done()
        made = program.method("forward").submit(torch.from_numpy(linear_input)).result()
        assert isinstance(made, torch.Tensor)


def test_results_in_memory_of_the_caller(linear_input: np.ndarray) -> None:
    with purevk.load(LINEAR) as program:
        wanted = program.forward(linear_input)
        memory = [np.full_like(wanted, np.nan) for _ in range(3)]
        handles = [program.submit(linear_input, out=each) for each in memory]
        for handle, each in zip(handles, memory):
            assert handle.result(60) is each
            np.testing.assert_array_equal(each, wanted)
        with pytest.raises(purevk.InputError, match="out"):
            program.submit(linear_input, out=np.zeros(3, np.int8)).result(60)


def test_states_keep_the_order_of_calls() -> None:
    with purevk.load(COUNTER) as program:
        x = np.ones((2, 4), np.float32)
        alone = [program.forward(x * np.float32(n)) for n in range(6)]
        program.reset_state()
        made: list[Any] = []
        for n in range(6):  # submitted and plain calls in turns
            made.append(
                program.submit(x * np.float32(n)) if n % 3 else program.forward(x * np.float32(n))
            )
        made = [each if isinstance(each, np.ndarray) else each.result() for each in made]
        np.testing.assert_array_equal(made, alone)
        program.submit(x)
        program.reset_state()
        np.testing.assert_array_equal(program.forward(x * 0), alone[0])


def test_inputs_that_a_model_writes() -> None:
    class Writes(torch.nn.Module):
        def forward(self, x: Any, y: Any) -> Any:
            y.add_(x)
            return y * 2

    given = torch.zeros(3), torch.zeros(3)
    with purevk.compile(Writes(), given) as program:
        y, out = torch.ones(3), torch.empty(3)
        handle = program.submit(torch.full((3,), 2.0), y)
        assert torch.equal(handle.result(), torch.full((3,), 6.0)) and torch.equal(
            y, torch.full((3,), 3.0)
        )
        assert program.forward(torch.ones(3), y, out=out) is out
        assert torch.equal(out, torch.full((3,), 8.0)) and torch.equal(y, torch.full((3,), 4.0))


def test_errors_come_out_of_the_result(gate: Any, linear_input: np.ndarray) -> None:
    program = gate(lambda x: 1 / 0)
    handle = program.submit(np.zeros(4, np.float32))
    with pytest.raises(FallbackError, match="failed on the CPU"):
        handle.result()
    wrong = program.submit(np.zeros(5, np.float32))
    assert isinstance(wrong.exception(), InputError)
    purevk.ops.register_executor("purevk_gate.pass_")(lambda x: x)
    np.testing.assert_array_equal(program.submit(np.zeros(4, np.float32)).result(), np.full(4, 2))
    program.close()
    with pytest.raises(PurevkError, match="closed"):
        program.submit(np.zeros(4, np.float32))


def test_so_many_calls_are_in_flight_and_no_more(gate: Any) -> None:
    go, running = threading.Event(), threading.Semaphore(0)

    def slow(x: np.ndarray) -> np.ndarray:
        running.release()
        assert go.wait(60)
        return x

    program = gate(slow)
    x = np.zeros(4, np.float32)
    first = program.submit(x)
    running.acquire()
    second, late = program.submit(x + 1), []
    third = threading.Thread(target=lambda: late.append(program.submit(x + 2)))
    third.start()
    with pytest.raises(TimeoutError):
        first.result(0.05)
    third.join(0.1)
    assert third.is_alive() and not late and not first.done()
    assert second.cancel()  # makes room
    third.join(60)
    assert len(late) == 1
    go.set()
    np.testing.assert_array_equal(first.result(60), np.full(4, 2))
    np.testing.assert_array_equal(late[0].result(60), np.full(4, 6))
    with pytest.raises(CancelledError):
        second.result()


def test_closing_waits(gate: Any) -> None:
    program = gate(lambda x: (time.sleep(0.1), x)[1])
    handles = [program.submit(np.full(4, n, np.float32)) for n in range(2)]
    program.close()
    assert [handle.result(0)[0] for handle in handles] == [2, 4]


def test_a_callback_may_submit_and_close(gate: Any) -> None:
    program = gate(lambda x: x)
    done = threading.Event()
    chain: list[Any] = []

    def again(handle: Any) -> None:
        chain.append(handle.result())
        if len(chain) < 4:
            program.submit(handle.result()).add_done_callback(again)
        else:
            program.close()
            done.set()

    program.submit(np.zeros(4, np.float32)).add_done_callback(again)
    assert done.wait(60)
    assert [int(each[0]) for each in chain] == [2, 6, 14, 30]


def test_the_host_prepares_meanwhile(gate: Any) -> None:
    """Each call runs until the host has prepared and submitted the input of the next one."""
    submitted = [threading.Event() for _ in range(8)]

    def run(x: np.ndarray) -> np.ndarray:
        following = int(x[0])
        if following < len(submitted):
            assert submitted[following].wait(30), "the host waits for the call"
        return x

    program = gate(run)
    handles = []
    for n, event in enumerate(submitted):
        x = np.full(4, n, np.float32)
        event.set()
        handles.append(program.submit(x))
    wait(handles)
    for n, handle in enumerate(handles):
        np.testing.assert_array_equal(handle.result(), np.full(4, 2 * (n + 1)))


def test_a_forgotten_program_is_released(linear_input: np.ndarray) -> None:
    program = purevk.load(LINEAR)
    program.submit(linear_input).result()
    gone, before = weakref.ref(program), threading.active_count()
    del program
    gc.collect()
    assert gone() is None
    for _ in range(100):
        if threading.active_count() < before:
            break
        time.sleep(0.02)
    assert threading.active_count() < before


# -- threads -------------------------------------------------------------------------------------
class Grows(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return torch.softmax(self.linear(x), 0).sum(1) + x[:, 0]


def test_threads_call_submit_and_lower_again_on_one_device(context: Context) -> None:
    """Several programs, several threads each, with sizes for which methods are lowered again
    meanwhile."""
    models = [Grows().eval() for _ in range(2)]
    dim = ({0: torch.export.Dim("n", min=2, max=8)},)
    programs = [
        purevk.compile(
            torch.export.export(model, (torch.zeros(4, 8),), dynamic_shapes=dim),
            context=context,
            bounds="grow",
        )
        for model in models
    ]

    def calls(which: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        handles = []
        for number, size in enumerate((3, 8, 20, 5, 40, 2)):
            x = torch.randn(size, 8, generator=generator)
            with torch.no_grad():
                expected = models[which](x)
            if number % 2:
                handles.append((programs[which].submit(x), expected))
            else:
                torch.testing.assert_close(programs[which].forward(x), expected)
        for handle, expected in handles:
            torch.testing.assert_close(handle.result(60), expected)

    in_threads(
        *(
            lambda which=which, seed=seed: calls(which, seed)
            for which in range(2)
            for seed in range(2)
        )
    )
    for program in programs:
        program.close()


def test_methods_of_one_program_at_once() -> None:
    x = np.random.default_rng(0).standard_normal((2, 5), np.float32)
    with purevk.load(DATA / "two_methods.pte") as program:
        expected = program.forward(x), program.method("step")(x[:1])

        def forward() -> None:
            for _ in range(20):
                np.testing.assert_array_equal(program.forward(x), expected[0])

        def step() -> None:
            handles = [program.method("step").submit(x[:1]) for _ in range(20)]
            for handle in handles:
                np.testing.assert_array_equal(handle.result(60), expected[1])

        in_threads(forward, step, forward)


def test_closing_while_threads_call(linear_input: np.ndarray) -> None:
    """Each call either gives its result or says that the program is closed."""
    program = purevk.load(LINEAR)
    expected = program.forward(linear_input)
    started = threading.Barrier(4)

    def calls() -> None:
        started.wait()
        for number in range(200):
            try:
                made = (
                    program.submit(linear_input).result(60)
                    if number % 2
                    else program.forward(linear_input)
                )
            except PurevkError as error:
                assert "closed" in str(error)
                return
            np.testing.assert_array_equal(made, expected)

    def close() -> None:
        started.wait()
        time.sleep(0.03)
        program.close()

    in_threads(calls, calls, calls, close)


def test_large_inputs_keep_their_elements() -> None:
    """Their copies use memory again, once no call needs it."""
    rows = torch.export.Dim("rows", min=1, max=4)
    x = torch.zeros(2, 1 << 19)
    with purevk.compile(torch.nn.ReLU(), (x,), dynamic_shapes=({0: rows},)) as program:
        given = np.empty((2, 1 << 19), np.float32)
        futures = []
        for number in range(8):
            given[:] = number
            futures.append(program.submit(given[: 1 + number % 2]))
        for number, future in enumerate(futures):
            made = future.result()
            assert made.shape[0] == 1 + number % 2 and (made == number).all()
