"""The backend of torch.compile against eager torch: dynamic sizes, graph breaks, writes into
arguments, parameters that change."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import purevk  # noqa: E402
from purevk import compiled_graphs, dynamo  # noqa: E402
from purevk.errors import InputError, SizeConstraintError, UnsupportedProgramError  # noqa: E402
from purevk.graph.context import context_of  # noqa: E402
from purevk.graph.executable import Executable  # noqa: E402
from tests.program.signatures.harness import not_before  # noqa: E402

pytestmark = pytest.mark.device


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def _agrees(compiled: Callable[..., Any], eager: Callable[..., Any], *args: Any) -> None:
    """The same results, and the same left in the arguments."""
    copies = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    have, want = compiled(*args), eager(*copies)
    torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)
    for arg, same in zip(args, copies):
        if isinstance(arg, torch.Tensor):
            torch.testing.assert_close(arg, same)


def _programs() -> list[purevk.Program]:
    gc.collect()
    return [each.program for each in compiled_graphs.shared]


def _mlp() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(6, 32), torch.nn.GELU(), torch.nn.Linear(32, 3)
    ).eval()


@pytest.mark.slow
def test_a_module_with_its_weights_on_the_device_once() -> None:
    """A graph for each size, made anew by dynamo: one program, whose weights do not grow."""
    before = set(_programs())
    module = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.Flatten(2)
    ).eval()
    compiled = torch.compile(module, backend="purevk", dynamic=False)
    _agrees(compiled, module, torch.randn(1, 3, 8, 8))
    (program,) = set(_programs()) - before
    weights = program.memory.weights
    assert weights and program.report()["cpu_nodes"] == 0
    _agrees(compiled, module, torch.randn(2, 3, 8, 8))
    _agrees(compiled, module, torch.randn(1, 3, 12, 8))
    assert set(_programs()) - before == {program} and len(program.methods) == 3
    assert program.memory.weights == weights
    torch._dynamo.reset()
    del compiled, program
    assert set(_programs()) <= before


def test_dynamic_sizes_take_one_graph() -> None:
    module = _mlp()
    compiled = torch.compile(module, backend="purevk", dynamic=True)
    before = set(_programs())
    for size in (5, 2, 70, 300):
        _agrees(compiled, module, torch.randn(size, 6))
    (program,) = set(_programs()) - before
    (method,) = program.methods.values()
    assert len(method.specializations) <= 3  # grown twice


def test_a_dim_that_is_marked() -> None:
    module, x = _mlp(), torch.randn(4, 6)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=32)
    compiled = torch.compile(module, backend="purevk")
    before = set(_programs())
    for given in (x, torch.randn(2, 6), torch.randn(32, 6)):
        _agrees(compiled, module, given)
    (program,) = set(_programs()) - before
    (method,) = program.methods.values()
    assert [str(size) for size in method.graph.inputs[0].type.dims][1] == "6" and len(
        method.specializations
    ) == 1


def test_memory_for_a_bound_that_the_model_decides() -> None:
    """Pipelines of diffusers compare the number of elements with 2**31."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin() if x.numel() * 2 > 2**31 else x.cos()

    compiled = torch.compile(function, backend="purevk", options={"fallback": False})
    before = set(_programs())
    for size in (5, 70, 300):
        x = torch.randn(16, size)
        torch._dynamo.mark_dynamic(x, 1)
        _agrees(compiled, function, x)
    (program,) = set(_programs()) - before
    assert 0 < program.memory.inputs < 2**20


def test_memory_is_planned_for_less_where_tensors_would_not_fit() -> None:
    """A batch of 64 would be larger than one binding, so its operators would run on the CPU."""
    module = torch.nn.Sequential(torch.nn.Sigmoid(), torch.nn.Softmax(1))
    limit = context_of(None).traits.max_storage_range
    compiled = torch.compile(module, backend="purevk", options={"fallback": False})
    before = set(_programs())
    for batch in (2, 9):
        x = torch.rand(batch, limit // 4 // 12)
        torch._dynamo.mark_dynamic(x, 0)
        _agrees(compiled, module, x)
    (program,) = set(_programs()) - before
    (method,) = program.methods.values()
    assert program.report()["cpu_nodes"] == 0
    assert len(method.specializations) == 2


@pytest.mark.parametrize("grown, text", [(12, 4), (70, 4), (12, 8)])
def test_sizes_that_the_model_relates(grown: int, text: int) -> None:
    """dynamo keeps a guard where it finds no symbol for a size, such as that of an image that shrinks
    to the size of a latent, or of ids that are flattened and split by another batch."""

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shrink = torch.nn.Conv2d(1, 1, 3, stride=2, padding=1)
            self.embed = torch.nn.Linear(20, 4)

        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            latent, image, words, ids = args
            times = (ids.flatten()[:, None] * torch.arange(4)).reshape(words.shape[0], -1)
            embedded = self.embed(torch.cat([words, times], 1))
            return (latent + self.shrink(image)).mean((1, 2, 3))[:, None] + embedded

    module = Module().eval()
    compiled = torch.compile(module, backend="purevk", dynamic=True, options={"fallback": False})
    for batch, size in ((3, 8), (5, grown)):
        latent, image = torch.randn(batch, 1, size, 8), torch.randn(batch, 1, 2 * size, 16)
        words, ids = torch.randn(batch, text), torch.randn(batch, (20 - text) // 4)
        _agrees(compiled, module, latent, image, words, ids)


def test_a_program_inside_is_not_traced() -> None:
    module, x = _mlp(), torch.randn(4, 6)
    with purevk.compile(module, (x,)) as program:
        method = program.method("forward")
        calls: list[Callable[..., Any]] = [
            program,
            lambda x: program(x + 1) * 2,
            lambda x: method(x) + 1,
            lambda x: program.submit(x).result(),
        ]
        for call in calls:
            traced: list[str] = []

            def note(graph: torch.fx.GraphModule, _: Any) -> Any:
                traced.extend(str(node.meta.get("stack_trace")) for node in graph.graph.nodes)
                return dynamo.purevk_backend(graph, _)

            _agrees(torch.compile(call, backend=note), call, x)
            assert not any("purevk/program" in each for each in traced)
            _agrees(program, module, x)


def test_graph_breaks() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x @ w)
        torch._dynamo.graph_break()
        return y * 2 if y.sum() > 0 else y - 1

    compiled = torch.compile(function, backend="purevk")
    for size, sign in ((3, 1), (3, -1), (7, 1)):
        _agrees(compiled, function, torch.rand(size, 4), sign * torch.rand(4, 5))


def test_writes_into_arguments_and_buffers() -> None:
    class Cache(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rows", torch.zeros(8, 4))
            self.calls = 0

        def forward(self, x: torch.Tensor, at: int, log: torch.Tensor) -> torch.Tensor:
            self.rows[at : at + 1] = x
            self.calls += 1
            log.add_(self.rows.sum())
            log[0].mul_(2)
            return self.rows.cumsum(0) + self.calls

    module = Cache()
    same = copy.deepcopy(module)
    compiled = torch.compile(module, backend="purevk", dynamic=True)
    for at in (2, 3, 7):
        _agrees(compiled, same, torch.randn(1, 4), at, torch.randn(3))
        assert torch.equal(module.rows, same.rows)


def test_whole_numbers_of_the_call() -> None:
    def function(x: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return x.repeat(n, 1) + torch.arange(n)[0] + n, x[:, :n] + x[:, -n:], n * 2 + x.shape[0]

    compiled = torch.compile(function, backend="purevk", dynamic=True)
    for n in (3, 4, 200, 5):
        _agrees(compiled, function, torch.randn(2, 9), n)


def test_numbers_of_the_call() -> None:
    compiled = torch.compile(lambda x, s: x * s + s, backend="purevk")
    for number in (0.5, 0.25, 3.0):
        _agrees(compiled, lambda x, s: x * s + s, torch.randn(2, 9), number)


def test_sizes_that_come_about_during_a_call() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        places = torch.nonzero(x > 0)
        return places.t(), x[x > 0] * 2

    compiled = torch.compile(function, backend="purevk", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for size in (4, 9, 40):
            _agrees(compiled, function, torch.randn(size, 5))


def test_no_tensor_goes_in() -> None:
    def function(n: int) -> torch.Tensor:
        return torch.arange(n).float().mean()

    compiled = torch.compile(function, backend="purevk", dynamic=True)
    for n in (5, 77):
        _agrees(compiled, function, n)


def test_results_are_views_as_in_eager_torch() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return x.t(), y.t(), y.view(-1), y, y[1:, ::2]

    compiled = torch.compile(function, backend="purevk")
    x = torch.randn(4, 5)
    for have, want in zip(compiled(x), function(x)):
        assert torch.equal(have, want) and have.stride() == want.stride()
    outputs = compiled(x)
    assert outputs[0].data_ptr() == x.data_ptr()
    outputs[3].zero_()
    assert not any(view.any() for view in outputs[1:])


def test_attention_is_one_kernel() -> None:
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    before = set(_programs())
    compiled = torch.compile(function, backend="purevk")
    _agrees(compiled, function, *(torch.randn(1, 2, 12, 8) for _ in range(3)))
    (program,) = set(_programs()) - before
    (method,) = program.methods.values()
    # A result that leaves the graph is written in the caller's order.
    labels = [dispatch.label.split()[0] for dispatch in method.executable.plan.dispatches]
    assert labels == ["purevk.attention"] and program.report()["cpu_nodes"] == 0


@pytest.mark.parametrize("causal", [False, True])
def test_attention_with_fewer_heads_of_keys(causal: bool) -> None:
    def attend(*args: torch.Tensor) -> torch.Tensor:
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(*args, is_causal=causal, enable_gqa=True)

    q, k, v = torch.rand(2, 6, 5, 8), torch.rand(2, 3, 7, 8), torch.rand(2, 3, 7, 8)
    _agrees(torch.compile(attend, backend="purevk"), attend, q, k, v)


@pytest.mark.parametrize("dynamic, masked", [(1, False), (2, False), (2, True)])
def test_attention_over_keys_or_values_of_an_open_length(dynamic: int, masked: bool) -> None:
    """dynamo learns the length of the keys from a mask, and compares it to no other."""

    def attend(*args: torch.Tensor | None) -> torch.Tensor:
        q, k, v, mask = args
        k, v = (torch.cat([each, each[:, :, :1]], 2) for each in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    sizes = (3, 7, 7)
    given = [torch.rand(1, 2, size, 8) for size in sizes]
    torch._dynamo.mark_dynamic(given[dynamic], 2)
    compiled = torch.compile(attend, backend="purevk", dynamic=False)
    mask = torch.rand(1, 1, 3, 8) if masked else None
    _agrees(compiled, attend, *given, mask)
    for size in (6, 9, 70):
        given[dynamic] = torch.rand(1, 2, size, 8)
        with pytest.raises(SizeConstraintError):
            compiled(*given, mask)


def test_operators_that_may_fail() -> None:
    """torch checks factorizations by an operator with an effect, which it orders by a token."""

    def solve(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        square = a @ a.mT + torch.eye(4)
        return torch.linalg.inv(a), torch.linalg.solve(a, b), torch.linalg.cholesky(square)

    compiled = torch.compile(solve, backend="purevk")
    a, b = torch.randn(4, 4) + 4 * torch.eye(4), torch.randn(4, 2)
    for _ in range(2):
        _agrees(compiled, solve, a, b)
    singular = torch.zeros(4, 4)
    with pytest.raises(RuntimeError, match="singular"):
        solve(singular, b)
    if _backends_check():
        with pytest.raises(InputError, match="singular"):  # the device checks it
            compiled(singular, b)
    else:
        assert all(part.isnan().any() or part.isinf().any() for part in compiled(singular, b)[:2])


def _backends_check() -> bool:
    """Whether torch tells backends to check factorizations. Older versions drop the check before."""
    try:
        torch.compile(torch.linalg.inv, backend="aot_eager")(torch.zeros(4, 4))
    except RuntimeError:
        return True
    return False


def test_a_sum_of_sizes() -> None:
    def padded(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        rows = torch.sym_sum((x.shape[0], y.shape[0], z.shape[0], 1))
        return torch.ones(rows, 2) * x.sum()

    compiled = torch.compile(padded, backend="purevk", dynamic=True)
    for sizes in ((3, 5, 2), (4, 2, 7)):
        _agrees(compiled, padded, *(torch.rand(size, 2) for size in sizes))


def test_the_window_of_a_growing_tensor() -> None:
    """The last 6 rows, or all of them as long as they are fewer."""

    def windows(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x[-6:] + 1, x[-6:-2] + 1, x[-6::2] + 1

    compiled = torch.compile(windows, backend="purevk", dynamic=True)
    for rows in (3, 4, 5, 7, 9, 12):
        _agrees(compiled, windows, torch.randn(rows, 3))


@pytest.mark.parametrize("others", [(9, 7), (4, 5)], ids=str)
def test_the_window_of_all_rows_of_the_first_call(others: tuple[int, ...]) -> None:
    """The first size is where the window begins with the first row: it moves in larger tensors."""

    def windows(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x[-6:-2] + 1, x[-6::2] + 1

    torch._dynamo.reset()
    compiled = torch.compile(windows, backend="purevk", dynamic=True)
    for rows in (6, *others):
        _agrees(compiled, windows, torch.randn(rows, 3))


def test_a_tensor_of_which_only_the_size_matters() -> None:
    """The graph gets its size as a number, and has no rows left at the bounds of the sizes."""

    def rest(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x[y.shape[0] :] * 2

    compiled = torch.compile(rest, backend="purevk", dynamic=True)
    for rows, others in ((7, 4), (60, 2), (5, 5), (8, 7), (90, 70), (3, 5)):
        _agrees(compiled, rest, torch.randn(rows, 3), torch.randn(others, 2))


def test_an_integer_that_torch_finds_to_be_one_number() -> None:
    def scaled(x: torch.Tensor, count: int) -> torch.Tensor:
        torch._check(count == 7)
        return x * count

    compiled = torch.compile(scaled, backend="purevk", dynamic=True)
    _agrees(compiled, scaled, torch.randn(4, 3), 7)


def test_a_loop_over_the_experts_in_use() -> None:
    """Which experts, and how many rows each has, depends on the data."""

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 5, 5))

        def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            made = torch.zeros_like(x)
            mask = torch.nn.functional.one_hot(chosen, 4).permute(2, 1, 0)
            for number in torch.greater(mask.sum((-1, -2)), 0).nonzero():
                expert = number[0]
                _, rows = torch.where(mask[expert])
                found = torch.nn.functional.linear(x[rows], self.weight[expert])
                made.index_add_(0, rows, found)
            return made

    experts = Experts()
    compiled = torch.compile(experts, backend="purevk")
    for chosen in ([0, 1, 1, 3], [2, 2, 2, 2], [3, 0, 1, 2]):
        _agrees(compiled, experts, torch.randn(4, 5), torch.tensor(chosen)[:, None])


def test_parameters_that_change_are_seen() -> None:
    module = _mlp()
    compiled = torch.compile(module, backend="purevk")
    for _ in range(4):
        _agrees(compiled, module, torch.randn(4, 6))
        module[0].weight.mul_(2)
    module.load_state_dict(
        {name: torch.randn_like(value) for name, value in module.state_dict().items()}
    )
    _agrees(compiled, module, torch.randn(4, 6))


def test_writes_through_data_are_seen() -> None:
    """As libraries merge adapters into weights: torch does not count these writes."""
    torch.manual_seed(0)
    module, x = _mlp(), torch.randn(4, 6)
    module[0].weight.requires_grad_(False)
    whole = torch.compile(module, backend="purevk")
    first = torch.compile(module[0], backend="purevk")
    _agrees(whole, module, x)
    for factor in (2.0, 0.5, 2.0):
        module[0].weight.data *= factor
        _agrees(first, module[0], x)  # at first a new graph, of a weight that is on the device
        _agrees(whole, module, x)
        module[0].weight.numpy()[:] *= factor
        _agrees(whole, module, x)
        _agrees(first, module[0], x)


def test_a_parameter_at_the_address_of_an_earlier_one() -> None:
    """The copy of a strided parameter does not keep its memory, so another one may get it."""
    memory = np.ones((3, 6), np.float32)
    layer = torch.nn.Linear(3, 6).eval()
    layer.weight = torch.nn.Parameter(torch.from_numpy(memory).T)
    compiled = torch.compile(layer, backend="purevk")
    x = torch.randn(2, 3)
    _agrees(compiled, layer, x)
    layer._parameters["weight"] = None
    memory[:] = 2
    layer._parameters["weight"] = torch.nn.Parameter(torch.from_numpy(memory).T)
    _agrees(compiled, layer, x)


def test_training_runs_in_eager_torch_with_one_warning() -> None:
    module = _mlp()
    compiled = torch.compile(module, backend="purevk")
    dynamo._warn_about_training.cache_clear()
    with torch.enable_grad(), pytest.warns(UserWarning, match="inference only"):
        compiled(torch.randn(4, 6)).sum().backward()
    assert module[0].weight.grad is not None
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        compiled(torch.randn(1, 6))
    _agrees(compiled, module, torch.randn(4, 6))


# -- what purevk cannot run ----------------------------------------------------------------------
FALLBACK = {"fallback": True}


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not warned yet."""
    monkeypatch.setattr(dynamo, "_reasons", set())


def _through_uint16(x: torch.Tensor) -> torch.Tensor:
    return x.abs().to(torch.uint16).float()


def test_what_cannot_be_run_runs_in_eager_torch_with_one_warning(forgotten: None) -> None:
    compiled = torch.compile(_through_uint16, backend="purevk", options=FALLBACK, dynamic=False)
    with pytest.warns(UserWarning, match=r"uint16 cannot be run \(in .*_through_uint16"):
        _agrees(compiled, _through_uint16, torch.randn(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        _agrees(compiled, _through_uint16, torch.randn(3))
        _agrees(compiled, _through_uint16, torch.randn(5))  # another graph, of the same reason


def test_strict_compilation_raises() -> None:
    for compiled in (
        torch.compile(_through_uint16, backend="purevk", options={"fallback": False}),
        torch.compile(_through_uint16, backend="purevk"),  # as the tests' PUREVK_EAGER_FALLBACK=0
    ):
        with pytest.raises(UnsupportedProgramError, match="uint16"):
            compiled(torch.randn(3))
    with pytest.raises(Exception, match="unknown options: triton"):
        torch.compile(_through_uint16, backend="purevk", options={"triton": 1})(torch.randn(3))


@pytest.mark.slow
def test_what_torch_cannot_trace_for_a_backend_runs_in_eager_torch(forgotten: None) -> None:
    def padded(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        rows = n.item()
        torch._check(rows <= x.shape[0])
        return torch.nn.utils.rnn.pad_sequence([x[:rows], x])

    compiled = torch.compile(padded, backend="purevk", options=FALLBACK)
    with (
        torch._dynamo.config.patch(capture_scalar_outputs=True),
        pytest.warns(UserWarning, match="GuardOnDataDependentSymNode"),
    ):
        _agrees(compiled, padded, torch.randn(4, 3), torch.tensor(2))


def test_errors_of_a_call_are_those_of_eager_torch(forgotten: None) -> None:
    """And the graph stays on the device for later calls."""

    def invert(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(x)

    if not _backends_check():
        pytest.skip("this torch drops the check")
    compiled = torch.compile(invert, backend="purevk", options=FALLBACK)
    before = set(_programs())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(torch.linalg.LinAlgError, match="singular"):
            compiled(torch.zeros(4, 4))
        _agrees(compiled, invert, torch.randn(4, 4) + 4 * torch.eye(4))
    assert set(_programs()) - before


def test_errors_of_the_device_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*_: Any) -> None:
        raise purevk.DeviceLostError("the device was lost")

    monkeypatch.setattr(compiled_graphs.CompiledGraph, "_lower", lose)
    with pytest.raises(purevk.DeviceLostError):
        torch.compile(lambda x: x + 1, backend="purevk", options=FALLBACK)(torch.randn(3))


@pytest.mark.parametrize("noisy", [False, True])
def test_the_random_state_is_read_for_graphs_that_draw_numbers(
    noisy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + torch.rand(3) if noisy else torch.relu(x) + 1

    compiled = torch.compile(run, backend="purevk", options=FALLBACK)
    compiled(torch.ones(3))
    states: list[torch.Tensor] = []
    read = torch.get_rng_state
    monkeypatch.setattr(torch, "get_rng_state", lambda: (states.append(read()), states[-1])[1])
    compiled(torch.ones(3))
    assert len(states) == noisy


@pytest.mark.parametrize("fails", ["to compile", "after it ran"])
def test_eager_torch_draws_the_numbers_that_it_would_have_drawn(
    fails: str, forgotten: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert = _through_uint16 if fails == "to compile" else torch.relu

    def noisy(x: torch.Tensor) -> torch.Tensor:
        return torch.rand(3) + convert(x)

    run = Executable.run

    def run_and_fail(*args: Any, **kwargs: Any) -> None:
        run(*args, **kwargs)  # draws a seed
        raise InputError("not on uint16")

    if fails == "after it ran":
        monkeypatch.setattr(Executable, "run", run_and_fail)
    compiled = torch.compile(noisy, backend="purevk", options=FALLBACK)
    x = torch.ones(3)
    torch.manual_seed(3)
    want, following = noisy(x), torch.rand(3)
    torch.manual_seed(3)
    with pytest.warns(UserWarning, match="uint16"):
        assert torch.equal(compiled(x), want)
    assert torch.equal(torch.rand(3), following)


@pytest.mark.slow
def test_writes_happen_once_when_eager_torch_takes_over(forgotten: None) -> None:
    def count(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        total.add_(x.sum())
        return _through_uint16(total)

    compiled = torch.compile(count, backend="purevk", options=FALLBACK)
    x = torch.ones(3)
    with pytest.warns(UserWarning, match="eager torch"):
        for _ in range(2):
            _agrees(compiled, count, x, torch.zeros(2))


def _shift(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x + y


_SHARED: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "a part": lambda x: (x[:3], x[2:5]),
    "all": lambda x: (x[:4], x[:4]),
    "a transposed view": lambda x: (x[:4], x[:4].t()),
    "nothing": lambda x: (x[:3], x[3:]),
}


@pytest.mark.parametrize("name", _SHARED)
@pytest.mark.parametrize("separate_first", [True, False])
def test_inputs_that_share_memory_at_some_calls(
    name: str, separate_first: bool, forgotten: None
) -> None:
    """One of them is written. AOTAutograd guards the graph for this in few cases."""
    compiled = torch.compile(_shift, backend="purevk", options=FALLBACK, dynamic=False)
    x = torch.randn(6, 4)
    shapes = [each.shape for each in _SHARED[name](x)]

    def separate() -> None:
        _agrees(compiled, _shift, *(torch.randn(shape) for shape in shapes))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if separate_first:
            separate()
        have, want = x.clone(), x.clone()
        torch.testing.assert_close(compiled(*_SHARED[name](have)), _shift(*_SHARED[name](want)))
        torch.testing.assert_close(have, want)
        separate()


_WRITES: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    _shift,
    lambda x, y: (x.mul_(2), y.view(-1))[1],
    lambda x, y: (x[1:].mul_(2), y[1:] + 1)[1],
    lambda x, y: (x.add_(1), y.mul_(2), x.sum() + y)[2],
    lambda x, y: (y.t().add_(1), x.view(torch.int32) * 2)[1],
]


_VIEWS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: x.conj(),
    lambda x: x.mT,
    lambda x: x[1:],
    lambda x: x.expand(2, *x.shape),
    lambda x: x.imag if x.is_complex() else x,
    lambda x: x.real if x.is_complex() else x,
    torch._neg_view,
)


@pytest.mark.parametrize("seed", range(4))
def test_results_that_are_lazy_views_of_others(seed: int) -> None:
    """Conjugated or negated lazily, they share memory with results that are not."""
    random_ = random.Random(seed)
    chains = [random_.choices(_VIEWS, k=random_.randint(1, 3)) for _ in range(3)]
    written = seed % 2 == 0

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        x = x.mul_(2j) if written else x * 2j
        results = [x]
        for chain in [[_VIEWS[0]], *chains]:
            view = x
            for step in chain:
                view = step(view)
            results.append(view)
        return results

    compiled = torch.compile(function, backend="purevk", options={"fallback": False})
    _agrees(compiled, function, torch.randn(3, 3, dtype=torch.complex64))


@pytest.mark.parametrize("seed", range(6))
def test_inputs_that_share_memory_at_the_first_call(seed: int, forgotten: None) -> None:
    """AOTAutograd traces some of these wrongly: all run in eager torch, with one warning."""
    draw = random.Random(seed)
    function, dynamic = draw.choice(_WRITES), draw.random() < 0.5
    rows, first, second = draw.randint(2, 4), draw.randint(0, 5), draw.randint(0, 5)
    dtype = draw.choice([torch.float32, torch.int32])

    def views(memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = (memory[at : at + 3 * rows].view(rows, 3) for at in (first, second))
        return x, y.view(dtype)

    compiled = torch.compile(function, backend="purevk", options=FALLBACK, dynamic=dynamic)
    have, want = torch.arange(20.0), torch.arange(20.0)
    with pytest.warns(UserWarning, match="inputs share memory"):
        result, expected = compiled(*views(have)), function(*views(want))
    assert result.equal(expected) and have.equal(want)
    result.add_(1), expected.add_(1)
    assert have.equal(want)


def test_strict_compilation_raises_where_inputs_share_memory() -> None:
    compiled = torch.compile(_shift, backend="purevk", options={"fallback": False}, dynamic=False)
    x = torch.randn(6, 4)
    _agrees(compiled, _shift, torch.randn(3, 4), torch.randn(3, 4))
    with pytest.raises(UnsupportedProgramError, match="inputs share memory"):
        compiled(x[:3], x[2:5])


@pytest.mark.parametrize(
    "write",
    [lambda x: torch.nn.functional.relu(x, True), lambda x: torch._foreach_add_([x], 1.0)],
    ids=["by an argument", "lists"],
)
def test_all_writes_are_seen(forgotten: None, write: Callable[[torch.Tensor], Any]) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        write(x)
        return x * 2 + y

    compiled = torch.compile(function, backend="purevk", options={"fallback": False}, dynamic=False)
    _agrees(compiled, function, torch.randn(8), torch.randn(8))
    x = torch.randn(12)
    with pytest.raises(UnsupportedProgramError, match="inputs share memory"):
        compiled(x[:8], x[4:])


def test_a_failure_behind_a_write_is_raised(forgotten: None) -> None:
    """Eager torch would write a second time. It runs the next call."""

    def backend(module: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        def fail(x: torch.Tensor, y: torch.Tensor) -> None:
            x.add_(1)
            raise AssertionError("behind the graph")

        return dynamo._WithFallback(module, fail, dynamo.Overlaps(module))

    compiled = torch.compile(_shift, backend=backend)
    x, y = torch.zeros(3), torch.ones(3)
    with pytest.raises(UnsupportedProgramError, match="failed after it had written"):
        compiled(x, y)
    assert torch.equal(x, torch.ones(3))
    _agrees(compiled, _shift, x, y)


def test_recurrent_layers_of_any_length() -> None:
    """dynamo leaves such modules to eager torch, unless the backend has it trace them."""

    class Tagger(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.LSTM(4, 6, bidirectional=True, batch_first=True)
            self.second = torch.nn.GRU(12, 5, num_layers=2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x)[0].relu())[0]

    module = Tagger().eval()
    compiled = torch.compile(module, backend="purevk", fullgraph=True, options={"fallback": False})
    torch._dynamo.utils.counters.clear()
    for length in (5, 9, 30, 2):
        _agrees(compiled, module, torch.randn(3, length, 4))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    torch._dynamo.reset()
    other = torch.compile(module, backend="eager")  # traces them as before
    _agrees(other, module, torch.randn(3, 5, 4))


@pytest.mark.parametrize("kind", ["LSTM", "RNN"])
def test_recurrent_layers_within_autocast(kind: str) -> None:
    """The dtypes of their results follow from what torch does in each step."""
    if kind == "LSTM" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("torch traces oneDNN's LSTM in bfloat16, which this CPU does not have")
    module = getattr(torch.nn, kind)(4, 5).eval()
    compiled = torch.compile(module, backend="purevk", options=FALLBACK)
    x = torch.randn(3, 2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an LSTM of oneDNN runs in eager torch
        have, want = compiled(x)[0], module(x)[0]
    torch.testing.assert_close(have, want, rtol=2e-2, atol=2e-2)


# -- positions that follow from data ---------------------------------------------------------------
def _at(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    return x[n.sum().item()]


def _after(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x[n.sum().item() :], x[: n.item()] + 1


def _between(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    return x[n.sum().item() // 2 : n.item()].t()


@not_before("2.10", "torch.compile guards on the sign of such a position")
@pytest.mark.parametrize(
    "function", [_after, *(pytest.param(each, marks=pytest.mark.slow) for each in (_at, _between))]
)
def test_positions_that_follow_from_data_may_be_negative(function: Callable[..., Any]) -> None:
    compiled = torch.compile(function, backend="purevk", fullgraph=True)
    x = torch.randn(6, 4)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for position in (2, -2, 0, 5, -6, -1, *(() if function is _at else (9, -9))):
            _agrees(compiled, function, x, torch.tensor(position))
        if function is _at:
            with pytest.raises(purevk.InputError, match="above the last"):
                compiled(x, torch.tensor(6))


@pytest.mark.slow
def test_lists_of_numbers_that_follow_from_data() -> None:
    def part(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        first, last = n.tolist()
        return x[first:last]

    compiled = torch.compile(part, backend="purevk", fullgraph=True)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for bounds in ((1, 4), (0, 6), (3, 3), (-2, 6)):
            _agrees(compiled, part, torch.randn(6, 4), torch.tensor(bounds))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.empty(0),
        lambda x: torch.empty(2),
        lambda x: torch.empty_like(x[:1]),
        lambda x: x.new_empty(1, 2),
        lambda x: torch.empty_strided((2, 1), (1, 2)),
    ],
)
def test_a_result_without_content_may_be_resized(make: Callable[..., torch.Tensor]) -> None:
    """dynamo calls an operator with `out=` after the graph that makes the tensor."""

    def added(x: torch.Tensor) -> torch.Tensor:
        made = make(x)
        torch.add(x, 1, out=made)
        return made

    _agrees(torch.compile(added, backend="purevk"), added, torch.randn(3))


_OUT: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
    lambda x, out: torch.add(x, 1, out=out),
    lambda x, out: torch.cat([x, x], out=out),
    lambda x, out: torch.sum(x, 0, out=out),
    lambda x, out: torch.sort(x, out=(out, torch.zeros(3, dtype=torch.int64)))[1],
    lambda x, out: out.resize_(x.shape).copy_(x),
]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("seed", range(3))
def test_results_that_have_to_grow(seed: int, forgotten: None) -> None:
    """Results of a graph that code after it resizes."""
    draw = random.Random(seed)
    operators = draw.sample(_OUT, 2)
    dtype = draw.choice([torch.float32, torch.float16, torch.bfloat16, torch.int32])
    sizes = [draw.choice([(0,), (1,), (7,), (2, 9)]) for _ in range(4)]

    def written(x: torch.Tensor) -> list[torch.Tensor]:
        out = [x.sum() + torch.zeros(each, dtype=dtype) for each in sizes[:2]]
        out += [torch.ones(each, dtype=dtype) for each in sizes[2:]]
        torch._dynamo.graph_break()
        return [*out, *(op(x, each) for op, each in zip(operators, (out[1], out[2])))]

    x = torch.arange(draw.randint(1, 9)).to(dtype).unsqueeze(1).expand(-1, 2)
    results = list(zip(torch.compile(written, backend="purevk")(x), written(x), strict=True))
    for have, want in results:
        assert have.shape == want.shape and have.equal(want)
    for have, want in results[:4]:
        count = draw.randint(0, 40)
        least = min(count, want.numel())
        have, want = have.resize_(count), want.resize_(count)
        assert have[:least].equal(want[:least])


def test_inference_mode() -> None:
    with torch.inference_mode():
        module = _mlp()
        compiled = torch.compile(module, backend="purevk")
        for _ in range(2):
            _agrees(compiled, module, torch.randn(4, 6))
            module[0].weight.mul_(2)  # which such tensors do not tell


def test_tensors_without_elements_are_refused() -> None:
    with torch.device("meta"):
        module, x = _mlp(), torch.randn(4, 6)
    with pytest.raises(Exception, match="on the device meta") as caught:
        torch.compile(module, backend="purevk")(x)
    assert isinstance(caught.value, UnsupportedProgramError) or "UnsupportedProgramError" in str(
        caught.value
    )


def test_a_context_of_ones_own() -> None:
    from purevk import api
    from purevk.graph.context import Context

    with Context(api.open_device()) as context:
        module = _mlp()
        compiled = torch.compile(module, backend=dynamo.make_backend(context))
        _agrees(compiled, module, torch.randn(4, 6))
        assert any(program.context is context for program in _programs())
        torch._dynamo.reset()
        del compiled


def test_a_compiled_module_is_pickled_and_copied() -> None:
    module, x = _mlp(), torch.randn(4, 6)
    whole = torch.compile(module, backend="purevk")
    _agrees(whole, module, x)
    _agrees(pickle.loads(pickle.dumps(whole)), module, x)
    _agrees(copy.deepcopy(whole), module, x)
    written = io.BytesIO()
    torch.save(whole, written)
    written.seek(0)
    _agrees(torch.load(written, weights_only=False), module, x)


def test_torch_finds_the_backend() -> None:
    assert "purevk" in torch._dynamo.list_backends()
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    (line,) = (
        each
        for each in text.split('"torch_dynamo_backends"]')[1].splitlines()[:2]
        if each.startswith("purevk")
    )
    value = line.split("=")[1].strip().strip('"')
    assert EntryPoint("purevk", value, "torch_dynamo_backends").load() is dynamo.purevk_backend
