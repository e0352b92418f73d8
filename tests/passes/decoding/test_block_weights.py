"""A Llama whose prompts and tokens share weights in the order of fragments, in scalar arithmetic on any
device, against eager torch."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import purevk
import purevk.dynamo
from bench.decode import Form, Llama, build
from bench.timing import floats_of
from purevk import compiled_graphs
from purevk.dtypes import DType
from purevk.graph.context import default_context
from purevk.ops.attention import attention
from purevk.ops.matmul import fragments as operator
from purevk.passes.matmul import block_weights
from purevk.passes.matmul import fragments as pass_
from purevk.tuning import DEFAULT
from tests.passes.harness import Stepwise, StepwiseAttention

pytestmark = pytest.mark.device
FORM = Form(2, 128, 4, 2, 256, 512, 64)
DOT, MATMUL = "matmul_dot_blocks", "matmul_fragments"


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device of the tests as a GPU whose fragments are known, and are computed step by step."""
    context = default_context()
    traits = dataclasses.replace(
        context.traits,
        profile=DEFAULT,
        cores=4,
        max_texels=0,
        coopmat_shape=None,
        coopmat_columns=(16,),
        bfloat16_columns=(16,),
        fragment_order=lambda dtype, columns: True,
    )
    monkeypatch.setattr(context, "traits", traits)

    def tile_of(
        traits: Any,
        dtype: DType,
        rows: Any,
        columns: Any,
        terms: Any,
        paired: bool = False,
        always: bool = False,
        copied: int = 0,
        alone: bool = False,
    ) -> Stepwise:
        return Stepwise(1, 2, 1, 2, 2, 1, 1)

    for module in (operator, pass_):
        monkeypatch.setattr(module, "tile_of", tile_of)
    monkeypatch.setattr(attention, "choose", lambda *sizes: StepwiseAttention())
    monkeypatch.setattr(block_weights, "_LEAST_TERMS", 64)


def templates(program: purevk.Program, method: str) -> Counter[str]:
    """How often each template that multiplies by weights runs, and each that makes its rows."""
    found = program.methods[method].executable.plan.dispatches
    names = [each.kernel.template.split("/")[1].removesuffix(".comp") for each in found]
    names += [
        f"{name} {macro}"
        for name, each in zip(names, found)
        for macro in ("PAIRED", "NORM")
        if dict(each.kernel.macros).get(macro) == "1"
    ]
    return Counter(name for name in names if "matmul" in name or name in ("row_blocks", "map"))


def tokens(length: int, position: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    given = torch.randint(FORM.vocab, (1, length), generator=generator)
    return given, torch.tensor([position])


STEPS = [("prompt", 37, 0), ("token", 1, 37), ("token", 1, 38), ("few", 3, 39), ("seven", 7, 42)]


def converse(variant: str) -> tuple[purevk.Program, list[float]]:
    """A prompt and what follows it, in methods that share weights and caches, and the errors."""
    torch.manual_seed(0)
    model = build(FORM, variant)
    reference = copy.deepcopy(model).float()
    if variant == "bf16":  # angles as the model has them
        for name in ("cos", "sin"):
            getattr(reference, name).copy_(getattr(model, name))
    lengths = {name: length for name, length, _ in STEPS}
    program = purevk.compile({name: (model, tokens(n, 0)) for name, n in lengths.items()})
    errors = []
    for name, length, position in STEPS:
        given = tokens(length, position)
        made = program.methods[name](*(each.numpy() for each in given))
        wanted = reference(*given).detach()
        made = torch.as_tensor(floats_of(made))
        errors.append(float((made - wanted).abs().max() / wanted.abs().max()))
    return program, errors


def weights_of(program: purevk.Program) -> set[str]:
    """The kernels that read weights in rows."""
    return {
        each.kernel.template
        for method in program.methods.values()
        for each in method.executable.plan.dispatches
        if each.kernel.template.startswith("matmul/")
    } - {f"matmul/{name}.comp" for name in (DOT, MATMUL, "row_blocks")}


def test_prompts_and_tokens() -> None:
    program, errors = converse("fp16")
    assert max(errors) < 5e-3
    assert not weights_of(program)
    layers = FORM.layers
    token = {DOT: 4 * layers + 1, f"{DOT} PAIRED": 2 * layers, f"{DOT} NORM": 2 * layers + 1}
    assert templates(program, "token") == templates(program, "few") == token
    # Queries, keys and values with the rotation and the caches behind them, and a gate, in the matmul.
    # Behind the last attention, only the row of the last token is computed.
    prompt = {MATMUL: 4 * layers - 3, f"{MATMUL} PAIRED": 2 * layers - 1}
    prompt |= {DOT: 4, f"{DOT} PAIRED": 1, f"{DOT} NORM": 2}
    assert templates(program, "prompt") == prompt


def test_narrow_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of columns that lie half a block apart, or less."""
    for heads in (8, 16):  # 16 and 8 columns each
        monkeypatch.setattr(
            "tests.passes.decoding.test_block_weights.FORM", Form(1, 128, heads, 4, 128, 256, 64)
        )
        program, errors = converse("fp16")
        assert max(errors) < 5e-3
        assert not weights_of(program)


def test_rows_that_nothing_writes_in_this_order() -> None:
    """The gate of a matmul of few rows writes rows."""
    program, _ = converse("fp16")
    found = templates(program, "seven")
    layers = FORM.layers - 1  # the last one multiplies only the row of the last token
    assert (found["row_blocks"], found[MATMUL]) == (layers, 2 * layers)


def test_bfloat16() -> None:
    program, errors = converse("bf16")
    assert max(errors) < 3e-2
    assert not weights_of(program)


def test_weights_are_on_the_device_once() -> None:
    """Each method reads the same copies of the weights."""
    model = build(FORM, "fp16")
    alone = purevk.compile({"token": (model, tokens(1, 0))})
    both = purevk.compile({"token": (model, tokens(1, 0)), "prompt": (model, tokens(37, 0))})
    sizes = [each.memory.weights for each in (alone, both)]
    assert sizes[1] - sizes[0] < FORM.width * FORM.inner


def test_other_lengths() -> None:
    """A method for all lengths of prompts."""
    model = build(FORM, "fp16")
    reference = copy.deepcopy(model).float()
    length = torch.export.Dim("length", min=2, max=48)
    prompt = (model, tokens(20, 0), ({1: length}, None))
    program = purevk.compile({"prompt": prompt, "token": (model, tokens(1, 0))})
    for method, count, position in (("prompt", 30, 0), ("token", 1, 30), ("prompt", 9, 31)):
        inputs = tokens(count, position)
        made = torch.as_tensor(program.methods[method](*(each.numpy() for each in inputs)))
        wanted = reference(*inputs).detach()
        assert (made.float() - wanted).abs().max() < 5e-3 * wanted.abs().max()
    assert not weights_of(program)


class AllLogits(Llama):
    """Logits of all rows."""

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        positions = position + self.rows[: tokens.shape[1]]
        x = self.embedding(tokens)
        mask = self.rows[None, :] <= positions[:, None]
        for layer in self.layers:
            x = layer(x, positions, mask, self.cos[positions], self.sin[positions])
        return self.head(self.norm(x))


def test_a_tied_weight_stays_in_rows() -> None:
    """The embedding reads its rows, so the order of fragments would take a second copy."""
    model = build(FORM, "fp16")
    model.__class__ = AllLogits
    model.head.weight = model.embedding.weight
    methods = {"token": (model, tokens(1, 0)), "prompt": (model, tokens(37, 0))}
    program = purevk.compile(methods)
    assert templates(program, "token")[DOT] == 4 * FORM.layers and len(weights_of(program)) == 2
    for name, (_, given) in methods.items():
        made = torch.as_tensor(program.methods[name](*(each.numpy() for each in given))).float()
        wanted = copy.deepcopy(model).float()(*given).detach()
        assert (made - wanted).abs().max() < 5e-3 * wanted.abs().max()
    alone = purevk.compile({"token": methods["token"]})
    assert program.memory.weights - alone.memory.weights < model.head.weight.nbytes


class Cached(nn.Module):
    """A linear layer with a bias, whose results go into a buffer: without attention."""

    def __init__(self, columns: int, terms: int = 128) -> None:
        super().__init__()
        self.linear, self.second = nn.Linear(terms, columns), nn.Linear(columns, 64)
        self.register_buffer("sum", torch.zeros(64, dtype=torch.float16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.second(self.linear(x).relu())
        self.sum.add_(made.sum(0))
        return made + self.sum


@pytest.mark.parametrize("rows", [1, 4, 5, 40])
@pytest.mark.parametrize("columns", [64, 72])
def test_biases_and_epilogues(rows: int, columns: int) -> None:
    """Weights whose columns or terms fill no blocks stay in rows."""
    torch.manual_seed(1)
    model = Cached(columns).half().eval().requires_grad_(False)
    x = torch.randn(rows, 128).half()
    program = purevk.compile({"forward": (model, (x,))})
    made = torch.as_tensor(program.forward(x.numpy()).copy()).float()
    wanted = copy.deepcopy(model).float()(x.float())
    assert (made - wanted).abs().max() < 5e-3 * wanted.abs().max()
    found = templates(program, "forward")
    assert found[DOT if rows < 5 else MATMUL] == (2 if columns == 64 else 0)


def test_a_weight_that_is_an_output() -> None:
    class Shown(Cached):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().forward(x), self.linear.weight * 1

    torch.manual_seed(2)
    model = Shown(64).half().eval().requires_grad_(False)
    x = torch.randn(1, 128).half()
    program = purevk.compile({"forward": (model, (x,))})
    made, weight = program.forward(x.numpy())
    assert (torch.as_tensor(weight.copy()) == model.linear.weight).all()
    wanted = copy.deepcopy(model).float()(x.float())[0]
    assert (torch.as_tensor(made.copy()).float() - wanted).abs().max() < 5e-3 * wanted.abs().max()
    assert templates(program, "forward")[DOT] == 1


@pytest.mark.parametrize("group", [32, 64])
def test_quantized_weights_of_prompts(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of 4 bits is made into halves in the order of fragments, and read as others are."""
    pytest.importorskip("executorch.backends.vulkan.custom_ops_lib")  # defines the operator
    monkeypatch.setattr(pass_, "is_dequantized", lambda traits, matmul: True)
    monkeypatch.setattr("bench.decode.GROUP", group)
    program, errors = converse("q4")
    assert max(errors) < 1e-2
    found = program.methods["prompt"].executable.plan.dispatches
    blocks = [each for each in found if dict(each.kernel.macros).get("BLOCKS") == "1"]
    assert sum("qdequantize" in each.kernel.template for each in blocks) == 4 * FORM.layers
    assert templates(program, "prompt")[MATMUL] == 4 * FORM.layers


def test_quantized_weights_of_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    here = "tests.passes.decoding.test_block_weights"
    monkeypatch.setattr(f"{here}.FORM", Form(1, 64, 2, 1, 128, 128, 64))
    monkeypatch.setattr(f"{here}.STEPS", STEPS[:2])
    test_quantized_weights_of_prompts(32, monkeypatch)


class Layers(nn.Module):
    """Two linear layers without states."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(128, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def _layers() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    given = {"one": torch.randn(1, 128).half(), "many": torch.randn(40, 128).half()}
    return Layers().half().eval().requires_grad_(False), given


def _is_close(made: Any, model: nn.Module, x: torch.Tensor) -> bool:
    wanted = copy.deepcopy(model).float()(x.float())
    error = (torch.as_tensor(np.array(made)).float() - wanted).abs().max()
    return bool(error < 5e-3 * wanted.abs().max())


def test_methods_without_states(tmp_path: Path) -> None:
    """They share weights, in a file as well. One method alone reads weights as they are."""
    model, given = _layers()
    program = purevk.compile({name: (model, (x,)) for name, x in given.items()})
    program.save(tmp_path / "layers.pvk")
    for each in (program, purevk.load(tmp_path / "layers.pvk")):
        for name, x in given.items():
            assert _is_close(each.methods[name](x.numpy()), model, x)
        assert templates(each, "one") == {DOT: 2}
        assert templates(each, "many") == {MATMUL: 2, "row_blocks": 1}
    alone = purevk.compile(model, (given["one"],))
    assert templates(alone, "forward")[DOT] == 0
    assert program.memory.weights - alone.memory.weights < 4096


def test_graphs_of_torch_compile() -> None:
    model, given = _layers()
    compiled = torch.compile(model, backend="purevk", dynamic=False)
    for x in given.values():
        assert _is_close(compiled(x), model, x)
    (shared,) = [each for each in compiled_graphs.shared if len(each.program.methods) == 2]
    one, many = shared.program.methods
    assert templates(shared.program, one) == {DOT: 2}
    assert templates(shared.program, many) == {MATMUL: 2, "row_blocks": 1}
