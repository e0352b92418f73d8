"""Language models of .pte files, against eager torch and ExecuTorch's own runners."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("executorch")
pytest.importorskip("tokenizers")
torch = pytest.importorskip("torch")

import purevk.llm  # noqa: E402
from purevk.cli import main  # noqa: E402
from purevk.errors import FileFormatError, InputError, UnsupportedProgramError  # noqa: E402
from purevk.llm.sequences import TAIL  # noqa: E402
from purevk.runtime import llm as ours  # noqa: E402
from tests.llm import executorch_models as models  # noqa: E402

pytestmark = [pytest.mark.export, pytest.mark.device]
PROMPTS = ([5, 17, 3], [9], list(range(3, 23)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pte")
    models.write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def cached(folder: Path) -> Path:
    """A model with a cache, of portable kernels, which ExecuTorch's runner runs too."""
    path = folder / "cached.pte"
    path.write_bytes(models.export("cache_position", dynamic=False, delegated=False))
    return path


@pytest.fixture
def model(cached: Path) -> Iterator[purevk.llm.Model]:
    with purevk.llm.load(cached, tokenizer=cached.parent / "tokenizer.json") as model:
        yield model


def test_tokens_are_those_of_eager(model: purevk.llm.Model) -> None:
    for prompt in PROMPTS:
        assert model.generate(prompt, max_tokens=20).tokens() == models.greedy(prompt, 20)
    assert (model.context, model.vocab) == (models.CONTEXT, models.VOCAB)


def test_a_conversation_in_a_terminal(
    cached: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models.write_tokenizer(tmp_path)
    template = "{% for each in messages %}{{ each.content }}{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    words = ["chat", str(cached), "--prompt", "hi", "--max-tokens", "4", "--json"]
    assert main([*words, "--tokenizer", str(tmp_path / "tokenizer.json")]) == 0
    (turn,) = json.loads(capsys.readouterr().out)["turns"]
    with purevk.llm.load(cached, tokenizer=tmp_path / "tokenizer.json") as model:
        assert turn["answer"] == model.chat("hi", max_tokens=4).text()
    assert main(words) == 1
    assert "tokenizer" in json.loads(capsys.readouterr().out)["error"]["next"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "dynamic", "last"),
    [
        ("input_pos", False, True),
        ("input_pos", True, False),
        ("cache_position", True, False),
        ("", True, True),
    ],
)
def test_each_form_gives_the_tokens_of_eager(
    form: str, dynamic: bool, last: bool, tmp_path: Path
) -> None:
    path = tmp_path / "model.pte"
    path.write_bytes(models.export(form, dynamic, last=last))
    with purevk.llm.load(path) as model:
        for prompt in PROMPTS:
            assert model.generate(prompt, max_tokens=20).tokens() == models.greedy(prompt, 20)
        if form:  # the host does not wait for a token before it submits the next step
            assert model.program.method("decode").executable.overlapped is not None
        repeated = [model.generate([7], max_tokens=8, temperature=1.0, seed=4) for _ in "ab"]
        assert len({tuple(each.tokens()) for each in repeated}) == 1


def test_sampling_and_constraints_are_those_of_the_loop(model: purevk.llm.Model) -> None:
    (piece,) = model.generate([5, 17, 3], max_tokens=1, logprobs=3)
    eager = models.Model("", last=False).eval()
    with torch.inference_mode():
        want = eager(torch.tensor([[5, 17, 3]]))[0, -1].log_softmax(-1)
    assert piece.logprobs[0].logprob == pytest.approx(float(want.max()), abs=1e-4)
    (token,) = piece.tokens
    biased = model.generate([5, 17, 3], max_tokens=1, logit_bias={token: -1e9}).tokens()
    assert biased == [int(want.topk(2).indices[1])]


def test_sessions_and_grammars_are_those_of_the_loop(model: purevk.llm.Model) -> None:
    session = model.session(max_tokens=4)
    first = session.send("hi").text()
    pieces = session.send("you")
    second = pieces.tokens()
    prompt = model.tokenizer.encode(f"hi\n{first}\nyou\n")
    assert second == models.greedy(prompt, 4)
    assert pieces.stats.reused_tokens > 0
    pytest.importorskip("llguidance")
    assert model.generate("a", grammar='start: "yes" | "no"', max_tokens=8).text() in ("yes", "no")


def test_the_cache_is_rewound_and_overflow_changes_nothing(model: purevk.llm.Model) -> None:
    prompt = PROMPTS[2]
    model.generate(prompt, max_tokens=4).tokens()
    pieces = model.generate([*prompt[:10], 30, 31], max_tokens=20)
    assert pieces.tokens() == models.greedy([*prompt[:10], 30, 31], 20)
    assert pieces.stats.reused_tokens == 10
    position = model.position
    with pytest.raises(InputError, match="the cache holds 48 tokens"):
        model.generate([4] * 49)
    assert model.position == position
    answer = model.generate([5, 17, 3])
    assert len(answer.tokens()) == models.CONTEXT - 3 + 1
    assert answer.stats.why == "context"


@pytest.mark.slow
def test_text_ends_at_the_tokens_of_the_file(folder: Path) -> None:
    path = folder / "ends.pte"
    prompt = [1, *(ord(letter) - 28 for letter in "hello")]
    answer = models.greedy(prompt, 8)
    path.write_bytes(
        models.export("cache_position", False, delegated=False, get_eos_ids=[31, answer[-1]])
    )
    with purevk.llm.load(path, tokenizer=folder / "tokenizer.json", context=20) as model:
        assert model.tokenizer.encode("hello") == prompt
        assert model.tokenizer.end_tokens == {31, answer[-1]}
        pieces = model.generate("hello")
        assert pieces.text() == model.tokenizer.decode(answer[: answer.index(answer[-1])])
        assert pieces.stats.why == "end"
        with pytest.raises(UnsupportedProgramError, match="is not saved"):
            model.save(folder / "model.pvk")
    with purevk.llm.load(path) as model, pytest.raises(InputError, match="has no tokenizer"):
        model.generate("hello")
    with pytest.raises(InputError, match="from 2 to 48"):
        purevk.llm.load(path, context=49)
    with pytest.raises(InputError, match="float16"):
        purevk.llm.load(path, dtype="float16")
    with pytest.raises(UnsupportedProgramError, match="no plan of a .pte file"):
        purevk.llm.plan(path)


class Recurrent(torch.nn.Module):
    """Its state is no cache: it cannot be cut, and ExecuTorch never clears it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = torch.nn.Embedding(32, 16)
        self.head = torch.nn.Linear(16, 32)
        self.register_buffer("state", torch.zeros(1, 16))
        self.requires_grad_(False)

    def forward(self, tokens: Any, position: Any) -> Any:
        self.state.copy_(torch.tanh(self.state + self.tokens(tokens)[:, 0]) + position * 0.01)
        return self.head(self.state)


def test_a_recurrent_model_begins_anew_or_at_a_copy(tmp_path: Path) -> None:
    from executorch.exir import to_edge_transform_and_lower

    inputs = (torch.tensor([[1]]), torch.tensor([0]))
    exported = torch.export.export(Recurrent(), inputs, strict=False)
    numbers = {"get_max_seq_len": 32}
    edge = to_edge_transform_and_lower(exported, constant_methods=numbers)
    path = tmp_path / "model.pte"
    path.write_bytes(edge.to_executorch().buffer)
    with purevk.llm.load(path) as model:
        long = [*range(3, 15)]
        for prompt in ([3, 4], [3, 4, 5], [3, 9], [3], long, [*long[:-1], 20]):
            eager, want, tokens = Recurrent(), [], list(prompt)
            for position in range(len(prompt) + 5):
                with torch.inference_mode():
                    logits = eager(torch.tensor([[tokens[position]]]), torch.tensor([position]))
                if position >= len(prompt) - 1:
                    want.append(int(logits.argmax()))
                    tokens.append(want[-1])
            pieces = model.generate(prompt, max_tokens=6)
            assert pieces.tokens() == want
            np.testing.assert_allclose(model.logits, logits[0].numpy(), atol=1e-5)
        assert pieces.stats.reused_tokens == len(long) - TAIL


@pytest.mark.slow
def test_other_programs_are_refused(folder: Path) -> None:
    from executorch.exir import to_edge_transform_and_lower

    module = torch.nn.Linear(4, 4)
    exported = torch.export.export(module, (torch.zeros(2, 4),))
    path = folder / "linear.pte"
    path.write_bytes(to_edge_transform_and_lower(exported).to_executorch().buffer)
    with pytest.raises(UnsupportedProgramError, match="not one of a language model"):
        purevk.llm.load(path)
    with pytest.raises(UnsupportedProgramError, match="token_embedding"):
        ours.MultimodalRunner(path, folder / "tokenizer.json")
    static = folder / "static.pte"
    exported = torch.export.export(models.Model("").eval(), models.inputs_of("", 3), strict=False)
    edge = to_edge_transform_and_lower(exported, constant_methods={"get_max_seq_len": 3})
    static.write_bytes(edge.to_executorch().buffer)
    with pytest.raises(UnsupportedProgramError, match="takes exactly 3 tokens"):
        purevk.llm.load(static)
    edge = to_edge_transform_and_lower(exported, constant_methods={"get_max_seq_len": -3})
    static.write_bytes(edge.to_executorch().buffer)
    with pytest.raises(FileFormatError, match="get_max_seq_len returns"):
        purevk.llm.load(static)


# -- runners ----------------------------------------------------------------------------------
def _texts(api: Any, path: Path) -> list[Any]:
    """What a runner gives to its callbacks in several turns."""
    runner = api.TextLLMRunner(str(path), str(path.parent / "tokenizer.json"))
    results: list[Any] = []

    def turn(prompt: str, **options: Any) -> None:
        pieces: list[str] = []
        results.append(pieces)
        config = api.GenerationConfig(temperature=0.0, **options)
        try:
            runner.generate(prompt, config, pieces.append, lambda stats: results.append(
                (stats.num_prompt_tokens, stats.num_generated_tokens)))  # fmt: skip
        except RuntimeError:
            results.append("refused")

    turn("hello", max_new_tokens=8)
    turn(" you", max_new_tokens=5, echo=False)  # goes on where the first turn ended
    turn("x" * 60)
    runner.reset()
    turn("")
    turn("hello", seq_len=12, echo=False, num_bos=1)
    runner.reset()
    turn("hello", echo=False)
    turn("x")  # the cache is full
    runner.reset()
    runner.prefill("he", api.GenerationConfig())
    runner.prefill("llo", api.GenerationConfig())
    turn("", max_new_tokens=6)
    results.pop()  # ExecuTorch counts generated tokens as those of the prompt then
    return results


def test_texts_are_those_of_executorchs_runner(cached: Path) -> None:
    theirs = pytest.importorskip("executorch.extension.llm.runner")
    assert _texts(ours, cached) == _texts(theirs, cached)


def test_a_runner_stops_when_it_is_told(cached: Path) -> None:
    runner = ours.TextLLMRunner(cached, cached.parent / "tokenizer.json")
    pieces: list[str] = []

    def take(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 3:
            runner.stop()

    config = ours.GenerationConfig(temperature=0.0, echo=False)
    runner.generate("hello", config, take)
    assert len(pieces) == 3
    more: list[str] = []
    runner.generate(" you", ours.GenerationConfig(temperature=0.7, max_new_tokens=4), more.append)
    assert len(more) == 5
    assert runner.get_vocab_size() == models.VOCAB
    runner.close()


def test_without_a_callback_the_text_is_printed(
    cached: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = ours.TextLLMRunner(cached, cached.parent / "tokenizer.json")
    texts: list[str] = []
    config = ours.GenerationConfig(temperature=0.0, max_new_tokens=5)
    runner.generate("hello", config, texts.append)
    runner.reset()
    runner.generate("hello", config)
    assert capsys.readouterr().out == "".join(texts)
    runner.reset()
    config.warming = True
    runner.generate("hello", config)
    assert capsys.readouterr().out == ""


def _seen(api: Any, path: Path) -> list[Any]:
    runner = api.MultimodalRunner(str(path), str(path.parent / "tokenizer.json"))
    results: list[Any] = []

    def turn(*parts: Any, **options: Any) -> None:
        pieces: list[str] = []
        config = api.GenerationConfig(temperature=0.0, **options)
        runner.generate(list(parts), config, pieces.append, lambda stats: results.append(
            (stats.num_prompt_tokens, stats.num_generated_tokens)))  # fmt: skip
        results.append(pieces)

    image = api.make_image_input(torch.from_numpy(IMAGE))
    turn(api.make_text_input("see "), image, api.make_text_input(" what"), max_new_tokens=8)
    turn(api.make_text_input(" and"), max_new_tokens=4, echo=False)
    runner.reset()
    turn(image, api.make_token_input([5, 6, 7]), max_new_tokens=6)
    runner.reset()
    runner.prefill([image])
    turn(api.make_text_input("hi"), max_new_tokens=6)
    return results


IMAGE = np.random.default_rng(1).standard_normal((3, 8, 8)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("delegated", [False, True])
def test_images_are_seen_as_by_eager_and_executorchs_runner(delegated: bool, folder: Path) -> None:
    path = folder / f"seeing_{delegated}.pte"
    path.write_bytes(models.export_seeing(delegated))
    if not delegated:
        theirs = pytest.importorskip("executorch.extension.llm.runner")
        assert _seen(ours, path) == _seen(theirs, path)
    runner = ours.MultimodalRunner(path, folder / "tokenizer.json")
    config = ours.GenerationConfig(temperature=0.0, max_new_tokens=20, echo=False)
    tokenizer = runner._tokenizer
    for before, after in (([5, 17, 3], [9]), ([8], [4, 5]), ([40, 50], [60])):
        parts = [before, torch.from_numpy(IMAGE)[None], after]
        want = tokenizer.decode(models.greedy_seeing(parts, 20))
        runner.reset()
        given = [
            ours.MultimodalInput(before),
            ours.make_image_input(IMAGE),
            ours.make_token_input(after),
        ]
        assert runner.generate_text(given, config) == want
        runner.reset()
        inputs = {"input_ids": np.array([[*before, 95, 95, 95, 95, *after]]), "pixel_values": IMAGE}
        assert runner.generate_text_hf(inputs, config, 95) == want
    with pytest.raises(InputError, match="float32"):
        runner.generate_text([ours.make_image_input((IMAGE * 50).astype(np.uint8))], config)
    with pytest.raises(InputError, match="the cache holds 48 tokens"):
        runner.prefill([ours.make_text_input("x" * 12)] * 4)
    runner.close()
