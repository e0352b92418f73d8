"""`.pt2` files: all that torch.export writes loads, and nothing that is in one runs code."""

from __future__ import annotations

import copy
import io
import itertools
import json
import os
import random
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import purevk
from purevk.errors import FileFormatError, PurevkError
from purevk.frontends.files import FileSource, open_file
from purevk.frontends.saved import write_program
from purevk.frontends.torch.archive.members import unpickled
from purevk.pte import source
from tests.harness import DATA
from tests.pickles import members, older, packed, pickles

torch = pytest.importorskip("torch")


def saved(program: Any, **options: Any) -> bytes:
    data = io.BytesIO()
    torch.export.save(program, data, **options)
    return data.getvalue()


class Everything(torch.nn.Module):
    """Kwargs, control flow, sizes that follow from data, views, tied and empty weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.tied = torch.nn.Linear(4, 4, bias=False)
        self.tied.weight = self.first.weight
        self.constant = torch.arange(8.0).reshape(2, 4)[:, ::2].repeat(1, 2)
        self.register_buffer("metadata", torch.full((4,), 0.5, dtype=torch.bfloat16))
        self.register_buffer("empty", torch.ones(0, 4))
        self.register_buffer("count", torch.zeros(1))
        self.table = torch.nn.ParameterDict({"a-b": torch.ones(4), "c d": torch.zeros(4)})

    def forward(self, x: Any, scale: int, *, name: Any) -> Any:
        self.count.add_(1)
        with torch.no_grad():
            y = self.first(x) * scale + self.tied(x)
        y = torch.cond(y.sum() > 0, lambda y: y * 2, lambda y: y + 1, (y,))
        y = torch.cat([y, name, self.empty]) + self.constant[0] + self.table["a-b"]
        torch._check(y.shape[0] > 1)
        rows = (y > 0).any(1).nonzero()
        return {"y": y * self.metadata.float(), "rows": [rows, self.count + 0]}, y.shape[0]


@pytest.fixture(scope="module")
def everything() -> tuple[Any, bytes]:
    torch.manual_seed(0)
    sizes = {
        "x": {0: torch.export.Dim("n", min=2, max=64)},
        "scale": None,
        "name": {0: torch.export.Dim("m", min=2, max=64)},
    }
    program = torch.export.export(
        Everything(), (torch.randn(3, 4), 3), {"name": torch.randn(6, 4)}, dynamic_shapes=sizes
    )
    return program, saved(program, extra_files={"notes/a.txt": "any text"})


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.constant = torch.ones(2)

    def forward(self, x: Any, *, name: Any) -> Any:
        return {
            "y": torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x + 1, (x,))
            + self.weight
            + self.constant
            + name
        }


@pytest.fixture(scope="module")
def small() -> bytes:
    x = torch.ones(3, 2)
    sizes = {"x": {0: torch.export.Dim("n", min=2, max=64)}, "name": None}
    return saved(torch.export.export(Small(), (x,), {"name": torch.ones(2)}, dynamic_shapes=sizes))


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    """A folder that is there once code of a file has run."""
    path = str(tmp_path / "ran")
    yield path
    assert not os.path.exists(path)


def load(data: bytes, mark: str = "") -> Any:
    """An open file, or the error."""
    try:
        with open_file(data) as file:
            return file
    except PurevkError as error:
        return error
    finally:
        if mark:
            assert not os.path.exists(mark)


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads files, but traces no programs."""
    monkeypatch.setattr("purevk.frontends.torch.module.ProgramSource", lambda *_, **__: None)


@pytest.mark.device
def test_all_that_an_export_has(everything: tuple[Any, bytes]) -> None:
    program, data = everything
    eager = program.module()
    with purevk.load(data) as loaded, torch.no_grad():
        for rows, more in ((3, 6), (17, 2)):
            x, name = torch.randn(rows, 4), torch.randn(more, 4)
            made, wanted = loaded(x, 3, name=name), eager(x, 3, name=name)
            torch.testing.assert_close(made, wanted)


@pytest.mark.device
def test_no_other_thread_traces_meanwhile(
    everything: tuple[Any, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch computes sizes while it reads a program. It has one stack of modes for all threads, so a
    trace before dispatch of another thread would record that."""
    from torch._dynamo.convert_frame import compile_lock

    unlocked = []
    real = torch._ops.mode_stack_state_for_pre_dispatch

    def noted() -> Any:
        unlocked.append(not compile_lock._is_owned())
        return real()

    monkeypatch.setattr(torch._ops, "mode_stack_state_for_pre_dispatch", noted)
    with open_file(everything[1]) as file:
        file.graph("forward")
    assert unlocked and not any(unlocked)


def test_bytes_of_weights(tmp_path: Path) -> None:
    """Each dtype, views that share memory, and layouts."""

    class Weights(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.arange(24.0).reshape(4, 6)
            self.a, self.b, self.c = whole, whole.T, whole[1:3, ::2]
            for dtype in (torch.int8, torch.uint8, torch.int64, torch.float16, torch.float64):
                self.register_buffer(str(dtype)[6:], torch.arange(3).to(dtype))
            self.register_buffer("mask", torch.tensor([True, False, True]))
            self.register_buffer("scalar", torch.tensor(2.5))

        def forward(self, x: Any) -> Any:
            sums = [each.float().sum() for each in self.buffers()]
            return x @ self.b, self.a + 1, self.c * 2, sums

    x = torch.randn(2, 6)
    module = Weights()
    path = tmp_path / "m.pt2"
    torch.export.save(torch.export.export(module, (x,)), path)
    with purevk.load(path) as loaded:
        torch.testing.assert_close(loaded(x), module(x))


# -- pickles -------------------------------------------------------------------------------------
def test_pickles_in_each_member(small: bytes, mark: str, read_only: None, tmp_path: Path) -> None:
    for data in (small, *older(small)):
        contents = members(data)
        assert not isinstance(load(data), PurevkError)
        for name in contents:
            for payload in pickles(mark):
                made = load(packed({**contents, name: payload}), mark)
                skipped = "sample_inputs" in name or "example_inputs" in name or "extra" in name
                skipped |= ".data/" in name
                if not skipped and not name.rpartition("/")[2].startswith(("weight_", "tensor_")):
                    assert isinstance(made, FileFormatError), name
    with open(tmp_path / "m.pt2", "wb") as file:
        file.write(packed({**members(small), "archive/data/sample_inputs/model.pt": payload}))
    assert not isinstance(load(tmp_path / "m.pt2"), PurevkError)


def test_weights_that_ask_for_a_pickle(small: bytes, mark: str) -> None:
    contents = members(small)
    for kind in ("weights", "constants"):
        config = f"archive/data/{kind}/model_{kind}_config.json"
        entries = json.loads(contents[config])
        entry = next(iter(entries["config"].values()))
        entry["use_pickle"] = True
        for payload in pickles(mark):
            changed = {**contents, config: json.dumps(entries).encode()}
            changed[f"archive/data/{kind}/{entry['path_name']}"] = payload
            assert isinstance(load(packed(changed), mark), FileFormatError)
        for prefix in ("custom_obj_0", "opaque_obj_0"):
            entry["path_name"] = prefix
            changed = {**contents, config: json.dumps(entries).encode()}
            changed[f"archive/data/{kind}/{prefix}"] = payload
            error = load(packed(changed), mark)
            assert isinstance(error, FileFormatError) and prefix in error.what and error.next


def test_tensors_that_lie(small: bytes, read_only: None) -> None:
    contents = members(small)
    config = "archive/data/weights/model_weights_config.json"
    entries = json.loads(contents[config])
    meta = entries["config"]["weight"]["tensor_meta"]
    for key, value in (
        ("sizes", [3]), ("sizes", [1 << 40]), ("sizes", [-1]), ("strides", [5]), ("strides", [-1]),
        ("storage_offset", 1), ("storage_offset", -1), ("storage_offset", 1 << 60), ("dtype", 8),
        ("dtype", 99), ("dtype", "FLOAT"), ("sizes", [2, 2]), ("sizes", None), ("device", {"type": "none"}),
    ):  # fmt: skip
        wrapped: Any = value
        if key != "dtype":
            wrapped = [{"as_int": each} for each in value] if isinstance(value, list) else value
        if key == "storage_offset":
            wrapped = {"as_int": value}
        changed = copy.deepcopy(entries)
        changed["config"]["weight"]["tensor_meta"] = {**meta, key: wrapped}
        made = load(packed({**contents, config: json.dumps(changed).encode()}))
        assert isinstance(made, FileFormatError), (key, value)
    empty = packed({**contents, "archive/data/weights/weight_0": b""})
    assert "no bytes" in load(empty).why


def test_weights_that_are_much_larger_than_the_file(small: bytes, read_only: None) -> None:
    """A stride of 0 states 1 TB in 8 bytes. Weights that are expanded as such are sound."""
    contents = members(small)
    config = "archive/data/weights/model_weights_config.json"

    def stated(*sizes: int) -> Any:
        entries = json.loads(contents[config])
        meta = entries["config"]["weight"]["tensor_meta"]
        meta["sizes"] = [{"as_int": each} for each in sizes]
        meta["strides"] = [{"as_int": 0} for _ in sizes]
        return load(packed({**contents, config: json.dumps(entries).encode()}))

    assert not isinstance(stated(2000, 2000), PurevkError)
    error = stated(1 << 20, 1 << 18)
    assert isinstance(error, FileFormatError) and "bytes in memory" in error.why
    state = io.BytesIO()
    torch.save({"weight": torch.ones(2, 1).expand(2, 1 << 38)}, state)
    changed = {**members(older(small)[0]), "archive/data/weights/model.pt": state.getvalue()}
    assert "bytes in memory" in load(packed(changed)).why


def test_weights_that_are_no_plain_array() -> None:
    class Add(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("two", torch.ones(2))

        def forward(self, x: Any) -> Any:
            return x + self.two

    data = older(saved(torch.export.export(Add(), (torch.ones(2),))))[0]
    for tensor in (torch.ones(2).to_sparse(), torch.nested.as_nested_tensor([torch.ones(2)])):
        weights = io.BytesIO()
        torch.save({"two": tensor}, weights)
        changed = packed({**members(data), "archive/data/weights/model.pt": weights.getvalue()})
        refused = (
            "sparse or nested|no plain tensor"  # by us, or by torch (nested ones, from 2.15 on)
        )
        with pytest.raises(PurevkError, match=refused) as caught, open_file(changed) as file:
            file.graph("forward")
        assert "to_padded_tensor" in caught.value.next and "weights_only" not in str(caught.value)


MORE = [
    "archive/data/aotinductor/model/a.so", "archive/data/constants/custom_obj_0", "archive/x.pkl",
    "archive/data/constants/opaque_obj_7", "archive/models/other.json", "other/models/model.json",
    "archive/data/executorch/m.pte", "archive/data.pkl", "archive/constants.pkl",
    "archive/code/__torch__.py", "archive/data/weights/../../x", "archive/data/weights/weight_0.py",
]  # fmt: skip


@pytest.mark.parametrize("name", MORE)
def test_members_that_are_refused(name: str, small: bytes, mark: str) -> None:
    for payload in pickles(mark):
        error = load(packed({**members(small), name: payload}), mark)
        assert isinstance(error, FileFormatError) and repr(name) in error.what
        assert "torch.export.save" in error.next


def test_compressed_and_double_members(small: bytes) -> None:
    contents = members(small)
    assert "compressed" in load(packed(contents, zipfile.ZIP_DEFLATED)).why
    saved, inner = io.BytesIO(), io.BytesIO()
    torch.save({"x": torch.zeros(1000)}, saved)
    with zipfile.ZipFile(saved) as parts, zipfile.ZipFile(inner, "w", zipfile.ZIP_DEFLATED) as made:
        for name in parts.namelist():
            made.writestr(name, parts.read(name))
    assert torch.equal(unpickled(saved.getvalue())["x"], torch.zeros(1000))
    with pytest.raises(FileFormatError, match="compressed"):
        unpickled(inner.getvalue())
    data = io.BytesIO(small)
    with zipfile.ZipFile(data, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("archive/models/model.json", b"{}")
    assert "twice" in load(data.getvalue()).why
    damaged = bytearray(small)
    damaged[damaged.index(contents["archive/data/weights/weight_0"])] ^= 1
    assert "checksum" in load(bytes(damaged)).why


STATED = {
    "byteorder": [b"big", b"", b"little\0", b"little" * 99],
    "archive_format": [b"pt3", b"", b"PT2", None],
    "archive_version": [b"1", b"", b"-1", b"0.1", b"\xff", None],
}


def test_kinds_versions_and_byte_orders(small: bytes, read_only: None) -> None:
    """The weights of another byte order would be other numbers. torch.export.load takes them."""
    for layout in (small, older(small)[0]):
        contents = members(layout)
        for name, values in STATED.items():
            for value in values:
                changed = {**contents, f"archive/{name}": value or b""}
                if value is None:
                    del changed[f"archive/{name}"]
                error = load(packed(changed))
                assert isinstance(error, FileFormatError) and error.next
                assert name in error.what + error.why, (name, value)
        del contents["archive/byteorder"]
        assert not isinstance(load(packed(contents)), PurevkError)
    oldest = members(older(small)[1])
    for stated in (b"7.20", b"9", b"", b"88.1"):
        assert isinstance(load(packed({**oldest, "version": stated})), FileFormatError)
    assert "big" in load(packed({**oldest, "byteorder": b"big"})).what


# -- texts ---------------------------------------------------------------------------------------
def texts(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all texts in JSON. The last item is "key" for keys of objects."""
    if isinstance(value, str):
        yield (*path, "value")
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from texts(item, (*path, at))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield (*path, key, "key")
            yield from texts(item, (*path, key))


def replaced(root: Any, path: tuple[Any, ...], text: str) -> Any:
    root = copy.deepcopy(root)
    *path, kind = path
    place = root
    for step in path[:-1]:
        place = place[step]
    if kind == "key":
        place[text] = place.pop(path[-1])
    else:
        place[path[-1]] = text
    return root


def hostile(mark: str, old: str) -> list[str]:
    code = f"__import__('os').mkdir({mark!r})"
    other = f'__import__("os").mkdir("{mark}")'
    return [
        code, other, f"{old}={code}", f"{old}: {code}", f"{old} + {code}", f"{old}\n{code}",
        f"{old}'+{code}+'", f'{old}"+{other}+"', f"{old})+{code}#", f'{old}") or {other} #',
        f"Symbol('s0').__class__.__mro__[-1].__subclasses__() or {code}", f"[{code}][0]",
        f"(lambda: {code})()", "torch.os.mkdir", "torch.os.system", "_operator.methodcaller",
        "torch.ops.load_library", "torch.ops.aten.save.default", "torch.ops.aten.from_file.default",
        "torch.ops.higher_order.print", "torch.serialization.load", "math.__loader__.load_module",
        json.dumps([1, {"type": "builtins.tuple", "context": "null", "children_spec": [
            {"type": "builtins.tuple", "context": "null", "children_spec": []},
            {"type": "builtins.dict", "context": json.dumps([f"x={code}"]), "children_spec": []}]}]),
        json.dumps([1, {"type": "collections.defaultdict", "children_spec": [], "context": {
            "default_factory_module": "this", "default_factory_name": "s", "dict_context": []}}]),
        json.dumps([1, {"type": "builtins.dict", "children_spec": [], "context": json.dumps(
            [{"__enum__": True, "fqn": "this:s", "name": "x"}])}]),
        f"{old}\\", "x" * 5000, "Pow(Integer(9), Pow(Integer(9), Integer(99999999)))", "9**9**9**9",
        "LShift(Integer(1), Integer(99999999999))", "(" * 3000, "\0", "é", "lambda", "None",
    ]  # fmt: skip


def check_texts(small: bytes, mark: str, draw: random.Random, number: int) -> None:
    """A text of the program is code: nothing runs, and nothing but PurevkError is raised."""
    contents = members(small)
    program = json.loads(contents["archive/models/model.json"])
    # One place of each field, more of those that torch evaluates.
    places: dict[Any, list[tuple[Any, ...]]] = {}
    for path in texts(program):
        if "metadata" not in path or draw.random() < 0.05:
            names = tuple(step for step in path if isinstance(step, str))
            places.setdefault(names[-3:], []).append(path)
    refused = cases = 0
    for paths in places.values():
        path = draw.choice(paths)
        for text in draw.sample(hostile(mark, str(path[-2])), number):
            changed = json.dumps(replaced(program, path, text)).encode()
            made = load(packed({**contents, "archive/models/model.json": changed}), mark)
            refused, cases = refused + isinstance(made, PurevkError), cases + 1
    assert refused > cases / 2 and "this" not in sys.modules


def test_texts_of_the_program(small: bytes, mark: str, read_only: None) -> None:
    check_texts(small, mark, random.Random(5), 1)


@pytest.mark.slow
def test_texts_of_programs_that_are_traced(small: bytes, mark: str) -> None:
    check_texts(small, mark, random.Random(6), 6)


def edited(edit: Callable[[Any], None], data: bytes) -> bytes:
    contents = members(data)
    program = json.loads(contents["archive/models/model.json"])
    edit(program)
    return packed({**contents, "archive/models/model.json": json.dumps(program).encode()})


def test_each_way_to_run_code(small: bytes, mark: str) -> None:
    """Those by which torch 2.13 runs code of a program."""
    code = f"__import__('os').mkdir({mark!r})"

    def expression(text: str) -> Callable[[Any], None]:
        def edit(program: Any) -> None:
            sizes = program["graph_module"]["graph"]["tensor_values"]["x"]["sizes"]
            sizes[0]["as_expr"]["expr_str"] = text

        return edit

    def name(program: Any) -> None:
        new = json.loads(json.dumps(program).replace('"name"', '"name={}"').replace("{}", code))
        program.clear()
        program.update(new)

    def placeholder(program: Any) -> None:
        text = json.dumps(program).replace('"x"', json.dumps(f"x={code}"))
        program.clear()
        program.update(json.loads(text))

    def structure(text: str) -> Callable[[Any], None]:
        def edit(program: Any) -> None:
            program["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = text

        return edit

    def target(text: str, *arguments: Any) -> Callable[[Any], None]:
        def edit(program: Any) -> None:
            node = program["graph_module"]["graph"]["nodes"][0]
            node["target"] = text
            node["inputs"] = [{"name": "", "arg": each, "kind": 1} for each in arguments]

        return edit

    def guard(program: Any) -> None:
        program["guards_code"] = [code]

    def forward_name(program: Any) -> None:
        signature = program["graph_module"]["module_call_graph"][0]["signature"]
        signature["forward_arg_names"][0] = f"x={code}"

    def weight(program: Any) -> None:
        spec = program["graph_module"]["signature"]["input_specs"][0]
        spec["parameter"]["parameter_name"] = f'a")+{code}#'

    edits = [
        expression(code), expression(f"s0+{code}"), expression("9**9**9**9"), placeholder, guard,
        forward_name, weight, structure(hostile(mark, "x")[22]), structure(hostile(mark, "x")[23]),
        structure(hostile(mark, "x")[24]), target("torch.os.mkdir", {"as_string": mark}),
        target("torch.ops.load_library", {"as_string": mark}),
        target("torch.ops.aten.save.default", {"as_tensor": {"name": "x"}}, {"as_string": mark}),
        target("torch.ops.aten.from_file.default", {"as_string": mark}, {"as_bool": True}, {"as_int": 9}),
        target("#torch.os:mkdir", {"as_string": mark}),
    ]  # fmt: skip
    for edit in edits:
        error = load(edited(edit, small), mark)
        assert isinstance(error, FileFormatError), edit
        assert error.why and error.next
    assert "this" not in sys.modules


# -- names of files ------------------------------------------------------------------------------
def test_suffix_and_content_agree(small: bytes, tmp_path: Path) -> None:
    pte = Path(__file__).parent.parent / "data" / "pte" / "branch.pte"
    for content, suffixes in ((small, ("pvk", "pte", "PTE")), (pte.read_bytes(), ("pvk", "pt2"))):
        for suffix in suffixes:
            path = tmp_path / f"m.{suffix}"
            path.write_bytes(content)
            with pytest.raises(FileFormatError, match="suffix") as caught:
                purevk.load(path)
            assert "rename it to m." in caught.value.next
        with open_file(content):
            pass


def test_a_file_that_another_one_replaces_while_it_is_opened(
    small: bytes, read_only: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What told the kind is what is read."""
    inner = DATA / "branch.pte"
    saved_path = tmp_path / "saved.pvk"
    with open_file(inner) as file:
        write_program(saved_path, "m", {n: FileSource(file, n) for n in file.methods}, "test")
    contents = {"pt2": small, "pte": inner.read_bytes(), "pvk": saved_path.read_bytes()}
    path, other = tmp_path / "m", tmp_path / "other"
    open_map = source.map_file
    for first, second in itertools.permutations(contents, 2):
        path.write_bytes(contents[first])
        other.write_bytes(contents[second])

        def replaced(*args: Any) -> Any:
            made = open_map(*args)
            if other.exists():
                other.replace(path)
            return made

        monkeypatch.setattr(source, "map_file", replaced)
        with open_file(path) as file:
            assert file.kind == first and not other.exists()
            if first != "pt2":
                assert file.graph(file.methods[0]).nodes
