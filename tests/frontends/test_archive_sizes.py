"""Sizes in `.pt2` files that torch would take hours to read."""

from __future__ import annotations

import io
import json
import time

import pytest

from purevk.errors import FileFormatError
from purevk.frontends.files import open_file
from purevk.frontends.torch.archive import check
from purevk.frontends.torch.archive.cost import steps_of
from tests.pickles import members, packed

torch = pytest.importorskip("torch")
SUM = "(s0 + s1 + s2 + s3 + 1)"
ENDLESS = {
    "power": f"FloorDiv({SUM}**20, s0 - s1 + s2 - 3)",
    "products": f"Mod({'*'.join(f'({SUM} + {n}*s0)' for n in range(20))}, s0 - s1)",
    "functions of sympy": "FloorDiv(Pow(Add(Symbol('s0'), Symbol('s1'), Symbol('s2'), Symbol('s3'),"
    " Integer(1)), Integer(20)), Add(Symbol('s0'), Mul(Integer(-1), Symbol('s1'))))",
    "operators": f"{SUM}**20 // (s0 - s1 + s2 - 3)",
    "maximum": f"Max({', '.join(f'{n}*s0 - {n * n % 997}*s1' for n in range(500))})",
    "nested divisions": "FloorDiv(" * 80 + "s0" + " + s1, 3)" * 80,
    "nested maxima": "Max(" * 60 + "s0*s1" + " + s1, 3*s0)" * 60,
}
# What torch.export writes of models with dynamic sizes.
OF_MODELS = [
    "s0", "2*s0*s1", "FloorDiv(s0*s1, 4)", "(((s0 - 1)//2) + 1)**2",
    "FloorDiv(FloorDiv(FloorDiv(s0 - 1, 2), 2), 2) + 1", "Max(1, s0 - s1)", "Mod(-s0, 7) + s0",
    f"FloorDiv({' + '.join(f's{n}' for n in range(60))}, 2)",
    "Add(Mul(Integer(4), Symbol('s77', positive=True, integer=True)), Integer(-1))",
    "FloorDiv(Add(Mul(Integer(8), Symbol('s14', positive=True, integer=True)), Integer(1)), Integer(3))",
    "(s0//2 + 1)*(s1//2 + 1) + (s0//4 + 1)*(s1//4 + 1) + (s0//8 + 1)*(s1//8 + 1)",
]  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_expressions_that_take_long(name: str) -> None:
    assert steps_of(ENDLESS[name]) > check._MOST_STEPS


@pytest.mark.parametrize("text", OF_MODELS, ids=range(len(OF_MODELS)))
def test_expressions_of_models(text: str) -> None:
    assert steps_of(text) == 0


def test_long_expressions_are_estimated_in_little_time() -> None:
    start = time.process_time()
    assert steps_of("+".join(f"s{n}" for n in range(900))) == 0
    assert steps_of("*".join(f"(s{n} + 1)" for n in range(900))) == 0
    steps_of("FloorDiv(" * 60 + "+".join(f"s{n}" for n in range(900)) + ", 3)" * 60)
    assert time.process_time() - start < 2


def test_files_with_such_expressions_are_refused() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(-1) * 2

    sizes = ({at: torch.export.Dim(name, max=64) for at, name in enumerate("abcd")},)
    program = torch.export.export(Model(), (torch.ones(2, 3, 4, 5),), dynamic_shapes=sizes)
    data = io.BytesIO()
    torch.export.save(program, data)
    contents = members(data.getvalue())
    description = json.loads(contents["archive/models/model.json"])
    inputs = description["graph_module"]["graph"]["tensor_values"]["x"]["sizes"]
    names = [size["as_expr"]["expr_str"].split("'")[-2] for size in inputs]  # of symbols
    values = description["graph_module"]["graph"]["tensor_values"]
    (size,) = values["view"]["sizes"] if "view" in values else values["reshape"]["sizes"]
    for name, text in ENDLESS.items():
        for number, symbol in enumerate(names):
            text = text.replace(f"s{number}", symbol)
        size["as_expr"]["expr_str"] = text
        changed = {**contents, "archive/models/model.json": json.dumps(description).encode()}
        with pytest.raises(FileFormatError, match="too long to compute") as caught:
            open_file(packed(changed))
        assert "steps" in caught.value.why, name
