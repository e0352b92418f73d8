"""Arguments of other types raise `InputError`, which says the argument and what it may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")

import purevk.llm
from purevk.errors import InputError
from purevk.llm import Model, arguments
from tests.fuzz import language

pytestmark = pytest.mark.device
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function"}]}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("model") / "model.pvk"
    Path(path).write_bytes(language.saved_model())
    with purevk.llm.load(path) as loaded:
        yield loaded


def generate(**options: Any) -> Callable[[Model], Any]:
    return lambda model: model.generate([1], **options)


def chat(**options: Any) -> Callable[[Model], Any]:
    return lambda model: model.chat("a", **options)


def send(message: Any, overflow: str = "error") -> Callable[[Model], Any]:
    return lambda model: model.session(overflow=overflow).send(message)


REFUSED: dict[str, tuple[str, Callable[[Model], Any]]] = {
    "prompt that is None": ("prompt=None", lambda model: model.generate(None)),  # type: ignore[arg-type]
    "prompt of texts": ("prompt=", lambda model: model.generate(["a"])),  # type: ignore[list-item]
    "prompt of floats": ("prompt=", lambda model: model.generate([float("nan")])),  # type: ignore[list-item]
    "prompt of rows": ("prompt=", lambda model: model.generate(np.ones((2, 2), int))),  # type: ignore[arg-type]
    "prompt of a large number": ("no token", lambda model: model.generate([10**5000])),
    "stop that is a number": ("stop=5", generate(stop=5)),
    "stop with a number": ("stop=", generate(stop=["a", 5])),
    "bias that is a list": ("logit_bias=", generate(logit_bias=[1])),
    "bias by a text": ("logit_bias has 'a'", generate(logit_bias={"a": 1})),
    "bias that is a text": ("logit_bias", generate(logit_bias={1: "a"})),
    "bias that is no number": ("logit_bias", generate(logit_bias={1: float("nan")})),
    "temperature": ("temperature='x'", generate(temperature="x")),
    "large temperature": ("temperature=", generate(temperature=10**5000)),
    "top_k": ("top_k=1.5", generate(top_k=1.5)),
    "seed": ("seed=", generate(seed=[1])),
    "logprobs": ("logprobs=", generate(logprobs="all")),
    "max_tokens that is a text": ("max_tokens='5'", generate(max_tokens="5")),
    "max_tokens that is true": ("max_tokens=True", generate(max_tokens=True)),
    "grammar": ("grammar=5", generate(grammar=5)),
    "json_schema": ("json_schema=5", generate(json_schema=5)),
    "messages": ("messages=5", lambda model: model.chat(5)),  # type: ignore[arg-type]
    "a message": ("no message", lambda model: model.chat([5])),  # type: ignore[list-item]
    "arguments that are a list": ("template_args=", chat(template_args=[1])),
    "arguments without names": ("template_args=", chat(template_args={1: 1})),
    "arguments that are messages": ("template_args=", chat(template_args={"messages": []})),
    "tools": ("no tool", chat(tools=5)),
    "a tool": ("no tool", chat(tools=[{"function": 5}])),
    "counted tools": ("no tool", lambda model: model.count_tokens("a", tools=5)),  # type: ignore[arg-type]
    "message that is a number": ("no message", send(5)),
    "message without a role": ("no message", send({"content": "x"}, "slide")),
    "empty message": ("no message", send({}, "slide")),
    "system": ("system=5", lambda model: model.session(system=5)),  # type: ignore[arg-type]
    "overflow": ("overflow=", lambda model: model.session(overflow=[])),  # type: ignore[arg-type]
    "text that is cut": ("text=5", lambda model: model.cut_text(5, 1)),  # type: ignore[arg-type]
    "tokens that are cut": ("tokens='1'", lambda model: model.cut_text("ab", "1")),  # type: ignore[arg-type]
    "position": ("position=False", lambda model: setattr(model, "position", False)),
    "dtype": ("dtype=", lambda model: purevk.llm.load("x.gguf", dtype=[])),  # type: ignore[arg-type]
    "cache": ("cache=", lambda model: purevk.llm.plan("x.gguf", cache={})),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, model: Model) -> None:
    text, do = REFUSED[name]
    with pytest.raises(InputError) as error:
        do(model)
    assert text in str(error.value) and error.value.why


def test_accepted(model: Model) -> None:
    for prompt in ([1, 2], np.array([1, 2]), (np.int32(1), 2), iter([1, 2])):
        assert model.generate(prompt, max_tokens=1).tokens()  # type: ignore[arg-type]
    assert model.generate([1], stop=("x", "y"), max_tokens=1).tokens()
    assert (
        model.generate([1], logit_bias={1: 10**400, 2: -float("inf")}, max_tokens=2).tokens()[0]
        == 1
    )
    assert model.count_tokens(
        [CALL, {"role": "user", "content": "a"}],
        tools=(TOOL,),
        template_args={"self": 1, "x": None},
    )
    assert arguments.texts("stop", {"a": 1}) == ["a"]
