"""`purevk inspect`, mostly without a device; memory against what loading takes."""

from __future__ import annotations

from pathlib import Path

import pytest

import purevk
from purevk import api, pte
from purevk.cli import inspect
from purevk.cli.output import Output
from purevk.dtypes import DType
from purevk.errors import DeviceError
from purevk.graph.context import Context
from purevk.ir import Graph, TensorType, Value


def test_a_node_without_a_kernel_is_on_the_cpu(cli, data: Path, unregister_topk) -> None:
    found = cli("inspect", data / "topk.pte", "--no-device", "--json").json
    (method,) = found["methods"]
    assert found["ok"] and found["device"] is None and method["error"] is None
    assert method["inputs"] == [
        {"name": "input_0", "kind": "tensor", "dtype": "float32", "dims": [2, 7], "value": None}
    ]
    assert [each["dtype"] for each in method["outputs"]] == ["float32", "int64"]
    (node,) = method["cpu_nodes"]
    assert (node["operator"], node["why"]) == ("aten.topk.default", "no kernel")
    assert node["results"] == ["float32[2,2]", "int64[2,2]"]
    assert [each["on"] for each in method["segments"]] == ["gpu", "cpu", "gpu"]
    # 4 operators in the first delegate, topk, the sigmoid in the second.
    assert method["file_nodes"]["nodes"] == 6 and method["file_nodes"]["kernels"] == {
        "aten::topk.values": 1
    }
    assert method["dispatches"] == 2 == sum(each["dispatches"] for each in method["kernels"])
    text = cli("inspect", data / "topk.pte", "--no-device").out
    assert "on the CPU: 1 node" in text and "aten.topk.default" in text and "no kernel" in text


def test_everything_on_the_gpu(cli, data: Path) -> None:
    ran = cli("inspect", data / "dynamic_views.pte", "--no-device")
    assert ran.code == 0 and "every node runs on the GPU" in ran.out


def test_a_missing_feature_is_the_reason(cli, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUREVK_DISABLE", "int64")
    (method,) = cli("inspect", data / "gather.pte", "--no-device", "--json").json["methods"]
    assert {node["operator"] for node in method["cpu_nodes"]} == {
        "aten.index.Tensor",
        "aten.cat.default",
    }
    assert {node["why"] for node in method["cpu_nodes"]} == {"int64 needs the device feature int64"}


def test_dynamic_sizes(cli, data: Path) -> None:
    (method,) = cli("inspect", data / "dynamic_views.pte", "--no-device", "--json").json["methods"]
    assert (
        method["inputs"][0]["dims"][1] == "s0"
        and "s0 is not 1" in method["guards"]
        and method["sizes"]["s0"] == {"min": 1, "max": 16}
    )
    assert "size s0" in cli("inspect", data / "dynamic_views.pte", "--no-device").out


def test_one_of_several_methods(cli, data: Path) -> None:
    file = data / "two_methods.pte"
    assert [m["name"] for m in cli("inspect", file, "--no-device", "--json").json["methods"]] == [
        "forward",
        "step",
    ]
    (step,) = cli("inspect", file, "--no-device", "--json", "--method", "step").json["methods"]
    assert step["name"] == "step" and step["inputs"][0]["dims"] == [1, 5]
    ran = cli("inspect", file, "--no-device", "--method", "backward")
    assert ran.code == 1 and "methods: forward, step" in ran.err


def test_what_cannot_run_is_shown_and_fails(cli, foreign: Path) -> None:
    ran = cli("inspect", foreign, "--no-device", "--json")
    (method,) = ran.json["methods"]
    assert ran.code == 1 and ran.json["ok"] is False
    assert (
        method["error"]["type"] == "UnsupportedProgramError"
        and method["file_nodes"]["delegate_calls"] == 1
    )
    ran = cli("inspect", foreign, "--no-device")
    assert ran.code == 1 and "cannot run" in ran.out


def test_data_files(cli, data: Path) -> None:
    (weights,) = (data / "linear_relu_external").glob("*.ptd")
    found = cli(
        "inspect", data / "linear_relu_external.pte", "--data", weights, "--no-device", "--json"
    ).json
    assert found["ok"] and found["file"]["data_files"][0]["bytes"] == (3 * 5 + 3) * 4
    assert cli("inspect", data / "linear_relu_external.pte", "--no-device").code == 1


def test_the_graph_and_the_table_of_nodes(cli, data: Path, unregister_topk) -> None:
    found = cli(
        "inspect", data / "topk.pte", "--no-device", "--graph", "--node-table", "--json"
    ).json["methods"][0]
    assert found["graph"].startswith("method forward\ninput %input_0: float32[2,7]\n")
    rows = found["node_table"]
    assert [row["on"] for row in rows] == ["gpu", "cpu", "gpu"]
    assert sum(row["dispatches"] for row in rows) == found["dispatches"]
    text = cli("inspect", data / "topk.pte", "--no-device", "--graph", "--node-table").out
    assert found["graph"].rstrip() in text  # unwrapped


def test_the_choices_of_kernels(cli, data: Path) -> None:
    arguments = ("inspect", data / "linear_relu.pte", "--no-device", "--node-table")
    rows = cli(*arguments, "--json").json["methods"][0]["node_table"]
    assert [len(row["choices"]) for row in rows] == [0, 1]
    (choice,) = rows[1]["choices"]
    assert choice["kernel"].startswith("Vector(") and choice["cost"] > 0
    whys = {other["kernel"]: other["why"] for other in choice["others"]}
    assert whys["Dot"] == "needs a second operand that is dense along k"
    text = cli(*arguments).out
    assert "#1: matmul 2 x 3 x 5\n    Vector(" in text
    assert "    not Dot (4): needs a second operand that is dense along k\n" in text


def test_without_vulkan(cli, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_loader() -> None:
        raise DeviceError("No Vulkan loader on this machine", next="install one")

    monkeypatch.setattr("purevk.api.vk.library", no_loader)
    assert cli("inspect", data / "topk.pte", "--no-device").code == 0
    ran = cli("inspect", data / "topk.pte")
    assert ran.code == 1 and "install one; or look without a device: --no-device" in ran.err


@pytest.mark.device
@pytest.mark.parametrize(
    "name", ["topk", "dynamic_views", "linear_relu", "counter_portable", "gather", "two_methods"]
)
def test_memory_is_that_of_the_loaded_program(cli, data: Path, name: str) -> None:
    methods = cli("inspect", data / f"{name}.pte", "--json").json["methods"]
    with (
        Context(api.open_device()) as context,
        purevk.load(data / f"{name}.pte", context=context) as program,
    ):
        loaded = vars(program.memory)
        for key in ("planned", "naive", "lower_bound", "inputs", "outputs"):
            assert sum(method["memory"][key] for method in methods) == loaded[key], key
        weights, state = (
            sum(method["memory"][key] for method in methods) for key in ("weights", "state")
        )
        assert loaded["state"] == state and (loaded["weights"] == weights or len(methods) > 1)
        assert sum(method["dispatches"] for method in methods) == program.report()["dispatches"]


@pytest.mark.parametrize("name", ["topk", "gather", "linear_relu", "counter_portable"])
def test_inputs_are_those_of_the_file(cli, data: Path, name: str) -> None:
    """Against the tensors that the reader finds."""
    with pte.read_program(data / f"{name}.pte") as program:
        plan = program.method("forward")
        wanted = [
            (DType.from_pte(plan.values[i].scalar_type).name, list(plan.values[i].sizes))
            for i in plan.inputs
        ]
    (method,) = cli("inspect", data / f"{name}.pte", "--no-device", "--json").json["methods"]
    assert [(each["dtype"], each["dims"]) for each in method["inputs"]][: len(wanted)] == wanted


@pytest.mark.device
def test_a_saved_program(cli, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "saved.pvk"
    with purevk.load(data / "topk.pte") as program:
        program.save(path)
    found = cli("inspect", path, "--no-device", "--json").json
    wanted = cli("inspect", data / "topk.pte", "--no-device", "--json").json
    assert found["file"]["kind"] == "pvk" and found["file"]["bytes"] == path.stat().st_size
    for key in ("inputs", "outputs", "dispatches", "segments", "memory", "kernels"):
        assert found["methods"][0][key] == wanted["methods"][0][key], key
    assert "written by" in cli("inspect", path, "--no-device").out
    assert cli("ops", "--check", path, "--no-device", "--json").json["ok"]
    assert cli("run", path).code == 0


def test_the_graph_alone(cli, data: Path) -> None:
    for form, start in (("text", "method forward"), ("json", "{"), ("mermaid", "flowchart TD")):
        ran = cli("inspect", data / "topk.pte", "--no-device", "--format", form)
        assert ran.code == 0 and ran.out.startswith(start)
    found = cli(
        "inspect", data / "two_methods.pte", "--no-device", "--method", "step", "--format", "json"
    ).json
    assert found["name"] == "step" and found["segments"]
    wrapped = cli("inspect", data / "topk.pte", "--no-device", "--format", "mermaid", "--json").json
    assert wrapped["method"] == "forward" and wrapped["drawing"].startswith("flowchart")


def test_a_method_that_computes_nothing_takes_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    constants = inspect._constants(Graph("get_max_seq_len", (), (), (128, True)))
    inspect._show_method({"name": "get_max_seq_len", "constant": constants}, Output(), True)
    assert capsys.readouterr().out == "method get_max_seq_len: 128, True (constant)\n"
    value = Value("x", TensorType(DType.float32, (3,)))
    assert inspect._constants(Graph("forward", (value,), (), (value,))) is None
