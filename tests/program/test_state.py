"""States that are read, written, kept in files, and shared by methods."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import purevk  # noqa: E402
from purevk.errors import FileFormatError, InputError  # noqa: E402
from tests.models.messages import quiet  # noqa: E402
from tests.program.harness import check_file, tensor  # noqa: E402

pytestmark = [pytest.mark.device, pytest.mark.export]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("rows", torch.zeros(8, 4))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))


class Prefill(torch.nn.Module):
    """Writes several rows of the cache."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, x, at):
        self.model.rows.index_copy_(0, at, x)
        self.model.count.add_(1)
        return self.model.linear(self.model.rows).sum(0)


class Decode(Prefill):
    """Writes one row, and reads them all."""

    def forward(self, x, at):
        self.model.rows.index_copy_(0, at, x)
        return self.model.linear(self.model.rows).relu()[0] + self.model.rows.mean()


class Look(Prefill):
    """Only reads."""

    def forward(self, x):
        return self.model.rows.sum(0) * x


def modules():
    torch.manual_seed(1)
    model = Model()
    return Prefill(model), Decode(model), Look(model)


def fresh():
    with torch.no_grad():
        return modules()


CALLS = [
    ("prefill", (tensor(3, 4), torch.tensor([0, 1, 2]))), ("decode", (tensor(1, 4, seed=1), torch.tensor([3]))),
    ("look", (tensor(4, seed=2),)), ("decode", (tensor(1, 4, seed=3), torch.tensor([4]))),
    ("prefill", (tensor(3, 4, seed=4), torch.tensor([5, 6, 7]))), ("look", (tensor(4, seed=5),)),
]  # fmt: skip


def check(program) -> None:
    """Runs the calls on a program and on modules that share their buffers."""
    reference = dict(zip(("prefill", "decode", "look"), fresh()))
    with torch.no_grad():
        for name, inputs in CALLS:
            torch.testing.assert_close(
                program.method(name)(*inputs), reference[name](*inputs), rtol=1e-4, atol=1e-5
            )


def given():
    prefill, decode, look = fresh()
    return {
        "prefill": (prefill, CALLS[0][1]),
        "decode": torch.export.export(decode, CALLS[1][1], strict=False),
        "look": (look, CALLS[2][1], None),
    }


def test_methods_share_weights_and_buffers(tmp_path: Path) -> None:
    with purevk.compile(given()) as program:
        assert set(program.state) == {"model.rows", "model.count"}
        one = purevk.compile(fresh()[0], CALLS[0][1])
        assert (
            program.memory.weights < 1.5 * one.memory.weights
            and program.memory.state == one.memory.state
        )
        one.close()
        check(program)
        program.reset_state()
        check(program)
        program.save(tmp_path / "model.pvk")
    with purevk.load(tmp_path / "model.pvk") as program:
        assert set(program.state) == {"model.rows", "model.count"}
        check(program)


def test_reading_and_writing(tmp_path: Path) -> None:
    prefill, _, _ = fresh()
    with purevk.compile(*[prefill, CALLS[0][1]]) as program:
        state = program.state
        assert (
            len(state) == 2
            and state["model.rows"].shape == (8, 4)
            and not state["model.rows"].any()
        )
        program(*CALLS[0][1])
        np.testing.assert_allclose(state["model.rows"][:3], CALLS[0][1][0].numpy())
        assert state["model.count"].tolist() == [1]
        program.save_state(tmp_path / "state.npz")
        program.reset_state()
        assert not state["model.rows"].any()
        program.load_state(tmp_path / "state.npz")
        np.testing.assert_allclose(state["model.rows"][:3], CALLS[0][1][0].numpy())
        state["model.count"] = np.array([41])
        state.update({"model.rows": torch.ones(8, 4)})
        program(*CALLS[0][1])
        assert state["model.count"].tolist() == [42]
        assert (state["model.rows"][3:] == 1).all()
        with pytest.raises(InputError, match="float32"):
            state["model.rows"] = np.ones((8, 4))
        with pytest.raises(InputError, match=r"\[8,4\]"):
            state.update({"model.count": np.array([0]), "model.rows": np.ones((8, 5), np.float32)})
        assert state["model.count"].tolist() == [42]
        with pytest.raises(KeyError, match="model.count"):
            state["cache"]
        np.savez(tmp_path / "other.npz", cache=np.ones(3))
        with pytest.raises(InputError, match="other.npz"):
            program.load_state(tmp_path / "other.npz")
        with pytest.raises(InputError):
            del state["model.count"]


def test_damaged_files_of_states(tmp_path: Path) -> None:
    prefill, _, _ = fresh()
    path = tmp_path / "state.npz"
    with purevk.compile(*[prefill, CALLS[0][1]]) as program:
        program(*CALLS[0][1])
        program.save_state(path)
        whole, before = path.read_bytes(), program.state["model.rows"].copy()
        np.save(tmp_path / "one.npy", before)
        damaged = [whole[:size] for size in (0, 3, 100, len(whole) // 2, len(whole) - 1)]
        damaged += [b"not an archive" * 20, (tmp_path / "one.npy").read_bytes()]
        for position in range(0, len(whole), 41):
            changed = bytearray(whole)
            changed[position] ^= 0x5A
            damaged.append(bytes(changed))
        for content in damaged:
            path.write_bytes(content)
            try:
                program.load_state(path)
            except FileFormatError as error:
                assert "state.npz" in error.what and error.why and error.next
            except InputError:  # the file names other states
                pass
            np.testing.assert_array_equal(program.state["model.rows"], before)
        for content in damaged[:7]:
            path.write_bytes(content)
            with pytest.raises(FileFormatError):
                program.load_state(path)
        with pytest.raises(FileNotFoundError):
            program.load_state(tmp_path / "missing.npz")


def test_buffers_of_one_name_that_are_not_one() -> None:
    (one, _, _), (two, _, _) = fresh(), fresh()
    with purevk.compile({"one": (one, CALLS[0][1]), "two": (two, CALLS[0][1])}) as program:
        assert set(program.state) == {
            "one.model.rows",
            "one.model.count",
            "two.model.rows",
            "two.model.count",
        }
        program.method("one")(*CALLS[0][1])
        assert program.state["one.model.count"].tolist() == [1] and program.state[
            "two.model.count"
        ].tolist() == [0]


def test_what_is_no_model() -> None:
    with pytest.raises(InputError, match="'decode'"):
        purevk.compile({"decode": fresh()[1]})


@pytest.mark.parametrize(
    ("delegated", "named"),
    [
        ("", True),
        pytest.param("by executorch", False, marks=pytest.mark.slow),
        pytest.param("by purevk", True, marks=pytest.mark.slow),
    ],
)
def test_methods_of_a_file_share_buffers(delegated: str, named: bool) -> None:
    pytest.importorskip("executorch")
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner
    from executorch.exir import (
        EdgeCompileConfig,
        ExecutorchBackendConfig,
        to_edge_transform_and_lower,
    )
    from executorch.exir.passes import MemoryPlanningPass

    from purevk.export import PurevkPartitioner

    made = {
        "by executorch": lambda: VulkanPartitioner({}),
        "by purevk": lambda: PurevkPartitioner(share_buffers=True),
    }.get(delegated)
    with quiet(), torch.no_grad():
        programs = {
            name: torch.export.export(module, inputs, strict=False)
            for (name, inputs), module in zip(CALLS[:3], fresh())
        }
        edge = to_edge_transform_and_lower(
            programs,
            partitioner=made and {name: [made()] for name in programs},
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )
        config = ExecutorchBackendConfig(
            memory_planning_pass=MemoryPlanningPass(share_mutable_buffers=True),
            emit_mutable_buffer_names=named,
        )
        data = edge.to_executorch(config).buffer
    with purevk.load(data) as program:
        check(program)
        if named:
            assert set(program.state) >= {"model.rows", "model.count"}
        assert len(program.state) >= 2


class Two(torch.nn.Module):
    """Buffers of one type, the second of which is computed from the first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("one", torch.zeros(4))
        self.register_buffer("two", torch.zeros(4))

    def forward(self, x):
        self.one.add_(x)
        self.two.copy_(self.one * 2 + self.two)
        return self.one + self.two


class Parts(torch.nn.Module):
    """Writes into parts of a buffer; returns a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(4, 3))
        self.register_buffer("fixed", torch.arange(3.0))

    def forward(self, x):
        self.rows[1:3].copy_(x)
        self.rows[:, 0].add_(1)
        return self.rows.sum(0), self.fixed, x


@pytest.mark.parametrize(("module", "sizes", "vulkan"), [
    pytest.param(Two, (4,), True, marks=pytest.mark.slow), (Two, (4,), False), (Parts, (2, 3), False),
])  # fmt: skip
def test_forms_of_buffers_in_files(module, sizes, vulkan) -> None:
    pytest.importorskip("executorch")
    check_file(module(), [(tensor(*sizes, seed=seed),) for seed in range(3)], vulkan=vulkan)


def test_written_inputs_of_a_compiled_module() -> None:
    class Write(torch.nn.Module):
        def forward(self, x, y):
            x.add_(y)
            return x * 2

    with purevk.compile(Write(), (tensor(4), tensor(4, seed=1))) as program:
        given = tensor(4)
        torch.testing.assert_close(
            program(given, tensor(4, seed=1)), (tensor(4) + tensor(4, seed=1)) * 2
        )
        torch.testing.assert_close(given, tensor(4) + tensor(4, seed=1))
