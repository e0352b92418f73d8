"""Modules and exported programs of torch, compiled without a file between."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import purevk  # noqa: E402
from purevk.errors import GraphError, InputError, UnsupportedProgramError  # noqa: E402
from purevk.frontends.torch.decompose import decompose, is_decomposed  # noqa: E402

pytestmark = pytest.mark.device


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(16, 32), torch.nn.LayerNorm(32)
        self.mixer = torch.nn.Conv1d(4, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.mixer(torch.nn.functional.gelu(self.norm(self.linear(x))))
        heads = y[:, None]
        mixed = torch.nn.functional.scaled_dot_product_attention(
            heads, heads, heads, is_causal=True
        )
        return mixed.softmax(-1), y.mean(dim=1, keepdim=True)


def _block() -> Block:
    torch.manual_seed(0)
    return Block().eval()


def _agrees(program: purevk.Program, module: torch.nn.Module, *inputs: torch.Tensor) -> None:
    with torch.no_grad():
        wanted = module(*inputs)
    torch.testing.assert_close(program.forward(*inputs), wanted, rtol=1e-5, atol=1e-5)


def test_a_module() -> None:
    module, x = _block(), torch.randn(2, 4, 16)
    with purevk.compile(module, (x,)) as program:
        assert program.report()["cpu_nodes"] == 0 and program.report()["segments"] == 1
        _agrees(program, module, x)
        _agrees(program, module, torch.randn(2, 4, 16))


def test_an_exported_program() -> None:
    module, x = _block(), torch.randn(2, 4, 16)
    with purevk.compile(torch.export.export(module, (x,), strict=False)) as program:
        _agrees(program, module, x)


def test_sizes_between_the_bounds_take_one_lowering() -> None:
    module = _block()
    batch = torch.export.Dim("batch", min=2, max=8)
    with purevk.compile(
        module, (torch.randn(4, 4, 16),), dynamic_shapes={"x": {0: batch}}
    ) as program:
        for size in (2, 5, 8, 3, 5):
            _agrees(program, module, torch.randn(size, 4, 16))
        assert len(program.method("forward").specializations) == 1


def test_larger_sizes_grow_the_bounds(caplog: pytest.LogCaptureFixture) -> None:
    module = _block()
    batch = torch.export.Dim("batch", min=2, max=8)
    exported = torch.export.export(
        module, (torch.randn(4, 4, 16),), dynamic_shapes={"x": {0: batch}}
    )
    with purevk.compile(exported, bounds="grow") as program:
        with caplog.at_level(logging.WARNING, "purevk"):
            for size in (9, 16, 12, 3):
                _agrees(program, module, torch.randn(size, 4, 16))
        assert len(program.method("forward").specializations) == 2
        assert caplog.text.count("above the exported bounds") == 1


def test_strict_bounds_hold() -> None:
    module = _block()
    batch = torch.export.Dim("batch", min=2, max=8)
    example = (torch.randn(4, 4, 16),)
    with purevk.compile(
        module, example, dynamic_shapes={"x": {0: batch}}, bounds="strict"
    ) as program:
        with pytest.raises(InputError, match="x.shape\\[0\\] is 9"):
            program.forward(torch.randn(9, 4, 16))


def test_buffers_live_on_the_device() -> None:
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total.add_(x)
            return self.total * 2

    x = torch.tensor([1.0, 2.0, 3.0])
    with purevk.compile(Counter(), (x,)) as program:
        for count in (1, 2, 3):
            torch.testing.assert_close(program.forward(x), 2.0 * count * x)
        program.reset_state()
        torch.testing.assert_close(program.forward(x), 2.0 * x)


def test_what_has_no_kernel_runs_on_the_cpu() -> None:
    class Exponential(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.matrix_exp(0.1 * x) @ x

    x = torch.randn(5, 5)
    with purevk.compile(Exponential(), (x,)) as program:
        assert program.report()["cpu_nodes"] >= 1
        _agrees(program, Exponential(), x)


def test_inputs_that_are_written() -> None:
    class Append(torch.nn.Module):
        def forward(
            self, x: torch.Tensor, cache: torch.Tensor, total: torch.Tensor
        ) -> torch.Tensor:
            cache[:, 1:3] = x
            total.add_(x.sum())
            return cache.softmax(-1) * total

    x, mine, theirs = (
        torch.randn(4, 2, 3),
        [torch.zeros(4, 5, 3), torch.ones(1)],
        [torch.zeros(4, 5, 3), torch.ones(1)],
    )
    with purevk.compile(Append(), (x, torch.zeros(4, 5, 3), torch.ones(1))) as program:
        for _ in range(2):
            torch.testing.assert_close(program.forward(x, *mine), Append()(x, *theirs))
            torch.testing.assert_close(mine, theirs)
        arrays = [each.numpy().copy() for each in theirs]
        program.forward(x.numpy(), *arrays)
        Append()(x, *theirs)
        torch.testing.assert_close([torch.from_numpy(each) for each in arrays], theirs)
        arrays[0].flags.writeable = False
        with pytest.raises(InputError, match="cache cannot be written"):
            program.forward(x.numpy(), *arrays)


def test_an_instance_norm_keeps_its_statistics() -> None:
    mine, theirs = (
        torch.nn.InstanceNorm1d(3, affine=True, track_running_stats=True) for _ in range(2)
    )
    x = torch.randn(2, 3, 8)
    with purevk.compile(mine, (x,)) as program:
        for _ in range(2):
            torch.testing.assert_close(program.forward(x), theirs(x))
        assert program.report()["cpu_nodes"] == 0
    module = torch.nn.InstanceNorm1d(3, track_running_stats=True)
    state = [torch.zeros(3), torch.ones(3)]

    class Norm(torch.nn.Module):
        def forward(
            self, x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor
        ) -> torch.Tensor:
            return torch.nn.functional.instance_norm(
                x, mean, variance, use_input_stats=True, momentum=0.1
            )

    with purevk.compile(Norm(), (x, torch.zeros(3), torch.ones(3))) as program:
        torch.testing.assert_close(program.forward(x, *state), module(x))
    torch.testing.assert_close(state, [module.running_mean, module.running_var])


def test_complex_numbers_run_on_the_device() -> None:
    class Spectrum(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("window", torch.hann_window(32))
            self.register_buffer(
                "turns", torch.polar(torch.ones(17, 1), torch.arange(17.0)[:, None])
            )

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            spectrum = torch.stft(x, 32, 8, window=self.window, return_complex=True) * self.turns
            return (spectrum.abs() + 1).log().mean(-1), spectrum.conj()

    module, x = Spectrum(), torch.randn(2, 200)
    with purevk.compile(module, (x,)) as program:
        assert program.report()["cpu_nodes"] == 0 and program.report()["segments"] == 1
        _agrees(program, module, x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = (
        torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.SiLU(), torch.nn.Linear(40, 8))
        .eval()
        .to(dtype)
    )
    x = torch.randn(7, 24, dtype=dtype)
    with purevk.compile(module, (x,)) as program, torch.no_grad():
        # Half values with sums in float32: as far from eager as a few roundings of the type.
        torch.testing.assert_close(program.forward(x), module(x), rtol=3e-2, atol=1e-2)


def test_integers_of_the_call() -> None:
    class Shift(torch.nn.Module):
        def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
            return x * n + 1

    x = torch.arange(4.0)
    exported = torch.export.export(
        Shift(), (x, 3), dynamic_shapes={"x": None, "n": torch.export.Dim.DYNAMIC}, strict=False
    )
    with purevk.compile(exported) as program:
        for n in (3, 7, -2):
            torch.testing.assert_close(program.forward(x, n), x * n + 1)


def test_weights_without_data_are_refused() -> None:
    with torch.device("meta"):
        module = torch.nn.Linear(3, 3)
    with pytest.raises(UnsupportedProgramError, match="no data"):
        purevk.compile(module, (torch.randn(2, 3, device="meta"),))


def test_what_needs_no_decomposition_is_not_traced_anew() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = torch.nn.Conv2d(3, 4, 3, stride=2), torch.nn.BatchNorm2d(4)
            torch.nn.init.normal_(self.norm.running_mean)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.conv(x)).relu_() + 1

    module, x = Block().eval(), torch.randn(1, 3, 8, 8)
    exported = torch.export.export(module, (x,), strict=False)
    assert is_decomposed(exported) and decompose(exported) is exported
    with purevk.compile(exported) as program:
        plan = program.method("forward").executable.plan
        # The new weights are computed once; at a call there are the convolution and the copies
        # around it.
        assert len(plan.once) >= 3 and len(plan.dispatches) <= 3
        _agrees(program, module, x)


def test_writes_that_others_see_are_taken_out_by_torch() -> None:
    class Writes(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y, z = x + 1, x * 2
            part = y.view(-1)
            y.relu_()
            z[0].sigmoid_()
            return part * 2, z

    module, x = Writes().eval(), torch.randn(3, 4)
    exported = torch.export.export(module, (x,), strict=False)
    assert not is_decomposed(exported)
    with purevk.compile(exported) as program:
        _agrees(program, module, x)


class Cached(torch.nn.Module):
    """executorch's operators that write into a buffer: what is before can be read as well, and a
    cache may be a mere value."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, 8, 2, 4))
        self.register_buffer("values", torch.zeros(1, 8, 2, 4))

    def forward(
        self, x: torch.Tensor, position: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        start = position[0].item()
        torch._check(start >= 0)
        torch._check(start < 8)
        before, own = self.keys * 1.0, self.keys * 2.0
        torch.ops.llama.update_cache(x, self.keys, start)
        torch.ops.llama.update_cache(x * 2, self.values, start)
        torch.ops.llama.update_cache(x * 3, self.values, 0)
        torch.ops.llama.update_cache(x, own, start)
        return (
            torch.ops.llama.custom_sdpa(x, self.keys, self.values, start, None, 0.0, True),
            before,
            own,
        )


def test_operators_that_write_into_buffers() -> None:
    pytest.importorskip("executorch.extension.llm.custom_ops.custom_ops")
    torch.manual_seed(0)
    program = purevk.compile(Cached(), (torch.randn(1, 1, 2, 4), torch.tensor([0])))
    nodes = [node.op for node in program.methods["forward"].graph.nodes]
    # The caches are written in place; only the copy of one is left to the CPU.
    assert nodes.count("purevk.write") == 3 and nodes.count("purevk.host") == 1
    assert "purevk.store" not in nodes
    module = Cached()
    for position in range(4):
        _agrees(program, module, torch.randn(1, 1, 2, 4), torch.tensor([position]))


def test_nodes_are_named_after_the_modules_that_call_them(tmp_path: Path) -> None:
    stack = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()))
    with purevk.compile(stack.eval(), (torch.randn(2, 4),)) as program:
        program.save(tmp_path / "stack.pvk")
        (label,) = _labels(program)
        assert "0.0.linear" in label and "0.1.gelu" in label
    with purevk.load(tmp_path / "stack.pvk") as loaded:
        assert _labels(loaded) == [label]


class Named(torch.nn.Module):
    """A parameter with the name that a result could have, one that is shared, and a literal."""

    def __init__(self) -> None:
        super().__init__()
        self.add_0 = torch.nn.Parameter(torch.randn(4))
        self.inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        self.inner[1].weight = self.inner[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x + self.add_0) * torch.tensor([1.0, 2.0, 3.0, 4.0])


def test_constants_are_named_after_parameters(tmp_path: Path) -> None:
    wanted = {"self.add_0", "inner.0.weight", "inner.0.bias", "inner.1.bias"}
    model, x = Named().eval(), torch.randn(2, 4)
    with purevk.compile(model, (x,)) as program:
        names = {value.name for value in program.methods["forward"].graph.constants}
        assert wanted < names and len(names) == len(wanted) + 1
        program.save(tmp_path / "named.pvk")
    with purevk.load(tmp_path / "named.pvk") as loaded:
        graph = loaded.methods["forward"].graph
        assert {value.name for value in graph.constants} == names
        results = {value.name for node in graph.nodes for value in node.results}
        assert not results & names
        torch.testing.assert_close(loaded(x), model(x), rtol=1e-4, atol=1e-5)


def _labels(program: purevk.Program) -> list[str]:
    return [each.label for each in program.methods["forward"].executable.plan.dispatches]


def test_states_of_an_lstm_as_torch_2_11_traces_them() -> None:
    """It notes a dim too many: [layers, 1, batch, width]."""

    class Outputs(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.LSTM(4, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)[0]

    module, x = Outputs().eval().requires_grad_(False), torch.randn(3, 2, 4)
    exported = torch.export.export(module, (x,))
    (node,) = (node for node in exported.graph.nodes if "lstm" in str(node.target))
    out, hidden, cell = node.meta["val"]
    states = (state.reshape(state.shape[0], 1, *state.shape[-2:]) for state in (hidden, cell))
    node.meta["val"] = (out, *states)
    with purevk.compile(exported) as program:
        torch.testing.assert_close(program.forward(x), module(x))


class Bags(torch.nn.Module):
    def __init__(self, mode: str, last: bool) -> None:
        super().__init__()
        self.mode, self.last = mode, last

    def forward(self, table: torch.Tensor, starts: torch.Tensor, entries: torch.Tensor) -> list:
        return [
            torch.nn.functional.embedding_bag(
                entries, part, starts, mode=self.mode, include_last_offset=self.last
            )
            for part in (table, table[:, ::2], table[:, :6].t())
        ]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("last", [False, True])
def test_bags_of_a_table_whose_columns_are_apart(mode: str, last: bool) -> None:
    """Torch takes other kernels, which do not end sums and means at the last offset."""
    entries = torch.tensor([4, 0, 5, 3, 3, 1, 2, 0, 4, 5, 1])
    module, starts = Bags(mode, last), torch.tensor([0, 3, 3, 7])
    given = torch.randn(11, 12), starts, entries
    with purevk.compile(module, given) as program:
        assert program.report()["cpu_nodes"] == 0
        for wanted, found in zip(module(*given), program.forward(*given)):
            torch.testing.assert_close(found, wanted)


def test_weights_of_entries_that_are_apart() -> None:
    class Weighted(torch.nn.Module):
        def forward(self, table: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            entries, starts = torch.tensor([4, 0, 5, 3, 3]), torch.tensor([0, 2, 4])
            return torch.nn.functional.embedding_bag(
                entries,
                table,
                starts,
                mode="sum",
                per_sample_weights=weights[::2],
                include_last_offset=True,
            )

    given = torch.randn(6, 4), torch.randn(10)
    with purevk.compile(Weighted(), given) as program:
        _agrees(program, Weighted(), *given)


def test_a_shape_that_torch_does_not_record_is_no_damaged_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from purevk.ops import registry

    definition = registry.find("aten.relu.default")
    assert definition is not None
    wrong = lambda args: [args[0].type.with_dims((7,))]  # noqa: E731
    monkeypatch.setattr(type(definition), "infer", lambda self, args: wrong(args))
    with pytest.raises(GraphError, match="recorded as float32") as caught:
        purevk.compile(torch.nn.ReLU(), (torch.randn(3),))
    assert "report it" in caught.value.next and "file" not in caught.value.next


@pytest.mark.parametrize("seed", range(3))
def test_sizes_of_inputs_that_are_equal_after_other_operators(seed: int, tmp_path: Path) -> None:
    """Dims with names of their own, of which one is what a convolution makes of the other."""
    draw = random.Random(seed)
    kernel, stride, grow = draw.choice([2, 3, 5]), draw.choice([1, 2, 3]), draw.choice([1, 2])

    class Joined(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = torch.nn.Conv1d(3, 2, kernel, stride, padding=kernel // 2)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            low = self.down(y).repeat_interleave(grow, 2)
            return torch.cat([low, x], 1) + low[:, :1]

    module = Joined().eval()

    def inputs(length: int) -> tuple[torch.Tensor, ...]:
        y = torch.randn(1, 3, length)
        return torch.randn(1, 2, grow * module.down(y).shape[2]), y

    dynamic = ({2: torch.export.Dim.DYNAMIC}, {2: torch.export.Dim.DYNAMIC})
    with (
        torch.no_grad(),
        purevk.compile(torch.export.export(module, inputs(16), dynamic_shapes=dynamic)) as program,
    ):
        program.save(tmp_path / "x.pvk")
        with purevk.load(tmp_path / "x.pvk") as loaded:
            for length in (16, 90, 11, draw.randint(200, 300)):
                given = inputs(length)
                _agrees(program, module, *given)
                _agrees(loaded, module, *given)
