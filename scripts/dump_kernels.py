#!/usr/bin/env python3
"""Dumps the dispatches that tests and models lower to under several profiles, and compares two dumps.

    python scripts/dump_kernels.py dump OLD tests/ops/matmul tests/ops/conv
    python scripts/dump_kernels.py dump OLD --models resnet18 gpt2_cached --half
    python scripts/dump_kernels.py compare OLD NEW

For changes that should change no kernel. Nothing runs on a device: a test ends where it has lowered
its first graph. A dump has the templates too, so that kernels whose templates or macros changed are
compared by their SPIR-V without debug names. Prints each difference; the exit code is 1 if there is
one. A dump is a pickle: read only those that you wrote.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from purevk.errors import PurevkError  # noqa: E402
from purevk.graph.context import default_context  # noqa: E402
from purevk.ir import Graph  # noqa: E402
from purevk.program.variants import lowering, variant  # noqa: E402
from purevk.report import lowered  # noqa: E402
from purevk.shaders import shaderc  # noqa: E402
from purevk.shaders.source import GLSL_FOLDER, expand, source_files  # noqa: E402
from purevk.tuning import DEFAULT, DeviceTraits  # noqa: E402
from purevk.tuning.families import amd, mobile, nvidia  # noqa: E402

_HEADER = 5  # words of SPIR-V
_DEBUG = {3, 4, 5, 6, 7, 8, 317, 330}  # OpSource, OpName, OpString, OpLine and their like
Plans = dict[str, list[tuple[Any, ...]]]


def profiles(device: DeviceTraits) -> dict[str, DeviceTraits]:
    """Traits by name: those of the device, and of GPUs that are simulated with its features."""
    large = dataclasses.replace(
        device, profile=DEFAULT, cores=32, max_texels=0, subgroup_size=32, max_invocations=1024,
        max_shared_memory=49152, features=device.features | {"subgroup_shuffle", "integer_dot_product"},
        fragment_order=lambda dtype, columns: True,
    )  # fmt: skip
    matrices = {
        "coopmat_shape": (16, 16, 16), "coopmat_columns": (8, 16), "bfloat16_columns": (8, 16),
        "int8_columns": (8, 16), "bfloat16_fragments": True,
    }  # fmt: skip
    workgroup = {
        "workgroup_matrices": ((32, 16, 16, 128), (32, 32, 16, 256)), "max_workgroup_matrix": 256,
        "bfloat16_matrices": True,
    }  # fmt: skip
    replace = functools.partial(dataclasses.replace, large)
    return {
        "own": device,
        "gpu": large,
        "amd": replace(profile=amd.AMD, **matrices),
        "mobile": replace(profile=mobile.MOBILE, cores=4, max_shared_memory=16384),
        "nvidia": replace(profile=nvidia.NVIDIA, cores=132, **matrices, **workgroup),
    }


def dispatches_of(source: Callable[[], Graph], traits: DeviceTraits, **options: Any) -> list[Any]:
    """What a graph lowers to, as plain tuples; or the error."""
    try:
        plan = lowering.lower_graph(source, traits, **options).plan
    except PurevkError as error:
        return [("error", str(error))]
    inner = [each for plans in plan.inner.values() for each in plans]
    rows = [
        (
            (kernel.template, kernel.macros),
            (kernel.constants, kernel.bindings, kernel.subgroup_size),
            tuple((b.storage.name, b.write, b.kind, b.offset) for b in dispatch.bindings),
            tuple(map(str, (*dispatch.push, *dispatch.grid, dispatch.repeat))),
            tuple(map(str, (dispatch.flops, dispatch.nbytes, dispatch.params_buffer))),
            (dispatch.label, dispatch.external),
        )
        for each in (plan, *inner)
        for dispatch in (*each.once, *each.dispatches)
        for kernel in (dispatch.kernel,)
    ]
    return rows


class Hook:
    """As a plugin of pytest, ends tests where a program lowers its first graph."""

    def __init__(self) -> None:
        self.plans: Plans = {}
        self.name = ""
        callers: Any = variant, lowered
        for module in callers:
            module.lower_graph = self.lower

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.name = item.nodeid

    def lower(self, source: Callable[[], Graph], traits: DeviceTraits, *rest: Any) -> Any:
        for profile, each in profiles(traits).items():
            self.plans[f"{self.name} {profile}"] = dispatches_of(source, each)
        pytest.skip("lowered")


def dump(path: str, models: list[str], half: bool, tests: list[str]) -> None:
    hook = Hook()
    if tests:
        pytest.main(["-q", "-p", "no:cacheprovider", "-o", "addopts=", *tests], plugins=[hook])
    warnings.simplefilter("ignore")
    for name in models:
        hook.name = name
        try:
            _model(name, half)
        except (pytest.skip.Exception, Exception) as error:
            print(f"{name}: {error}".splitlines()[0])
    files = {
        str(file.relative_to(GLSL_FOLDER)): file.read_text() for file in GLSL_FOLDER.rglob("*.*")
    }
    Path(path).write_bytes(pickle.dumps((files, hook.plans)))
    print(f"{sum(map(len, hook.plans.values()))} dispatches of {len(hook.plans)} plans")


def _model(name: str, half: bool) -> None:
    """Compiles a model of tests/models/gallery, until it is lowered."""
    import torch
    from torch.utils import _pytree

    import purevk
    from tests.models.gallery import MODELS

    built = MODELS[name].build()
    module, inputs = built.module, built.inputs
    if half:
        cast = lambda x: x.half() if isinstance(x, torch.Tensor) and x.is_floating_point() else x  # noqa: E731
        module, inputs = module.half(), _pytree.tree_map(cast, inputs)
    purevk.compile(module, inputs, dynamic_shapes=built.dynamic_shapes, context=default_context())


def stripped(spirv: bytes) -> list[int]:
    """The words of SPIR-V without debug names."""
    words = list(memoryview(spirv).cast("I"))
    kept, at = words[:_HEADER], _HEADER
    while at < len(words):
        count = words[at] >> 16
        if words[at] & 0xFFFF not in _DEBUG:
            kept += words[at : at + count]
        at += count
    return kept


def _given(kernel: tuple[str, Any], files: Mapping[str, str]) -> Any:
    """The template, and the macros whose text is not their default."""
    name, macros = kernel
    return name, [
        (macro, text) for macro, text in macros if _defaults(*files.values()).get(macro) != {text}
    ]


@functools.cache
def _defaults(*files: str) -> dict[str, set[str]]:
    """The texts that templates define for a macro, by its name."""
    found: dict[str, set[str]] = {}
    for text in files:
        for name, default in re.findall(r"^ *# *define (\w+)(?!\w|\() *(.*)$", text, re.MULTILINE):
            found.setdefault(name, set()).add(default.partition("//")[0].strip())
    return found


class Sources:
    """Compares kernels (a template and its macros) of two dumps, whose templates it has."""

    def __init__(self, *files: Mapping[str, str]) -> None:
        self.files, self.compiled = files, 0
        self.same = functools.cache(self._same)
        self.text = functools.cache(self._text)

    def _same(self, old: tuple[str, Any], new: tuple[str, Any]) -> bool:
        files = self._files(old[0], 0)
        if files == self._files(new[0], 1) and (
            old == new or (files and _given(old, files) == _given(new, files))
        ):
            return True
        if self.text(old, 0) == self.text(new, 1):
            return True
        self.compiled += 1
        try:
            return self._words(old, 0) == self._words(new, 1)
        except PurevkError as error:
            print(f"not compared: {error}".splitlines()[0])
            return False

    def _find(self, number: int) -> Callable[[str], tuple[str, str]]:
        return lambda name: (name, self.files[number][name])

    def _files(self, name: str, number: int) -> Any:
        text = self.files[number].get(name)
        return text and source_files(text, name=name, include=self._find(number))

    def _text(self, kernel: tuple[str, Any], number: int) -> str:
        """What the compiler reads, without directives and spaces."""
        name, macros = kernel
        source, find = self.files[number][name], self._find(number)
        text = expand(source, name=name, macros=dict(macros), include=find)
        command = ["glslc", "-E", "-fshader-stage=compute", "-o", "-", "-"]
        done = subprocess.run(command, input=text, capture_output=True, text=True)
        lines = (line for line in done.stdout.splitlines() if not line.startswith("#"))
        return "".join("".join(lines).split()) + done.stderr

    def _words(self, kernel: tuple[str, Any], number: int) -> list[int]:
        name, macros = kernel
        source, find = self.files[number][name], self._find(number)
        spirv = shaderc.load().compile(source, name=name, macros=dict(macros), include=find)
        return stripped(spirv)


def compare(old: str, new: str) -> int:
    """Prints what differs between two dumps; gives the number of plans that do."""
    (files, plans), (new_files, new_plans) = (
        pickle.loads(Path(p).read_bytes()) for p in (old, new)
    )
    sources, equal, different = Sources(files, new_files), 0, 0
    for name in sorted({*plans, *new_plans}):
        rows, others = plans.get(name, []), new_plans.get(name, [])
        wrong = [f"{len(rows)} dispatches, then {len(others)}"] if len(rows) != len(others) else []
        for number, (row, other) in enumerate(zip(rows, others)):
            if row[1:] != other[1:] or row[0] == "error" != other[0]:
                pairs = [(x, y) for x, y in zip(row, other) if x != y]
                wrong.append(f"dispatch {number}: " + "; ".join(f"{x} -> {y}" for x, y in pairs))
            elif row[0] != "error" and not sources.same(row[0], other[0]):
                gone, added = ({*r[0][1]} - {*o[0][1]} for r, o in ((row, other), (other, row)))
                wrong.append(f"dispatch {number}: {row[0][0]}: {gone} -> {added}")
        equal += len(rows) if not wrong else 0
        different += bool(wrong)
        if wrong:
            print(name, *wrong[:3], sep="\n  ")
    print(f"{len(plans)} plans, {different} differ; {equal} dispatches are equal")
    print(f"{sources.compiled} kernels were compared by their SPIR-V")
    return different


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("action", choices=("dump", "compare"))
    parser.add_argument("file", help="the dump to write, or the old one")
    parser.add_argument("names", nargs="*", help="tests, or the new dump")
    parser.add_argument("--models", nargs="*", default=[], help="of tests/models/gallery")
    parser.add_argument("--half", action="store_true", help="models in float16")
    args = parser.parse_args()
    if args.action == "compare":
        return int(compare(args.file, args.names[0]) > 0)
    dump(args.file, args.models, args.half, args.names)
    return 0


if __name__ == "__main__":
    sys.exit(main())
