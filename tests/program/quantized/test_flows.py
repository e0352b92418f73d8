"""Every way to quantize for the Vulkan delegate: exported, loaded, run without the CPU, and held
against the file's graph."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.export, pytest.mark.slow]
torch = pytest.importorskip("torch")
pytest.importorskip("torchao")
pytest.importorskip("executorch")

from purevk import pte  # noqa: E402
from purevk.frontends.executorch.methods import read_method  # noqa: E402
from purevk.program import Program  # noqa: E402
from tests.models import quantized  # noqa: E402
from tests.ops.harness import context, host_nodes  # noqa: E402
from tests.ops.quantized.harness import kernels_of  # noqa: E402
from tests.program.quantized.reference import run_graph  # noqa: E402

_exports: dict[str, quantized.Exported] = {}


def exported(name: str) -> quantized.Exported:
    if name not in _exports:
        _exports[name] = quantized.export(name)
    return _exports[name]


def operators(program: pte.Program) -> set[str]:
    """Names of the Vulkan graphs' operators, as they stand in the file."""
    delegates = program.method("forward").delegates
    return {call.name for delegate in delegates for call in program.vulkan_graph(delegate).chain}


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("name", quantized.FLOWS)
def test_flow(name, device):
    flow, case = quantized.FLOWS[name], exported(name)
    file = pte.read_program(case.blob)
    assert set(flow.operators) <= operators(file)
    want = run_graph(read_method(file), list(case.inputs))[0]
    source = lambda sizes: read_method(pte.read_program(case.blob), sizes=sizes)  # noqa: E731
    with kernels_of(device), Program(name, {"forward": source}, context()) as program:
        assert not host_nodes(program)
        have = program.forward(*case.inputs)
    # Sums in another order; if quantized values follow, these are the same.
    torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)
    error = (have - case.float_result).abs().max() / case.float_result.abs().max()
    assert error < flow.tolerance, f"{error} from the float model"
