"""What a user can get wrong, from `purevk.load` on: each a typed error that says what, where, why
and what next."""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import purevk
from purevk import pte
from purevk.errors import (
    DeviceError,
    FileFormatError,
    InputError,
    PurevkError,
    UnsupportedProgramError,
)
from purevk.frontends.executorch.control_flow import structure
from tests.harness import DATA, python
from tests.models.harness import exported

pytestmark = pytest.mark.device
LINEAR = DATA / "linear_relu.pte"


def refused(error: type[PurevkError], use: Any) -> PurevkError:
    """The error that `use()` raises; it survives a process pool and is complete."""
    with pytest.raises(error) as caught:
        use()
    raised = caught.value
    assert raised.what and raised.where and str(pickle.loads(pickle.dumps(raised))) == str(raised)
    return raised


# -- files ---------------------------------------------------------------------------------------
def test_no_such_file() -> None:
    with pytest.raises(FileNotFoundError, match="nowhere.pte"):
        purevk.load("nowhere.pte")


def test_not_a_pte(tmp_path: Path) -> None:
    path = tmp_path / "model.pte"
    path.write_text("PK\x03\x04 this is a zip file, perhaps a model of torch.save\n" * 20)
    raised = refused(FileFormatError, lambda: purevk.load(path))
    assert (
        "not a .pte file" in raised.what
        and "model.pte" in raised.where
        and raised.why
        and raised.next
    )


def test_unknown_bytes_name_all_formats() -> None:
    raised = refused(FileFormatError, lambda: purevk.load(b"something else" * 20))
    assert ".pvk and .pt2" in raised.why and "Program.save" in raised.next


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
def test_pipes_are_no_files(tmp_path: Path) -> None:
    pipe = tmp_path / "model.pte"
    os.mkfifo(pipe)
    for path in (str(pipe), pipe, os.devnull):
        raised = refused(FileFormatError, lambda path=path: purevk.load(path))
        assert "not a regular file" in raised.what and str(path) in raised.where
        assert "bytes" in raised.next
    with pytest.raises(FileFormatError, match="not a regular file"):
        purevk.load(LINEAR, [pipe])


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 0.999])
def test_truncated(share: float, tmp_path: Path) -> None:
    data = LINEAR.read_bytes()
    path = tmp_path / "model.pte"
    path.write_bytes(data[: int(len(data) * share)])
    raised = refused(FileFormatError, lambda: purevk.load(path))
    assert "model.pte" in raised.where and raised.why and "again" in raised.next


def test_a_delegate_of_another_backend() -> None:
    data = LINEAR.read_bytes()
    assert data.count(b"VulkanBackend") == 1
    raised = refused(
        UnsupportedProgramError,
        lambda: purevk.load(data.replace(b"VulkanBackend", b"CoreMLBackend")),
    )
    assert (
        "CoreMLBackend" in raised.what
        and "VulkanBackend" in raised.why
        and "VulkanPartitioner" in raised.next
    )


def test_jumps_that_no_exporter_writes() -> None:
    with pte.read_program(DATA / "branch.pte") as program:
        plan = program.method()
        (chain,) = plan.chains
        for at, call in enumerate(chain.instructions):
            if isinstance(call, pte.types.JumpFalse):
                for destination in (at, 0) if at else (at,):
                    instructions = (
                        *chain.instructions[:at],
                        call._replace(destination=destination),
                        *chain.instructions[at + 1 :],
                    )
                    changed = plan._replace(chains=(chain._replace(instructions=instructions),))
                    raised = refused(
                        UnsupportedProgramError,
                        lambda changed=changed: structure(changed, "branch.pte"),
                    )
                    assert (
                        "control flow" in raised.what
                        and "branch.pte" in raised.where
                        and "jump" in raised.why
                    )


def test_a_data_file_that_is_missing_or_of_another_model(tmp_path: Path) -> None:
    path = DATA / "linear_relu_external.pte"
    for data in ((), sorted((DATA / "linear_portable_external").glob("*.ptd"))):
        raised = refused(PurevkError, lambda data=data: purevk.load(path, data))
        assert "linear_relu_external.pte" in raised.where and ".ptd" in str(raised) and raised.next


# -- inputs --------------------------------------------------------------------------------------
X = np.zeros((2, 5), np.float32)
WRONG: dict[str, tuple[tuple[Any, ...], str, str, str]] = {
    "none": ((), "0 inputs were given, 1 are expected", "", "one tensor for each input"),
    "two": ((X, X), "2 inputs were given, 1 are expected", "", "one tensor for each input"),
    "rank": ((X[0],), "input 0 has rank 1", "float32[2,5] is expected, float32[5] was given", ""),
    "float64": (
        (X.astype(np.float64),),
        "input 0 has dtype float64",
        "float32 is expected",
        "x.astype(numpy.float32)",
    ),
    "int32": (
        (X.astype(np.int32),),
        "input 0 has dtype int32",
        "float32 is expected",
        "x.to(torch.float32)",
    ),
    "text": ((np.array([["a"] * 5] * 2),), "input 0 has dtype <U1", "float32 is expected", ""),
    "rows": (
        (X[:1],),
        "input 0 has size 1 along dim 0",
        "float32[2,5] is expected, float32[1, 5] was given",
        "dynamic dim",
    ),
    "columns": (
        (X[:, :4],),
        "input 0 has size 4 along dim 1",
        "float32[2,5] is expected",
        "the exported size",
    ),
    "no_batch": ((X[0],), "input 0 has rank 1", "float32[2,5] is expected", "x[None]"),
    "rank_3": ((X[None],), "input 0 has rank 3", "float32[2,5] is expected", "x[0]"),
    "a_list": (([X],), "input 0 has rank 3", "float32[1, 2, 5] was given", "not in a list"),
    "rank_4": ((X[None, None],), "input 0 has rank 4", "float32[2,5] is expected", "reshape it"),
    "object": (
        (object(),),
        "input 0 is object",
        "a numpy array or a torch tensor is expected",
        "asarray",
    ),
    "nothing": ((None,), "input 0 is None", "float32[2,5] is expected", ""),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_inputs(kind: str) -> None:
    given, what, why, advice = WRONG[kind]
    with purevk.load(LINEAR) as program:
        raised = refused(InputError, lambda: program.forward(*given))
        assert what in raised.what and why in raised.why and advice in raised.next
        assert "linear_relu.pte, method forward(float32[2,5])" in raised.where
        assert program.forward(X).shape == (2, 3)


def test_a_torch_tensor_of_another_dtype() -> None:
    torch = pytest.importorskip("torch")
    with purevk.load(LINEAR) as program:
        raised = refused(
            InputError, lambda: program.forward(torch.zeros(2, 5, dtype=torch.bfloat16))
        )
        assert (
            "bfloat16" in raised.what
            and "float32 is expected" in raised.why
            and "torch.float32" in raised.next
        )


@pytest.mark.export
@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(3, 4), (0, 0)])
def test_sizes_that_do_not_fit_together(lengths: tuple[int, int]) -> None:
    """Dynamic sizes that the graph cannot take are the caller's error, not a damaged file."""
    ids, mask = (np.ones((1, length), np.int64) for length in lengths)
    with purevk.load(exported("minilm_sdpa_dyn")) as program:
        raised = refused(InputError, lambda: program.forward(ids, mask))
        assert f"int64[1,{lengths[0]}], int64[1,{lengths[1]}]" in raised.what
        assert (
            "minilm_sdpa_dyn.pte, method forward(int64[1,s0<=128]" in raised.where
            and raised.why
            and raised.next
        )
        assert program.forward(np.ones((1, 3), np.int64), np.ones((1, 3), np.int64)).shape == (
            1,
            384,
        )


# -- the machine ---------------------------------------------------------------------------------
FAIL = """
import json, sys, purevk
try:
    purevk.load(sys.argv[1])
except purevk.PurevkError as error:
    kinds = [each.__name__ for each in type(error).__mro__]
    print(json.dumps({"kinds": kinds, "what": error.what, "why": error.why, "next": error.next}))
"""


@pytest.mark.parametrize("variable", ["VK_DRIVER_FILES", "VK_ICD_FILENAMES"])
def test_no_driver(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        monkeypatch.delenv(name, raising=False)  # the first wins if both are set
    raised = python(FAIL, LINEAR, **{variable: "/nonexistent.json"})
    assert DeviceError.__name__ in raised["kinds"]
    assert "no Vulkan device" in raised["what"] or "driver" in raised["what"] + raised["why"]
    assert variable in raised["next"] and "mesa-vulkan-drivers" in raised["next"]


def test_no_such_device() -> None:
    raised = python(FAIL, LINEAR, PUREVK_DEVICE="Voodoo 3")
    assert DeviceError.__name__ in raised["kinds"]
    assert (
        "Voodoo 3" in raised["what"] + raised["why"]
        and "llvmpipe" in raised["what"] + raised["why"] + raised["next"]
    )


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="Python 3.10 has no notes")
def test_what_torch_cannot_export_names_another_way() -> None:
    torch = pytest.importorskip("torch")

    class Solve(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.linalg.lstsq(x, x).solution

    with pytest.raises(Exception, match="lstsq") as caught:
        purevk.compile(Solve(), (torch.rand(4, 4),))
    (note,) = caught.value.__notes__
    assert "export Solve for the method 'forward'" in note and 'backend="purevk"' in note
    assert f"at {__file__}:{Solve.forward.__code__.co_firstlineno + 1}." in note


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="Python 3.10 has no notes")
def test_a_branch_on_elements_names_its_line_and_torch_cond() -> None:
    torch = pytest.importorskip("torch")

    class Branch(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x + 1 if x.sum() > 0 else x - 1

    with pytest.raises(Exception, match="data-dependent") as caught:
        purevk.compile(Branch(), (torch.rand(2),))
    (note,) = caught.value.__notes__
    assert f"at {__file__}:{Branch.forward.__code__.co_firstlineno + 1}." in note
    assert "torch.cond" in note


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="Python 3.10 has no notes")
def test_numpy_in_forward_names_torch_compile() -> None:
    torch = pytest.importorskip("torch")

    class Through(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.from_numpy(x.numpy() * 2)

    with pytest.raises(RuntimeError, match="numpy") as caught:
        purevk.compile(Through(), (torch.rand(2),))
    (note,) = caught.value.__notes__
    assert 'backend="purevk"' in note and "itself runs" not in note


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="Python 3.10 has no notes")
def test_istft_with_an_odd_length_names_irfft() -> None:
    torch = pytest.importorskip("torch")

    class Inverse(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.istft(x, 33, window=torch.ones(33))

    with pytest.raises(AssertionError, match="n_fft") as caught:
        purevk.compile(Inverse(), (torch.rand(17, 9) + 0j,))
    (note,) = caught.value.__notes__
    assert "even n_fft" in note and "torch.fft.irfft" in note and "itself runs" not in note


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="Python 3.10 has no notes")
def test_missing_example_inputs_are_asked_for() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="input") as caught:
        purevk.compile(torch.nn.Linear(2, 3))
    (note,) = caught.value.__notes__
    assert "Check the example inputs: one is needed for each argument" in note
    assert "torch.compile" not in note and "dynamic_shapes" not in note


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="Python 3.10 has no notes")
@pytest.mark.parametrize(
    "case, words",
    [
        ("range", "dynamic_shapes"),
        ("keys", "dynamic_shapes"),
        ("bare dim", "dynamic_shapes: it has an entry for each argument"),
        ("sizes", "module(*inputs)"),
        ("meta", "meta device: load them"),
        ("meta input", "A tensor is on the meta device"),
    ],
)
def test_an_export_that_fails_says_what_to_check(case: str, words: str) -> None:
    torch = pytest.importorskip("torch")
    batch = torch.export.Dim("batch", min=5, max=9)
    shapes = {"range": ({0: batch},), "keys": {"y": {0: batch}}, "bare dim": batch}.get(case)
    module = torch.nn.Linear(
        3 if case == "sizes" else 2, 3, device="meta" if case == "meta" else None
    )
    x = torch.rand(2, 2, device="meta" if case == "meta input" else None)
    with pytest.raises(Exception) as caught:
        purevk.compile(module, (x,), shapes)
    (note,) = caught.value.__notes__
    assert words in note


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="Python 3.10 has no notes")
def test_a_word_for_dynamic_shapes() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(AssertionError) as caught:
        purevk.compile(torch.nn.Linear(2, 3), (torch.rand(2, 2),), "auto")
    (note,) = caught.value.__notes__
    assert "dynamic_shapes: it has an entry for each argument" in note


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="Python 3.10 has no notes")
@pytest.mark.filterwarnings("ignore")
def test_packed_weights_are_named() -> None:
    torch = pytest.importorskip("torch")
    from torch.ao.quantization import quantize_dynamic

    if torch.backends.quantized.engine == "none":
        pytest.skip("this torch has no engine for quantized layers")
    model = quantize_dynamic(torch.nn.Sequential(torch.nn.Linear(2, 3)), {torch.nn.Linear})
    with pytest.raises(AttributeError) as caught:
        purevk.compile(model, (torch.rand(2, 2),))
    (note,) = caught.value.__notes__
    assert "torchao" in note and "itself runs" not in note


def test_quantized_dtypes_are_named() -> None:
    torch = pytest.importorskip("torch")

    class Packed(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.quantize_per_tensor(x, 0.1, 0, torch.quint8).dequantize()

    with pytest.raises(UnsupportedProgramError, match="quint8") as caught:
        purevk.compile(Packed(), (torch.rand(2),))
    assert "torch.ao" in caught.value.why and "torchao" in caught.value.next


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="Python 3.10 has no notes")
@pytest.mark.parametrize("transform", ["jacfwd", "jacrev", "hessian"])
def test_derivatives_in_forward_are_named(transform: str) -> None:
    torch = pytest.importorskip("torch")

    class Derived(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return getattr(torch.func, transform)(lambda each: each.sin().sum())(x)

    try:
        program = purevk.compile(Derived(), (torch.rand(2),))
    except Exception as error:
        notes = getattr(error, "__notes__", [str(error)])
        assert "torch.func" in notes[0]
    else:
        x = torch.rand(2)
        torch.testing.assert_close(program(x), Derived()(x))


def test_what_is_no_module_is_told_what_to_do() -> None:
    torch = pytest.importorskip("torch")
    cases = {
        "purevk.load": LINEAR,
        "forward calls": torch.relu,
        "forward calls the function": lambda x: x + 1,
        "Linear(...)": torch.nn.Linear,
        "purevk.compile(module, inputs)": 3,
    }
    for words, given in cases.items():
        with pytest.raises(InputError, match="is made of") as caught:
            purevk.compile(given, (torch.rand(2),))
        assert words in caught.value.next


def test_a_state_dict_is_no_module() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(InputError, match="state dict") as caught:
        purevk.compile(torch.nn.Linear(2, 3).state_dict(), (torch.rand(2),))
    assert "load_state_dict" in caught.value.next
    with pytest.raises(InputError, match="no method"):
        purevk.compile({})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["traced", "scripted", "a scripted child", "a traced child"])
def test_modules_of_torchscript(kind: str) -> None:
    torch = pytest.importorskip("torch")
    linear, x = torch.nn.Linear(3, 2).eval(), torch.randn(1, 3)
    made = torch.jit.script(linear) if "scripted" in kind else torch.jit.trace(linear, x)
    module = torch.nn.Sequential(torch.nn.ReLU(), made) if "child" in kind else made
    error = refused(UnsupportedProgramError, lambda: purevk.compile(module, (x,)))
    assert ("1 is" if "child" in kind else "this is") in error.what and "TorchScript" in error.what
    assert "Linear" in error.why and "torch.jit" in error.next
    refused(UnsupportedProgramError, lambda: purevk.compile({"run": (module, (x,))}))


@pytest.mark.parametrize("name", [1, None, "", ("forward",)])
def test_names_of_methods_are_texts(name: Any) -> None:
    torch = pytest.importorskip("torch")
    methods: Any = {name: (torch.nn.ReLU(), (torch.ones(2),))}
    error = refused(InputError, lambda: purevk.compile(methods))
    assert f"named {name!r}" in error.what


@pytest.mark.device
def test_so_many_calls_in_flight_are_none() -> None:
    with purevk.load(DATA / "linear_relu.pte") as program:
        for wrong in ("a", 0, -1, 1.5, True, None):
            error = refused(InputError, lambda: setattr(program, "in_flight", wrong))
            assert repr(wrong) in error.what and program.in_flight == 2
        program.in_flight = 3
        assert program.in_flight == 3


@pytest.mark.device
def test_example_inputs_may_be_arrays() -> None:
    torch = pytest.importorskip("torch")
    module, x = torch.nn.Linear(2, 3), np.random.default_rng(0).random((4, 2), np.float32)
    with purevk.compile(module, (x,)) as program:
        torch.testing.assert_close(
            torch.as_tensor(program(x)), module(torch.from_numpy(x)).detach()
        )


def test_one_data_file_needs_no_list(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="weights.ptd"):
        purevk.load(DATA / "linear_relu.pte", str(tmp_path / "weights.ptd"))


def test_torch_does_not_warn_of_what_purevk_does(caplog: pytest.LogCaptureFixture) -> None:
    torch = pytest.importorskip("torch")

    class Loop(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            start = torch.tensor(0), x
            return torch.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y * 2), start)[1]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        looped = purevk.compile(Loop(), (torch.ones(2),))(torch.ones(2))
        purevk.plan(Loop(), (torch.ones(2),), device="typical")
    assert looped.tolist() == [8, 8]
    assert not [str(each.message) for each in caught if "treespec" in str(each.message)]
    assert not [str(each.message) for each in caught if "side effects" in str(each.message)]

    batch = torch.export.Dim("batch", max=8)
    program = purevk.compile(torch.nn.ReLU(), (torch.ones(3, 2),), [{0: batch}])
    with caplog.at_level("WARNING"):
        assert [program(torch.ones(rows, 2)).shape[0] for rows in (1, 2, 0)] == [1, 2, 0]
    assert "specialized" not in caplog.text


def test_a_state_of_a_program_without_states() -> None:
    with pytest.raises(KeyError, match=r"no state 'cache' in .*; it has no states"):
        purevk.load(LINEAR).state["cache"]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none" / "model.pvk"
    with pytest.raises(FileNotFoundError) as caught:
        purevk.load(LINEAR).save(path)
    assert caught.value.filename == str(path)


def test_a_variable_that_cannot_be_read() -> None:
    raised = python(FAIL, LINEAR, PUREVK_VALIDATION="perhaps")
    assert "PUREVK_VALIDATION='perhaps'" in raised["what"] and "1 or 0" in raised["why"]


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="Python 3.10 has no notes")
def test_checks_of_distributions_are_named() -> None:
    import torch

    class Policy(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = torch.distributions.Categorical(logits=x, validate_args=True)
            return made.log_prob(x.argmax(-1))

    try:
        with purevk.compile(Policy(), (torch.rand(2, 3),)) as program:  # from torch 2.15 on
            with pytest.raises(purevk.InputError, match="distribution constraint"):
                program(torch.full((2, 3), torch.nan))
    except RuntimeError as error:
        assert "data-dependent" in str(error)
        (note,) = error.__notes__
        assert "validate_args=False" in note


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="Python 3.10 has no notes")
def test_what_tracing_breaks_names_torch_compile() -> None:
    """The module runs: only torch.export does not follow an exchange of memory."""
    import torch

    class Exchanged(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.from_dlpack(x.__dlpack__()) + 1

    with pytest.raises(RuntimeError) as caught:
        purevk.compile(Exchanged(), (torch.rand(5),))
    (note,) = caught.value.__notes__
    assert "module itself runs" in note and 'backend="purevk"' in note


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="Python 3.10 has no notes")
@pytest.mark.parametrize(
    "case, words", [("decides", "torch.export.Dim.DYNAMIC"), ("fixes", "torch.export.Dim.AUTO")]
)
def test_another_kind_of_dim_is_named(case: str, words: str) -> None:
    import torch

    class Sized(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if case == "fixes":
                return torch.stack([x[at] * at for at in range(x.shape[0])])
            return x * 2 if 2 % (x.shape[0] // 3) else x

    module, dim = Sized(), torch.export.Dim("n", min=3, max=90)
    with pytest.raises(Exception, match="Constraints violated") as caught:
        purevk.compile(module, (torch.rand(9),), [{0: dim}])
    (note,) = caught.value.__notes__
    assert words in note
    other = getattr(torch.export.Dim, words.rpartition(".")[2])
    with purevk.compile(module, (torch.rand(9),), [{0: other}]) as program:
        for size in (9, 4, 30):
            x = torch.rand(size)
            torch.testing.assert_close(program(x), module(x))


def test_sparse_tensors_in_a_module_are_refused() -> None:
    import torch

    class Graph(torch.nn.Module):
        def __init__(self, edges: torch.Tensor) -> None:
            super().__init__()
            self.register_buffer("edges", edges)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.edges.to_dense() @ x.to_sparse().to_dense()

    for edges, node in ((torch.eye(3).to_sparse(), "b_edges"), (torch.eye(3), "to_sparse")):
        with pytest.raises(purevk.UnsupportedProgramError, match="layout sparse_coo") as caught:
            purevk.compile(Graph(edges), (torch.rand(3, 2),))
        assert node in caught.value.where and "to_dense()" in caught.value.next


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="Python 3.10 has no notes")
def test_dynamic_dims_that_an_input_lacks_are_named() -> None:
    import torch

    with pytest.raises(IndexError) as caught:
        purevk.compile(torch.nn.Linear(3, 4), (torch.rand(2, 3),), ({7: torch.export.Dim("b")},))
    (note,) = caught.value.__notes__
    assert "Check dynamic_shapes" in note and "dims that the arguments have" in note


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="Python 3.10 has no notes")
@pytest.mark.parametrize("size", [0, 1])
def test_a_dynamic_dim_that_export_fixes_is_named(size: int) -> None:
    import torch

    class Fixed(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(size, 3) + 1

    with pytest.raises(Exception, match="specialized") as caught:
        purevk.compile(Fixed(), (torch.rand(size, 3),), {"x": {0: torch.export.Dim("batch")}})
    (note,) = caught.value.__notes__
    assert f"x.shape[0] is {size}" in note and "example of 2 or more" in note


def test_other_wrong_dims_are_named_before_sizes_of_one() -> None:
    import torch

    class Even(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.shape[1] > 5 else x

    shapes = {"x": {0: torch.export.Dim("batch"), 1: torch.export.Dim("n", min=2, max=9)}}
    with pytest.raises(Exception, match="n <= 9") as caught:
        purevk.compile(Even(), (torch.rand(1, 4),), shapes)
    assert "constant (1)" not in str(caught.value)


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="Python 3.10 has no notes")
def test_objects_that_export_does_not_know_are_named() -> None:
    import torch

    class Box:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    class Boxed(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Box:
            return Box(x * 2)

    with pytest.raises(Exception, match="not a known type") as caught:
        purevk.compile(Boxed(), (torch.rand(2, 3),))
    (note,) = caught.value.__notes__
    assert "tuples, lists and dicts" in note and "register_dataclass" in note
    assert "itself runs" not in note


def test_a_failed_export_prints_no_graph(capfd: pytest.CaptureFixture[str]) -> None:
    import torch

    class Branch(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            print("from forward", file=sys.stderr)
            return x + 1 if x.sum() > 0 else x - 1

    with pytest.raises(Exception, match="data-dependent"):
        purevk.compile(Branch(), (torch.rand(2),))
    shown = capfd.readouterr().err
    assert "from forward" in shown and "torch.ops.aten" not in shown


def test_torch_does_not_warn_of_recurrent_layers(recwarn: pytest.WarningsRecorder) -> None:
    import torch

    with purevk.compile(torch.nn.LSTM(3, 4).eval(), (torch.rand(5, 2, 3),)):
        assert not [each for each in recwarn if "_flat_weights" in str(each.message)]
