"""Files of every release of executorch, against what eager torch gave when they were made
(`tests/data/releases`)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

import purevk
from purevk import pte
from purevk.frontends.executorch.methods import read_method
from purevk.frontends.executorch.names import INTEGER_OPERATORS, vulkan_name
from purevk.ir.printer import to_text
from purevk.ops import registry
from tests.ops.harness import context
from tests.program.harness import FILES, RELEASES, data_files, samples_of

MADE_WITH = {
    path.parent.name: json.loads(path.read_text())
    for path in sorted(RELEASES.glob("*/made_with.json"))
}
SAME = {
    f"{version}/{name}": f"{other}/{name}"
    for version, made in MADE_WITH.items()
    for name, other in made["same_as"].items()
}
"""Files that a release wrote as another one did, byte for byte."""
# The largest error, as a share of the largest element: sums in another order, or what the name
# says.
ROUNDING = 5e-6
HALF = 2e-3
FOLDED = 1e-2  # the exporter drops the quantization of some activations, eager torch does not
TOLERANCES = {
    "mlp_half": HALF, "convnet_half": HALF, "int8_dynamic_int8_weight": FOLDED, "int8_xnnpack_dynamic": FOLDED,
    "vulkan_dynamic": FOLDED, "int8_dynamic_int8_weight_bare": FOLDED, "vulkan_dynamic_bare": FOLDED,
    "1.0.1/int8_static_linear_bare": FOLDED, "1.0.1/int8_static_conv_bare": FOLDED,
    "1.1.0/int8_static_linear_bare": FOLDED, "1.2.0/int8_dynamic_int4_weight": FOLDED,
}  # fmt: skip

# What the front ends do themselves, and what exporters remove before they write.
WITHOUT_A_ROW = {
    "et_vk.prepack.default", "et_vk.select_as_symint.default", "sym_size.int", "_assert_scalar.default", "getitem",
    "sym_constrain_range_for_size.default",
}  # fmt: skip

_verified: set[str] = set()


def digest(file: str) -> str:
    """Of all that running a file depends on: the graphs of its methods, and their constants."""
    made = hashlib.sha256()
    with pte.read_program(RELEASES / f"{file}.pte", data_files(file)) as program:
        for name in sorted(program.methods):
            graph = read_method(program, name)
            made.update(to_text(graph).encode())
            for value, constant in (*graph.constants.items(), *graph.states.items()):
                made.update(
                    b"" if constant is None else np.ascontiguousarray(constant.array(value.type))
                )
    own = RELEASES / f"{file}.npz"
    made.update(own.read_bytes() if own.exists() else Path(file).name.encode())
    return made.hexdigest()


@pytest.mark.device
@pytest.mark.parametrize("file", FILES)
def test_file(file):
    """Results are those of eager torch, and the whole method is one segment of the device. What
    releases write alike runs once."""
    key = digest(file)
    if key in _verified:
        return
    tolerance = TOLERANCES.get(file, TOLERANCES.get(Path(file).name, ROUNDING))
    with purevk.load(RELEASES / f"{file}.pte", data_files(file), context=context()) as program:
        samples = samples_of(file)
        assert set(program.methods) == set(samples)
        for method, calls in samples.items():
            steps = program.method(method).executable.plan.steps
            assert [step.on_device for step in steps] == [True], [
                step.nodes[0] for step in steps if not step.on_device
            ]
            for inputs, expected in calls:
                made = program.method(method)(*inputs)
                made = made if isinstance(made, tuple) else (made,)
                assert len(made) == len(expected)
                for have, want in zip(made, expected):
                    assert have.shape == want.shape and have.dtype == want.dtype
                    np.testing.assert_allclose(
                        have, want, rtol=0, atol=tolerance * np.abs(want).max()
                    )
    _verified.add(key)


@pytest.mark.parametrize("version", MADE_WITH)
def test_release(version):
    """Every model is there or is known to be refused. Every operator that the partitioner of the
    release takes has a definition."""
    made = MADE_WITH[version]
    there = {Path(file).name for file in (*FILES, *SAME) if file.startswith(f"{version}/")}
    assert there | set(made["refused"]) == {
        path.stem for path in (RELEASES / "eager").glob("*.npz")
    }
    assert not there & set(made["refused"]) and set(SAME.values()) <= set(FILES)
    names = made["operators"]
    assert len(names) > 100
    known = WITHOUT_A_ROW | set(INTEGER_OPERATORS)
    assert [
        name for name in names if name not in known and registry.find(vulkan_name(name)) is None
    ] == []
