"""Measured kernels in place of those of the cost models: which answers count, and that every
candidate is right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import purevk
from purevk import api
from purevk.cli.tune import Trial
from purevk.graph.context import Context
from purevk.lower import gpu_tiles
from purevk.lower.gpu_kernels import Dot, Problem, TileBounds
from purevk.lower.gpu_tiles import choose_few_rows, choose_gpu
from purevk.ops.attention.choice import choose as choose_attention
from purevk.ops.attention.kernels import Problem as Attention
from purevk.ops.matmul.choice import choose_registers
from purevk.ops.quantized.choice import choose as choose_quantized
from purevk.ops.quantized.kernels import QuantizedMatmul
from purevk.report.words import choice_rows
from purevk.tuning import SOFTWARE, Choices, DeviceTraits, question
from purevk.tuning.candidates import Candidate
from purevk.tuning.choices import Choice, RecordedChoices
from purevk.tuning.families.nvidia import NVIDIA

GPU = DeviceTraits(
    features=frozenset({"subgroup_shuffle", "subgroup_basic"}),
    cores=132,
    profile=NVIDIA,
    max_shared_memory=49152,
    max_invocations=1024,
    coopmat_shape=(16, 16, 16),
    workgroup_matrices=((16, 16, 16, 128), (32, 32, 16, 256)),
    max_workgroup_matrix=1024,
)


def test_answers() -> None:
    read = []

    def answers() -> dict[str, str]:
        read.append(1)
        return {question("tile", (1, 2)): "16", question("tile", (3, 4)): "no candidate"}

    choices = Choices(answers)
    assert not read
    take = choices.take
    assert take("tile", (1, 2), (8, 16, 32)) == 16
    assert take("tile", (3, 4), (8, 16, 32)) == 8
    for kind, problem in (("tile", (5, 6)), ("other", (1, 2))):
        candidates = iter((8, 16, 32))
        assert take(kind, problem, candidates) == 8
        assert next(candidates) == 16  # no answer: nothing else is enumerated
    assert read == [1]
    assert Choices().take("tile", (1, 2), (8,)) == 8


@pytest.mark.parametrize(
    "problem",
    [
        Problem(4096, 4096, 4096, half=True, tiles=TileBounds(4096, 4096, 4096)),
        Problem(100, 300, 200, vectors=(False, True)),
        Problem(3, 2048, 2048, transposed=True),
        Problem(12544, 64, 576, window=True),
        Problem(7, 30, 9000, batches=3),
    ],
    ids=str,
)
def test_the_default_is_the_first_candidate(problem: Problem) -> None:
    default = choose_gpu(GPU, problem)
    taken = []
    for number in range(200):
        trial = Trial(number, 200)
        taken.append(choose_gpu(dataclasses.replace(GPU, choices=trial), problem))
        (asked,) = trial.asked.values()
        if number + 1 == len(asked):
            break
    assert taken[0] == default and len(set(taken)) == len(taken) == len(asked) > 1
    assert all(each.fits(GPU, problem) for each in taken)
    for each in taken[1:]:
        answers = {question("matmul", problem): str(each)}
        traits = dataclasses.replace(GPU, choices=Choices(lambda kept=answers: kept))
        assert choose_gpu(traits, problem) == each


def recorded(choose: Callable[[DeviceTraits], object]) -> list[Choice]:
    """What a choice for a node noted."""
    choices = RecordedChoices(Choices())
    choices.begin("node")
    choose(dataclasses.replace(GPU, choices=choices))
    return list(choices.by_node["node"].values())


def test_the_reasons_against_others() -> None:
    problem = Problem(12, 4096, 4096, transposed=True)
    (choice,) = recorded(lambda traits: choose_gpu(traits, problem))
    kernels = set(gpu_tiles._kernels(GPU, problem))
    assert choice.kernel == choose_gpu(GPU, problem) and choice.cost > 0
    assert {choice.kernel, *(kernel for kernel, _ in choice.others)} == kernels
    for kernel, why in choice.others:
        assert isinstance(kernel, Candidate)
        assert kernel.fits(GPU, problem) == isinstance(why, float)
        assert isinstance(why, str) or why >= choice.cost
    (row,) = choice_rows([choice])
    assert {
        "kernel": "WorkgroupCoopmat",
        "count": 9,
        "why": "needs matrix cores for the dtype of the operands",
    } in row["others"]
    assert sum(other["count"] for other in row["others"]) == len(choice.others)


def test_the_reasons_against_other_quantized_kernels() -> None:
    matmul = QuantizedMatmul(1, 1024, 2048, 4, 256, 0, 32, False, True)
    form = choose_quantized(GPU, matmul)
    choices = recorded(lambda traits: choose_quantized(traits, matmul))
    (choice,) = (each for each in choices if each.kind == "quantized matmul")
    assert form.template == "quantized/qmatvec.comp" and str(choice.kernel) == "Vectors"
    reasons = {str(kernel): why for kernel, why in choice.others}
    assert reasons == {
        "IntegerFragments": "int8 activations",
        "DotCoopmat": "several rows, or many columns",
        "MatmulCoopmat": "2 rows",
        "Dot": "sums of subgroups",
        "HalfTiles": "one scale for each row of the weight",
        "Tiles": 0.0,
    }


def test_an_answer_does_not_decide_what_is_fused() -> None:
    """Whether a matmul of a few rows is joined with its neighbours follows from the cost model."""
    problem = Problem(1, 2048, 2048)
    vector = choose_few_rows(GPU, problem)
    assert vector is not None
    other = next(
        text for text in candidates_of(problem) if text.startswith("Tiled")
    )  # a kernel that is no Vector
    choices = Choices(lambda: {question("matmul", problem): other})
    assert choose_few_rows(dataclasses.replace(GPU, choices=choices), problem) == vector


def candidates_of(problem: Problem) -> list[str]:
    trial = Trial(0, 1000)
    choose_gpu(dataclasses.replace(GPU, choices=trial), problem)
    (found,) = trial.asked.values()
    return found


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("width", [40, 64, 128])
@pytest.mark.parametrize("queries", [1, 300])
def test_attention(half: bool, width: int, queries: int) -> None:
    traits = dataclasses.replace(
        GPU, coopmat_columns=(8,), fragment_order=lambda dtype, columns: True
    )
    problem = Attention(1, 8, queries, 4000, width, width, half)
    default = choose_attention(traits, problem)
    trial = Trial(1, 100)
    other = choose_attention(dataclasses.replace(traits, choices=trial), problem)
    (asked,) = trial.asked.values()
    assert asked[0] == str(default) != str(other) == asked[1]
    assert type(other) is type(default)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_quantized_rows(rows: int, bits: int) -> None:
    features = GPU.features | {"subgroup_arithmetic", "subgroup_size_control"}
    traits = dataclasses.replace(GPU, features=features)
    matmul = QuantizedMatmul(rows, 16384, 2048, bits, 2048 * bits // 32, 0, 32, False, True)
    default = choose_quantized(traits, matmul)
    trial = Trial(0, 100)
    assert choose_quantized(dataclasses.replace(traits, choices=trial), matmul) == default
    (asked,) = trial.asked.values()
    for number in range(1, len(asked)):
        trial = Trial(number, 100)
        form = choose_quantized(dataclasses.replace(traits, choices=trial), matmul)
        macros = form.macros
        assert form != default and form.template == default.template
        assert all(macros[n] == default.macros[n] for n in ("ROWS", "SHARE", "ANY_GROUP"))
        assert matmul.reads_words(macros["WORDS"])
        assert macros["LX"] * macros["TEAMS"] <= GPU.max_invocations
        assert macros["TEAMS"] == 1 or macros["SUBGROUP"] == macros["LX"]


def test_tiles_of_software_devices() -> None:
    traits = DeviceTraits(
        frozenset({"subgroup_shuffle"}), subgroup_size=8, cores=2, profile=SOFTWARE
    )
    default = choose_registers(traits, 70, 64, 64, 1, True, True)
    trial = Trial(1, 100)
    other = choose_registers(dataclasses.replace(traits, choices=trial), 70, 64, 64, 1, True, True)
    assert other != default and other.tm * other.tn4 <= 32


# -- all candidates on a device ------------------------------------------------------------------
def _random(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def _convolve(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.conv2d(x, weight, padding=1, groups=x.shape[1] // weight.shape[1])


CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "matmul": (torch.matmul, (_random(37, 66), _random(66, 52))),
    "few rows": (torch.matmul, (_random(5, 72), _random(72, 40))),
    "long sums": (torch.matmul, (_random(9, 700), _random(700, 20))),
    "convolution": (_convolve, (_random(2, 12, 13, 17), _random(20, 12, 3, 3))),
    "images": (_convolve, (_random(2, 8, 32, 32), _random(24, 8, 3, 3))),
    "depthwise": (_convolve, (_random(2, 24, 11, 19), _random(24, 1, 3, 3))),
    "attention": (
        functional.scaled_dot_product_attention,
        (_random(1, 3, 45, 40), _random(1, 3, 70, 40), _random(1, 3, 70, 40)),
    ),
    "decoding": (
        functional.scaled_dot_product_attention,
        (_random(1, 4, 1, 32), _random(1, 4, 300, 32), _random(1, 4, 300, 32)),
    ),
}


class Of(torch.nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.function(*args)


@pytest.mark.slow
@pytest.mark.device
@pytest.mark.parametrize("profile", ["software", "nvidia"])
@pytest.mark.parametrize("name", CASES)
def test_every_candidate_is_right(
    name: str, profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, args = CASES[name]
    with purevk.compile(Of(function), args) as program:
        program.save(tmp_path / "case.pvk")
    monkeypatch.setenv("PUREVK_PROFILE", profile)
    number = count = 0
    while number <= min(count, 12):
        trial = Trial(number, 40)
        with Context(api.open_device(None)) as context:
            context.traits = dataclasses.replace(context.traits, choices=trial)
            with purevk.load(tmp_path / "case.pvk", context=context) as program:
                made = program.forward(*args)
        torch.testing.assert_close(made, function(*args), rtol=1e-4, atol=1e-4)
        count = max((len(found) - 1 for found in trial.asked.values()), default=0)
        number += 1
    assert count > 0 or (name, profile) == ("depthwise", "nvidia")  # another kernel


def test_few_rows_are_preferred_where_they_save_dispatches() -> None:
    """A product that takes over the norm before it may cost as much more as a dispatch takes."""
    sizes = Problem(1, 1536, 1152, half=True, transposed=True, wide=True)
    needed = {"cooperative_matrix", "float16", "storage_16bit", "subgroup_size_control"}
    needed |= {"subgroup_arithmetic", "vulkan_memory_model"}
    traits = dataclasses.replace(GPU, features=GPU.features | needed)
    assert choose_few_rows(traits, sizes) is None
    assert isinstance(choose_few_rows(traits, sizes, saved=1), Dot)
    many = dataclasses.replace(sizes, m=16)
    assert choose_few_rows(traits, many, saved=2) is None
