"""Names and texts of files reach no terminal as commands: each command runs with a file in which all
of them hold escape sequences, control characters of 8 bits, and marks of direction."""

from __future__ import annotations

import io
import json
import logging
import pickle
import random
import subprocess
import sys
import traceback
import unicodedata
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import purevk
from purevk import errors, knobs, progress, pte
from purevk.cli import commands
from purevk.frontends.files import open_file
from purevk.plain_text import LOGGERS, json_text, printable
from tests.fuzz.mutations import description, with_description
from tests.harness import ROOT

torch = pytest.importorskip("torch")
HOSTILE = "\x1b]0;x\x07\x1b[2J\x9b2J\x85\u202eevil\u2066\u200f\x7f\x08\r\u2028\U000e0041\udcff"
_WORDS = {
    "dict",
    "tuple",
    "list",
    "namedtuple",
    "object",
    "leaf",
    "",
    *purevk.dtypes.DType.__members__,
}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Any, *, options: Any) -> Any:
        self.count.add_(1)
        added = self.linear(x) + options["b"].sum() * self.count
        return {"a": added, "c": torch.linalg.det(x[:3, :3])}  # one node runs on the CPU


def _hostile(value: Any) -> Any:
    """The description of a program with a text at the end of each name."""
    if isinstance(value, dict):
        return {
            key + HOSTILE if key == "forward" else key: _hostile(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_hostile(item) for item in value]
    operator = isinstance(value, str) and value.startswith(("aten.", "purevk."))
    if not isinstance(value, str) or value in _WORDS or operator:
        return value
    return value + HOSTILE


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program, with such a name of the file too."""
    folder = tmp_path_factory.mktemp("hostile")
    path = folder / "m.pvk"
    shapes = {"x": {0: torch.export.Dim("n", min=3, max=8)}, "options": {"b": None}}
    with purevk.compile(
        Model(),
        (torch.ones(4, 3),),
        kwargs={"options": {"b": torch.ones(2)}},
        dynamic_shapes=shapes,
    ) as program:
        program.save(path)
    data = path.read_bytes()
    file = folder / f"m{HOSTILE}.pvk"
    file.write_bytes(with_description(data, _hostile(description(data))))
    return file


def _assert_safe(text: str) -> None:
    wrong = {each for each in text if not each.isprintable() and each not in "\n\t"}
    assert not wrong, (wrong, text)


COMMANDS = {
    "inspect": ["inspect", "FILE"],
    "graph": ["inspect", "FILE", "--graph"],
    "node table": ["inspect", "FILE", "--node-table", "--no-device"],
    "drawing": ["inspect", "FILE", "--format", "text"],
    "mermaid": ["inspect", "FILE", "--format", "mermaid"],
    "run": ["run", "FILE"],
    "bench": ["bench", "FILE", "--no-load", "--runs", "1", "--profile"],
    "profile": ["profile", "FILE"],
    "report": ["report", "FILE", "-o", "FOLDER/r.html", "--no-device"],
    "ops": ["ops", "--check", "FILE"],
    "warmup": ["warmup", "FILE"],
    "bisect": ["bisect", "FILE"],
    "tune": ["tune", "FILE", "--candidates", "1"],
    "cache": ["cache", "ls", "--folder", "FOLDER/evil" + HOSTILE],
}


def test_every_command_is_there() -> None:
    """Or has nothing of a file, or a test of its own (`chat`)."""
    tested = {words[0] for words in COMMANDS.values()}
    assert {command.name for command in commands.COMMANDS} - tested == {"info", "doctor", "chat"}


@pytest.mark.device
@pytest.mark.parametrize("name", COMMANDS)
def test_commands(name: str, hostile: Path, tmp_path: Path, cli: Callable[..., Any]) -> None:
    words = [
        w.replace("FILE", str(hostile)).replace("FOLDER", str(tmp_path)) for w in COMMANDS[name]
    ]
    (tmp_path / f"evil{HOSTILE}").mkdir()
    ran = cli(*words)
    assert ran.code == 0, ran
    _assert_safe(ran.out + ran.err)
    assert "evil" in ran.out or name == "tune"  # the names are there
    if name in ("bench", "profile", "bisect", "tune"):  # they take their time
        return
    ran = cli(*words, "--json")
    _assert_safe(ran.out + ran.err)
    assert HOSTILE in _texts(ran.json)


def _texts(value: Any) -> str:
    if isinstance(value, dict):
        return "".join(map(_texts, [*value, *value.values()]))
    return "".join(map(_texts, value)) if isinstance(value, list) else str(value)


WRONG = {
    "no file": ["run", "FILE.gone"],
    "no method": ["run", "FILE", "--method", HOSTILE],
    "no size": ["run", "FILE", "--size", f"{HOSTILE}=3"],
    "wrong size": ["run", "FILE", "--size", f"n{HOSTILE}=999"],
    "no input": ["run", "FILE", "--input", HOSTILE],
    "damaged": ["inspect", "DAMAGED"],
    "option": ["inspect", "FILE", f"--{HOSTILE}"],
    "argument": ["inspect", "FILE", HOSTILE],
    "command": [HOSTILE],
    "module": ["inspect", "FILE", "--import", HOSTILE],
    "folder": ["cache", "diff", HOSTILE],
    "bundle": ["warmup", "--from-bundle", HOSTILE],
    "device": ["run", "FILE", "--device", HOSTILE],
}


@pytest.mark.device
@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str, hostile: Path, tmp_path: Path, cli: Callable[..., Any]) -> None:
    damaged = tmp_path / f"d{HOSTILE}.pvk"
    damaged.write_bytes(hostile.read_bytes()[:99])
    paths = {"FILE": hostile, "DAMAGED": damaged, "FILE.gone": f"{hostile}.gone"}
    words = [str(paths.get(word, word)) for word in WRONG[name]]
    for more in ([], ["--json"]):
        ran = cli(*words, *more)
        assert ran.code in (1, 2), ran
        _assert_safe(ran.out + ran.err)
    if ran.code == 1:
        with pytest.raises(purevk.PurevkError) as raised:
            cli(*words, "--traceback")
        _assert_safe(str(raised.value))
        assert "evil" in str(raised.value)  # the name is there


@pytest.mark.device
def test_objects(hostile: Path, tmp_path: Path) -> None:
    """What a user prints in a program or a notebook."""
    other = tmp_path / f"evil{HOSTILE}.pte"
    other.write_bytes((ROOT / "tests/data/pte/linear_relu_inline.pte").read_bytes())
    cache = purevk.cache.Cache(tmp_path / f"evil{HOSTILE}")
    with purevk.load(hostile) as program:
        (method,) = program.methods.values()
        drawing = program.graph(method.name)
        objects = [program, method, program.state, drawing, drawing.to_mermaid(), cache]
        objects += [*method.inputs, *method.outputs]
        objects.append(purevk.plan(hostile, method=method.name))
        objects += [dim for spec in method.inputs for dim in spec.sizes]
        objects += [spec.sizes for spec in method.inputs]
        with open_file(hostile) as file:
            graph = file.graph(method.name)
        assert graph.signature is not None
        objects += [graph, *graph.nodes, *graph.inputs, *graph.nodes[0].results]
        objects += [each.tree for each in graph.signature.parameters]
        objects.append(pte.types.Operator(f"aten::add{HOSTILE}", HOSTILE))
        texts = [str(each) for each in objects]
        texts += [repr(each) for each in objects if not isinstance(each, str)]
        texts += [repr(program.report()), pte.describe(pte.read_program(other))]
    for text in texts:
        _assert_safe(text)
    assert sum("evil" in text for text in texts) > 15


def reachable(*roots: Any) -> list[Any]:
    """The objects of classes of purevk that objects lead to by attributes, slots and containers."""
    found: list[Any] = []
    waiting, seen = [*roots], {id(each): each for each in roots}
    while waiting:
        each = waiting.pop()
        inner: list[Any] = []
        if isinstance(each, (list, tuple, set, frozenset, dict)):
            inner = [*each, *(each.values() if isinstance(each, dict) else ())]
        elif type(each).__module__.partition(".")[0] == "purevk":
            found.append(each)
            names = [name for cls in type(each).__mro__ for name in getattr(cls, "__slots__", ())]
            inner = [getattr(each, name) for name in names if hasattr(each, name)]
            inner += getattr(each, "__dict__", {}).values()
        for item in inner:
            if id(item) not in seen:
                seen[id(item)] = item
                waiting.append(item)
    return found


@pytest.mark.device
def test_all_objects_that_a_program_leads_to(hostile: Path, tmp_path: Path) -> None:
    """Whatever class they are of: no text of one is raw."""
    other = tmp_path / f"evil{HOSTILE}.pte"
    other.write_bytes((ROOT / "tests/data/pte/linear_relu_inline.pte").read_bytes())
    with purevk.load(hostile) as program, open_file(hostile) as file:
        (method,) = program.methods.values()
        roots = [program, file, file.graph(method.name), program.graph(method.name)]
        roots += [purevk.plan(hostile, method=method.name), program.report()]
        objects = reachable(*roots, pte.read_program(other), list(method.inputs))
        classes: dict[type, int] = {}
        for each in objects:
            number = classes[type(each)] = classes.get(type(each), 0) + 1
            if number <= 50:  # of one class
                _assert_safe(str(each))
                _assert_safe(repr(each))
    assert len(classes) > 60, sorted(each.__name__ for each in classes)


def test_tracebacks_of_the_process(hostile: Path) -> None:
    """With the causes of an error, which may be of other packages."""
    command = [sys.executable, "-m", "purevk", "run", f"{hostile}.gone", "--traceback"]
    environment = knobs.child_environment({"PYTHONPATH": str(ROOT)})
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 1 and "Traceback" in ran.stderr and "\\x1b" in ran.stderr
    _assert_safe(ran.stdout + ran.stderr)


def test_logs_and_warnings() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        try:
            try:
                raise ValueError(HOSTILE)
            except ValueError:
                logger.error("%s: %d", HOSTILE, 3, exc_info=True)
        finally:
            logger.removeHandler(handler)
    _assert_safe(stream.getvalue())
    assert f"{printable(HOSTILE)}: 3" in stream.getvalue()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        knobs.warn(HOSTILE)
    _assert_safe(str(caught[0].message))


def test_each_error() -> None:
    """Its text is safe, its attributes are as they were, here and in another process."""
    classes = [each for each in vars(errors).values() if isinstance(each, type)]
    classes = [each for each in classes if issubclass(each, purevk.PurevkError)]
    assert len(classes) > 15
    for each in classes:
        error = each(HOSTILE, where=HOSTILE, why=HOSTILE, next=HOSTILE)
        for copy in (error, pickle.loads(pickle.dumps(error))):
            _assert_safe(str(copy))
            _assert_safe("".join(traceback.format_exception(copy)))
            assert type(copy) is each and copy.what == copy.where == copy.why == HOSTILE


def test_all_loggers_are_safe() -> None:
    for path in (ROOT / "purevk").rglob("*.py"):
        for piece in path.read_text(encoding="utf-8").split("getLogger(")[1:]:
            name = piece.partition(")")[0]
            assert name == "_name" or name.strip('"') in LOGGERS, path


def test_progress() -> None:
    from rich.console import Console

    stream = io.StringIO()
    bar = progress.ProgressBar(console=Console(file=stream, force_terminal=True, width=400))
    bar.step(HOSTILE)
    bar(HOSTILE, 1, 3)
    bar.close()
    text = stream.getvalue()
    assert printable(HOSTILE) in text
    assert not any(each in text for each in ("\x1b]0", "\x9b", "\u202e", "\x7f", "\x08"))


def test_each_character() -> None:
    """All characters of all kinds; what is printed says which they were."""
    draw = random.Random(0)
    everything = [*range(0x3000), *(draw.randrange(0x110000) for _ in range(5000))]
    for code in everything:
        character = chr(code)
        shown = printable(character)
        category = unicodedata.category(character)
        assert shown.isprintable() or shown in "\n\t"
        dangerous = category in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in "\n\t"
        assert (shown != character) == (not character.isprintable() and character not in "\n\t")
        assert not dangerous or shown.encode("ascii").decode("unicode_escape") == character
        text = json_text({character: [character]})
        assert text.replace("\n", "").isprintable()
        assert json.loads(text) == {character: [character]}
