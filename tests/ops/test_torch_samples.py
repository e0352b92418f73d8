"""Every operator on the device, with the calls that the samples of torch's own operator tests
make."""

from __future__ import annotations

import os

import pytest

import purevk.ops  # noqa: F401
from purevk.ops import registry
from tests.ops.harness import failures, ran_on_host
from tests.ops.sample_cases import as_case, is_sound, spread
from tests.ops.samples import calls

pytestmark = [
    pytest.mark.device,
    pytest.mark.slow,
]  # slow: torch's samples take half a minute to make

NAMES = [each.name for each in registry.definitions() if each.name.startswith("aten.")]


@pytest.mark.parametrize("name", NAMES)
def test_operator(name):
    found = spread([call for call in calls().get(name, []) if is_sound(call)])
    if not found:
        pytest.skip("no sample of torch's OpInfo calls the operator")
    before = len(ran_on_host)
    wrong = failures([as_case(call) for call in found])
    folder = os.environ.get("PUREVK_TEST_REPORT")
    if folder:
        with open(os.path.join(folder, "samples.txt"), "a", encoding="utf-8") as file:
            file.write(
                f"{name} {len(found) - len(wrong)}/{len(found)}, {len(ran_on_host) - before} on"
                f" the CPU {ran_on_host[before:][:1]}\n"
            )
    assert not wrong, f"{len(wrong)} of {len(found)}:\n" + "\n".join(wrong)
