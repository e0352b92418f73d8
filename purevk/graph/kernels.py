"""Makes pipelines from kernel specs, in parallel, and keeps them. SPIR-V comes from the cache or
the compiler."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from purevk import api, knobs
from purevk.cache import Cache
from purevk.compiling import Compiled, load_or_compile
from purevk.errors import (
    DeviceError,
    DeviceLostError,
    OutOfDeviceMemoryError,
    ShaderCompilerError,
)
from purevk.graph.first_dispatch import FirstDispatches
from purevk.graph.kernel_files import dump, dump_spirv, overridden
from purevk.lower.lowering import KernelSpec
from purevk.shaders.cache_entry import CacheKey
from purevk.shaders.source import UNOPTIMIZED, CompileJob, find_include_beside
from purevk.shaders.templates import find_template
from purevk.tuning import DeviceTraits

_log = logging.getLogger("purevk")
GLSL_FOLDER = Path(__file__).parent.parent / "glsl"


_BATCH = 16  # pipelines of a driver that compiles them at the first dispatch


@dataclass
class KernelReport:
    """Counts of making kernels.

    Attributes:
        compiled: SPIR-V modules that the compiler made. cached: modules that the cache had.
        pipelines: pipelines made.
    """

    compiled: int = 0
    cached: int = 0
    pipelines: int = 0
    templates: dict[str, int] = field(default_factory=dict)


# Folders of templates that take subnormal float32 numbers for 0 where the device does by default. With the
# mode that keeps them, quotients and exponentials of an epilogue take longer: a gated product of one row 1.2
# times as long on an H200.
_FLUSHES_SUBNORMALS = ("matmul/", "conv/", "attention/", "quantized/")

_Source = tuple[str, tuple[tuple[str, str], ...]]  # a template and its macros


def _after(
    progress: Callable[[str, int, int], None], done: int, total: int
) -> Callable[[str, int, int], None]:
    """Reports the progress of a batch as that of all."""
    return lambda stage, count, of: progress(stage, done + count, total)


class KernelStore:
    """The pipelines of a device.

    One `KernelSpec` is one pipeline, for all programs that are loaded; it lives as long as one of
    them holds it.
    """

    def __init__(self, device: api.Device, cache: Cache, traits: DeviceTraits) -> None:
        self.device, self.cache, self.traits = device, cache, traits
        self._pipelines: weakref.WeakValueDictionary[KernelSpec, api.ComputePipeline] = (
            weakref.WeakValueDictionary()
        )
        self._sources: dict[str, str] = {}
        self._keys: dict[_Source, CacheKey] = {}
        self._lock = threading.RLock()
        self._driver_cache: api.PipelineCache | None = None
        self._on_disk = b""  # what the cache has of it
        self._dirty = False
        self.report = KernelReport()
        macros = {
            "KEEP_SUBNORMALS": device.features.denorm_preserve,
            "PACKS_TO_NEAREST": traits.profile.packs_to_nearest,
        }
        self._device_macros = {name: "1" for name, holds in macros.items() if holds}
        self._flushing_macros = {
            name: "1" for name in self._device_macros if name != "KEEP_SUBNORMALS"
        }
        # SPIR-V 1.6 writes workgroup sizes in a way that needs maintenance4.
        newest = 3 if device.features.maintenance4 else 2
        self.target_env = f"vulkan1.{min(device.physical.api_version[1], newest)}"

    @property
    def device_key(self) -> str:
        """The name of the device and driver in the cache."""
        physical = self.device.physical
        return f"{physical.name}|{physical.driver}|{physical.pipeline_cache_uuid.hex()}"

    def job(self, spec: KernelSpec) -> CompileJob:
        """The compile job of a spec."""
        own = find_template(spec.template)
        if own is not None:
            return CompileJob(
                own.text,
                name=spec.template,
                macros=dict(spec.macros),
                include=find_include_beside(own.folder),
                target_env=self.target_env,
            )
        source = self._sources.get(spec.template)
        if source is None:
            source = self._sources[spec.template] = (GLSL_FOLDER / spec.template).read_text(
                encoding="utf-8"
            )
        return CompileJob(
            source,
            name=spec.template,
            macros={**dict(spec.macros), **self._macros_of_device(spec.template)},
            include=GLSL_FOLDER,
            target_env=self.target_env,
            optimize=UNOPTIMIZED not in dict(spec.macros),
        )

    def _macros_of_device(self, template: str) -> Mapping[str, str]:
        flushes = template.startswith(_FLUSHES_SUBNORMALS)
        return self._flushing_macros if flushes else self._device_macros

    def key(self, spec: KernelSpec) -> CacheKey:
        """The cache key of a spec's SPIR-V."""
        short = (spec.template, spec.macros)
        if short not in self._keys:
            self._keys[short] = CacheKey.of(self.job(spec))
        return self._keys[short]

    def prepare(
        self,
        specs: Iterable[KernelSpec],
        progress: Callable[[str, int, int], None] | None = None,
        may_compile: bool = True,
    ) -> list[api.ComputePipeline]:
        """Makes the pipelines of all specs. Threads compile what the cache lacks.

        Args:
            progress: called with ("compile" or "pipeline", done, total).
            may_compile: False, or PUREVK_CACHE=only=1: what the cache lacks raises
                KernelNotCachedError.

        Returns:
            The pipelines. Who needs them keeps the list: a pipeline that nobody holds is released.
        """
        with self._lock:
            wanted = list(dict.fromkeys(specs))
            if folder := knobs.dump_folder():
                dump(folder, self._jobs(wanted))
            found = {spec: held for spec in wanted if (held := self._pipelines.get(spec))}
            missing = [spec for spec in wanted if spec not in found]
            if not missing:
                return list(found.values())
            may_compile = may_compile and not knobs.CACHE().only
            # A driver that compiles at the first dispatch compiles the pipelines of a batch while the
            # shader compiler makes the SPIR-V of the next one.
            overlaps = may_compile and self.traits.profile.compiles_at_dispatch
            size = _BATCH if overlaps else len(missing)
            with FirstDispatches(self.device) as dispatches:
                for first in range(0, len(missing), size):
                    batch, last = missing[first : first + size], first + size >= len(missing)
                    shown = progress
                    if progress is not None and len(batch) < len(missing):
                        shown = _after(progress, first, len(missing))
                    compiled = self.report.compiled
                    made = self._made(batch, shown, may_compile)
                    found.update(zip(batch, made))
                    if self.report.compiled > compiled and not last:
                        dispatches.submit(list(zip(batch, made)))
            self._pipelines.update((spec, found[spec]) for spec in missing)
            self._dirty = True
            return [found[spec] for spec in wanted]

    def _made(
        self,
        specs: list[KernelSpec],
        progress: Callable[[str, int, int], None] | None,
        may_compile: bool,
    ) -> list[api.ComputePipeline]:
        """New pipelines of specs."""
        modules = self._modules(specs, progress, may_compile)
        try:
            made = self._create(specs, modules.spirv, progress)
        except (DeviceLostError, OutOfDeviceMemoryError):
            raise
        except DeviceError as error:
            if not may_compile or modules.overridden:
                raise
            modules = self._compiled_again(specs, modules, error)
            made = self._create(specs, modules.spirv, progress)
        self.report.pipelines += len(made)
        return made

    def pipeline(self, spec: KernelSpec) -> api.ComputePipeline:
        """The pipeline of a spec that was prepared and is held."""
        return self._pipelines[spec]

    def spirv(self, specs: Iterable[KernelSpec]) -> dict[KernelSpec, bytes]:
        """The SPIR-V of specs that were prepared, from the cache, or compiled again."""
        with self._lock:
            wanted = list(dict.fromkeys(specs))
            modules = self._modules(wanted, None, True)
            return {spec: modules.spirv[self.key(spec)] for spec in wanted}

    def _create(
        self,
        specs: list[KernelSpec],
        spirv: Mapping[CacheKey, bytes],
        progress: Callable[[str, int, int], None] | None,
    ) -> list[api.ComputePipeline]:
        return api.create_pipelines(
            self.device,
            [self._pipeline_spec(spec, spirv[self.key(spec)]) for spec in specs],
            cache=self._cache(),
            progress=None
            if progress is None
            else lambda done: progress("pipeline", done, len(specs)),
        )

    def _compiled_again(
        self, specs: list[KernelSpec], modules: Compiled, error: DeviceError
    ) -> Compiled:
        """The SPIR-V of specs after the driver has refused some of it: what the cache had is
        compiled again. Raises `error` if that changes nothing."""
        kept = {self.key(spec) for spec in specs}.difference(modules.fresh)
        for key in kept:
            self.cache.drop_spirv(key)
        try:
            again = self._modules(specs, None, True)
        except ShaderCompilerError:
            raise error from None  # there is no compiler
        if all(again.spirv[key] == modules.spirv[key] for key in kept):
            raise error
        _log.warning("%s; the cache held other SPIR-V than the compiler makes", error.what)
        return again

    def _modules(
        self,
        specs: list[KernelSpec],
        progress: Callable[[str, int, int], None] | None,
        may_compile: bool,
    ) -> Compiled:
        keys = {(spec.template, spec.macros): self.key(spec) for spec in specs}
        jobs = self._jobs(specs)
        done = load_or_compile(
            jobs,
            self.cache,
            progress=None if progress is None else partial(progress, "compile"),
            may_compile=may_compile,
        )
        report, fresh = self.report, set(done.fresh)
        for (template, _), key in keys.items():
            if key in fresh:
                report.templates[template] = report.templates.get(template, 0) + 1
        report.cached += len(jobs) - len(fresh)
        report.compiled += len(fresh)
        if folder := knobs.dump_folder():
            dump_spirv(folder, done.spirv)
        if knobs.OVERRIDE():
            changed = overridden(done.spirv, jobs)
            done = replace(done, spirv={**done.spirv, **changed}, overridden=frozenset(changed))
        return done

    def _jobs(self, specs: Iterable[KernelSpec]) -> dict[CacheKey, Callable[[], CompileJob]]:
        """How to compile each kernel, by its key."""
        return {self.key(spec): partial(self.job, spec) for spec in specs}

    def _pipeline_spec(self, spec: KernelSpec, spirv: bytes) -> api.PipelineSpec:
        size = spec.subgroup_size
        if size == self.traits.subgroup_size and not self.device.chooses_subgroup_size:
            size = None  # the size that kernels have anyway
        kinds = tuple(kind.partition(":")[0] for kind in spec.bindings)
        return api.PipelineSpec(
            spirv,
            kinds,
            specialization=dict(spec.constants),
            required_subgroup_size=size,
            label=spec.template,
        )

    def _cache(self) -> api.PipelineCache:
        if self._driver_cache is None:
            physical = self.device.physical
            data = self.cache.get_pipeline_cache(
                self.device_key,
                vendor=physical.vendor_id,
                device=physical.device_id,
                pipeline_uuid=physical.pipeline_cache_uuid,
            )
            self._on_disk = data or b""
            self._driver_cache = api.PipelineCache(self.device, self._on_disk)
        return self._driver_cache

    def save(self) -> None:
        """Writes the driver's pipeline cache to disk if pipelines were made since the last time, and
        the driver has added any of them."""
        with self._lock:
            if self._dirty and self._driver_cache is not None and not self.device.closed:
                self._dirty = False
                try:
                    data = self._driver_cache.get_data()
                except DeviceError as error:  # it only saves time the next time
                    _log.info("the driver's pipeline cache is not kept: %s", error.what)
                    return
                if data != self._on_disk:
                    self.cache.put_pipeline_cache(self.device_key, data)
                    self._on_disk = data

    def close(self) -> None:
        """Saves the driver's cache and destroys the pipelines."""
        self.save()
        for pipeline in list(self._pipelines.values()):
            pipeline.destroy()
        self._pipelines.clear()
        if self._driver_cache is not None:
            self._driver_cache.destroy()
            self._driver_cache = None
