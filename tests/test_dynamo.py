"""The backend of torch.compile against eager torch: dynamic sizes, graph breaks, writes into
arguments, parameters that change."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import purevk  # noqa: E402
from purevk import dynamo  # noqa: E402
from purevk.errors import UnsupportedProgramError  # noqa: E402

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
    return [each.program for each in dynamo._shared]


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


def test_operators_that_may_fail() -> None:
    """torch checks factorizations by an operator with an effect, which it orders by a token."""

    def solve(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        square = a @ a.mT + torch.eye(4)
        return torch.linalg.inv(a), torch.linalg.solve(a, b), torch.linalg.cholesky(square)

    compiled = torch.compile(solve, backend="purevk")
    a, b = torch.randn(4, 4) + 4 * torch.eye(4), torch.randn(4, 2)
    for _ in range(2):
        _agrees(compiled, solve, a, b)
    with pytest.raises(RuntimeError, match="singular"):
        solve(torch.zeros(4, 4), b)
    with pytest.raises(RuntimeError, match="singular"):
        compiled(torch.zeros(4, 4), b)


def test_a_sum_of_sizes() -> None:
    def padded(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        rows = torch.sym_sum((x.shape[0], y.shape[0], z.shape[0], 1))
        return torch.ones(rows, 2) * x.sum()

    compiled = torch.compile(padded, backend="purevk", dynamic=True)
    for sizes in ((3, 5, 2), (4, 2, 7)):
        _agrees(compiled, padded, *(torch.rand(size, 2) for size in sizes))


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


def test_training_runs_in_eager_torch_with_one_warning() -> None:
    module = _mlp()
    compiled = torch.compile(module, backend="purevk")
    dynamo._warn_about_training.cache_clear()
    with torch.enable_grad(), pytest.warns(UserWarning, match="inference only"):
        compiled(torch.randn(4, 6)).sum().backward()
    assert module[0].weight.grad is not None
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(torch.randn(1, 6))
    _agrees(compiled, module, torch.randn(4, 6))


def test_inference_mode() -> None:
    with torch.inference_mode():
        module = _mlp()
        compiled = torch.compile(module, backend="purevk")
        for _ in range(2):
            _agrees(compiled, module, torch.randn(4, 6))
            module[0].weight.mul_(2)  # which such tensors do not tell


def test_other_devices_are_refused() -> None:
    with torch.device("meta"):
        module, x = _mlp(), torch.randn(4, 6)
    with pytest.raises(Exception, match="tensors of the CPU are accepted") as caught:
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
