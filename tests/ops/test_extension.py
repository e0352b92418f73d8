"""Operators that users register: the page about it, run as it stands, and what the page does not
show."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import purevk
from purevk.errors import FallbackError, GraphError, InputError, ShaderCompilerError
from tests.harness import NO_TORCH, python

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def clean() -> Iterator[None]:
    """Whatever a test registers is gone after it."""
    before = {(op.name, op.origin) for op in purevk.ops.list_registered_ops()}
    yield
    for op in purevk.ops.list_registered_ops():
        if (op.name, op.origin) not in before:
            purevk.ops.unregister(op.name)
        purevk.ops.unregister_executor(op.name)


@pytest.fixture(scope="module")
def library() -> Iterator[Any]:
    library = torch.library.Library("purevk_ext", "DEF")
    library.define(
        "pick(Tensor table, Tensor index, Tensor? weight=None, *, Tensor[] extra) -> (Tensor, Tensor)"
    )
    library.define(
        "pick.out(Tensor table, Tensor index, Tensor? weight=None, *, Tensor[] extra, Tensor(a!)"
        " rows, Tensor(b!) ok) -> (Tensor(a!), Tensor(b!))"
    )
    library.define("wave(Tensor x, *, float rate, str kind='sin') -> Tensor")
    library.define(
        "wave.out(Tensor x, *, float rate, str kind='sin', Tensor(a!) out) -> Tensor(a!)"
    )

    def pick(table: Any, index: Any, weight: Any = None, *, extra: Any) -> Any:
        rows = table[index] * (1 if weight is None else weight[:, None])
        return sum(extra, rows), index > 1

    def wave(x: Any, *, rate: float, kind: str = "sin") -> Any:
        return getattr(torch, kind)(rate * x)

    library.impl("pick", pick, "CPU")
    library.impl("wave", wave, "CPU")
    library.impl(
        "wave.out",
        lambda x, *, rate, kind="sin", out: out.resize_(x.shape).copy_(
            wave(x, rate=rate, kind=kind)
        ),
        "CPU",
    )
    torch.library.register_fake("purevk_ext::pick", pick, lib=library)
    torch.library.register_fake("purevk_ext::wave", wave, lib=library)
    yield torch.ops.purevk_ext
    library._destroy()


PICK = """
#version 450
#extension GL_GOOGLE_include_directive : enable
#include "kernel.glslh"
#include "scaled.glslh"
void main() {
    if (INDEX >= COUNT) return;
    int row = INDEX / width, at = int(READ_INDEX(row));
    float v = READ_TABLE(at * width + INDEX % width);
#if HAS_WEIGHT
    v = scaled(v, READ_WEIGHT(row));
#endif
#if COUNT_EXTRA > 1
    v += READ_EXTRA0(INDEX) + READ_EXTRA1(INDEX);
#endif
    WRITE_OUT0(INDEX, v);
    if (INDEX % width == 0) WRITE_OUT1(row, at > LIMIT);
}
"""


class Picks(torch.nn.Module):
    def forward(self, table: Any, index: Any, weight: Any) -> Any:
        ops = torch.ops.purevk_ext
        part = table[:, 1:5]
        rows, large = ops.pick(
            part, index, weight, extra=[weight[:, None] + table[:3, :4], table[2:5, 2:6]]
        )
        plain, _ = ops.pick(part.half(), index, extra=[])
        return rows, large, plain


@pytest.mark.device
def test_the_page_runs(clean: None) -> None:
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 6
    code = re.search(r"purevk\.ops\.register_kernel\(\n.*?\n\)\n", text, re.DOTALL)
    assert code is not None and code[0].count("\n") <= 20
    space: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/extending.md", "exec"), space)


@pytest.mark.device
def test_a_template_from_a_file(clean: None, library: Any, tmp_path: Path) -> None:
    """Its own include, an optional tensor, a list of tensors, several results, indices of 64 bits,
    half precision, views."""
    (tmp_path / "pick.comp").write_text(PICK, encoding="utf-8")
    (tmp_path / "scaled.glslh").write_text(
        "float scaled(float v, float by) { return v * by; }\n", encoding="utf-8"
    )

    def shape(table: Any, index: Any, weight: Any = None, extra: Any = ()) -> Any:
        return table.with_dims((*index.dims, table.dims[1])), index.with_dtype(
            purevk.ops.DType.bool
        )

    purevk.ops.register_kernel(
        "purevk_ext::pick",
        tmp_path / "pick.comp",
        shape,
        params=lambda table, **_: {"width": table.dims[1]},
        specialize=["width"],
        macros={"LIMIT": 1},
        dtypes=("float32", "float16", "int64", "bool"),
        local_size=32,
    )
    given = torch.randn(6, 7), torch.tensor([4, 0, 5]), torch.randn(3)
    with purevk.compile(Picks(), given) as program:
        assert program.report()["cpu_nodes"] == 0
        for one, other in zip(program.forward(*given), Picks()(*given)):
            torch.testing.assert_close(one, other)
    (found,) = [
        op for op in purevk.ops.list_registered_ops() if op.name == "purevk_ext.pick.default"
    ]
    assert (found.form, found.origin, found.cpu_function) == (
        "kernel",
        "user",
        False,
    ) and "int64" in found.dtypes


@pytest.mark.device
def test_pointwise_kernels_take_all_floats(clean: None, library: Any) -> None:
    """GLSL has `sin` and the like for float alone; in double precision they are purevk's own."""
    purevk.ops.register_pointwise(
        "purevk_ext.wave",
        lambda kind, **_: f"{kind}(x * ACC(rate))",
        "x, rate, kind='sin'",
        compute="float",
    )

    class Waves(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            wave = torch.ops.purevk_ext.wave
            return (
                wave(x, rate=2.0) + 1,
                wave(x.half(), rate=0.5, kind="cos"),
                wave(x.double(), rate=1.0),
            )

    x = torch.randn(5, 3)
    with purevk.compile(Waves(), (x,)) as program:
        assert program.report()["cpu_nodes"] == 0
        for one, other in zip(program.forward(x), Waves()(x)):
            tolerance = {torch.float16: 1e-3, torch.float32: 1e-6, torch.float64: 1e-13}[one.dtype]
            torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


@pytest.mark.device
def test_files_without_torch(library: Any, tmp_path: Path) -> None:
    """An out-variant in a file: through torch here, if that is allowed, and by what is registered in
    a process without torch."""
    exir = pytest.importorskip("executorch.exir")

    class Wave(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.ops.purevk_ext.wave(x, rate=3.0) + x

    x = torch.randn(2, 3)
    config = exir.EdgeCompileConfig(_check_ir_validity=False)
    edge = exir.to_edge(torch.export.export(Wave(), (x,)), compile_config=config)
    (tmp_path / "wave.pte").write_bytes(edge.to_executorch().buffer)
    np.save(tmp_path / "x.npy", x.numpy())
    with purevk.load(tmp_path / "wave.pte") as program:
        with pytest.raises(
            purevk.errors.FallbackError, match="a model file may not run purevk_ext.wave"
        ):
            program.forward(x)
        purevk.ops.allow_operator("purevk_ext.wave")
        try:
            torch.testing.assert_close(program.forward(x), Wave()(x))
        finally:
            purevk.ops.disallow_operator("purevk_ext.wave")
    source = (
        NO_TORCH
        + """
import json, numpy as np, purevk
x = np.load(sys.argv[2])
if sys.argv[3] == "cpu":
    @purevk.ops.register_executor("purevk_ext.wave")
    def wave(x, rate, kind):
        return getattr(np, kind)(rate * x)
if sys.argv[3] == "gpu":
    purevk.ops.register_pointwise("purevk_ext.wave", "sin(x * ACC(rate))", "x, rate, kind='sin'")
try:
    program = purevk.load(sys.argv[1])
    y = program.forward(x).tolist()
except purevk.PurevkError as error:
    y = str(error)
print(json.dumps({"y": y, "cpu": program.report()["cpu_nodes"]}))
"""
    )
    for how, nodes in (("cpu", 1), ("gpu", 0)):
        said = python(source, tmp_path / "wave.pte", tmp_path / "x.npy", how)
        assert said["cpu"] == nodes
        np.testing.assert_allclose(said["y"], Wave()(x).numpy(), rtol=0, atol=2e-6)
    said = python(source, tmp_path / "wave.pte", tmp_path / "x.npy", "none")
    assert "purevk.ops.register_executor('purevk_ext.wave.default')" in said["y"]


@pytest.mark.device
def test_executors_take_torch_tensors(clean: None, library: Any) -> None:
    @purevk.ops.register_executor("purevk_ext::pick", tensors="torch")
    def pick(table: Any, index: Any, weight: Any, extra: Any) -> Any:
        assert isinstance(table, torch.Tensor) and isinstance(extra, list)
        rows, large = torch.ops.purevk_ext.pick(table, index, weight, extra=extra)
        return [rows, large]

    given = torch.randn(6, 7), torch.tensor([4, 0, 5]), torch.randn(3)
    with purevk.compile(Picks(), given) as program:
        for one, other in zip(program.forward(*given), Picks()(*given)):
            torch.testing.assert_close(one, other)
        purevk.ops.register_executor("purevk_ext.pick")(lambda *args: 1 / 0)
        with pytest.raises(
            FallbackError, match="purevk_ext.pick.default failed on the CPU"
        ) as error:
            program.forward(*given)
        assert isinstance(error.value.__cause__, ZeroDivisionError)
        purevk.ops.register_executor("purevk_ext.pick")(lambda table, *args: (table, table))
        with pytest.raises(
            FallbackError, match=r"result 0 of purevk_ext.pick.default has sizes \[6, 4\]"
        ):
            program.forward(*given)


def test_what_cannot_be_registered(clean: None, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no name of an operator"):
        purevk.ops.register_executor("gate")
    with pytest.raises(InputError, match="tensors='jax'"):
        purevk.ops.register_executor("a.b", tensors="jax")
    with pytest.raises(InputError, match="cannot be read"):
        purevk.ops.register_pointwise("a.b", "x", "x, *y")
    with pytest.raises(InputError, match="no tensor"):
        purevk.ops.register_pointwise("a.b", "a", "a, b=1")
    with pytest.raises(InputError, match="no dtype"):
        purevk.ops.register_pointwise("a.b", "x", out="float8")
    with pytest.raises(InputError, match="template of a.b.default cannot be read"):
        purevk.ops.register_kernel("a.b", tmp_path / "none.comp", lambda x: x)
    with pytest.raises(GraphError, match="registered twice"):
        purevk.ops.register_pointwise("aten.relu", "x")
    purevk.ops.register_pointwise("a.b", "x")
    purevk.ops.register_pointwise("a.b", "x + ACC(1)", replace=True)


@pytest.mark.device
def test_a_mistake_in_a_template_is_shown(clean: None, library: Any) -> None:
    purevk.ops.register_kernel(
        "purevk_ext.wave", PICK.replace('#include "scaled.glslh"\n', ""), lambda x, rate, kind: x
    )

    class Wave(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.ops.purevk_ext.wave(x, rate=3.0)

    with pytest.raises(ShaderCompilerError, match="purevk_ext.wave.default") as error:
        purevk.compile(Wave(), (torch.randn(2, 3),))
    assert "width" in str(error.value)


def test_a_definition_of_another_schema_is_refused(clean: None) -> None:
    """Arguments that a definition lacks would have no effect."""

    @torch.library.custom_op("purevk_ext::halves", mutates_args=())
    def halves(x: torch.Tensor, factor: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
        return x * factor, x / 2

    @halves.register_fake
    def _(x: Any, factor: int = 3) -> Any:
        return torch.empty_like(x), torch.empty_like(x)

    class Both(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return torch.ops.purevk_ext.halves(x, 2)

    name, text = "purevk_ext.halves", '#include "kernel.glslh"\nvoid main() {}'
    purevk.ops.register_kernel(name, text, shape=lambda x: (x, x))
    with pytest.raises(InputError, match="lacks arguments of the operator\n.*\n.* has 2, .* 1: x"):
        purevk.plan(Both(), (torch.ones(3),), device="typical")
    purevk.ops.register_kernel(name, text, shape=lambda x, factor=3: x, replace=True)
    with pytest.raises(InputError, match="another number of results") as caught:
        purevk.plan(Both(), (torch.ones(3),), device="typical")
    assert "its shape function gives 1, the operator gives 2" in str(caught.value)
    shape = lambda x, factor=3: (x, x.with_dims((7,)))  # noqa: E731
    purevk.ops.register_kernel(name, text, shape=shape, replace=True)
    with pytest.raises(InputError, match="result 1 of .* is recorded as") as caught:
        purevk.plan(Both(), (torch.ones(3),), device="typical")
    assert "correct the shape function" in caught.value.next
    # Right for five rows, wrong for the three of the trace.
    shape = lambda x, factor=3: (x, x.with_dims((2 * x.dims[0] - 5,)))  # noqa: E731
    purevk.ops.register_kernel(name, text, shape=shape, replace=True)
    dynamic = {"x": {0: torch.export.Dim("rows", max=64)}}
    with pytest.raises(InputError, match="result 1 of .* is recorded as"):
        purevk.plan(Both(), (torch.ones(3),), dynamic_shapes=dynamic, device="typical")


@pytest.mark.device
@pytest.mark.parametrize("text", ["x * unknown_name", "x * (x"])
def test_an_error_of_the_compiler_names_the_operator_and_its_text(text: str) -> None:
    name = "mylib.faulty_x"
    with torch.library._scoped_library("mylib", "FRAGMENT") as library:
        library.define("faulty_x(Tensor x) -> Tensor")
        library.impl("faulty_x", lambda x: x.clone(), "CompositeExplicitAutograd")
        purevk.ops.register_pointwise(name, text, "x", replace=True)

        class Model(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.relu(torch.ops.mylib.faulty_x(x + 1))

        try:
            with pytest.raises(purevk.ShaderCompilerError) as caught:
                purevk.compile(Model(), (torch.rand(3, 8),))
        finally:
            purevk.ops.unregister(name)
    (line,) = [each for each in caught.value.why.splitlines() if "operator of yours" in each]
    assert "/* mylib.faulty_x.default */" in line and ("unknown_name" in line or "* (" in line)
