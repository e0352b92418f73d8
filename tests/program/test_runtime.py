"""The API of ExecuTorch's runtime: the same metadata of the same files, and the same code on both."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import purevk
from purevk.errors import FileFormatError, InputError, UnsupportedProgramError
from purevk.runtime import Runtime
from tests.harness import DATA


@pytest.fixture(scope="module")
def theirs() -> Any:
    return pytest.importorskip("executorch.runtime").Runtime.get()


def infos(meta: Any, kind: str) -> list[tuple[Any, ...]]:
    """All that a method's metadata say of its inputs, outputs or attributes."""
    found = []
    for index in range(getattr(meta, f"num_{kind}s")()):
        info = getattr(meta, f"{kind}_tensor_meta")(index)
        found.append(
            (tuple(info.sizes()), info.dtype(), info.nbytes(), info.is_memory_planned(), repr(info))
        )
    with pytest.raises(IndexError, match=f"Cannot get {kind} tensor meta at 99"):
        getattr(meta, f"{kind}_tensor_meta")(99)
    return found


@pytest.mark.export
@pytest.mark.parametrize("file", sorted(path.name for path in DATA.glob("*.pte")))
def test_metadata_are_those_of_executorch(theirs: Any, file: str) -> None:
    ours, other = Runtime.get().load_program(DATA / file), theirs.load_program(DATA / file)
    assert ours.method_names == other.method_names
    for name in other.method_names:
        one, two = ours.metadata(name), other.metadata(name)
        assert one.name() == two.name() and repr(one) == repr(two)
        for kind in ("input", "output", "attribute"):
            assert infos(one, kind) == infos(two, kind)


@pytest.mark.export
def test_every_element_type_has_executorchs_name(theirs: Any) -> None:
    torch = pytest.importorskip("torch")
    exir = pytest.importorskip("executorch.exir")

    class Model(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x.to(torch.float32) * 2, x

    ep = torch.export.export(Model(), (torch.ones(2, 3).to(torch.uint16),))
    data = bytes(exir.to_edge(ep).to_executorch().buffer)
    one, two = (each.load_program(data).metadata("forward") for each in (Runtime.get(), theirs))
    assert repr(one) == repr(two) and "UInt16" in repr(one)


@pytest.mark.export
@pytest.mark.device
def test_the_same_code_runs_on_both(theirs: Any) -> None:
    torch = pytest.importorskip("torch")
    x = torch.randn(2, 5)

    def run(runtime: Any) -> Any:
        program = runtime.load_program(DATA / "linear_portable.pte")
        method = program.load_method("forward")
        assert method is program.load_method("forward") and method.metadata.num_inputs() == 1
        (first,) = method.execute([x])
        method.execute([x + 1])
        return first

    torch.testing.assert_close(run(purevk.Runtime.get()), run(theirs))
    assert theirs.backend_registry.is_available(
        "VulkanBackend"
    ) <= Runtime.get().backend_registry.is_available("VulkanBackend")
    assert not Runtime.get().backend_registry.is_available("XnnpackBackend")
    assert {
        "aten::add.Tensor",
        "aten::convolution",
    } <= Runtime.get().operator_registry.operator_names


@pytest.mark.device
def test_files_of_every_kind(
    linear_input: np.ndarray, linear_output: np.ndarray, tmp_path: Path
) -> None:
    runtime = Runtime.get()
    data = (DATA / "linear_relu.pte").read_bytes()
    with purevk.load(data) as program:
        program.save(tmp_path / "linear.pvk")
    for given in (
        str(DATA / "linear_relu.pte"),
        data,
        bytearray(data),
        io.BytesIO(data),
        tmp_path / "linear.pvk",
    ):
        program = runtime.load_program(given)
        (made,) = program.load_method("forward")([linear_input])
        assert type(made) is np.ndarray
        np.testing.assert_allclose(made, linear_output, rtol=0, atol=1e-6)
        assert infos(program.metadata("forward"), "output")[0][:3] == ((2, 3), 6, 24)
    external = runtime.load_program(
        DATA / "linear_relu_external.pte",
        data_path=next((DATA / "linear_relu_external").glob("*.ptd")),
    )
    np.testing.assert_allclose(
        external.load_method("forward").execute([linear_input])[0], linear_output, rtol=0, atol=1e-6
    )


@pytest.mark.device
def test_methods_share_what_they_hold() -> None:
    program = Runtime.get().load_program(DATA / "two_methods.pte")
    assert program.method_names == {"forward", "step"}
    forward, step = program.load_method("forward"), program.load_method("step")
    x = np.random.default_rng(0).standard_normal((2, 5), np.float32)
    np.testing.assert_allclose(
        step.execute([x[:1]])[0], forward.execute([x])[0][:1], rtol=0, atol=1e-6
    )


def test_what_is_refused() -> None:
    runtime = Runtime.get()
    with pytest.raises(FileFormatError):
        runtime.load_program(b"nothing")
    with pytest.raises(TypeError, match="data is int"):
        runtime.load_program(3)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedProgramError, match="ETDump"):
        runtime.load_program(DATA / "topk.pte", enable_etdump=True)
    program = runtime.load_program(DATA / "topk.pte")
    with pytest.raises(InputError, match="no method 'backward'"):
        program.metadata("backward")
    with pytest.raises(InputError, match="^there is no method 'backward'"):
        program.load_method("backward")
    with pytest.raises(KeyError):
        program.load_method("backward")
    with pytest.raises(IndexError, match="Cannot get output tensor meta at -1"):
        program.metadata("forward").output_tensor_meta(-1)
    with pytest.raises(UnsupportedProgramError, match="ETDump"):
        program.write_etdump_result_to_file("a", "b")


@pytest.mark.device
def test_a_tensor_in_place_of_a_list_is_refused() -> None:
    method = Runtime.get().load_program(DATA / "linear_relu.pte").load_method("forward")
    with pytest.raises(InputError, match="the inputs are a") as caught:
        method.execute(np.ones((2, 5), np.float32))
    assert "execute([x])" in caught.value.next
