"""Plans in the cache: they are those that lowering makes, and none serves a file, a device or
settings that it was not made for."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import purevk
from purevk import api
from purevk.cache import Cache
from purevk.cli import main
from purevk.dtypes import DType
from purevk.errors import FileFormatError, UnsupportedProgramError
from purevk.frontends.files import FilePart, FileSource, open_file
from purevk.graph.context import Context
from purevk.ir import TensorType, Value
from purevk.ir.printer import to_text
from purevk.ops import executors, extension, registry
from purevk.program.leaves import Leaves
from purevk.program.plan_cache import cache as cache_module
from purevk.program.plan_cache import code, comparison, records
from purevk.program.plan_cache.cache import PlanCache
from purevk.report import lowered
from purevk.schedule.plan import Lowered
from purevk.tuning import Choices
from tests.ops.harness import context as shared_context
from tests.pickles import pickles
from tests.program.harness import FILES, RELEASES, data_files, samples_of

pytestmark = pytest.mark.device
RUN = [
    "1.5.1/kv_cache_dynamic", "1.5.1/attention_sdpa_dynamic", "1.5.1/external", "1.2.0/methods", "1.2.0/counter",
    "1.2.0/lstm", "1.2.0/int8_weight", "1.2.0/gathers", "1.2.0/convnet_half", "1.0.1/int4_embedding",
]  # fmt: skip


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    """The device of the tests, with a cache for plans of its own, and without what other tests have
    registered."""
    monkeypatch.setenv("PUREVK_VERIFY", "0")
    for module, name, empty in (
        (executors, "_executors", {}),
        (executors, "_allowed", set()),
        (extension, "_own", {}),
        (extension, "_withdrawn", {}),
    ):
        monkeypatch.setattr(module, name, empty)
    found = shared_context()
    monkeypatch.setattr(found, "cache", Cache(tmp_path / "plans"))
    yield found


@dataclass
class Opened:
    """A method of a file, lowered, and what keeps its plan."""

    plans: PlanCache
    key: str
    lowered: Lowered


def lower(context: Context, path: Path, data: Sequence[Path] = (), method: str = "") -> Opened:
    program = open_file(path, data, check=False)
    method = method or program.methods[0]
    leaves = Leaves()
    made = lowered.lower(program, method, context.traits, None, leaves)
    plans = PlanCache.of(context, FileSource(program, method), leaves)
    assert plans is not None
    key = plans.key(method, None, None, False)
    assert key is not None
    return Opened(plans, key, made)


def text(made: Lowered) -> list[str]:
    """All of a lowered method that matters, as text."""
    found = [
        to_text(made.imported),
        to_text(made.graph),
        repr(made.guards),
        repr(made.graph.constraints),
        repr(made.indices),
        repr(sorted((value.name, label) for value, label in made.graph.labels.items())),
    ]
    for plan in made.plan.nested():
        found += [
            to_text(plan.graph),
            repr([(value.name, size) for value, size in plan.sizes.items()]),
            repr([[value.name for value in each] for each in (*plan.uploads, *plan.downloads)]),
            repr(
                [(value.name, constant.known) for value, constant in plan.graph.constants.items()]
            ),
            repr((plan.ranges, plan.requirements, list(plan.checks.values()))),
            repr(
                [value.name for value in (*plan.constants, *plan.once_constants, *plan.once_kept)]
            ),
        ]
        found += [
            repr(
                (
                    each.kernel, each.push, each.grid, each.label, each.params_buffer, each.flops, each.nbytes,
                    [(b.storage.name, b.write, b.kind, b.offset) for b in each.bindings],
                )
            )
            for each in (*plan.once, *plan.dispatches)
        ]  # fmt: skip
    return found


def content(made: Lowered) -> list[bytes]:
    """The bytes of the constants of the graph that runs."""
    return [
        bytes(each.data) for plan in made.plan.nested() for each in plan.graph.constants.values()
    ]


def run(
    path: Path, data: Sequence[Path], context: Context, file: str
) -> tuple[list[Any], set[str]]:
    """The results of all recorded calls of a file, and the phases of loading it."""
    with purevk.load(path, data, context=context) as program:
        results = [
            program.method(method)(*inputs)
            for method, calls in samples_of(file).items()
            for inputs, _ in calls
        ]
        return results, set(program.seconds)


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other):
            assert_equal(left, right)
    else:
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("file", FILES)
def test_a_kept_plan_is_what_lowering_makes(file: str, context: Context, tmp_path: Path) -> None:
    """Also of a file with other weights: bytes that an entry leaves out decide nothing."""
    path, data = RELEASES / f"{file}.pte", data_files(file)
    rng = np.random.default_rng(5)
    with open_file(path, data) as program:
        methods = program.methods
    for method in methods:
        made = lower(context, path, data, method)
        assert made.plans.put(made.key, made.lowered)
        found = made.plans.get(made.key)
        assert found is not None
        assert text(found) == text(made.lowered)
        assert content(found) == content(made.lowered)
        paths = []
        for number, (before, skipped) in enumerate(zip(made.plans.files, head_of(made)["skipped"])):
            other = bytearray(before)
            for first, size in skipped:
                other[first : first + size] = rng.bytes(size)
            paths.append(tmp_path / f"{method}{number}{(path, *data)[number].suffix}")
            paths[-1].write_bytes(other)
        again = lower(context, paths[0], paths[1:], method)
        assert text(again.lowered) == text(made.lowered)
        served = again.plans.get(made.key)
        assert served is not None and content(served) == content(again.lowered)


def head_of(made: Opened) -> Any:
    payload = made.plans.context.cache.get_plan(made.key)
    assert payload is not None
    return records.Reader(payload).head


def test_some_plans_depend_on_elements(context: Context) -> None:
    """Else the test above would hold without a `ReadLog`."""
    depending = [
        file
        for file in FILES
        if file.startswith("1.2.0/")
        and lower(context, RELEASES / f"{file}.pte", data_files(file)).lowered.read
    ]
    assert len(depending) > 10


@pytest.mark.parametrize("file", RUN)
def test_files_run_by_kept_plans(file: str, context: Context) -> None:
    path, data = RELEASES / f"{file}.pte", data_files(file)
    expected, phases = run(path, data, context, file)
    assert {"import", "passes", "lower", "plan"} <= phases
    again, phases = run(path, data, context, file)
    assert not phases & {"import", "passes", "lower"}
    assert_equal(again, expected)


def test_other_weights_run_by_the_same_plan(context: Context, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    x = torch.randn(3, 8)
    results = []
    for number in (1, 2):
        torch.manual_seed(number)
        module = torch.nn.Sequential(torch.nn.Linear(8, 5), torch.nn.Tanh()).eval()
        path = tmp_path / "model.pvk"
        with purevk.compile(module, (x,), context=context) as program:
            program.save(path)
        with purevk.load(path, context=context) as program:
            made = program.forward(x)
            # The checksums of tensors are in the file, so other weights are another file.
            assert "lower" in program.seconds
        torch.testing.assert_close(made, module(x).detach())
        with purevk.load(path, context=context) as program:
            assert "lower" not in program.seconds
            assert_equal(program.forward(x).numpy(), made.numpy())
        results.append(made)
    assert not torch.equal(*results)


def test_other_elements_that_decided_something_are_lowered_anew(
    context: Context, tmp_path: Path
) -> None:
    file = next(
        file
        for file in FILES
        if lower(context, RELEASES / f"{file}.pte", data_files(file)).lowered.read
    )
    made = lower(context, RELEASES / f"{file}.pte", data_files(file))
    assert made.plans.put(made.key, made.lowered)
    span = made.plans._span_of(made.lowered.read[0])
    assert span is not None and span[0] == 0
    changed = bytearray(made.plans.files[0])
    changed[span[1]] ^= 1
    path = tmp_path / "changed.pte"
    path.write_bytes(changed)
    other = open_file(path, data_files(file), check=False)
    plans = PlanCache.of(context, FileSource(other, "forward"), Leaves())
    assert plans is not None and plans.get(made.key) is None
    assert made.plans.get(made.key) is not None  # the entry is still there for its own file


def test_any_other_byte_is_compared(context: Context, tmp_path: Path) -> None:
    made = lower(context, RELEASES / "1.2.0/mlp.pte")
    assert made.plans.put(made.key, made.lowered)
    skipped = head_of(made)["skipped"][0]
    before = bytes(made.plans.files[0])
    left_out = {at for first, size in skipped for at in range(first, first + size)}
    assert left_out  # the weights
    for at in range(0, len(before), 97):
        after = bytearray(before)
        after[at] ^= 0xFF
        plans = PlanCache(context, [FilePart(memoryview(bytes(after)), [], [])], Leaves(), {})
        assert (plans.get(made.key) is not None) == (at in left_out)


def test_settings_that_lowering_depends_on_have_plans_of_their_own(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = RELEASES / "1.2.0/convnet.pte"

    def phases() -> set[str]:
        with purevk.load(path, context=context) as program:
            return set(program.seconds)

    assert "lower" in phases()
    assert "lower" not in phases()
    monkeypatch.setenv("PUREVK_TIMEOUT", "77")  # has no part in it
    assert "lower" not in phases()
    for name, value in {
        "PUREVK_SKIP_PASSES": "fold_batch_norm",
        "PUREVK_CHECK_INDICES": "0",
        "PUREVK_TUNED": "0",
    }.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert "lower" in phases(), name
    with monkeypatch.context() as patch:
        traits = dataclasses.replace(context.traits, max_shared_memory=16384)
        patch.setattr(context, "traits", traits)
        assert "lower" in phases()
        answers = {"matmul: a problem": "a kernel"}
        patch.setattr(
            context, "traits", dataclasses.replace(traits, choices=Choices(lambda: answers))
        )
        assert "lower" in phases()
    assert "lower" not in phases()
    monkeypatch.setattr(cache_module, "CODE", "another version")
    assert "lower" in phases()


@pytest.mark.parametrize("name", ["PUREVK_VERIFY", "PUREVK_DUMP", "PUREVK_CACHE"])
def test_who_wants_to_see_passes_gets_them(
    name: str, context: Context, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    value = {"PUREVK_VERIFY": "1", "PUREVK_DUMP": str(tmp_path / "dump"), "PUREVK_CACHE": "plans=0"}
    path = RELEASES / "1.2.0/mlp.pte"
    purevk.load(path, context=context).close()
    monkeypatch.setenv(name, value[name])
    with purevk.load(path, context=context) as program:
        assert "lower" in program.seconds and "plan" not in program.seconds


def test_files_of_one_size_have_plans_of_their_own(context: Context) -> None:
    paths = [RELEASES / "1.2.0/mlp.pte", RELEASES / "1.2.0/mlp_dynamic.pte"]
    assert len({path.stat().st_size for path in paths}) == 1
    for known in (False, True, True):
        for path in paths:
            with purevk.load(path, context=context) as program:
                assert ("lower" not in program.seconds) == known


def test_a_folder_that_cannot_be_written_is_read(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = RELEASES / "1.2.0/mlp.pte"
    purevk.load(path, context=context).close()
    monkeypatch.setattr(context.cache._entries, "writable", False)
    with purevk.load(path, context=context) as program:
        assert "lower" not in program.seconds
    with purevk.load(RELEASES / "1.2.0/norms.pte", context=context) as program:
        assert "lower" in program.seconds


def test_tensors_of_other_methods_are_not_compared(context: Context, tmp_path: Path) -> None:
    """Nor those that no method reads, in files that say where tensors are."""
    torch = pytest.importorskip("torch")

    class Large(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(1 << 15, 1 << 8))

        def forward(self, x: Any) -> Any:
            return x @ self.table.T

    path = tmp_path / "two.pvk"
    methods = {name: (Large().eval(), (torch.randn(2, 1 << 8),)) for name in ("encode", "decode")}
    with purevk.compile(methods, context=context) as program:
        program.save(path)
    made = lower(context, path, method="encode")
    assert made.plans.put(made.key, made.lowered)
    left_out = sum(size for _, size in head_of(made)["skipped"][0])
    assert left_out == 2 * 4 << 23 and path.stat().st_size - left_out < 1 << 16


def test_ranges() -> None:
    without = comparison.without
    assert without([], []) == without([(3, 0)], []) == []
    assert without([(8, 4), (0, 4), (12, 1)], []) == [(0, 4), (8, 5)]
    assert without([(0, 10), (2, 3), (8, 4)], []) == [(0, 12)]
    assert without([(0, 10)], [(3, 2), (9, 9)]) == [(0, 3), (5, 4)]
    assert without([(0, 4), (4, 4)], [(0, 8)]) == []
    rng = np.random.default_rng(8)
    for _ in range(200):
        ranges = [tuple(map(int, rng.integers(0, 20, 2))) for _ in range(rng.integers(0, 6))]
        read = [tuple(map(int, rng.integers(0, 20, 2))) for _ in range(rng.integers(0, 4))]
        bytes_of = lambda these: {at for first, size in these for at in range(first, first + size)}  # noqa: E731
        found = without(ranges, read)
        assert bytes_of(found) == bytes_of(ranges) - bytes_of(read)
        assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(found))


def test_the_code_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes and dates count, and contents where all dates are one, or an installer noted them."""
    package = tmp_path / "purevk"
    (package / "ops").mkdir(parents=True)
    files = [package / "one.py", package / "ops" / "two.comp"]
    monkeypatch.setattr(code, "_PACKAGE", str(package))
    assert code.code() == ""
    names = []

    def write(text: str, *dates: int) -> None:
        for path, date in zip(files, dates):
            path.write_text(text)
            os.utime(path, (date, date))
        names.append(code.code())

    write("a", 100, 200)
    write("a", 100, 200)
    assert names[0] == names[1]
    write("a", 100, 201)
    write("ab", 100, 200)
    write("a", 100, 100)
    write("b", 100, 100)
    (tmp_path / "purevk-0.2.0.dist-info").mkdir()
    record = tmp_path / "purevk-0.2.0.dist-info" / "RECORD"
    record.write_text("one.py,sha256=1")
    write("b", 100, 100)
    record.write_text("one.py,sha256=2")
    write("b", 100, 100)
    assert len(set(names)) == len(names) - 1


def test_code_that_changes_meanwhile_keeps_nothing(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lower(context, RELEASES / "1.2.0/mlp.pte")
    with monkeypatch.context() as patch:
        patch.setattr(code, "code", lambda: "another")
        assert not made.plans.put(made.key, made.lowered)
    assert made.plans.put(made.key, made.lowered)


@pytest.mark.parametrize("kind", ["pte", "pte with a blob", "ptd", "pvk"])
def test_what_graphs_are_read_from_is_compared(kind: str, context: Context, tmp_path: Path) -> None:
    """Also of a file that states that all of it is tensors."""
    file = {"pte with a blob": "1.0.1/vulkan_w8", "ptd": "1.5.1/external"}.get(kind, "1.2.0/mlp")
    path, data = RELEASES / f"{file}.pte", data_files(file)
    if kind == "pvk":
        with purevk.load(path, context=context) as program:
            path = tmp_path / "mlp.pvk"
            program.save(path)
    made = lower(context, path, data)
    plans = made.plans
    plans.parts = [part._replace(tensors=[(0, len(part.view))]) for part in plans.parts]
    assert plans.put(made.key, made.lowered)
    number = len(plans.parts) - 1 if kind == "ptd" else 0
    assert data or kind != "ptd"
    structure = plans.parts[number].structure
    assert structure and sum(size for _, size in structure) > 100
    compared = {at for first, size in structure for at in range(first, first + size)}
    for at in sorted(compared)[:: max(len(compared) // 50, 1)]:
        parts = list(plans.parts)
        after = bytearray(parts[number].view)
        after[at] ^= 0xFF
        parts[number] = parts[number]._replace(view=memoryview(bytes(after)))
        assert PlanCache(context, parts, Leaves(), {}).get(made.key) is None
    assert PlanCache(context, plans.parts, Leaves(), {}).get(made.key) is not None


def test_registered_operators_turn_plans_off(context: Context) -> None:
    path = RELEASES / "1.2.0/mlp.pte"
    purevk.load(path, context=context).close()
    purevk.ops.register_executor("mylib.kept")(np.negative)
    try:
        with purevk.load(path, context=context) as program:
            assert "lower" in program.seconds
    finally:
        purevk.ops.unregister_executor("mylib.kept")
    purevk.ops.register_pointwise("mylib.kept", "-x")
    try:
        with purevk.load(path, context=context) as program:
            assert "lower" in program.seconds
    finally:
        purevk.ops.unregister("mylib.kept")
    relu = registry.find("aten.relu.default")
    assert relu is not None
    purevk.ops.register_pointwise("aten.relu", "x", replace=True)
    try:
        assert extension.any_changed()
        purevk.ops.unregister("aten.relu")
        assert extension.any_changed()
        with purevk.load(RELEASES / "1.2.0/norms.pte", context=context) as program:
            assert "lower" in program.seconds
    finally:
        registry.register(relu)
    with purevk.load(path, context=context) as program:
        assert "lower" not in program.seconds


def test_specializations_have_plans_too(context: Context) -> None:
    """Sizes that break a guard, and sizes above the bounds."""
    path = RELEASES / "1.2.0/mlp_dynamic.pte"

    def calls() -> tuple[list[np.ndarray], int]:
        with purevk.load(path, context=context, bounds="grow") as program:
            (width,) = samples_of("1.2.0/mlp_dynamic")["forward"][0][0][0].shape[1:]
            rng = np.random.default_rng(2)
            given = [rng.standard_normal((rows, width), np.float32) for rows in (1, 2, 300)]
            made = [program.forward(x) for x in given]
            return made, len(program.method("forward").specializations)

    expected, count = calls()
    entries = {each.digest for each in context.cache.entries() if each.kind == "plan"}
    assert len(entries) == count
    again, _ = calls()
    assert_equal(again, expected)
    assert {each.digest for each in context.cache.entries()} == entries


def test_methods_share_weights_and_states_as_before(context: Context) -> None:
    path = RELEASES / "1.2.0/methods.pte"
    found = []
    for _ in range(2):
        with purevk.load(path, context=context) as program:
            found.append(
                (
                    program.weights.nbytes,
                    len(program.weights.ranges),
                    len(program.states.ranges),
                    sorted(program.state),
                    "lower" in program.seconds,
                )
            )
    assert found[0][:-1] == found[1][:-1]
    assert found[0][-1] and not found[1][-1]


def test_data_dependent_sizes(context: Context, tmp_path: Path) -> None:
    """One without a bound is lowered again during a call, and refused with strict bounds."""
    torch = pytest.importorskip("torch")

    class Repeated(torch.nn.Module):
        def forward(self, x: Any, counts: Any) -> Any:
            return torch.repeat_interleave(x, counts) * 2

    path = tmp_path / "repeated.pvk"
    x, few, many = torch.randn(4), torch.tensor([1, 2, 0, 1]), torch.tensor([100, 200, 3, 400])
    with purevk.compile(Repeated().eval(), (x, few), context=context) as program:
        program.save(path)
    for known in (False, True):
        with purevk.load(path, context=context) as program:
            for counts in (few, many, few):
                torch.testing.assert_close(
                    program.forward(x, counts), torch.repeat_interleave(x, counts) * 2
                )
            assert ("lower" not in program.seconds) == known
    with pytest.raises(UnsupportedProgramError, match="no upper bound"):
        purevk.load(path, context=context, bounds="strict")


def test_control_flow_and_seeds(context: Context, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Chosen(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.cond(
                x.sum() > 0, lambda x: x + 1 + torch.rand(3), lambda x: x - torch.rand(3), (x,)
            )

    path = tmp_path / "chosen.pvk"
    x = torch.ones(3)
    with purevk.compile(Chosen().eval(), (x,), context=context) as program:
        program.save(path)
    results = []
    for known in (False, True):
        with purevk.load(path, context=context) as program:
            assert ("lower" not in program.seconds) == known
            assert program.report()["control_flow"] == 1
            purevk.manual_seed(3)
            made = [program.forward(x), program.forward(-x)]
            assert (made[0] >= 2).all() and (made[1] <= -1).all() and made[0].std() > 0
            results.append(torch.stack(made))
    assert torch.equal(*results)


def test_operators_on_the_cpu(topk_on_the_cpu: Path, context: Context) -> None:
    x = np.random.default_rng(4).standard_normal((4, 10), np.float32)
    results = []
    for known in (False, True):
        with purevk.load(topk_on_the_cpu, context=context) as program:
            assert ("lower" not in program.seconds) == known
            assert program.report()["cpu_nodes"] == 1
            shape = [int(size) for size in program.inputs[0].sizes]
            results.append(program.forward(x[: shape[0], : shape[1]]))
    assert_equal(results[0], results[1])


def test_pickles_run_no_code(context: Context, tmp_path: Path) -> None:
    """In place of an entry's payload, and of each of its parts."""
    made = lower(context, RELEASES / "1.2.0/mlp.pte")
    mark = str(tmp_path / "ran")
    assert made.plans.put(made.key, made.lowered)
    whole = context.cache.get_plan(made.key)
    assert whole is not None
    size, count = struct.unpack_from("<II", whole)
    for payload in pickles(mark):
        for changed in (
            payload,
            struct.pack("<II", len(payload), 0) + payload,
            whole[: 8 + size] + payload,
            whole[: 8 + size + 4 * count] + payload,
        ):
            context.cache.put_plan(made.key, changed, "device", "forward")
            found = made.plans.get(made.key)
            assert found is None or text(found) == text(made.lowered)
            assert not Path(mark).exists()
    for payload in (b"", b"\0" * 8, b"\xff" * 64, whole[:-1] if count else b"", whole[: 8 + size]):
        context.cache.put_plan(made.key, payload, "device", "forward")
        if made.plans.get(made.key) is None:
            assert context.cache.get_plan(made.key) is None  # it is dropped


NAMES = [
    "os:system", "builtins:exec", "subprocess:Popen", "purevk.ops.extension:register_kernel",
    "purevk.ops.registry:Operator", "purevk.ir.graph:map_leaves", "purevk.ir.graph:Layout",
    "purevk.irrelevant:Graph", "purevk.ir.graph:np", "purevk.ir..os:system", "purevk.cache:Cache",
    "purevk.ops.executors:Executor", "purevk.lower.lowering:Lowering", "purevk.ir.types:Value", "tuple 3",
    "tuple -1", "tuple 0", "tuple x", "dict", "node", "leaf", "span", "bytes", "attribute", "dim", "dtype", "",
]  # fmt: skip
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    1 << 40,
    1.5,
    "x",
    "",
    "float32",
    [],
    [1],
    {},
    2.0,
    "mul",
]


def changed(payload: bytes, draw: random.Random) -> bytes:
    """A payload with a change of bytes, of its header, or of a number of its tables."""
    size, count = struct.unpack_from("<II", payload)
    header, rest = json.loads(payload[8 : 8 + size]), bytearray(payload[8 + size :])
    how = draw.randrange(8)
    if how == 0:
        made = bytearray(payload)
        for _ in range(draw.choice((1, 1, 4))):
            made[draw.randrange(len(made))] = draw.randrange(256)
        return bytes(made)
    if how == 1:
        return payload[: draw.randrange(len(payload))]
    if how == 2:
        header["scalars"][draw.randrange(len(header["scalars"]))] = draw.choice(VALUES)
    elif how == 3:
        draw.choice(header["groups"])[0] = draw.choice(NAMES)
    elif how == 4:
        draw.choice(header["groups"])[1] = draw.choice(VALUES)
    elif how == 5:
        draw.shuffle(header["groups"])
    else:
        for _ in range(draw.choice((1, 1, 5))):
            at = draw.randrange(count)
            other = draw.choice((draw.randrange(count), draw.randrange(1 << 32)))
            number = bytes(rest[4 * other : 4 * other + 4]) or struct.pack("<I", other)
            rest[4 * at : 4 * at + 4] = number
    described = json.dumps(header).encode()
    return struct.pack("<II", len(described), count) + described + bytes(rest)


@pytest.mark.parametrize(
    "file", ["1.2.0/mlp_dynamic", "1.2.0/convnet_half", "1.5.1/kv_cache_dynamic"]
)
def test_changed_payloads_are_misses_or_plans(file: str, context: Context) -> None:
    """Whatever is changed, reading raises nothing but what counts as damaged, and what it makes has
    the types that are declared: it can be written and read again."""
    made = lower(context, RELEASES / f"{file}.pte", data_files(file))
    assert made.plans.put(made.key, made.lowered)
    payload = context.cache.get_plan(made.key)
    assert payload is not None
    draw = random.Random(7)
    misses = 0
    for _ in range(300):
        try:
            other = changed(payload, draw)
            found = records.Reader(other, made.plans.files, shared_leaf).root()
            for node in found.graph.nodes if isinstance(found, Lowered) else ():
                assert isinstance(node.args, tuple)
        except records.DAMAGED:
            misses += 1
            continue
        again = records.Writer(made.plans._span_of).payload(found, None)
        records.Reader(again, made.plans.files).root()
    assert 100 < misses < 300
    for _ in range(20):
        context.cache.put_plan(made.key, changed(payload, draw), "device", "forward")
        assert isinstance(made.plans.get(made.key), Lowered | None)


def shared_leaf(name: str, dtype: Any, dims: Any, *_: Any) -> Value:
    return Value(name, TensorType(dtype, dims))


def test_damaged_arguments_of_operators_are_typed_errors() -> None:
    """They are read when a call needs them."""
    payload = records.Writer(plain=True).payload((1, 2.5, "x", None), None)
    assert records.Attribute(payload).open() == (1, 2.5, "x", None)
    draw = random.Random(3)
    refused = 0
    for _ in range(200):
        try:
            records.Attribute(changed(payload, draw)).open()
        except FileFormatError as error:
            refused += 1
            assert "cache clear" in error.next
    assert refused > 50


def test_fields_of_other_types_are_no_plans(context: Context) -> None:
    """For each field of each class of a plan: a value that its type does not have."""
    made = lower(context, RELEASES / "1.5.1/kv_cache_dynamic.pte")
    objects: dict[type, Any] = {}
    stack: list[Any] = [made.lowered]
    while stack:
        each = stack.pop()
        if isinstance(each, (tuple, frozenset)):
            stack += each
        elif isinstance(each, dict):
            stack += [*each, *each.values()]
        elif dataclasses.is_dataclass(each) and type(each) not in objects:
            objects[type(each)] = each
            stack += vars(each).values()
    checked = 0
    for kind, each in objects.items():
        for field in dataclasses.fields(kind):
            declared = str(field.type)
            if any(word in declared for word in ("Any", "Arg", "DType")):
                continue  # some of the values below are right there
            before = vars(each)[field.name]
            for wrong in (DType.bool, (DType.bool,), ((1, "x"),), {"x": DType.bool}):
                vars(each)[field.name] = wrong
                try:
                    with pytest.raises((records.NotCacheable, *records.DAMAGED)):
                        records.Reader(records.Writer().payload(each, None)).root()
                finally:
                    vars(each)[field.name] = before
                checked += 1
    assert checked > 200


def test_one_object_stays_one(context: Context) -> None:
    """Values, nodes and graphs, which are compared by identity; equal types become one."""
    made = lower(context, RELEASES / "1.2.0/convnet.pte").lowered
    payload = records.Writer().payload(made, None)
    read = records.Reader(payload).root()
    value = read.graph.nodes[0].results[0]
    assert any(value is each for node in read.graph.nodes[1:] for each in node.inputs)
    assert read.plan.graph.nodes[0] in read.plan.nodes_of or read.plan.graph.nodes
    types = [each.type for node in read.graph.nodes for each in node.results]
    assert len({id(each) for each in types}) == len(set(types))


def test_damaged_entries_are_misses(context: Context) -> None:
    path = RELEASES / "1.2.0/mlp.pte"
    purevk.load(path, context=context).close()
    (entry,) = [each for each in context.cache.entries() if each.kind == "plan"]
    assert entry.name == "mlp.pte, forward" and not entry.problem
    whole = entry.path.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:-1] + b"x", b""):
        entry.path.write_bytes(damaged)
        with purevk.load(path, context=context) as program:
            assert "lower" in program.seconds
        with purevk.load(path, context=context) as program:
            assert "lower" not in program.seconds


def test_what_cannot_be_read_is_not_kept(context: Context) -> None:
    made = lower(context, RELEASES / "1.2.0/mlp.pte")
    first = made.lowered.plan.once[0] if made.lowered.plan.once else made.lowered.plan.dispatches[0]
    object.__setattr__(first, "label", np.float32)  # a class that is no part of a plan
    assert not made.plans.put(made.key, made.lowered)
    assert context.cache.get_plan(made.key) is None


SCRIPT = """
import sys
import numpy, purevk
with purevk.load(sys.argv[1]) as program:
    made = program.forward(numpy.linspace(-1, 1, 8, dtype=numpy.float32).reshape(2, 4)[:, :int(sys.argv[2])])
    print(sorted(program.seconds), "purevk.ops" in sys.modules, "purevk.passes.pipeline" in sys.modules)
    print(made.tobytes().hex())
"""


def test_other_processes_find_them(tmp_path: Path) -> None:
    """Hashes of names differ between processes. Neither operators nor passes are imported."""
    torch = pytest.importorskip("torch")
    path = tmp_path / "model.pvk"
    n = torch.export.Dim("n", min=2, max=64)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Softmax(-1)).eval()
    with purevk.compile(
        module, (torch.randn(4, 3),), [{0: n}], context=shared_context()
    ) as program:
        program.save(path)
    environment = {
        **os.environ,
        "PUREVK_VERIFY": "0",
        "PUREVK_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        ),
    }
    results = []
    for seed in ("1", "2", "3"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(path), "3"],
            env={**environment, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        results.append(done.stdout.splitlines())
    assert "'lower'" in results[0][0] and results[0][0].endswith("True True")
    for phases, made in results[1:]:
        assert "'lower'" not in phases and phases.endswith("False False")
        assert made == results[0][1]


def test_warmup_keeps_plans(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PUREVK_CACHE", str(tmp_path / "cache"))
    path = RELEASES / "1.2.0/mlp_dynamic.pte"
    assert main(["warmup", str(path)]) == 0
    with Context(api.open_device(), Cache(tmp_path / "cache")) as other:
        with purevk.load(path, context=other) as program:
            assert "lower" not in program.seconds
