"""A call binds its arguments as the module itself does, tells Python values apart, and sees weights
that change."""

from __future__ import annotations

import collections
import copy
import dataclasses
import logging
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import purevk  # noqa: E402
from purevk.errors import (  # noqa: E402
    InputError,
    SignatureError,
    SizeConstraintError,
    UnsupportedProgramError,
)
from purevk.frontends.torch.module import ModuleSource  # noqa: E402
from purevk.program import Method  # noqa: E402
from tests.program.signatures.harness import module  # noqa: E402

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore")]
X, Y, Z = (torch.tensor(row) for row in ([1.0, 2.0, 3.0], [4.0, -1.0, 0.5], [7.0, 8.0, 9.0]))
Named = collections.namedtuple("Named", "u v")


@dataclasses.dataclass
class Pair:
    a: torch.Tensor
    b: torch.Tensor


torch.export.register_dataclass(Pair, serialized_type_name="tests.Pair")


@pytest.fixture(autouse=True)
def quiet() -> Any:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def agree(program: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    got, wanted = program(*args, **kwargs), model(*args, **kwargs)
    leaves, nesting = torch.utils._pytree.tree_flatten(wanted)
    ours, our_nesting = torch.utils._pytree.tree_flatten(got)
    assert our_nesting == nesting
    for one, two in zip(ours, leaves):
        assert type(one) is type(two)
        if isinstance(two, torch.Tensor):
            torch.testing.assert_close(one, two)
        else:
            assert one == two


def scaled(self: Any, a: Any, n: Any = 2, *, flag: Any = True, mode: Any = "mul") -> Any:
    made = a * n if mode == "mul" else a + n
    return made if flag else made + 100


VALUES = [4, 3, -2, 0, True, 2.5, float("inf"), np.int64(7), np.float64(0.5), 2**40]


def test_python_values_are_told_apart(tmp_path: Path) -> None:
    model = module(scaled)
    with purevk.compile(model, (X, 3)) as program:
        for value in VALUES:
            agree(program, model, X, value)
        agree(program, model, X)
        agree(program, model, X, flag=False)
        agree(program, model, X, mode="add", n=3)
        agree(program, model, torch.arange(3).float(), n=Y)
    with purevk.compile(torch.export.export(model, (X, 3), {"flag": True})) as program:
        agree(program, model, X, 3, flag=True)
        for value in (4, 3.0, True, None, "3", Y):
            with pytest.raises(SignatureError, match="n is"):
                program(X, value, flag=True)
        with pytest.raises(SignatureError, match="flag is False"):
            program(X, 3, flag=False)
        program.save(tmp_path / "m.pvk")
    with purevk.load(tmp_path / "m.pvk") as program:
        agree(program, model, X, 3, flag=True)
        with pytest.raises(SignatureError):
            program(X, 4, flag=True)


def test_a_variant_says_why_it_does_not_take_a_call() -> None:
    """It answers with the error, so that the next variant can be asked. What no export of the
    module takes is raised."""

    class Scale(torch.nn.Module):
        def forward(self, x: Any, factor: int = 2) -> Any:
            return x * factor

    x = torch.ones(4)
    with purevk.compile(Scale(), (x, 3)) as program:
        reader = program.method("forward").variants[0].reader
        taken = reader.read_call((x,), {"factor": 3})
        assert not isinstance(taken, InputError)
        assert np.shares_memory(taken.arrays[0], x.numpy())
        assert isinstance(reader.read_call((x,), {"factor": 5}), SignatureError)
        assert isinstance(reader.read_call(([x],), {"factor": 3}), SignatureError)
        assert isinstance(reader.read_call((None,), {"factor": 3}), SignatureError)
        refused = reader.read_call((torch.ones(5),), {"factor": 3})
        assert isinstance(refused, SizeConstraintError) and "size 5 along dim 0" in str(refused)
        assert reader.refused_sizes(taken.arrays) is None
        assert isinstance(reader.refused_sizes([np.ones(5, np.float32), 3]), SizeConstraintError)
        for other in (torch.ones(4, dtype=torch.float64), torch.ones(2, 2)):
            with pytest.raises(InputError):
                reader.read_call((other,), {"factor": 3})


def test_none_and_tensors() -> None:
    model = module(lambda self, x, y=None: x + 1 if y is None else x - y)
    for example in ((X,), (X, None), (X, Y)):
        with purevk.compile(model, example) as program:
            for args in ((X,), (X, None), (X, Z)):
                agree(program, model, *args)
    with purevk.compile(torch.export.export(model, (X, None))) as program:
        agree(program, model, X, None)
        with pytest.raises(SignatureError, match="y is a Tensor"):
            program(X, Y)


def adds(self: Any, x: Any, y: Any) -> Any:
    x.add_(1)
    return y * 2


@pytest.mark.parametrize("exported", [False, True])
def test_memory_in_common(exported: bool) -> None:
    model = module(adds)
    example = (X.clone(), Y.clone())
    made = torch.export.export(model, example) if exported else model
    with purevk.compile(made, () if exported else example) as program:
        base, other = torch.zeros(4, 2, dtype=torch.float32)[:3], X.clone()
        with pytest.raises(InputError, match="x and y share memory"):
            program(other, other)
        with pytest.raises(InputError, match="share memory"):
            program(base.T[0], base.T[0][:])
        torch.testing.assert_close(program(base[:, 0], base[:, 1]), base[:, 1] * 2)
        assert base[:, 0].tolist() == [1, 1, 1]
        assert base[:, 1].tolist() == [0, 0, 0]
        with pytest.raises(InputError, match="cannot be written"):
            program(torch.zeros(1).expand(3), X)


def test_inputs_without_elements_are_written() -> None:
    model = module(adds)
    sizes = {0: torch.export.Dim("rows", min=0, max=4)}
    example = (torch.ones(3, 2), X)
    with purevk.compile(model, example, dynamic_shapes={"x": sizes, "y": None}) as program:
        for x in (torch.ones(0, 2), torch.ones(4, 4)[:0, ::2], np.zeros((0, 2), np.float32)):
            torch.testing.assert_close(torch.as_tensor(program(x, X)), X * 2)
        x = torch.zeros(2, 2)
        program(x, X)
        assert x.tolist() == [[1, 1], [1, 1]]
        with pytest.raises(InputError, match="cannot be written"):
            # Eager torch would add to an element once for each view of it.
            program(torch.zeros(3).unfold(0, 2, 1), X)


def test_examples_that_are_one_tensor() -> None:
    model = module(lambda self, a, b, c: (a - b + 2 * c, c - a))
    with purevk.compile(model, (X, Y, X)) as program:
        agree(program, model, Z, Y, X)


def test_a_misspelt_keyword_names_the_one_that_is_meant(tmp_path: Path) -> None:
    model = module(lambda self, image, *, mask, scale=None: image * mask)
    with purevk.compile(model, (X,), kwargs={"mask": Y}) as program:
        program.save(tmp_path / "m.pvk")
    with purevk.load(tmp_path / "m.pvk") as program:
        cases = {
            "mask is missing, and maks is no argument; is mask meant?": {"maks": Y},
            "scales is no argument; is scale meant?": {"mask": Y, "scales": None},
            "other is no argument; the method takes image, mask": {"mask": Y, "other": Y},
        }
        for text, kwargs in cases.items():
            with pytest.raises(SignatureError) as caught:
                program(X, **kwargs)
            assert caught.value.what == text
        with pytest.raises(SignatureError) as caught:
            program(imag=X, mask=Y)
        assert caught.value.what == "image is missing, and imag is no argument; is image meant?"


def test_keywords_in_any_order(tmp_path: Path) -> None:
    model = module(lambda self, x, b, *, c, d=2.0: x * b - c * d)
    with purevk.compile(torch.export.export(model, (X,), {"c": Y, "b": Z})) as program:
        agree(program, model, X, b=Z, c=Y)
        agree(program, model, X, c=Y, b=Z)
        with pytest.raises(SignatureError, match="pass c, b by name"):
            program(X, Z, Y)
        with pytest.raises(SignatureError, match="^c is missing, and e is no argument") as caught:
            program(X, b=Z, e=Y)
        assert caught.value.next.endswith("its arguments are x, c, b")
        assert [each.name for each in program.inputs] == ["x", "c", "b"]
        program.save(tmp_path / "m.pvk")
    with purevk.load(tmp_path / "m.pvk") as program:
        agree(program, model, X, b=Z, c=Y)
    with purevk.compile(model, (X,), kwargs={"c": Y, "b": Z}) as program:
        agree(program, model, X, Z, c=Y)
        agree(program, model, c=Y, b=Z, x=X)
        agree(program, model, X, Z, c=Y, d=3.0)
        torch.testing.assert_close(program.submit(X, c=Y, b=Z).result(), model(X, c=Y, b=Z))
        out = torch.empty(3)
        assert program(X, c=Y, b=Z, out=out) is out
        torch.testing.assert_close(out, model(X, c=Y, b=Z))
        for args, kwargs in (((X, Z, Y), {}), ((X,), {"c": Y}), ((X, Z), {"c": Y, "w": 1})):
            with pytest.raises(InputError):
                program(*args, **kwargs)


def test_the_order_of_keywords_that_nobody_declared() -> None:
    def ranked(self: Any, x: Any, *rest: Any, **more: Any) -> Any:
        return sum(rest, x) + sum(rank * each for rank, each in enumerate(more.values(), 1))

    model = module(ranked)
    with purevk.compile(model, (X, Y), kwargs={"k": Z}) as program:
        agree(program, model, X, Z, k=Y)
        agree(program, model, X, Y, k=Z, j=X)
        agree(program, model, X, Y, j=X, k=Z)
        agree(program, model, X, k=Z)
        agree(program, model, X, Y, Z)


def test_the_order_of_keys() -> None:
    model = module(lambda self, d: sum(rank * each for rank, each in enumerate(d.values(), 1)))
    with purevk.compile(model, ({"a": X, "b": Y},)) as program:
        agree(program, model, {"a": Y, "b": Z})
        agree(program, model, {"b": Z, "a": Y})
        agree(program, model, {"b": Z})


def test_nested_inputs_and_outputs(tmp_path: Path) -> None:
    def forward(self: Any, d: Any, pair: Any, named: Any) -> Any:
        return {
            "sum": d["a"] + d["b"][0],
            "all": (d["b"][1], [pair.a - named.u, None, 3]),
            "pair": Pair(pair.b, named.v),
            "named": Named(pair.a, d["a"]),
        }

    model = module(forward)
    args = {"a": X, "b": [Y, Z]}, Pair(X, Y), Named(Z, X)
    # torch.export itself takes two inputs that are one tensor for one.
    args = torch.utils._pytree.tree_map(torch.clone, args)
    for made in (purevk.compile(model, args), purevk.compile(torch.export.export(model, args))):
        with made as program:
            other = {"a": Z, "b": [X, Y]}, Pair(Y, Z), Named(X, Z.clone())
            got, wanted = program(*other), model(*other)
            assert type(got["pair"]) is Pair and type(got["named"]) is Named
            agree(program, model, *other)
            names = [each.name for each in program.inputs]
            assert names == ["d.a", "d.b.0", "d.b.1", "pair.a", "pair.b", "named.u", "named.v"]
            assert [each.name for each in program.outputs][:3] == ["sum", "all.0", "all.1.0"]
            with pytest.raises(InputError):
                program({"a": X}, Pair(Y, Z), Named(X, Z))
            program.save(tmp_path / "m.pvk")
        with purevk.load(tmp_path / "m.pvk") as loaded:
            got = loaded(*other)
            assert got["named"]._fields == ("u", "v") and set(got["pair"]) == {"a", "b"}
            torch.testing.assert_close(got["pair"]["a"], wanted["pair"].a)


def test_model_outputs() -> None:
    utils = pytest.importorskip("transformers.modeling_outputs")

    def forward(self: Any, x: Any, y: Any = None) -> Any:
        loss = None if y is None else (x - y).sum()
        return utils.SequenceClassifierOutput(logits=x * 2, loss=loss)

    model = module(forward)
    with purevk.compile(model, (X,)) as program:
        for kwargs in ({}, {"y": Y}):
            got = program(X, **kwargs)
            assert type(got) is utils.SequenceClassifierOutput
            assert list(got) == list(model(X, **kwargs))
            torch.testing.assert_close(got.logits, X * 2)


def test_arrays_of_every_kind() -> None:
    with purevk.compile(module(lambda self, x: x * 2), (X,)) as program:
        array = pickle.loads(pickle.dumps(X.numpy()))
        assert program(array).tolist() == [2, 4, 6]
        assert program(copy.deepcopy(array)).tolist() == [2, 4, 6]
        for masked in (np.ma.array(array, mask=[0, 1, 0]), np.ma.array(array)):
            with pytest.raises(InputError, match="x is a masked array"):
                program(masked)
        with pytest.raises(InputError, match="float64"):
            program(array.astype(np.float64))


def test_a_number_is_no_tensor() -> None:
    model = module(lambda self, x, y: x * y)
    with purevk.compile(model, (torch.arange(3), torch.tensor(2.0))) as program:
        got = program(torch.arange(3), 3)
        assert got.dtype is torch.int64 and got.tolist() == [0, 3, 6]


class Box:
    """A container with a value that torch's pytree takes for a part of its structure."""

    def __init__(self, x: Any, factor: int) -> None:
        self.x, self.factor = x, factor


torch.utils._pytree.register_pytree_node(
    Box,
    lambda box: ([box.x], box.factor),
    lambda children, factor: Box(next(iter(children)), factor),
    serialized_type_name="tests.Box",
    flatten_with_keys_fn=lambda box: (
        [(torch.utils._pytree.GetAttrKey("x"), box.x)],
        box.factor,
    ),
)


def test_values_in_the_structure_of_containers() -> None:
    class Branch(torch.nn.Module):
        def forward(self, box: Box) -> torch.Tensor:
            return box.x * box.factor if box.x.shape[0] > 4 else box.x - box.factor

    dynamic = {"box": [{0: torch.export.Dim.DYNAMIC}]}
    with purevk.compile(Branch(), (Box(torch.ones(8), 2),), dynamic) as program:
        for size, factor in ((8, 2), (8, 5), (2, 2), (2, 5), (6, 5), (6, 2), (3, 5)):
            box = Box(torch.arange(float(size)), factor)
            torch.testing.assert_close(program(box), Branch()(box))


def test_classes_of_dicts() -> None:
    class Kind(torch.nn.Module):
        def forward(self, given: Any) -> Any:
            return given["a"] if type(given) is dict else given["a"] + 1

    with purevk.compile(Kind(), ({"a": X},)) as program:
        for given in ({"a": X}, collections.OrderedDict(a=X), {"a": Y}):
            torch.testing.assert_close(program(given), Kind()(given))


def test_inputs_without_dense_elements() -> None:
    class Twice(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    class Failing:
        def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
            raise ZeroDivisionError("no array")

    x = torch.ones(2, 3)
    refused = {
        "sparse_coo": x.to_sparse(),
        "sparse_csr": x.to_sparse_csr(),
        "meta": x.to("meta"),
        "float8_e4m3fn": x.to(torch.float8_e4m3fn),
        "complex32": x.to(torch.complex32),
        "quantized": torch.quantize_per_tensor(x, 0.1, 0, torch.quint8),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "FakeTensor": torch._subclasses.FakeTensorMode().from_tensor(x),
        "dtype": torch.float32,
        "ValueError": [[1.0, 2.0], [3.0]],
        "ZeroDivisionError": Failing(),
    }
    with purevk.compile(Twice(), (x,)) as program:
        for word, given in refused.items():
            with pytest.raises(InputError, match=word):
                program(given)
            if isinstance(given, torch.Tensor):
                with pytest.raises(InputError, match="out 0"):
                    program.method("forward")(x, out=given)
        for given in (torch.nn.Parameter(x), x.clone().requires_grad_(), torch._neg_view(-x)):
            torch.testing.assert_close(program(given), x * 2)


def test_tensors_of_transforms_are_named() -> None:
    with purevk.compile(torch.nn.ReLU(), (X,)) as program:
        for call in (
            lambda: torch.vmap(program)(torch.ones(2, 3)),
            lambda: torch.func.vjp(program, X),
        ):
            with pytest.raises(InputError, match=r"is a tensor of torch\.func") as caught:
                call()
            assert "outside of torch.vmap and torch.func" in caught.value.next


class Plain(torch.Tensor):
    pass


class Doubled(torch.Tensor):
    """Whatever torch computes with it is doubled."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        made = super().__torch_function__(function, types, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return made * 2 if isinstance(made, torch.Tensor) else made


def test_classes_of_tensors() -> None:
    with purevk.compile(module(lambda self, x: x + 1), (X,)) as program:
        for same in (X.as_subclass(Plain), torch.nn.Parameter(X), torch.nn.Buffer(X)):
            torch.testing.assert_close(program(same), X + 1)
        masked = torch.masked.masked_tensor(X, X > 1)
        jagged = torch.nested.nested_tensor([X, X], layout=torch.jagged)
        for other, word in ((X.as_subclass(Doubled), "Doubled"), (masked, "MaskedTensor")):
            with pytest.raises(InputError, match=f"x is a {word}"):
                program(other)
        with pytest.raises(InputError, match="nested tensor"):
            program(jagged)


def test_gradients_are_refused_where_they_would_be_missing() -> None:
    model = module(lambda self, x: (x * 2, x.argmax()))
    x, weight = X.clone().requires_grad_(), torch.ones(3, requires_grad=True)
    with purevk.compile(model, (X,)) as program:
        for made in (program(x), program.submit(x).result()):
            torch.testing.assert_close(made[0].detach(), X * 2)
            assert made[0].requires_grad and not made[1].requires_grad
            with pytest.raises(UnsupportedProgramError, match="no gradients"):
                (made[0] * weight).sum().backward()
        with torch.no_grad():
            assert not program(x)[0].requires_grad
        assert not program(x.detach())[0].requires_grad
        assert not program(X)[0].requires_grad
    with purevk.compile(module(lambda self, x: x.add_(1)), (X.clone(),)) as program:
        with pytest.raises(InputError, match="x requires gradients"):
            program(x)
        with torch.no_grad():
            torch.testing.assert_close(program(x), X + 1)
        torch.testing.assert_close(x.detach(), X + 1)


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.register_buffer("b", torch.ones(3))
        self.t = torch.ones(3)

    def forward(self, x: Any) -> Any:
        return self.linear(x) * self.b + self.t


CHANGES = {
    "in place": lambda m: m.linear.weight.mul_(2),
    "load_state_dict": lambda m: m.load_state_dict(Layers().state_dict()),
    "assign": lambda m: m.load_state_dict(Layers().state_dict(), assign=True),
    "parameter": lambda m: setattr(m.linear, "weight", torch.nn.Parameter(torch.randn(3, 3))),
    "data": lambda m: setattr(m.linear.weight, "data", torch.randn(3, 3)),
    "buffer": lambda m: setattr(m, "b", torch.full((3,), 5.0)),
    "attribute": lambda m: setattr(m, "t", torch.full((3,), 7.0)),
    "attribute in place": lambda m: m.t.add_(1),
    "sub-module": lambda m: setattr(m, "linear", torch.nn.Linear(3, 3)),
    "no bias": lambda m: setattr(m.linear, "bias", None),
}


@torch.no_grad()
def test_weights_that_change(tmp_path: Path) -> None:
    model, x = Layers().eval(), torch.randn(2, 3)
    with purevk.compile(model, (x,)) as program:
        for change in CHANGES.values():
            change(model)
            agree(program, model, x)
        CHANGES["in place"](model)
        torch.testing.assert_close(program.submit(x).result(), model(x))
        CHANGES["in place"](model)
        torch.testing.assert_close(program.method("forward").run_flat([x])[0], model(x))


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(3))
        self.w = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: Any) -> Any:
        self.n.add_(1)
        return x * self.w + self.n


@torch.no_grad()
def test_states_outlive_changes_of_weights() -> None:
    model, eager = Counter(), Counter()
    reader, eager_reader = (module(lambda self, x, m=m: x * m.w + m.n) for m in (model, eager))
    reader.m = model
    states = {"n": torch.full((3,), 10.0), "w": torch.full((3,), 3.0)}
    changes = [
        lambda m: None,
        lambda m: m.w.mul_(2),
        lambda m: setattr(m, "w", torch.nn.Parameter(torch.full((3,), 9.0))),
        lambda m: m.load_state_dict(states),
        lambda m: m.n.fill_(50),
        lambda m: setattr(m, "n", torch.full((3,), 70.0)),
        lambda m: m.load_state_dict({k: v.clone() for k, v in states.items()}, assign=True),
    ]
    with purevk.compile({"step": (model, (X,)), "read": (reader, (X,))}) as program:
        step, read = program.method("step"), program.method("read")
        for change in changes:
            change(model), change(eager)
            for _ in range(2):
                agree(step, eager, X)
            agree(read, eager_reader, X)


@torch.no_grad()
def test_a_weight_that_is_replaced_while_another_thread_takes_over_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    renew = ModuleSource.renew

    def replaced_meanwhile(source: ModuleSource) -> None:
        renew(source)
        layer.weight = torch.nn.Parameter(torch.full((2, 3), 5.0))

    with purevk.compile(layer, (x,)) as program:
        monkeypatch.setattr(ModuleSource, "renew", replaced_meanwhile)
        layer.weight = torch.nn.Parameter(torch.ones(2, 3))
        program(x)
        monkeypatch.undo()
        agree(program, layer, x)


def test_a_call_that_another_thread_exports_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    with purevk.compile(module(lambda self, x, factor: x * factor), (X, 2)) as program:
        find = Method._find

        def too_early(method: Method, *given: Any) -> Any:
            monkeypatch.undo()
            refused = find(method, *given)
            program(X, 3)  # which exports it
            return refused

        monkeypatch.setattr(Method, "_find", too_early)
        assert torch.equal(program(X, 3), X * 3)
        assert len(program.method("forward").variants) == 2


@torch.no_grad()
def test_calls_while_weights_change() -> None:
    linear = torch.nn.Linear(8, 8, bias=False).eval()
    linear.weight.fill_(1.0)
    wrong: list[Any] = []
    done = threading.Event()
    with purevk.compile(linear, (torch.ones(4, 8),)) as program:

        def call() -> None:
            while not done.is_set():
                try:
                    made = program(torch.ones(4, 8))
                    if not bool((made == made[0, 0]).all()):
                        wrong.append(made)
                except Exception as error:
                    wrong.append(error)

        threads = [threading.Thread(target=call) for _ in range(2)]
        for thread in threads:
            thread.start()
        for number in range(6):
            linear.weight.fill_(float(number))
            done.wait(0.02)
        done.set()
        for thread in threads:
            thread.join(30)
        assert not wrong
        agree(program, linear, torch.ones(4, 8))


def test_a_size_without_a_bound_is_described_without_one() -> None:
    """The bound for which memory is planned at first holds for no call."""
    x, batch = torch.ones(3, 4), torch.export.Dim("batch")
    for dims, described in (
        ({0: batch}, r"float32\[\w+,4\]"),
        ({0: torch.export.Dim("batch", max=9)}, r"float32\[\w+<=9,4\]"),
    ):
        exported = torch.export.export(torch.nn.Linear(4, 4), (x,), dynamic_shapes=(dims,))
        with (
            purevk.compile(exported) as program,
            pytest.raises(InputError, match=f"{described} is expected"),
        ):
            program(torch.ones(3, 5))


def test_an_export_of_another_module_is_not_waited_for() -> None:
    """A call whose weights have changed reads its own modules alone."""
    started, ended = threading.Event(), threading.Event()

    class Slow(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            started.set()
            assert ended.wait(60)
            return x + 1

    x, module = torch.randn(2, 4), torch.nn.Linear(4, 4)
    with torch.no_grad():
        program = purevk.compile(module, (x,))
        thread = threading.Thread(target=purevk.compile, args=(Slow(), (x,)))
        thread.start()
        try:
            assert started.wait(60)
            module.weight.add_(1)
            torch.testing.assert_close(program(x), module(x))
            assert not ended.is_set()
        finally:
            ended.set()
            thread.join()
