"""Every operator on the device, with the calls that the samples of torch's own operator tests
make."""

from __future__ import annotations

import os

import pytest

from tests.ops.harness import failures, ran_on_host
from tests.ops.sample_cases import as_case, is_sound, spread
from tests.ops.samples import calls, sampled

pytestmark = pytest.mark.device


@pytest.mark.parametrize("name", sampled())
def test_operator(name):
    found = spread([call for call in calls().get(name, []) if is_sound(call)])
    if not found:
        pytest.skip("torch's samples of the operator do not tell whether a result is right")
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
