"""Operators on the CPU: arguments of every kind rebuilt from schemas, results of every kind,
against torch called by hand."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import purevk
from purevk import fallback, pure_operators
from purevk.dtypes import DType
from purevk.errors import FallbackError
from purevk.ir import Node, TensorType, Value
from purevk.ops import executors
from purevk.ops.executors import Executor
from purevk.passes import placement
from purevk.tuning import DeviceTraits

torch = pytest.importorskip("torch")
aten = torch.ops.aten


def leaves(made: Any) -> list[Any]:
    if isinstance(made, (list, tuple)):
        return [leaf for each in made for leaf in leaves(each)]
    if isinstance(made, (bool, int, float)):
        return [torch.tensor(made)]
    return [made] if isinstance(made, torch.Tensor) else []


def as_node(args: list[Any]) -> tuple[list[Any], dict[Value, np.ndarray]]:
    """Arguments of torch as those of a node, with the tensors' arrays."""
    arrays: dict[Value, np.ndarray] = {}

    def convert(arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            value = Value(
                f"v{len(arrays)}", TensorType(DType.from_torch(arg.dtype), tuple(arg.shape))
            )
            arrays[value] = fallback.to_numpy(arg).copy()
            return value
        if isinstance(arg, (list, tuple)):
            return tuple(convert(item) for item in arg)
        return DType.from_torch(arg) if isinstance(arg, torch.dtype) else arg

    return [convert(arg) for arg in args], arrays


def run(name: str, args: list[Any], expected: list[Any], trusted: bool = False) -> list[Any]:
    """The node's results as tensors; the arrays that it was given must stay as they were."""
    converted, arrays = as_node(args)
    before = {value: array.copy() for value, array in arrays.items()}
    types = [TensorType(DType.from_torch(each.dtype), tuple(each.shape)) for each in expected]
    made = fallback.run(name, converted, arrays, types, "test", trusted)
    for value, array in before.items():
        np.testing.assert_array_equal(arrays[value], array)
    return [fallback.to_torch(array, type.dtype) for array, type in zip(made, types)]


def check(name: str, args: list[Any], expected: Any, trusted: bool = False) -> None:
    wanted = leaves(expected)
    made = run(name, args, wanted, trusted)
    assert len(made) == len(wanted)
    for one, other in zip(made, wanted):
        torch.testing.assert_close(
            one, other, rtol=1e-6, atol=1e-6, equal_nan=True
        )  # other strides, another order of sums


torch.manual_seed(5)
X, Y, V = torch.randn(5, 7), torch.randn(5, 7), torch.randn(7)
AT = torch.tensor([0, 3, 1])
B = torch.tensor([True, False, True, True, False])

# Operator, arguments in the schema's order, and how torch is called for the same.
KINDS: dict[str, tuple[str, list[Any], Callable[[], Any]]] = {
    "tensors and numbers": ("aten.add.Tensor", [X, Y, 2], lambda: aten.add.Tensor(X, Y, alpha=2)),
    "number for a tensor": ("aten.add.Tensor", [X, 2.5, 1], lambda: X + 2.5),
    "tensor for a number": ("aten.mul.Scalar", [X, torch.tensor(3.0)], lambda: X * 3.0),
    "tensor for a list": (
        "aten.reshape.default",
        [X, torch.tensor([7, 5])],
        lambda: X.reshape(7, 5),
    ),
    "list of tensors": ("aten.cat.default", [[X, Y, X], 1], lambda: torch.cat([X, Y, X], 1)),
    "optional tensors in a list": ("aten.index.Tensor", [X, [None, AT]], lambda: X[:, AT]),
    "optional list, mask": ("aten.index.Tensor", [X, [B, None]], lambda: X[B]),
    "list of optionals, written": (
        "aten.index_put.default",
        [X, [None, AT], torch.tensor(1.0), True],
        lambda: X.index_put((torch.arange(5)[:, None], AT[None]), torch.tensor(1.0), True),
    ),
    "optional tensor, given": (
        "aten.layer_norm.default",
        [X, [7], V, V, 1e-5, True],
        lambda: torch.layer_norm(X, [7], V, V),
    ),
    "optional tensor, None": (
        "aten.layer_norm.default",
        [X, [7], None, None, 1e-5, False],
        lambda: torch.layer_norm(X, [7]),
    ),
    "keyword-only dtype": (
        "aten.sum.dim_IntList",
        [X, [1], True, torch.float64],
        lambda: X.sum(1, True, dtype=torch.float64),
    ),
    "keyword-only string": (
        "aten.div.Tensor_mode",
        [X, Y, "floor"],
        lambda: torch.div(X, Y, rounding_mode="floor"),
    ),
    "string and list": (
        "aten.einsum.default",
        ["ij,kj->ik", [X, Y], None],
        lambda: torch.einsum("ij,kj->ik", X, Y),
    ),
    "optional string": (
        "aten.linalg_norm.ord_str",
        [X, "nuc", None, False, None],
        lambda: torch.linalg.norm(X, "nuc"),
    ),
    "dtype of a file": (
        "aten.full.default",
        [[2, 3], 7, 3, None, None, None],
        lambda: torch.full((2, 3), 7, dtype=torch.int32),
    ),
    "device and layout": (
        "aten.full.default",
        [[2], 1.5, torch.float16, 0, "cuda:0", False],
        lambda: torch.full((2,), 1.5).half(),
    ),
    "required device": (
        "aten.to.device",
        [X, "cuda", torch.float64, False, False, 2],
        lambda: X.double(),
    ),
    "memory format": ("aten.clone.default", [X, 0], lambda: X.clone()),
    "generator": ("aten.bernoulli.default", [torch.ones(4), None], lambda: torch.ones(4)),
    "bools": ("aten.any.dims", [B, [0], True], lambda: B.any(0, True)),
    "list of bools": (
        "aten.native_layer_norm_backward.default",
        [Y, X, [7], X.mean(1, True), X.std(1, keepdim=True), V, V, [True, False, True]],
        lambda: aten.native_layer_norm_backward(
            Y, X, [7], X.mean(1, True), X.std(1, keepdim=True), V, V, [True, False, True]
        ),
    ),
    "several results": (
        "aten.native_layer_norm.default",
        [X, [7], V, None, 1e-5],
        lambda: aten.native_layer_norm(X, [7], V, None, 1e-5),
    ),
    "a list of results": ("aten.split.Tensor", [X, 3, 1], lambda: X.split(3, 1)),
    "four results": (
        "aten._embedding_bag.default",
        [X, AT, torch.tensor([0, 2]), False, 0, False, None, False, -1],
        lambda: aten._embedding_bag(X, AT, torch.tensor([0, 2])),
    ),
    "optional in the middle": (
        "aten.searchsorted.Tensor",
        [V.sort()[0], X, True, False, "right", None],
        lambda: torch.searchsorted(V.sort()[0], X, out_int32=True, side="right"),
    ),
    "a bool": ("aten.equal.default", [X, X], lambda: True),
    "a number": ("aten._local_scalar_dense.default", [V[2]], lambda: V[2]),
    "written in place": ("aten.add_.Tensor", [X, Y, 1], lambda: X + Y),
    "out-variant": ("aten.add.out", [X, Y, 3], lambda: torch.add(X, Y, alpha=3)),
    "out-variant, several": ("aten.topk.values", [X, 3, 1, True, True], lambda: X.topk(3, 1)),
    "out-variant, a list": ("aten.split_copy.Tensor_out", [X, 3, 1], lambda: X.split(3, 1)),
    "arguments of an out-variant": (
        "aten.empty_like.default",
        [torch.zeros(0), 0],
        lambda: torch.zeros(0),
    ),
    "bfloat16": (
        "aten.mul.Tensor",
        [X.bfloat16(), Y.bfloat16()],
        lambda: X.bfloat16() * Y.bfloat16(),
    ),
    "no elements": ("aten.cat.default", [[X[:0], X[:0]], 0], lambda: X[:0]),
    "no dims": ("aten.add.Tensor", [torch.tensor(2), torch.tensor(3), 1], lambda: torch.tensor(5)),
    "mixed precision": ("aten.mm.default", [X.half(), Y.t()], lambda: X.half().float() @ Y.t()),
    "32-bit indices": (
        "aten.gather.default",
        [X, 1, AT.int()[None], False],
        lambda: X.gather(1, AT[None]),
    ),
    "another namespace": (
        "prims.convert_element_type.default",
        [X, torch.float16],
        lambda: X.half(),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_and_results(kind: str) -> None:
    name, args, reference = KINDS[kind]
    check(name, args, reference())


@pytest.mark.slow
def test_every_overload_of_a_torch_sample() -> None:
    """Operators that torch has samples of, called through their schema as the graph of a trace
    names them."""
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.utils._python_dispatch import TorchDispatchMode

    calls: dict[str, tuple[Any, ...]] = {}

    class Trace(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            given = [each.clone() if isinstance(each, torch.Tensor) else each for each in args]
            made = func(*args, **(kwargs or {}))
            name = f"{func.namespace}.{func._opname}.{func._overloadname}"
            if name not in calls and not any(each.is_write for each in func._schema.arguments):
                calls[name] = (func, given, kwargs or {}, [each.clone() for each in leaves(made)])
            return made

    for info in op_db[::9]:
        if torch.float32 in info.dtypes and not info.name.startswith(("_refs", "jiterator")):
            for _, sample in zip(range(2), info.sample_inputs("cpu", torch.float32)):
                with Trace():
                    info(sample.input, *sample.args, **sample.kwargs)
    assert len(calls) > 80
    for name, (func, args, kwargs, made) in calls.items():
        wanted = leaves(made)
        random = torch.Tag.nondeterministic_seeded in func.tags or name.startswith(
            ("aten.empty", "aten.new_empty", "aten._ctc")
        )
        tensors = [*wanted, *(each for each in leaves(args) if isinstance(each, torch.Tensor))]
        if random or not all(
            each.layout is torch.strided and DType.from_torch(each.dtype) for each in tensors
        ):
            continue
        full = list(args)
        for each in func._schema.arguments[len(args) :]:
            full.append(kwargs.get(each.name, each.default_value))
        check(name, full, made, trusted=pure_operators.refusal(func) is not None)


def test_tensors_over_arrays() -> None:
    """They share the array's memory where torch can write it, and have torch's own strides."""
    read_only = np.ones(3, np.float32)
    read_only.flags.writeable = False
    wide = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for array, shared in (
        (wide, True),
        (wide[:1], True),
        (wide.transpose(0, 2, 1)[:, :, :1], False),
        (wide[0].T[:, :1].T, True),
        (np.ones((2, 5), np.float32).T[:1, :].T[:1], True),  # dims of size 1 have odd strides
        (np.float32(2.5), False),
        (np.array(2.5, np.float32), True),
        (np.empty((0, 4), np.float32), False),
        (read_only, False),
    ):
        made = fallback.to_torch(array, DType.float32)
        wanted = torch.tensor(np.asarray(array).tolist(), dtype=torch.float32).reshape(array.shape)
        assert torch.equal(made, wanted) and made.stride() == wanted.stride()
        assert np.shares_memory(made.numpy(), array) is shared
    bits = np.array([0x3F80], np.uint16)
    assert fallback.to_torch(bits, DType.bfloat16).tolist() == [1.0]


def test_what_cannot_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FallbackError, match="torch does not know it"):
        fallback.run("nolib.nothing.default", [], {}, [], "here")
    lacking = "int8 needs the device feature storage_8bit"
    with pytest.raises(FallbackError, match="torch does not know it") as error:
        fallback.run("nolib.nothing.default", [], {}, [], "here", reason=lacking)
    assert error.value.why == lacking
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)
        for reason in (
            "float32[1] is larger than the 128 bytes that one binding spans",
            "no kernel",
        ):
            with pytest.raises(FallbackError, match="and torch is not installed") as error:
                fallback.run("aten.mm.default", [], {}, [], "here", reason=reason)
            assert error.value.why.startswith(reason) and "no kernel" not in error.value.what
    args, arrays = as_node([X, X])
    wanted = [TensorType(DType.float32, (5, 5))]
    with pytest.raises(FallbackError, match="failed on the CPU") as error:
        fallback.run("aten.mm.default", args, arrays, wanted, "here")
    assert error.value.where == "here" and "must have same reduction dim" in error.value.why
    assert error.value.why.startswith("RuntimeError: ")
    with pytest.raises(FallbackError, match=r"result 0 of aten.add.Tensor has sizes \[5, 7\]"):
        fallback.run("aten.add.Tensor", args, arrays, wanted, "here")
    with pytest.raises(FallbackError, match="gave 1 results"):
        fallback.run("aten.add.Tensor", args, arrays, wanted * 2, "here")


@pytest.mark.device
def test_the_log_tells_of_nodes_on_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.frac(torch.linalg.eigvals(x).abs()) + torch.linalg.eigvals(x + 1).abs()

    x = torch.eye(3)
    with caplog.at_level("INFO", "purevk"), purevk.compile(Model(), (x,)):
        pass
    lines = [each.message for each in caplog.records if "on the CPU" in each.message]
    assert len(lines) == 1
    assert "2 x aten.linalg_eig.default (no kernel)" in lines[0]
    assert re.search(r": 2 of \d+ nodes run on the CPU", lines[0]) and "purevk inspect" in lines[0]
    caplog.clear()
    with caplog.at_level("INFO", "purevk"), purevk.compile(torch.nn.ReLU(), (x,)):
        pass
    assert "on the CPU" not in caplog.text


@pytest.mark.parametrize(
    "error", [KeyError("user problem"), ValueError(), RuntimeError("first\nsecond")], ids=repr
)
def test_errors_of_the_users_functions(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(executors, "find_executor", lambda name: Executor(name, fail, "numpy"))
    with pytest.raises(FallbackError, match="failed on the CPU") as caught:
        fallback.run("mine.op.default", [], {}, [], "here")
    wanted = {KeyError: "KeyError: 'user problem'", ValueError: "ValueError"}
    assert caught.value.why == wanted.get(type(error), "RuntimeError: first")


# -- operators of the user's own, in programs ----------------------------------------------------
@pytest.fixture(scope="module")
def own() -> Iterator[Any]:
    """A library of operators of many kinds, each with what tracing needs and an out-variant where
    files need one."""
    library = torch.library.Library("purevk_test", "DEF")
    library.define(
        "mix(Tensor x, Tensor?[] others, float[] weights, *, str how='sum', ScalarType?"
        " dtype=None, bool neg=False) -> Tensor"
    )
    library.define(
        "mix.out(Tensor x, Tensor?[] others, float[] weights, *, str how='sum', ScalarType?"
        " dtype=None, bool neg=False, Tensor(a!) out) -> Tensor(a!)"
    )
    library.define("parts(Tensor x, SymInt n) -> (Tensor, Tensor[])")
    library.define("halves(Tensor x) -> (Tensor, Tensor)")
    library.define(
        "halves.out(Tensor x, *, Tensor(a!) low, Tensor(b!) high) -> (Tensor(a!), Tensor(b!))"
    )
    library.define("step_(Tensor(a!) x, Tensor(b!) y, float by) -> ()")
    library.define("highest(Tensor x) -> Scalar")
    library.define("bits(Tensor x) -> SymInt")

    def mix(
        x: Any, others: Any, weights: Any, *, how: str = "sum", dtype: Any = None, neg: bool = False
    ) -> Any:
        made = x.clone()
        for other, weight in zip(others, weights):
            if other is not None:
                made = made + weight * other if how == "sum" else made * (weight * other)
        return (-made if neg else made).to(dtype or x.dtype)

    def into(out: Any, made: Any) -> Any:
        return out.resize_(made.shape).copy_(made)

    def step(x: Any, y: Any, by: float) -> None:
        x.add_(by)
        y.mul_(2)

    functions: dict[str, Any] = {
        "mix": mix,
        "mix.out": lambda *args, out, **named: into(out, mix(*args, **named)),
        "parts": lambda x, n: (x + 1, [x * number for number in range(n)]),
        "halves": lambda x: (x.clone(), x / 2),
        "halves.out": lambda x, low, high: (into(low, x), into(high, x / 2)),
        "step_": step,
        "highest": lambda x: float(x.max()),
        "bits": lambda x: int((x > 0).sum()),
    }
    for name, function in functions.items():
        library.impl(name, function, "CPU")
        if "out" not in name and name not in ("highest", "bits"):
            torch.library.register_fake(f"purevk_test::{name}", function, lib=library)
    torch.library.register_fake(
        "purevk_test::bits", lambda x: torch.library.get_ctx().new_dynamic_size(), lib=library
    )
    torch.library.register_fake("purevk_test::highest", lambda x: x.max().item(), lib=library)
    yield torch.ops.purevk_test
    library._destroy()


@pytest.mark.device
def test_programs_of_own_operators(own: Any) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.zeros(7))

        def forward(self, x: Any, y: Any) -> Any:
            mixed = own.mix(
                x, [None, y, x], [1.0, 2.0, 3.0], how="product", dtype=torch.float64, neg=True
            )
            first, (second, third) = own.parts(x, 2)
            z = y * 1.0
            own.step_(self.state, z, 0.5)
            rows = own.halves(x * torch.arange(x.shape[0], device=x.device)[:, None])
            return (
                mixed.float() + first,
                second + third,
                rows,
                self.state * 1.0,
                z + own.highest(x),
                own.bits(x),
                torch.add(x, y, alpha=x.max().item() * 2),
            )

    example = (torch.randn(3, 7), torch.randn(3, 7))
    dynamic = ({0: torch.export.Dim("n", min=2, max=16)},) * 2
    model = Model()
    with purevk.compile(model, example, dynamic) as program:
        for rows in (3, 9, 3):
            x, y = torch.randn(rows, 7), torch.randn(rows, 7)
            made, expected = leaves(list(program.forward(x, y))), leaves(list(model(x, y)))
            assert len(made) == len(expected)
            for one, other in zip(made, expected):
                torch.testing.assert_close(one, other, check_dtype=False)


@pytest.mark.device
@pytest.mark.export
def test_files_of_own_operators(own: Any, tmp_path: Path) -> None:
    exir = pytest.importorskip("executorch.exir")

    class Model(torch.nn.Module):
        def forward(self, x: Any, y: Any) -> Any:
            mixed = own.mix(x, [None, y, x], [1.0, 2.0, 3.0], how="product", neg=True)
            low, high = own.halves(mixed)
            return low + x, high, torch.full_like(high, 3.0) * x.sum().item()

    example = (torch.randn(3, 7), torch.randn(3, 7))
    edge = exir.to_edge(
        torch.export.export(Model(), example),
        compile_config=exir.EdgeCompileConfig(_check_ir_validity=False),
    )
    (tmp_path / "own.pte").write_bytes(edge.to_executorch().buffer)
    with purevk.load(tmp_path / "own.pte") as program:
        with pytest.raises(FallbackError, match=r"may not run purevk_test\.mix") as error:
            program.forward(*example)
        assert "allow_operator('purevk_test.mix.default')" in error.value.next
        purevk.ops.allow_operator("purevk_test.mix")
        purevk.ops.allow_operator("purevk_test::halves")
        try:
            for _ in range(2):
                x, y = torch.randn(3, 7), torch.randn(3, 7)
                for one, other in zip(program.forward(x, y), Model()(x, y)):
                    torch.testing.assert_close(one, other)
        finally:
            purevk.ops.disallow_operator("purevk_test.mix")
            purevk.ops.disallow_operator("purevk_test.halves")
        with pytest.raises(FallbackError, match=r"may not run purevk_test\.mix"):
            program.forward(*example)


@pytest.mark.device
def test_every_node_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose operators all have kernels gives the same with none of them."""

    def refuse(node: Node, traits: DeviceTraits) -> str | None:
        return None if node.op.startswith("purevk.") else "refused by the test"

    monkeypatch.setattr(placement, "refusal", refuse)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Sequential(
                torch.nn.Conv2d(3, 4, 3, padding=1),
                torch.nn.BatchNorm2d(4),
                torch.nn.ReLU(),
                torch.nn.MaxPool2d(2),
                torch.nn.Flatten(),
                torch.nn.Linear(64, 8),
                torch.nn.LayerNorm(8),
            )
            self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Any) -> Any:
            y = self.body(x)[None]
            mask = torch.ones(y.shape[1], y.shape[1], dtype=torch.bool, device=x.device).tril()
            made = self.attention(y, y, y, attn_mask=~mask)[0] + torch.arange(
                8, dtype=torch.float16
            )
            values, order = torch.topk(made, 3)
            return values, order, torch.cat([y, made], -1)[:, 1:, ::3].split(2, -1), made.argmax(-1)

    model = Model().eval()
    x = torch.randn(4, 3, 8, 8)
    with torch.no_grad(), purevk.compile(model, (x,)) as program:
        assert program.report()["dispatches"] == 0
        for one, other in zip(leaves(list(program.forward(x))), leaves(list(model(x)))):
            torch.testing.assert_close(one, other)
