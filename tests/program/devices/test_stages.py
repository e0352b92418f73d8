"""A model whose layers are split among devices, or contexts on one: see `contexts`."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import purevk
from purevk.graph.context import Context
from purevk.program.devices.cuts import choose_cuts, cut, with_early_stores
from purevk.program.devices.turns import Turns

pytestmark = pytest.mark.device
SIZE, CAPACITY, WORDS = 32, 24, 40


class Block(torch.nn.Module):
    """A layer of a transformer with a cache of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(SIZE, 3 * SIZE), torch.nn.Linear(SIZE, SIZE)
        self.up, self.down = torch.nn.Linear(SIZE, 2 * SIZE), torch.nn.Linear(2 * SIZE, SIZE)
        self.norm = torch.nn.LayerNorm(SIZE)
        self.register_buffer("keys", torch.zeros(1, 2, CAPACITY, SIZE // 2))
        self.register_buffer("values", torch.zeros(1, 2, CAPACITY, SIZE // 2))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rows = x.shape[1]
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (each.view(1, rows, 2, SIZE // 2).transpose(1, 2) for each in parts)
        self.keys.index_copy_(2, positions, k)
        self.values.index_copy_(2, positions, v)
        mask = torch.arange(CAPACITY)[None, :] <= positions[:, None]
        y = torch.nn.functional.scaled_dot_product_attention(
            q, self.keys, self.values, attn_mask=mask
        )
        x = x + self.out(y.transpose(1, 2).reshape(1, rows, SIZE))
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Language(torch.nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, SIZE)
        self.layers = torch.nn.ModuleList(Block() for _ in range(layers))
        self.head = torch.nn.Linear(SIZE, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, positions)
        return self.head(x)

    def reset(self) -> None:
        for buffer in self.buffers():
            buffer.zero_()


def close(made: Any, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(made), wanted, rtol=1e-4, atol=1e-4)


def save(path: Path, module: torch.nn.Module, *inputs: Any, shapes: Any = None) -> Path:
    with purevk.compile(module.eval(), inputs, dynamic_shapes=shapes) as program:
        program.save(path)
    return path


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> tuple[Language, Path]:
    torch.manual_seed(0)
    model = Language().eval()
    rows = torch.export.Dim("rows", min=2, max=16)
    path = tmp_path_factory.mktemp("language") / "model.pvk"
    prompt = torch.zeros(1, 4, dtype=torch.int64), torch.arange(4)
    methods = {
        "prefill": (model, prompt, {"tokens": {1: rows}, "positions": {0: rows}}),
        "forward": (model, (torch.zeros(1, 1, dtype=torch.int64), torch.arange(1))),
    }
    with purevk.compile(methods) as program:
        program.save(path)
    return model, path


# -- results -------------------------------------------------------------------------------------
def test_a_language_model_keeps_its_caches(
    language: tuple[Language, Path], contexts: list[Context], tmp_path: Path
) -> None:
    model, path = language
    model.reset()
    with purevk.load(path, device=contexts) as staged, torch.no_grad():
        assert isinstance(staged, purevk.StagedProgram)  # it keeps states
        assert [program.states.nbytes > 0 for program in staged.programs] == [True, True]
        tokens, positions = torch.randint(0, WORDS, (1, 6)), torch.arange(6)
        close(staged.method("prefill")(tokens, positions), model(tokens, positions))
        for at in range(6, 9):
            token, position = torch.tensor([[at]]), torch.tensor([at])
            close(staged(token, position), model(token, position))
        futures = [staged.submit(torch.tensor([[at]]), torch.tensor([at])) for at in range(9, 15)]
        for at, future in zip(range(9, 15), futures):
            close(future.result(), model(torch.tensor([[at]]), torch.tensor([at])))
        buffers = dict(model.named_buffers())
        assert set(staged.state) == set(buffers)
        for name, buffer in buffers.items():
            close(staged.state[name], buffer)
        staged.save_state(tmp_path / "state.npz")
        next_call = torch.tensor([[3]]), torch.tensor([15])
        wanted = model(*next_call)
        close(staged(*next_call), wanted)
        staged.reset_state()
        assert not any(staged.state[name].any() for name in staged.state)
        staged.load_state(tmp_path / "state.npz")
        close(staged(*next_call), wanted)
    with purevk.load(path) as whole:
        whole.load_state(tmp_path / "state.npz")
        close(whole(*next_call), wanted)


def test_weights_are_shared_out(language: tuple[Language, Path], three: list[Context]) -> None:
    model, path = language
    model.reset()
    with purevk.load(path, device=three, split="layers") as staged, torch.no_grad():
        each = [program.weights.nbytes for program in staged.programs]
        with purevk.load(path) as whole:
            tied = model.head.weight.nbytes
            assert sum(each) <= 1.1 * (whole.weights.nbytes + tied)
            assert max(each) <= 0.6 * whole.weights.nbytes
        tokens, positions = torch.randint(0, WORDS, (1, 16)), torch.arange(16)
        close(staged.method("prefill")(tokens, positions), model(tokens, positions))
        assert staged.describe().count("llvmpipe") == 3 or len(staged.programs) == 3


class Halves(torch.nn.Module):
    """What crosses the cut has sizes that are no size of an input; results come from everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, extra: torch.Tensor, times: int) -> dict[str, Any]:
        first = self.one(x)
        pairs = torch.cat([first, first * times]).relu()
        second = self.two(pairs).sin()
        third = self.three(second[: x.shape[0]]) + extra
        return {"early": first, "rows": pairs.shape[0], "late": third, "input": extra, "number": 3}


@pytest.mark.parametrize("split", ["layers", None])
def test_sizes_that_cross_the_cuts(split: str | None, three: list[Context], tmp_path: Path) -> None:
    model, rows = Halves(), torch.export.Dim("rows", min=1, max=32)
    auto = torch.export.Dim.DYNAMIC
    path = save(
        tmp_path / "model.pvk",
        model,
        torch.randn(4, 8),
        torch.randn(4, 8),
        3,
        shapes=({0: rows}, {0: rows}, auto),
    )
    with purevk.load(path, device=three, split=split) as program, torch.no_grad():
        assert isinstance(program, purevk.StagedProgram)  # `times` and `rows` go with no batch
        for count, times in ((4, 3), (1, 2), (17, 5)):
            given = torch.randn(count, 8), torch.randn(count, 8), times
            made, wanted = program(*given), model(*given)
            assert (made["rows"], made["number"]) == (wanted["rows"], 3)
            for name in ("early", "late", "input"):
                close(made[name], wanted[name])
            arrays = program(*(each.numpy() for each in given[:2]), times=times)
            assert isinstance(arrays["late"], np.ndarray)
        with pytest.raises(purevk.SizeConstraintError, match="1 to 32"):
            program(torch.randn(40, 8), torch.randn(40, 8), 2)
        with pytest.raises(purevk.InputError):
            program(torch.randn(4, 8), torch.randn(5, 8), 2)


def test_larger_sizes_than_exported(contexts: list[Context], tmp_path: Path) -> None:
    model, rows = Halves(), torch.export.Dim("rows", min=1, max=4)
    example = torch.randn(3, 8), torch.randn(3, 8), 3
    path = save(tmp_path / "model.pvk", model, *example, shapes=({0: rows}, {0: rows}, None))
    given = torch.randn(9, 8), torch.randn(9, 8), 3
    with purevk.load(path, device=contexts, split="layers", bounds="grow") as program:
        with torch.no_grad():
            close(program(*given)["late"], model(*given)["late"])


class Chosen(torch.nn.Module):
    """A data-dependent size, and a branch, in the middle of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(4))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor, written: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.layers[1](self.layers[0](x).relu())
        rows = x[x[:, 0] > 0]
        x = x + rows.sum(0)
        x = torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y - 1, (x,))
        self.calls.add_(1)
        written.add_(x.mean())
        return self.layers[3](self.layers[2](x).relu()), rows + self.calls


def test_data_dependent_sizes_stay_together(three: list[Context], tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Chosen()
    path = save(tmp_path / "model.pvk", model, torch.randn(5, 6), torch.zeros(3))
    model.calls.zero_()
    with purevk.load(path, device=three, split="layers") as staged, torch.no_grad():
        for _ in range(4):
            x = torch.randn(5, 6)
            mine, theirs = torch.ones(3), torch.ones(3)
            made, wanted = staged(x, mine), model(x, theirs)
            for one, other in zip(made, wanted):
                close(one, other)
            close(mine, theirs)


class Networks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        channels = [3, 8, 16, 16, 32]
        self.layers = torch.nn.ModuleList(
            torch.nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(channels)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.mean((2, 3))


@pytest.mark.export
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_of_executorch(dtype: torch.dtype, contexts: list[Context], tmp_path: Path) -> None:
    pytest.importorskip("executorch")
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner
    from executorch.exir import to_edge_transform_and_lower

    model = Networks().eval().to(dtype)
    x = torch.randn(2, 3, 8, 8).to(dtype)
    path = tmp_path / "model.pte"
    exported = torch.export.export(model, (x,))
    edge = to_edge_transform_and_lower(exported, partitioner=[VulkanPartitioner()])
    path.write_bytes(edge.to_executorch().buffer)
    with purevk.load(path, device=contexts) as staged, torch.no_grad():
        assert isinstance(staged, purevk.StagedProgram)  # its batch is fixed
        tolerance = 1e-4 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(staged(x), model(x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("free", [4096, 1 << 30], ids=["too_large", "fits"])
def test_a_model_without_room_is_split_by_layers(
    free: int, contexts: list[Context], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from purevk.program.devices import memory

    model, rows = Networks(), torch.export.Dim("rows", min=1, max=8)
    path = save(tmp_path / "model.pvk", model, torch.randn(2, 3, 8, 8), shapes=({0: rows},))
    monkeypatch.setattr(memory, "free_bytes", lambda context: free)
    with purevk.load(path, device=contexts) as program, torch.no_grad():
        wanted = purevk.StagedProgram if free == 4096 else purevk.Replicas
        assert isinstance(program, wanted)
        x = torch.randn(5, 3, 8, 8)
        close(program(x), model(x))


def test_large_tensors_cross_the_cut(contexts: list[Context], tmp_path: Path) -> None:
    """Their memory is used again, and results are not in it."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    rows = torch.export.Dim("rows", min=1, max=1 << 16)
    path = save(tmp_path / "model.pvk", model, torch.randn(4, 8), shapes=({0: rows},))
    given = [torch.randn(count, 8) for count in (1 << 15, 1 << 16, 1 << 16, 3, 1 << 16)]
    with purevk.load(path, device=contexts, split="layers") as staged, torch.no_grad():
        for x, future in [(x, staged.submit(x)) for x in given]:
            close(future.result(), model(x))
        results = [staged(x) for x in given]
        for x, made in zip(given, results):
            close(made, model(x))


# -- order ---------------------------------------------------------------------------------------
class Counting(torch.nn.Module):
    """Results show in which order calls went through both stages."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.register_buffer("first", torch.zeros(1))
        self.register_buffer("second", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.first.add_(1)
        x = self.one(x) * self.first
        first = self.first.clone()
        self.second.add_(1)
        return self.two(x), first, self.second.clone()


def test_calls_of_threads_keep_one_order(contexts: list[Context], tmp_path: Path) -> None:
    path = save(tmp_path / "model.pvk", Counting(), torch.randn(2, 4))
    with purevk.load(path, device=contexts, split="layers") as staged:
        homes = [{name for name in program.state} for program in staged.programs]
        assert homes == [{"first"}, {"second"}]
        x = np.ones((2, 4), np.float32)
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(lambda _: staged(x), range(24)))
            futures = [staged.submit(x) for _ in range(8)]
            made += list(pool.map(lambda _: staged(x), range(8)))
        made += [future.result() for future in futures]
        assert all(first == second for _, first, second in made)
        assert sorted(int(first[0]) for _, first, _ in made) == list(range(1, 41))


def test_a_failed_call_lets_others_through(contexts: list[Context], tmp_path: Path) -> None:
    path = save(tmp_path / "model.pvk", Counting(), torch.randn(2, 4))
    with purevk.load(path, device=contexts, split="layers") as staged:
        x = np.ones((2, 4), np.float32)
        method = staged.programs[1].method("forward")
        run = method.run_flat

        def fail(inputs: Any, targets: Any = None) -> Any:
            raise purevk.PurevkError("no")

        method.run_flat = fail  # type: ignore[method-assign]
        with pytest.raises(purevk.PurevkError, match="no"):
            staged(x)
        assert isinstance(staged.submit(x).exception(), purevk.PurevkError)
        method.run_flat = run  # type: ignore[method-assign]
        assert int(staged(x)[1][0]) == 3
        assert isinstance(staged.submit(np.ones((3, 3), np.float32)).exception(), purevk.InputError)
        staged.reset_state()
        assert int(staged(x)[1][0]) == 1
    with pytest.raises(purevk.PurevkError, match="closed"):
        staged(x)


def test_turns_keep_the_order_of_tickets() -> None:
    turns, seen = Turns(2), []
    tickets = [turns.take() for _ in range(3)]
    turns.leave(tickets[1], 0)  # cancelled before its turn

    def call(ticket: int) -> None:
        for stage in range(2):
            turns.wait(stage, ticket)
            seen.append((stage, ticket))
            turns.leave(ticket, stage, stage + 1)

    threads = [threading.Thread(target=call, args=(each,)) for each in (tickets[2], tickets[0])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert [ticket for stage, ticket in seen if stage == 0] == [0, 2]
    assert [ticket for stage, ticket in seen if stage == 1] == [0, 2]


# -- what is refused -----------------------------------------------------------------------------
class Together(torch.nn.Module):
    """One state that all layers write."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.register_buffer("sum", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sum.add_(1)
        x = self.one(x) + self.sum
        self.sum.add_(x.sum(0))
        return self.two(x) + self.sum


def test_what_cannot_be_split_is_refused(contexts: list[Context], tmp_path: Path) -> None:
    path = save(tmp_path / "model.pvk", torch.nn.ReLU(), torch.randn(4))
    with pytest.raises(purevk.InputError, match="into 2 stages"):
        purevk.load(path, device=contexts, split="layers")
    for options, why in (
        ({"device": contexts, "split": "rows"}, "accepted"),
        ({"split": "layers"}, "several devices"),
        ({"device": [], "split": "layers"}, "no device"),
        ({"device": [contexts[0], contexts[0]]}, "twice"),
    ):
        with pytest.raises(purevk.InputError, match=why):
            purevk.load(path, **options)  # type: ignore[call-overload]


def test_a_state_is_on_one_device(contexts: list[Context], tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = Together()
    path = save(tmp_path / "model.pvk", model, torch.randn(2, 4))
    model.sum.zero_()
    with purevk.load(path, device=contexts, split="layers") as staged, torch.no_grad():
        assert sum("sum" in program.state for program in staged.programs) == 1
        for _ in range(3):
            x = torch.randn(2, 4)
            close(staged(x), model(x))


def test_a_state_that_another_method_writes_is_in_one_place(
    contexts: list[Context], tmp_path: Path
) -> None:
    class Reader(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two((self.one(x * self.scale) * 2 + 1) * self.scale)

    class Writer(torch.nn.Module):
        def __init__(self, reader: Reader) -> None:
            super().__init__()
            self.reader = reader

        def forward(self, scale: torch.Tensor) -> torch.Tensor:
            self.reader.scale.copy_(scale)
            return self.reader.scale + 1

    class Constant(torch.nn.Module):
        def forward(self) -> torch.Tensor:
            return torch.full((2,), 7.0)

    reader = Reader().eval()
    writer, path = Writer(reader), tmp_path / "model.pvk"
    methods = {
        "forward": (reader, (torch.randn(2, 4),)),
        "set": (writer, (torch.randn(4),)),
        "seven": (Constant(), ()),
    }
    with purevk.compile(methods) as program:
        program.save(path)
    with purevk.load(path, device=contexts, split="layers") as staged, torch.no_grad():
        x, scale = torch.randn(2, 4), torch.randn(4)
        close(staged.method("set")(scale), writer(scale))
        close(staged(x), reader(x))
        close(staged.method("seven")(), torch.full((2,), 7.0))
        with pytest.raises(purevk.InputError, match="forward, set, seven"):
            staged.method("eight")


# -- the graph -----------------------------------------------------------------------------------
def graph_of(path: Path) -> Any:
    from purevk.frontends.files import open_file

    return open_file(path).graph("forward")


@pytest.mark.parametrize(
    "shares", [[1, 1], [1, 3], [1, 1, 1, 1]], ids=["halves", "unequal", "quarters"]
)
def test_shares_of_the_weights(shares: list[float], language: tuple[Language, Path]) -> None:
    graph = with_early_stores(graph_of(language[1]))
    cuts = choose_cuts({"forward": graph}, shares, "model")["forward"]
    parts = cut(graph, cuts)
    total = sum(stage.weight_bytes for stage in parts.stages)
    for stage, share in zip(parts.stages, shares):
        assert abs(stage.weight_bytes / total - share / sum(shares)) < 0.2
    assert [len(stage.nodes) for stage in parts.stages] == [
        len(stage.graph.nodes) for stage in parts.stages
    ]


def test_stores_keep_the_order_of_a_state(tmp_path: Path) -> None:
    path = save(tmp_path / "model.pvk", Together(), torch.randn(2, 4))
    graph = graph_of(path)
    early = with_early_stores(graph)
    assert sorted(map(id, early.nodes)) == sorted(map(id, graph.nodes))
    state = next(iter(graph.states))
    touching = [[n for n in each.nodes if state in n.inputs] for each in (graph, early)]
    assert touching[0] == touching[1]
