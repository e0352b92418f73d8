"""Devices by index and name, and several of them in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import purevk
from purevk import DeviceError, api, knobs
from purevk.errors import InputError
from purevk.graph.context import Context, default_context
from tests.harness import DATA

pytestmark = pytest.mark.device
MODEL = DATA / "linear_relu.pte"
_MANIFESTS = Path("/usr/share/vulkan/icd.d")


def test_the_list_and_the_default() -> None:
    found = purevk.devices()
    assert [device.index for device in found] == list(range(len(found)))
    (default,) = (device for device in found if device.default)
    assert default.name == default_context().device.name and default.memory_bytes > 0


def test_programs_on_one_device_share_a_context() -> None:
    (default,) = (device for device in purevk.devices() if device.default)
    context = default_context()
    for device in (default.index, str(default.index), default.name.upper(), context, ""):
        with purevk.load(MODEL, device=device) as program:
            assert program.context is context


def test_a_device_that_is_not_there() -> None:
    for device in ("no such device", 99, 100, -1):
        with pytest.raises(DeviceError, match=f"No Vulkan device fits '{device}'") as caught:
            purevk.load(MODEL, device=device)
        assert f"0: {purevk.devices()[0].name}" in caught.value.why


@pytest.mark.parametrize("device", [True, 1.5, b"0", {"0"}, [1.5], []])
def test_what_is_no_device(device: object) -> None:
    with pytest.raises(InputError, match="device="):
        purevk.load(MODEL, device=device)  # type: ignore[arg-type]


def test_both_arguments() -> None:
    with pytest.raises(InputError, match="both device and context"):
        purevk.load(MODEL, device=0, context=default_context())


def test_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [device.name for device in purevk.devices()]
    monkeypatch.setenv(knobs.DEVICE.name, "")
    monkeypatch.setenv(knobs.VISIBLE_DEVICES.name, f"{len(names) - 1}, 0, 0")
    visible = [device.name for device in purevk.devices()]
    assert visible == [names[-1], names[0]][: len(names)]
    monkeypatch.setenv(knobs.VISIBLE_DEVICES.name, "absent")
    with pytest.raises(DeviceError, match="No Vulkan device fits 'absent'") as caught:
        purevk.devices()
    assert caught.value.where == knobs.VISIBLE_DEVICES.name and names[0] in caught.value.why


def test_two_contexts_at_the_same_time() -> None:
    x = np.linspace(-2, 2, 10, dtype=np.float32).reshape(2, 5)
    with purevk.load(MODEL) as program:
        expected = program.forward(x)
    wrong: list[object] = []
    with Context(api.open_device()) as first, Context(api.open_device()) as second:
        programs = [purevk.load(MODEL, device=context) for context in (first, second)]
        assert programs[0].context is first and programs[1].context is second

        def run(program: purevk.Program) -> None:
            for scale in range(1, 30):
                made = program.forward(x) if scale % 2 else program.submit(x).result()
                if not np.array_equal(made, expected):
                    wrong.append(made)

        threads = [threading.Thread(target=run, args=(program,)) for program in programs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        first.close()  # leaves the other device as it is
        np.testing.assert_array_equal(programs[1].forward(x), expected)


_SCRIPT = """
import json, sys, purevk
model = sys.argv[1]
with purevk.load(model, device=0) as a, purevk.load(model, device=1) as b:
    again = purevk.load(model, device=1)
    print(json.dumps({
        "devices": [[each.index, each.default] for each in purevk.devices()],
        "shared": [a.context is b.context, again.context is b.context],
        "default": purevk.load(model).context is a.context,
        "indices": [a.device.physical.index, b.device.physical.index],
    }))
"""


def test_two_devices(tmp_path: Path) -> None:
    """lavapipe through two manifests is two devices to the Vulkan loader."""
    manifests = sorted(_MANIFESTS.glob("lvp_icd*.json"))
    if not manifests:
        pytest.skip("there is no manifest of lavapipe")
    copies = [tmp_path / f"{number}.json" for number in range(2)]
    for copy in copies:
        copy.write_text(manifests[0].read_text(encoding="utf-8"), encoding="utf-8")
    drivers = os.pathsep.join(map(str, copies))
    environment = {
        **os.environ,
        knobs.VK_DRIVER_FILES.name: drivers,
        knobs.VK_ICD_FILENAMES.name: drivers,
        knobs.DEVICE.name: "",
    }
    command = [sys.executable, "-c", _SCRIPT, str(MODEL)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {
        "devices": [[0, True], [1, False]],
        "shared": [False, True],
        "default": True,
        "indices": [0, 1],
    }
    environment[knobs.VISIBLE_DEVICES.name] = "1"
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 1 and "No Vulkan device fits '1'" in ran.stderr
