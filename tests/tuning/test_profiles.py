"""Device profiles: which device gets which, and that every field is described."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import purevk
from purevk import knobs
from purevk.api.physical import MatrixShape
from purevk.errors import PurevkError
from purevk.frontends.files import open_file
from purevk.graph import context
from purevk.graph.context import typical_traits
from purevk.report.lowered import lower
from purevk.tuning import (
    DEFAULT,
    SOFTWARE,
    DeviceIdentity,
    DeviceProfile,
    DeviceTraits,
    choose_profile,
    costs,
    registry,
    tiles,
)
from purevk.tuning.families import amd, apple, intel, mobile, nvidia
from purevk.tuning.families.alchemist import ALCHEMIST

LLVMPIPE = DeviceIdentity(0x10005, 0, "cpu", "llvmpipe (LLVM 15.0.6, 256 bits)")
DEVICES = [
    (LLVMPIPE, SOFTWARE),
    (DeviceIdentity(0x1AE0, 0xC0DE, "cpu", "SwiftShader Device"), SOFTWARE),
    (DeviceIdentity(0x10DE, 0x2330, "discrete", "NVIDIA H100 80GB HBM3"), nvidia.NVIDIA),
    (DeviceIdentity(0x1002, 0x744C, "discrete", "AMD Radeon RX 7900 XTX"), amd.AMD),
    (
        DeviceIdentity(0x8086, 0x56A0, "discrete", "Intel(R) Arc(tm) A770", min_subgroup_size=8),
        ALCHEMIST,
    ),
    (
        DeviceIdentity(0x8086, 0xE20B, "discrete", "Intel(R) Arc(tm) B580", min_subgroup_size=16),
        intel.INTEL,
    ),
    (
        DeviceIdentity(0x8086, 0x7D51, "integrated", "Intel(R) Arc(tm) 140T", min_subgroup_size=8),
        intel.INTEL,
    ),
    (DeviceIdentity(0x106B, 0x0D070209, "integrated", "Apple M1"), apple.APPLE),
    (DeviceIdentity(0x10005, 0, "integrated", "Apple M1 (G13G B1)"), apple.APPLE),
    (DeviceIdentity(0x5143, 0x43050A01, "integrated", "Adreno (TM) 740"), mobile.MOBILE),
    (DeviceIdentity(0x13B5, 0xA8670000, "integrated", "Mali-G710"), mobile.MOBILE),
    (DeviceIdentity(0x1010, 0, "integrated", "PowerVR B-Series"), mobile.MOBILE),
    (DeviceIdentity(0x1234, 0, "discrete", "Unknown"), DEFAULT),
]
FAMILY = """
from dataclasses import replace

from purevk.tuning import DEFAULT, Family, register

H200 = replace(DEFAULT, name="h200", loads_in_flight=16)

register(Family(H200, lambda device: device.name.startswith("NVIDIA H200"), priority=1))
"""


@pytest.mark.parametrize(("device", "profile"), DEVICES, ids=[device.name for device, _ in DEVICES])
def test_the_profile_of_a_device(device: DeviceIdentity, profile: DeviceProfile) -> None:
    assert choose_profile(device) is profile


def test_one_file_adds_a_family(tmp_path: Path) -> None:
    file = tmp_path / "h200.py"
    file.write_text(FAMILY)
    spec = importlib.util.spec_from_file_location("h200", file)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    try:
        one = DeviceIdentity(0x10DE, 0x2335, "discrete", "NVIDIA H200")
        assert (choose_profile(one).name, choose_profile(one).loads_in_flight) == ("h200", 16)
        assert choose_profile(dataclasses.replace(one, name="NVIDIA A100")) is nvidia.NVIDIA
        with pytest.raises(ValueError, match="already registered"):
            registry.register(registry.Family(DEFAULT, lambda device: True))
    finally:
        registry.unregister("h200")


def test_every_file_registers_a_family() -> None:
    files = {path.stem for path in Path(mobile.__file__).parent.glob("[a-z]*.py")}
    assert files == set(registry._FAMILIES)


def test_a_variable_forces_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(knobs.PROFILE.name, "software")
    assert choose_profile(DEVICES[2][0]) is SOFTWARE and typical_traits().profile is SOFTWARE
    monkeypatch.setenv(knobs.PROFILE.name, "")
    assert typical_traits().profile is DEFAULT
    monkeypatch.setenv(knobs.PROFILE.name, "h400")
    with pytest.raises(PurevkError, match="h400") as raised:
        choose_profile(LLVMPIPE)
    assert "software" in raised.value.why and raised.value.where == knobs.PROFILE.name


def fields_of(kind: type) -> list[str]:
    """Of a dataclass or a named tuple."""
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return list(kind._fields)  # type: ignore[attr-defined]


DESCRIBED = [
    DeviceTraits,
    DeviceProfile,
    *(each for each in vars(costs).values() if hasattr(each, "_fields")),
    tiles.TileSizes,
]


@pytest.mark.parametrize("described", DESCRIBED, ids=lambda kind: kind.__name__)
def test_every_field_is_described(described: type) -> None:
    attributes = (inspect.getdoc(described) or "").partition("Attributes:")[2]
    names = re.findall(r"^    ((?:\w+, )*\w+):", attributes, re.MULTILINE)
    assert ", ".join(names).split(", ") == fields_of(described)


def test_every_field_is_asked_for() -> None:
    """By kernels, their compilation, cost models, `DeviceTraits` or what makes these; a family that
    sets a field changes something."""
    package = Path(mobile.__file__).parents[2]
    readers = [
        *(path for name in ("lower", "ops") for path in (package / name).rglob("*.py")),
        *(package / "tuning" / f"{name}.py" for name in ("profile", "traits")),
        *(package / "graph" / f"{name}.py" for name in ("context", "kernels")),
    ]
    text = "\n".join(path.read_text(encoding="utf-8") for path in readers)
    asked = set(re.findall(r"\.([a-z]\w*)", text)) | {"name"}
    described = (each for each in DESCRIBED if each is not DeviceTraits)
    assert {name for each in described for name in fields_of(each)} <= asked


def test_profiles_are_frozen_keys() -> None:
    other = dataclasses.replace(DEFAULT, loads_in_flight=1)
    assert len({DEFAULT, other, dataclasses.replace(DEFAULT)}) == 2
    assert DEFAULT.overlaps_loads and not other.overlaps_loads
    with pytest.raises(dataclasses.FrozenInstanceError):
        DEFAULT.loads_in_flight = 1  # type: ignore[misc]


def test_the_profile_fills_in_what_a_device_does_not_report() -> None:
    traits = DeviceTraits(frozenset(), profile=mobile.MOBILE)
    assert traits.processors == mobile.MOBILE.assumed_cores
    assert dataclasses.replace(traits, cores=3).processors == 3
    assert DeviceTraits(frozenset(), profile=SOFTWARE).too_long(65535) is not None
    assert traits.too_long(65535) is None


@pytest.mark.parametrize(
    ("profile", "sizes", "chooses", "made"),
    [
        (intel.INTEL, (8, 32, 32), True, 16),
        (intel.INTEL, (16, 32, 32), True, 16),
        (intel.INTEL, (8, 32, 32), False, 32),
        (mobile.MOBILE, (64, 128, 128), True, 64),
        (mobile.MOBILE, (16, 16, 16), True, 16),
        (DEFAULT, (32, 64, 64), True, 64),
    ],
)
def test_a_profile_has_a_say_in_the_size_of_subgroups(
    profile: DeviceProfile, sizes: tuple[int, int, int], chooses: bool, made: int
) -> None:
    least, most, own = sizes
    device: Any = SimpleNamespace(
        limits=SimpleNamespace(min_subgroup_size=least, max_subgroup_size=most),
        physical=SimpleNamespace(subgroup_size=own),
        chooses_subgroup_size=chooses,
    )
    assert context._subgroup_size(device, profile) == made


@pytest.mark.parametrize(
    ("device", "seconds"),
    [("Mali-G710", 0.5), ("Adreno (TM) 740", 0.5), ("Intel(R) Arc(tm) B580", 0.64)],
)
def test_loops_end_before_the_watchdog_of_linux(device: str, seconds: float) -> None:
    (identity,) = (each for each, _ in DEVICES if each.name == device)
    profile = choose_profile(identity)
    most = DeviceTraits(frozenset(), profile=profile).max_iterations
    assert most * profile.iteration_seconds <= seconds
    assert DeviceTraits(frozenset(), profile=profile).too_long(most) is not None


# What drivers report for float16 operands and float32 sums: RADV for RDNA 3 and 4 (Mesa 26), ANV
# for Arc of the A series and integrated GPUs (Mesa's intel_device_info.c) and for Xe2 (Mesa 26),
# NVIDIA's driver, and two that no kernel takes.
SHAPES = {
    "RDNA 3": [(16, 16, 16)],
    "Xe": [(8, 8, 16)],
    "Xe2": [(8, 16, 16)],
    "NVIDIA": [(16, 16, 16), (16, 8, 16), (16, 8, 8)],
    "larger than tiles": [(32, 32, 16)],
    "no divisor": [(12, 16, 16)],
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_matrix_cores(name: str) -> None:
    half = ("float16", "float16", "float32", "float32", False, "subgroup")
    shapes = [MatrixShape(*shape, *half) for shape in SHAPES[name]]
    other = MatrixShape(16, 16, 16, "float16", "float16", "float16", "float16", False, "subgroup")
    device: Any = SimpleNamespace(physical=SimpleNamespace(matrix_shapes=(*shapes, other)))
    usable = name in ("RDNA 3", "Xe", "Xe2", "NVIDIA")
    assert context._fragments(device, "float16") == (SHAPES[name] if usable else [])


@pytest.mark.device
@pytest.mark.slow
def test_half_precision_is_computed_in_float32(tmp_path: Path) -> None:
    """Without matrix cores: on some GPUs float16 is the slower one."""
    torch = pytest.importorskip("torch")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.linear = torch.nn.Conv2d(8, 8, 3), torch.nn.Linear(36, 16)
            self.norm, self.layer = torch.nn.LayerNorm(16), torch.nn.LSTM(16, 8, batch_first=True)

        def forward(self, x: Any) -> Any:
            y = self.norm(self.linear(torch.relu(self.conv(x)).flatten(2)))
            y = torch.nn.functional.scaled_dot_product_attention(y, y, y)
            return self.layer(y.softmax(1))[0].cumsum(1)

    path = tmp_path / "half.pvk"
    with purevk.compile(Model().half().eval(), (torch.randn(1, 8, 8, 8).half(),)) as program:
        program.save(path)
    store = context.default_context().kernels
    with open_file(path) as file:
        traits = dataclasses.replace(store.traits, profile=mobile.MOBILE)
        specs = lower(file, "forward", traits).plan.kernels
    assert len(specs) > 5
    for spec, code in store.spirv(specs).items():
        assert not half_arithmetic(code), spec.template


def half_arithmetic(code: bytes) -> list[int]:
    """The instructions of a SPIR-V module that compute floats of 16 bits."""
    words = struct.unpack(f"<{len(code) // 4}I", code)
    halves, found, at = set(), [], 5
    while at < len(words):
        count, opcode = words[at] >> 16, words[at] & 0xFFFF
        operands = words[at + 1 : at + count]
        if (opcode == 22 and operands[1] == 16) or (opcode == 23 and operands[1] in halves):
            halves.add(operands[0])  # OpTypeFloat, OpTypeVector
        fma = opcode == 12 and operands[3] == 50
        if (opcode in (129, 131, 133, 136, 142, 148) or fma) and operands[0] in halves:
            found.append(opcode)  # OpFAdd, OpFSub, OpFMul, OpFDiv, OpVectorTimesScalar, OpDot
        at += count
    return found
