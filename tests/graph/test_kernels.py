"""Pipelines of kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from purevk import api, knobs
from purevk.api.features import Features
from purevk.cache import Cache, default_cache
from purevk.errors import DeviceError
from purevk.frontends.files import open_file
from purevk.graph import context
from purevk.graph.context import traits_of
from purevk.graph.kernels import KernelStore
from purevk.report.lowered import lower
from tests.harness import DATA


@pytest.mark.device
def test_a_device_that_takes_no_subgroup_size_runs_kernels_of_its_own_size() -> None:
    """AMD's GCN with RADV has the feature subgroup_size_control and subgroups of 64, and refuses any
    required size."""
    with api.Instance() as instance, api.Device(instance.pick()) as device:
        device.physical.required_subgroup_stages = 0
        traits = traits_of(device)
        store = KernelStore(device, default_cache(), traits)
        with open_file(str(DATA / "linear_relu_half.pte"), check=False) as program:
            kernels = lower(program, "forward", traits).plan.kernels
        specs = [replace(kernel, subgroup_size=traits.subgroup_size) for kernel in kernels]
        made = store.prepare(specs)
        assert made and all(pipeline.alive for pipeline in made)
        with pytest.raises(DeviceError, match="offers no choice"):
            store.prepare([replace(kernels[0], subgroup_size=2 * traits.subgroup_size)])


@pytest.mark.device
@pytest.mark.parametrize("profile", ["intel", "alchemist"])
def test_slow_matrix_cores_are_not_used(monkeypatch: pytest.MonkeyPatch, profile: str) -> None:
    shape = (8, 8, 16)
    monkeypatch.setattr(context, "_coopmat_shapes", lambda device, cache: [shape])
    monkeypatch.setenv(knobs.PROFILE.name, profile)
    with api.Instance() as instance, api.Device(instance.pick()) as device:
        assert traits_of(device).coopmat_shape == (shape if profile == "intel" else None)


@pytest.mark.device
@pytest.mark.parametrize("preserves", [False, True])
def test_kernels_ask_for_subnormal_numbers_where_they_may(
    monkeypatch: pytest.MonkeyPatch, preserves: bool
) -> None:
    """The execution mode DenormPreserve of float32, in kernels that compute no sums of products."""
    with api.Instance() as instance, api.Device(instance.pick()) as device:
        features = set(device.features) - {"denorm_preserve"}
        if preserves:
            features.add("denorm_preserve")
        monkeypatch.setattr(device, "features", Features(features))
        traits = traits_of(device)
        store = KernelStore(device, default_cache(), traits)
        with open_file(str(DATA / "linear_relu_half.pte"), check=False) as program:
            kernels = lower(program, "forward", traits).plan.kernels
        for kernel, code in store.spirv(kernels).items():
            words = np.frombuffer(code, np.uint32)
            # OpExecutionMode of 4 words, the entry point, DenormPreserve, 32
            starts = np.flatnonzero(words == (4 << 16 | 16))
            asks = any(words[at + 2 : at + 4].tolist() == [4459, 32] for at in starts)
            assert asks == (preserves and kernel.template == "elementwise/pointwise.comp")
        assert len({kernel.template for kernel in kernels}) == 2


@pytest.mark.device
def test_the_driver_cache_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that adds nothing to what it was given leaves nothing to write."""
    written: list[bytes] = []
    put = Cache.put_pipeline_cache

    def noted(cache: Cache, device_key: str, data: bytes) -> None:
        written.append(data)
        put(cache, device_key, data)

    monkeypatch.setattr(Cache, "put_pipeline_cache", noted)
    with api.Instance() as instance, api.Device(instance.pick()) as device:
        traits = traits_of(device)
        with open_file(str(DATA / "linear_relu_half.pte"), check=False) as program:
            kernels = lower(program, "forward", traits).plan.kernels
        for _ in range(2):
            store = KernelStore(device, Cache(tmp_path), traits)
            made = store.prepare(kernels)
            data = store._cache().get_data()
            monkeypatch.setattr(api.PipelineCache, "get_data", lambda _, data=data: data)
            store.close()
            del made
            assert written == [data]


@pytest.mark.device
def test_drivers_that_compile_late_do_so_while_other_kernels_are_compiled() -> None:
    """All but the last batch are dispatched before `prepare` returns, if something was compiled."""
    with api.Instance() as instance, api.Device(instance.pick()) as device:
        traits = traits_of(device)
        with open_file(str(DATA / "linear_relu_half.pte"), check=False) as program:
            kernel = lower(program, "forward", traits).plan.kernels[0]
        specs = [replace(kernel, macros=(*kernel.macros, ("PART", str(n)))) for n in range(35)]
        cache = Cache(None)
        for late, dispatches in ((False, 0), (True, 2), (True, 0)):
            store = KernelStore(
                device, cache if late else Cache(None), replace(traits, profile=replace(
                    traits.profile, compiles_at_dispatch=late))
            )  # fmt: skip
            seen: list[tuple[str, int, int]] = []
            before = device.queue.state.submitted
            made = store.prepare(specs, lambda *each: seen.append(each))
            assert [pipeline.alive for pipeline in made] == [True] * len(specs)
            assert device.queue.state.submitted - before == dispatches
            assert seen[-1] == ("pipeline", len(specs), len(specs))
            assert store.report.pipelines == len(specs)
            assert all(done <= total for _, done, total in seen)
