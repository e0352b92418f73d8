"""Plans that the cache keeps: they are those that lowering makes, and none serves a file, a device or
settings that it was not made for."""

from __future__ import annotations

import dataclasses
import io
import itertools
import os
import pickle
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
from purevk.errors import UnsupportedProgramError
from purevk.frontends.files import FilePart, FileSource, open_file
from purevk.graph.context import Context
from purevk.ir.printer import to_text
from purevk.ops import executors, extension, registry
from purevk.program.kept import code, comparison, pickles
from purevk.program.kept import keeper as keeper_module
from purevk.program.kept.keeper import Keeper
from purevk.program.leaves import Leaves
from purevk.report import lowered
from purevk.schedule.plan import Lowered
from purevk.tuning import Choices
from tests.ops.harness import context as shared_context
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

    keeper: Keeper
    question: str
    lowered: Lowered


def lower(context: Context, path: Path, data: Sequence[Path] = (), method: str = "") -> Opened:
    program = open_file(path, data, check=False)
    method = method or program.methods[0]
    leaves = Leaves()
    made = lowered.lower(program, method, context.traits, None, leaves)
    keeper = Keeper.of(context, FileSource(program, method), leaves)
    assert keeper is not None
    question = keeper.question(method, None, None, False)
    assert question is not None
    return Opened(keeper, question, made)


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
        assert made.keeper.keep(made.question, made.lowered)
        found = made.keeper.find(made.question)
        assert found is not None
        assert text(found) == text(made.lowered)
        assert content(found) == content(made.lowered)
        paths = []
        for number, (before, skipped) in enumerate(zip(made.keeper.files, head_of(made).skipped)):
            other = bytearray(before)
            for first, size in skipped:
                other[first : first + size] = rng.bytes(size)
            paths.append(tmp_path / f"{method}{number}{(path, *data)[number].suffix}")
            paths[-1].write_bytes(other)
        again = lower(context, paths[0], paths[1:], method)
        assert text(again.lowered) == text(made.lowered)
        served = again.keeper.find(made.question)
        assert served is not None and content(served) == content(again.lowered)


def head_of(made: Opened) -> Any:
    payload = made.keeper.context.cache.get_plan(made.question)
    assert payload is not None
    return pickles.Reader(io.BytesIO(payload), made.keeper.bytes_of).load()


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
    assert made.keeper.keep(made.question, made.lowered)
    span = made.keeper.span_of(made.lowered.read[0])
    assert span is not None and span[0] == 0
    changed = bytearray(made.keeper.files[0])
    changed[span[1]] ^= 1
    path = tmp_path / "changed.pte"
    path.write_bytes(changed)
    other = open_file(path, data_files(file), check=False)
    keeper = Keeper.of(context, FileSource(other, "forward"), Leaves())
    assert keeper is not None and keeper.find(made.question) is None
    assert made.keeper.find(made.question) is not None  # the entry is still there for its own file


def test_any_other_byte_is_compared(context: Context, tmp_path: Path) -> None:
    made = lower(context, RELEASES / "1.2.0/mlp.pte")
    assert made.keeper.keep(made.question, made.lowered)
    skipped = head_of(made).skipped[0]
    before = bytes(made.keeper.files[0])
    left_out = {at for first, size in skipped for at in range(first, first + size)}
    assert left_out  # the weights
    for at in range(0, len(before), 97):
        after = bytearray(before)
        after[at] ^= 0xFF
        keeper = Keeper(context, [FilePart(memoryview(bytes(after)), [], [])], Leaves(), {})
        assert (keeper.find(made.question) is not None) == (at in left_out)


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
    monkeypatch.setattr(keeper_module, "CODE", "another version")
    assert "lower" in phases()


@pytest.mark.parametrize("name", ["PUREVK_VERIFY", "PUREVK_DUMP", "PUREVK_KEEP_PLANS"])
def test_who_wants_to_see_passes_gets_them(
    name: str, context: Context, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    value = {"PUREVK_VERIFY": "1", "PUREVK_DUMP": str(tmp_path / "dump"), "PUREVK_KEEP_PLANS": "0"}
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
    assert made.keeper.keep(made.question, made.lowered)
    left_out = sum(size for _, size in head_of(made).skipped[0])
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
        assert not made.keeper.keep(made.question, made.lowered)
    assert made.keeper.keep(made.question, made.lowered)


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
    keeper = made.keeper
    keeper.parts = [part._replace(tensors=[(0, len(part.view))]) for part in keeper.parts]
    assert keeper.keep(made.question, made.lowered)
    number = len(keeper.parts) - 1 if kind == "ptd" else 0
    assert data or kind != "ptd"
    structure = keeper.parts[number].structure
    assert structure and sum(size for _, size in structure) > 100
    compared = {at for first, size in structure for at in range(first, first + size)}
    for at in sorted(compared)[:: max(len(compared) // 50, 1)]:
        parts = list(keeper.parts)
        after = bytearray(parts[number].view)
        after[at] ^= 0xFF
        parts[number] = parts[number]._replace(view=memoryview(bytes(after)))
        assert Keeper(context, parts, Leaves(), {}).find(made.question) is None
    assert Keeper(context, keeper.parts, Leaves(), {}).find(made.question) is not None


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


class Hostile:
    """What a pickle of anybody could do."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("hostile",)


def test_entries_run_no_code(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lower(context, RELEASES / "1.2.0/mlp.pte")
    monkeypatch.chdir(tmp_path)
    for payload in (
        pickle.dumps(Hostile()),
        b"cpurevk.program.kept.pickles\nos.system\n(S'mkdir hostile'\ntR.",
        b"cpurevk.ir.graph\nmap_leaves\n.",
        b"\x80\x04\x8c\x0fpurevk.ir.graph\x8c\x14functools._CacheInfo\x93.",
        b"cpurevk.ir.graph\nLayout\n.",  # of another module
        b"cpurevk.irrelevant\nGraph\n.",
        b"cpurevk.ops.extension\nregister_kernel\n.",
        b"",
        b"\x80\x05",
    ):
        context.cache.put_plan(made.question, payload, "device", "forward")
        assert made.keeper.find(made.question) is None
        assert context.cache.get_plan(made.question) is None  # it is dropped
    assert not (tmp_path / "hostile").exists()


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
    assert not made.keeper.keep(made.question, made.lowered)
    assert context.cache.get_plan(made.question) is None


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
        "PUREVK_CACHE_DIR": str(tmp_path / "cache"),
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
    monkeypatch.setenv("PUREVK_CACHE_DIR", str(tmp_path / "cache"))
    path = RELEASES / "1.2.0/mlp_dynamic.pte"
    assert main(["warmup", str(path)]) == 0
    with Context(api.open_device(), Cache(tmp_path / "cache")) as other:
        with purevk.load(path, context=other) as program:
            assert "lower" not in program.seconds
