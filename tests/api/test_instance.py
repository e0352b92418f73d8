"""Finding devices, their features, what errors say, and the validation layer."""

from __future__ import annotations

import gc
import os
import struct
import subprocess
import sys

import pytest

from purevk import api, knobs
from purevk.api import features, vk
from purevk.errors import (
    DeviceError,
    DeviceLostError,
    OutOfDeviceMemoryError,
    PurevkError,
    ValidationError,
)

pytestmark = pytest.mark.device


def run(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


CATCH = """
from purevk import errors, api
try:
    api.open_device()
except errors.DeviceError as error:
    print(type(error).__name__, error)
"""


def test_no_driver() -> None:
    said = run(CATCH, VK_ICD_FILENAMES="/nonexistent", VK_DRIVER_FILES="/nonexistent")
    assert said.startswith("DeviceError No Vulkan driver on this machine")
    for part in (
        "where:",
        "why:",
        "next:",
        "apt-get install mesa-vulkan-drivers libvulkan1",
        "VK_ICD_FILENAMES",
    ):
        assert part in said


def test_no_loader() -> None:
    said = run(
        "from purevk.api import vk\nvk._LOADERS[__import__('sys').platform] = ('libno-such.so',)\n"
        + CATCH
    )
    assert said.startswith("DeviceError No Vulkan loader on this machine")
    assert "libno-such.so" in said
    assert "apt-get install" in said


def test_no_validation_layer() -> None:
    said = run(CATCH, PUREVK_VALIDATION="1", VK_LAYER_PATH="/nonexistent")
    assert said.startswith("DeviceError The Vulkan validation layer is not installed")
    assert "vulkan-validationlayers" in said


def test_import_opens_nothing() -> None:
    assert (
        run("import purevk.api; print([l for l in open('/proc/self/maps') if 'libvulkan' in l])")
        == "[]\n"
    )


def test_picking(instance: api.Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    first = instance.physical_devices[0]
    assert instance.pick(0) is first
    assert instance.pick("0") is first
    assert instance.pick(first.name[1:6].upper()).name == first.name
    assert instance.pick(first.kind.upper()).kind == first.kind
    monkeypatch.setenv(knobs.DEVICE.name, "no such device")
    with pytest.raises(DeviceError) as caught:
        instance.pick()
    for part in ("'no such device'", "PUREVK_DEVICE", first.name, f"0: {first.name}"):
        assert part in str(caught.value)
    monkeypatch.setenv(knobs.DEVICE.name, "57")
    with pytest.raises(DeviceError, match="57"):
        instance.pick()
    monkeypatch.setenv(knobs.DEVICE.name, first.name)
    assert instance.pick().name == first.name


def test_the_best_device_is_taken() -> None:
    class Fake:
        def __init__(self, index: int, kind: str) -> None:
            self.index, self.kind, self.name = index, kind, f"{kind} {index}"

    kinds = ["cpu", "other", "integrated", "virtual", "discrete", "discrete"]
    instance = object.__new__(api.Instance)
    while kinds:
        instance.physical_devices = [Fake(index, kind) for index, kind in enumerate(kinds)]
        best = instance.pick("")
        order = ["discrete", "integrated", "virtual", "cpu", "other"]
        assert best.kind == min(kinds, key=order.index)
        assert best.index == kinds.index(best.kind)
        kinds.pop(best.index)


def test_device_facts(device: api.Device) -> None:
    physical = device.physical
    assert physical.api_version >= (1, 1, 0)
    assert physical.subgroup_size & (physical.subgroup_size - 1) == 0
    assert physical.subgroup_operations & 1
    assert device.limits.max_storage_buffer_range >= 2**27
    assert device.limits.max_push_constants >= 128
    assert all(count >= 65535 for count in device.limits.max_workgroup_count)
    assert all(0 <= kind.heap < len(physical.heaps) for kind in physical.memory_types)
    assert len(physical.pipeline_cache_uuid) == 16
    assert device.name and device.driver and device.core_count >= 0
    assert len(device.allocator.budget()) == len(physical.heaps)
    assert isinstance(physical.matrix_shapes, tuple)


def test_feature_rows_are_well_formed() -> None:
    names = [row.name for row in features.FEATURES]
    assert len(set(names)) == len(names)
    for index, row in enumerate(features.FEATURES):
        assert row.doc
        assert bool(row.fields) != bool(row.test), row.name
        assert row.core is not None or row.extension, row.name
        assert set(row.requires) <= set(names[:index]), row.name
        if isinstance(row.struct, features.RawStruct):
            members = set(row.struct.fields)
        else:
            members = {
                name for name, _ in vk.ffi.typeof(row.struct or "VkPhysicalDeviceFeatures").fields
            }
        assert members.issuperset(row.fields + row.extra), row.name


def test_kernels_that_need_a_feature_which_is_off(instance: api.Instance) -> None:
    """A driver may crash, as SwiftShader does, or compute anything."""
    module = struct.pack("<9I", 0x07230203, 0x10300, 0, 1, 0, 2 << 16 | 17, 1, 2 << 16 | 17, 39)
    with api.Device(instance.pick(), disable=("int8",)) as device:
        with pytest.raises(DeviceError, match="a kernel needs int8") as caught:
            api.ComputePipeline(device, module, 1, label="bytes.comp")
        assert caught.value.where == "bytes.comp"


def test_semaphores_that_no_other_api_may_import(instance: api.Instance) -> None:
    """Mesa's lavapipe has the extension in some releases, and exports no timeline semaphore."""
    with api.Device(instance.pick(), disable=("external_semaphore_fd",)) as device:
        with pytest.raises(DeviceError, match="no such semaphores"):
            api.TimelineSemaphore(device, external=True)
    with api.Device(instance.pick()) as device:
        if device.features.external_semaphore_fd:
            os.close(api.TimelineSemaphore(device, external=True).export_fd())


def test_features_read_as_attributes(device: api.Device) -> None:
    assert device.features <= device.physical.available
    assert device.features.subgroup_basic is ("subgroup_basic" in device.features)
    with pytest.raises(AttributeError, match="no feature is named 'flat16'"):
        device.features.flat16


@pytest.mark.parametrize("name", [row.name for row in features.FEATURES])
def test_each_feature_can_be_left_off(
    instance: api.Instance, increment_spirv: bytes, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(knobs.DISABLE.name, name)
    with api.Device(instance.pick()) as device:
        assert name not in device.features
        assert not [
            row for row in features.FEATURES if row.name in device.features and name in row.requires
        ]
        cache = api.PipelineCache(device)
        api.ComputePipeline(device, increment_spirv, 1, cache=cache)
        api.Buffer(device, 64)


def test_everything_can_be_left_off(instance: api.Instance) -> None:
    with api.Device(instance.pick(), disable=tuple(features.BY_NAME)) as device:
        assert device.features == frozenset()
        with pytest.raises(DeviceError, match="no timestamps"):
            api.TimestampPool(device, 1)


def test_pipeline_statistics_are_there_on_request(
    instance: api.Instance, increment_spirv: bytes
) -> None:
    physical = instance.pick()
    with api.Device(physical) as device:
        assert not device.features.pipeline_statistics
        pipeline = api.ComputePipeline(device, increment_spirv, 1)
        with pytest.raises(DeviceError, match="tells no statistics"):
            api.pipeline_statistics(pipeline)
    with api.Device(physical, request=("pipeline_statistics",)) as device:
        assert device.features.pipeline_statistics == ("pipeline_statistics" in physical.available)
        if device.features.pipeline_statistics:
            pipeline = api.ComputePipeline(device, increment_spirv, 1)
            assert any(each["statistics"] for each in api.pipeline_statistics(pipeline))


def test_unknown_feature_names_are_refused(
    instance: api.Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(knobs.DISABLE.name, "float16,flat16")
    with pytest.raises(PurevkError, match="flat16") as caught:
        api.Device(instance.pick())
    assert "storage_16bit" in str(caught.value)


def test_required_subgroup_size(device: api.Device, increment_spirv: bytes) -> None:
    with pytest.raises(DeviceError, match="Subgroups of 3"):
        api.ComputePipeline(device, increment_spirv, 1, required_subgroup_size=3)
    if device.chooses_subgroup_size:
        size = device.limits.max_subgroup_size
        assert api.ComputePipeline(device, increment_spirv, 1, required_subgroup_size=size).alive


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        ("VK_ERROR_OUT_OF_DEVICE_MEMORY", OutOfDeviceMemoryError),
        ("VK_ERROR_OUT_OF_POOL_MEMORY", OutOfDeviceMemoryError),
        ("VK_ERROR_DEVICE_LOST", DeviceLostError),
        ("VK_ERROR_FEATURE_NOT_PRESENT", DeviceError),
        ("VK_ERROR_UNKNOWN", DeviceError),
    ],
)
def test_results_become_errors(result: str, kind: type[DeviceError]) -> None:
    with pytest.raises(DeviceError) as caught:
        vk.check(vk.const(result), "vkDoThing", where="here")
    assert type(caught.value) is kind
    assert f"vkDoThing failed with {result}" in str(caught.value)
    assert caught.value.where == "here" and caught.value.next


def test_statuses_are_no_errors() -> None:
    for name in ("VK_SUCCESS", "VK_NOT_READY", "VK_TIMEOUT", "VK_INCOMPLETE"):
        vk.check(vk.const(name), "vkDoThing")


def test_every_struct_type_is_known() -> None:
    names = ("VkSubmitInfo", "VkPhysicalDevice16BitStorageFeatures", "VkPhysicalDeviceIDProperties")
    assert [vk.structure_type(name) for name in names] == [4, 1000083000, 1000071004]


def test_a_missing_barrier_is_found(
    instance: api.Instance, increment_spirv: bytes, scale_spirv: bytes
) -> None:
    """A dispatch reads what the one before writes, and nothing orders them: synchronization
    validation says so."""
    device = api.Device(instance.pick())
    first, second = api.Buffer(device, 256), api.Buffer(device, 256)
    increment = api.ComputePipeline(device, increment_spirv, 1, label="increment")
    scale = api.ComputePipeline(device, scale_spirv, 2, specialization={0: 64}, label="scale")
    arena, pool = api.DescriptorArena(device), api.CommandPool(device)
    one, two = arena.make(
        [
            (increment.layout, [(first, 0, None)]),
            (scale.layout, [(first, 0, None), (second, 0, None)]),
        ]
    )
    commands = pool.buffer("unordered")
    for ordered in (True, False):
        commands.begin()
        commands.record_dispatch(increment, one, None, 0, 1)
        if ordered:
            commands.barrier()
        commands.record_dispatch(scale, two, bytes(8), 8, 1)
        if ordered:
            commands.end()
    with pytest.raises(ValidationError, match="SYNC-HAZARD-READ-AFTER-WRITE") as caught:
        commands.end()
    assert "unordered" in str(caught.value)
    device.check()  # said once
    device.close()


def test_a_binding_beyond_its_buffer_is_found(
    instance: api.Instance, increment_spirv: bytes
) -> None:
    device = api.Device(instance.pick())
    buffer = api.Buffer(device, 256)
    layout = api.PipelineLayout.shared(device, 1)
    with pytest.raises(ValidationError, match="range"):
        api.DescriptorArena(device).make([(layout, [(buffer, 0, 512)])])
    device.close()
    del layout
    gc.collect()


def test_messages_stay_off_without_validation(increment_spirv: bytes) -> None:
    with api.open_device(validation=False) as device:
        assert not device.instance.validation
        pipeline = api.ComputePipeline(device, increment_spirv, 1, label="named")
        assert pipeline.alive
        device.check()


def test_loaders_of_each_platform() -> None:
    assert vk.loader_names("linux", "") == ["libvulkan.so.1", "libvulkan.so"]
    assert vk.loader_names("linux", "/sdk")[2:] == ["/sdk/lib/libvulkan.so.1"]
    assert vk.loader_names("win32", "C:/sdk") == ["vulkan-1.dll"]
    mac = vk.loader_names("darwin", "/sdk")
    assert mac[:3] == ["libvulkan.1.dylib", "libvulkan.dylib", "libMoltenVK.dylib"]
    assert mac[3:] == [
        f"{folder}/libvulkan.1.dylib"
        for folder in ("/sdk/lib", "/opt/homebrew/lib", "/usr/local/lib")
    ]
