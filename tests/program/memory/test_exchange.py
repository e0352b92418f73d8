"""Inputs from objects that implement DLPack or the buffer protocol, and results in memory of the
caller."""

from __future__ import annotations

import array
import ctypes
import itertools
import re
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import purevk
from purevk.dtypes import DType
from purevk.errors import InputError
from purevk.program.arrays import as_array
from purevk.program.call import MethodCall
from tests.harness import DATA

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.device
LINEAR = DATA / "linear_relu.pte"


class Exporter:
    """Memory behind one protocol alone."""

    def __init__(self, **members: Any) -> None:
        self.__dict__.update(members)


class WithDLPack:
    def __init__(self, tensor: Any, kind: int = 1) -> None:
        self.tensor, self.kind = tensor, kind

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0


class WithArray:
    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.values


class Refusing(WithArray):
    """DLPack, but not for this dtype, as of jax for those that numpy has not."""

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("no such dtype")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def exporters(x: np.ndarray) -> dict[str, Any]:
    return {
        "DLPack of torch": WithDLPack(torch.from_numpy(x.copy())),
        "DLPack of numpy": WithDLPack(x.copy()),
        "DLPack of pinned memory": WithDLPack(x.copy(), 3),
        "strided DLPack": WithDLPack(torch.from_numpy(x.T.copy()).t()),
        "array interface": Exporter(__array_interface__=x.__array_interface__, keep=x),
        "array": WithArray(x),
        "array, DLPack refuses": Refusing(x),
        "buffer": memoryview(x),
        "buffer of bytes": memoryview(bytearray(x.tobytes())).cast("f", list(x.shape)),
        "lists": x.astype(float).tolist(),
        "negative strides": x[::-1, ::-1].copy()[::-1, ::-1],
        "repeated rows": np.broadcast_to(x, x.shape),
    }


def test_inputs_of_every_protocol(linear_input: np.ndarray, linear_output: np.ndarray) -> None:
    with purevk.load(LINEAR) as program:
        for name, given in exporters(linear_input).items():
            made = program.forward(given)
            assert type(made) is np.ndarray, name
            np.testing.assert_allclose(made, linear_output, rtol=0, atol=1e-6, err_msg=name)
            np.testing.assert_array_equal(np.from_dlpack(made), made)
        flat = array.array("f", [1, 2, 3, 4, 5])
        with pytest.raises(InputError, match="has rank 1"):
            program.forward(flat)
        with pytest.raises(InputError, match="memory of another device") as error:
            program.forward(WithDLPack(linear_input, 2))
        assert "device type is 2" in error.value.why
        with pytest.raises(InputError, match="has dtype >f4"):
            program.forward(linear_input.astype(">f4"))


class _Tensor(ctypes.Structure):
    """`DLTensor`, and the end of `DLManagedTensor`."""

    _fields_: ClassVar = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class Lying:
    """DLPack that cannot be true: fields of the tensor, the name of the capsule, or no capsule."""

    def __init__(
        self, capsule: Any = None, device: Any = (1, 0), name: bytes = b"dltensor", **fields: Any
    ):
        self.memory = (ctypes.c_float * 10)()
        self.shape = (ctypes.c_int64 * 70)(*fields.pop("sizes", (2, 5)))
        self.device, self.name, self.capsule = device, name, capsule
        values = {"device_type": 1, "ndim": 2, "code": 2, "bits": 32, "lanes": 1, **fields}
        values = {"data": ctypes.addressof(self.memory), **values}
        self.tensor = _Tensor(shape=ctypes.addressof(self.shape), **values)

    def __dlpack__(self, **options: Any) -> Any:
        if self.capsule is not None:
            return self.capsule
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = (
            ctypes.py_object,
            [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
        )
        return new(ctypes.addressof(self.tensor), self.name, None)

    def __dlpack_device__(self) -> Any:
        return self.device


LIES: list[dict[str, Any]] = [
    {"capsule": 5},
    {"capsule": "text"},
    {"name": b"used_dltensor"},
    {"name": b"other"},
    {"ndim": -1},
    {"ndim": 70},
    {"sizes": (-2, 5)},
    {"sizes": (1 << 62, 1 << 62)},
    {"bits": 7},
    {"code": 77},
    {"lanes": 2},
    {"device_type": 2},
    {"data": 0},
    {"device": ()},
    {"device": None},
    {"device": ("cpu", 0)},
]


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_dlpack_that_lies(lie: dict[str, Any]) -> None:
    given = Lying(**lie)
    with pytest.raises(InputError) as caught:
        as_array(given, DType.float32, "input 0", "a test")
    assert "input 0" in caught.value.what


@pytest.mark.parametrize("stride", [1 << 40, (1 << 63) - 4, -(1 << 62), -(1 << 46)])
def test_strides_that_leave_the_memory_of_a_process(stride: int) -> None:
    """As a DLPack capsule and by the array interface; they ended the process."""
    array = np.zeros((2, 5), np.float32)
    steps = (ctypes.c_int64 * 2)(stride // 4, 1)
    pointer = array.ctypes.data, False
    fields = {"shape": (2, 5), "typestr": "<f4", "data": pointer, "strides": (stride, 4)}
    interface = type("Interface", (), {"__array_interface__": {**fields, "version": 3}})
    for given in (Lying(strides=ctypes.addressof(steps)), interface()):
        with pytest.raises(InputError, match="input 0 cannot be made an array"):
            as_array(given, DType.float32, "input 0", "a test")


PROTOCOLS = (
    "__dlpack__",
    "__dlpack_device__",
    "__array_interface__",
    "__array_struct__",
    "__array__",
)


def test_objects_whose_code_raises() -> None:
    """Any exception of any member, called or only looked up, is an error of the input."""

    def fail(error: Exception) -> Any:
        def raises(*_: Any, **__: Any) -> Any:
            raise error

        return raises

    device = {"__dlpack_device__": lambda _: (1, 0), "__dlpack__": lambda *_, **__: None}
    kinds = (
        ValueError,
        KeyError,
        OSError,
        MemoryError,
        RecursionError,
        StopIteration,
        ZeroDivisionError,
    )
    for kind, name in itertools.product(kinds, PROTOCOLS):
        for member in (fail(kind("why")), property(fail(kind("why")))):
            given = type("Given", (), {**(device if "dlpack" in name else {}), name: member})()
            with pytest.raises(InputError, match="input 0"):
                as_array(given, DType.float32, "input 0", "a test")


def test_inputs_are_not_copied(linear_input: np.ndarray) -> None:
    """Before the one copy into the device's memory."""
    with purevk.load(LINEAR) as program:
        read = program.method("forward").variants[0].reader.read
        x = linear_input.copy()
        for given in (x, torch.from_numpy(x), WithDLPack(x), memoryview(x), WithArray(x), x[:, :]):
            assert np.shares_memory(read([given]).arrays[0], x)
        wide = np.zeros((4, 10), np.float32)
        assert np.shares_memory(read([wide[::2, ::2]]).arrays[0], wide)
        assert np.shares_memory(read([torch.from_numpy(wide)[::2, ::2]]).arrays[0], wide)


def test_results_in_memory_of_the_caller(
    linear_input: np.ndarray, linear_output: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    with purevk.load(LINEAR) as program:
        wide = np.full((4, 6), 7, np.float32)
        for out in (
            np.empty((2, 3), np.float32),
            wide[::2, ::2],
            np.empty((3, 2), np.float32).T,
            torch.empty(2, 3),
            torch.empty(3, 2).t(),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(MethodCall, "copy", None)  # they are written there at once
                assert program.forward(linear_input, out=out) is out
            np.testing.assert_allclose(np.asarray(out), linear_output, rtol=0, atol=1e-6)
        assert (wide[1::2] == 7).all() and (wide[:, 1::2] == 7).all()
        out = np.empty((2, 3), np.float32)
        assert program.forward(torch.from_numpy(linear_input), out=[out]) is out
        frozen = np.empty((2, 3), np.float32)
        frozen.flags.writeable = False
        refused = {
            "has sizes": np.empty((3, 3), np.float32),
            "cannot take the result": np.empty((2, 3)),
            "out 0 is list": [[1.0]],
            "holds 2 tensors": [out, out],
        }
        for message, wrong in refused.items():
            with pytest.raises(InputError, match=message):
                program.forward(linear_input, out=wrong)
        with pytest.raises(InputError, match="cannot take the result") as error:
            program.forward(linear_input, out=frozen)
        assert "read-only" in error.value.why
    with purevk.load(DATA / "topk.pte") as program:
        x = np.random.default_rng(1).standard_normal((2, 7), np.float32)
        values, order = np.empty((2, 2), np.float32), np.empty((2, 2), np.int64)
        made = program.forward(x, out=[values, None])
        assert made[0] is values and type(made[1]) is np.ndarray
        program.method("forward")(x, out=(None, order))
        fresh = program.forward(x)
        np.testing.assert_array_equal(values, fresh[0])
        np.testing.assert_array_equal(order, fresh[1])


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(1, 3).expand(2, 3),
        np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), (2, 3), (4, 4)),
        np.lib.stride_tricks.as_strided(np.zeros(32, np.uint8).view(np.float32), (2, 3), (10, 4)),
        torch.zeros(9).as_strided((2, 3), (4, 2)),
    ],
    ids=["expanded", "window", "half an element", "interleaved"],
)
def test_memory_whose_elements_overlap(
    linear_input: np.ndarray, linear_output: np.ndarray, out: Any
) -> None:
    with purevk.load(LINEAR) as program:
        with pytest.raises(InputError, match="elements of out 0 share memory") as error:
            program.forward(linear_input, out=out)
        assert "strides" in error.value.why and "without out=" in error.value.next
        with pytest.raises(InputError, match="elements of out 0 share memory"):
            program.submit(linear_input, out=out).result(60)
        # The reach of a row is longer than the step to the next, and yet no element is another.
        apart = torch.zeros(9).as_strided((2, 3), (3, 2))
        program.forward(linear_input, out=apart)
        np.testing.assert_allclose(apart.numpy(), linear_output, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_results_in_memory_that_is_conjugated_or_negated_lazily(dtype: torch.dtype) -> None:
    """Its elements are not those in memory."""
    x = (torch.arange(3.0) + 1).to(dtype) * (1 + 2j if dtype.is_complex else 1)
    given = x.view(torch.uint16) if dtype is torch.bfloat16 else x
    with purevk.compile(Scaled(), (x,)) as program:
        for source in (x, given.numpy()):
            out = torch.zeros(3, dtype=dtype)
            out = out.conj() if dtype.is_complex else torch._neg_view(out)
            assert program(source, out=out) is out
            assert torch.equal(out, x * 2)


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Twofold(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x * 2, x + 1


def test_memory_of_two_results() -> None:
    x = torch.randn(2, 3)
    with purevk.compile(Twofold(), (x,)) as program:
        one, rows, columns = torch.zeros(2, 3), torch.zeros(3, 3), torch.zeros(2, 6)
        for out in ([one, one], [one, one.numpy()], [rows[:2], rows[1:]]):
            with pytest.raises(InputError, match="out 0 and out 1 share memory") as error:
                program(x, out=out)
            assert "leave one of them out" in error.value.next
        program(x, out=[columns[:, ::2], columns[:, 1::2]])
        torch.testing.assert_close(columns[:, ::2], x * 2)
        torch.testing.assert_close(columns[:, 1::2], x + 1)


def test_memory_that_requires_gradients(linear_input: np.ndarray) -> None:
    with purevk.load(LINEAR) as program:
        leaf = torch.zeros(2, 3, requires_grad=True)
        for out in (leaf, leaf * 1):
            with pytest.raises(InputError, match="out 0 requires gradients") as error:
                program.forward(linear_input, out=out)
            assert "no_grad" in error.value.next
        with torch.no_grad():  # as torch allows it
            assert program.forward(linear_input, out=leaf) is leaf
        assert leaf.detach().any()


class Double(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x * 2, x.float() + 1


def test_bits_of_bfloat16() -> None:
    x = torch.randn(4, 3).bfloat16()
    bits = x.view(torch.uint16).numpy()
    with purevk.compile(Double(), (x,)) as program:
        made, wide = program.forward(bits)
        assert made.dtype == np.uint16 and wide.dtype == np.float32
        np.testing.assert_array_equal(made, (x * 2).view(torch.uint16).numpy())
        out = torch.empty(4, 3, dtype=torch.bfloat16)
        assert program.forward(bits, out=[out, None])[0] is out
        assert torch.equal(out, x * 2)


def test_the_dtype_that_others_have_for_bfloat16() -> None:
    dtypes = pytest.importorskip("ml_dtypes")
    x = torch.randn(4, 3).bfloat16()
    bits = x.view(torch.uint16).numpy()
    with purevk.compile(Double(), (x,)) as program:
        made, wide = program.forward(bits.view(dtypes.bfloat16))
        assert made.dtype == dtypes.bfloat16 and wide.dtype == np.float32
        np.testing.assert_array_equal(made.astype(np.float32), (x * 2).float().numpy())


def test_numbers_take_the_dtype_of_the_method() -> None:
    class Add(torch.nn.Module):
        def forward(self, x: Any, y: Any) -> Any:
            return x + y

    with purevk.compile(Add(), (torch.zeros(2), torch.zeros(2, dtype=torch.int32))) as program:
        np.testing.assert_array_equal(program.forward([0.5, 1], [1, 2]), [1.5, 3])
        with pytest.raises(InputError, match="y has dtype float64"):
            program.forward([0.5, 1], [1.5, 2])


def test_the_page_runs(linear_input: np.ndarray) -> None:
    text = (Path(__file__).parents[3] / "docs" / "calling.md").read_text(encoding="utf-8")
    space: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(
            compile(block.replace('"model.pte"', repr(str(LINEAR))), "docs/calling.md", "exec"),
            space,
        )
    assert len(space["results"]) == 8
    space["program"].close()


def test_calls_are_ranges_of_torchs_profiler() -> None:
    class Double(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    with purevk.compile(Double(), (torch.ones(3),)) as program:
        program.forward(torch.ones(3))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            made = program.forward(torch.ones(3))
            with pytest.raises(purevk.InputError):
                program.forward(torch.ones(4))
        assert torch.equal(made, torch.full((3,), 2.0))
        (found,) = [each for each in profile.key_averages() if each.key.startswith("purevk ")]
        assert found.count == 2 and found.key.endswith(": forward")
