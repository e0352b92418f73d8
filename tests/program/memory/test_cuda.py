"""Tensors in the memory of another API on the same device: without CUDA by a stand-in for it that
uses the memory of the host, and with CUDA tensors of torch where there is an NVIDIA GPU."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import purevk
from purevk import api
from purevk.api import MemoryKind, TimelineSemaphore
from purevk.errors import DeviceError, InputError
from purevk.graph.call import Call
from purevk.graph.context import default_context
from purevk.graph.external import ExternalRange
from purevk.passes.check_indices import EXTERNAL
from tests.harness import DATA

torch = pytest.importorskip("torch")
import purevk.dynamo  # noqa: E402  registers the backend, also where purevk is not installed

pytestmark = pytest.mark.device
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class HostDevice:
    """The host as another API: it reaches exported buffers where they are host-visible."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def open(
        self,
        buffers: Sequence[api.Buffer],
        semaphores: tuple[TimelineSemaphore, TimelineSemaphore],
    ) -> HostMemory:
        assert buffers
        assert all(buffer.kind is MemoryKind.EXTERNAL for buffer in buffers)
        return HostMemory(self.log, semaphores)


class HostMemory:
    def __init__(self, log: list[str], semaphores: Sequence[TimelineSemaphore]) -> None:
        self.log, self.semaphores = log, semaphores

    def _array(self, part: ExternalRange) -> np.ndarray:
        view = part.span.buffer.view(part.span.offset, part.span.nbytes)
        return np.ndarray(part.sizes, part.dtype.numpy, view)

    def begin(self) -> None:
        self.log.append("begin")

    def write(self, target: ExternalRange, tensor: Any) -> None:
        self.log.append("write")
        np.copyto(self._array(target), tensor)

    def signal(self, value: int) -> None:
        self.semaphores[0].signal(value)

    def wait(self, value: int) -> None:
        end = time.monotonic() + 60
        while self.semaphores[1].value < value:
            assert time.monotonic() < end

    def read(self, source: ExternalRange, target: Any) -> Any:
        self.log.append("read")
        return self._array(source).copy()

    def end(self) -> None:
        self.log.append("end")

    def close(self) -> None:
        self.log.append("close")


@pytest.fixture
def host() -> HostDevice:
    device = default_context().device
    needed = ("external_memory_fd", "timeline_semaphore")
    if device.kind != "cpu" or any(name not in device.features for name in needed):
        pytest.skip("the host does not reach exported memory")
    return HostDevice()


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        y = self.linear(x)
        return torch.relu(y), y.sum(0), x.shape[0]


def test_inputs_and_outputs_are_in_exported_memory(host: HostDevice) -> None:
    model = Two().eval()
    rows = torch.export.Dim("rows", max=64)
    program = purevk.compile(model, (torch.randn(6, 8),), dynamic_shapes=({0: rows},))
    executable = program.method("forward").executable
    assert executable.takes_external
    calls = executable.external_calls(host)
    assert executable.external_calls(host) is calls
    (value,) = (each for each in executable.plan.uploads[0])
    specialization = program.method("forward").specializations[0]
    for count in (6, 1, 64):
        x = torch.randn(count, 8)
        env = specialization.environment([x.numpy()])
        made = executable.run_external(calls, Call({value: x.numpy()}, env))
        expected = model(x)
        np.testing.assert_allclose(made[0], expected[0].detach().numpy(), atol=1e-5)
        np.testing.assert_allclose(made[1], expected[1].detach().numpy(), atol=1e-5)
        assert made[2] == count
    assert host.log.count("write") == 3 and host.log.count("read") == 6
    # The program serves arrays too, before and after.
    x = torch.randn(3, 8)
    np.testing.assert_allclose(program(x.numpy())[0], model(x)[0].detach().numpy(), atol=1e-5)
    program.close()
    assert host.log[-1] == "close"


def test_states_and_weights_that_are_results(host: HostDevice) -> None:
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(4))

        def forward(self, x: Any) -> Any:
            self.total.add_(x)
            return self.total * 2, self.total

    with purevk.compile(Counter().eval(), (torch.ones(4),)) as program:
        executable = program.method("forward").executable
        calls = executable.external_calls(host)
        (value,) = executable.plan.uploads[0]
        for step in (1, 2, 3):
            made = executable.run_external(calls, Call({value: np.ones(4, np.float32)}, {}))
            np.testing.assert_array_equal(made[0], np.full(4, 2.0 * step, np.float32))
            np.testing.assert_array_equal(made[1], np.full(4, step, np.float32))
        np.testing.assert_array_equal(program.state["total"], np.full(4, 3, np.float32))


def test_indices_that_the_host_cannot_read(
    host: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call does not wait for the device. So the next one raises."""
    table = torch.arange(20.0).reshape(5, 4)

    class Picks(torch.nn.Module):
        def forward(self, index: Any) -> Any:
            return table[index]

    shared = default_context()
    traits = replace(shared.traits, features=shared.traits.features | set(EXTERNAL))
    monkeypatch.setattr(shared, "traits", traits)
    with purevk.compile(Picks(), (torch.tensor([0, 1]),)) as program:
        executable = program.method("forward").executable
        (value,) = executable.plan.uploads[0]
        calls = executable.external_calls(host)

        def call(*pair: int) -> Any:
            return executable.run_external(calls, Call({value: np.array(pair)}, {}))[0]

        np.testing.assert_array_equal(call(0, 4), table[[0, 4]].numpy())
        call(0, 5)
        with pytest.raises(InputError, match="is 5 in the call before this one"):
            call(0, 1)
        np.testing.assert_array_equal(call(0, 1), table[[0, 1]].numpy())
        # The host compares its own arrays: the kernel does not run.
        with pytest.raises(InputError, match="index has the index 7"):
            program(torch.tensor([0, 7]))
        torch.testing.assert_close(program(torch.tensor([0, 2])), table[[0, 2]])


def test_indices_and_states(host: HostDevice) -> None:
    """The call waits because of the state, and raises."""

    class Cache(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("position", torch.zeros(1, dtype=torch.long))
            self.register_buffer("rows", torch.zeros(3, 4))

        def forward(self, x: Any) -> Any:
            self.rows.index_copy_(0, self.position, x)
            self.position.add_(1)
            return self.rows.sum(0)

    with purevk.compile(Cache(), (torch.ones(1, 4),)) as program:
        executable = program.method("forward").executable
        (value,) = executable.plan.uploads[0]
        calls = executable.external_calls(host)
        given = {value: np.ones((1, 4), np.float32)}
        for step in (1, 2, 3):
            made = executable.run_external(calls, Call(given, {}))
            np.testing.assert_array_equal(made[0], np.full(4, step, np.float32))
        with pytest.raises(InputError, match=r"aten.index_copy.default is 3\n"):
            executable.run_external(calls, Call(given, {}))


def test_results_are_measured_before_the_call(host: HostDevice) -> None:
    with purevk.load(DATA / "linear_relu.pte") as program:
        method = program.method("forward")
        executable = method.executable
        (value,) = executable.plan.uploads[0]
        x = np.zeros(value.type.dims, np.float32)
        env = method.specializations[0].environment([x])
        calls = executable.external_calls(host)
        with pytest.raises(InputError, match="out has sizes"):
            executable.run_external(calls, Call({value: x}, env, [np.empty((99, 1), np.float32)]))


def test_what_the_host_takes_part_in_is_not_external() -> None:
    class Chooses(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x[x > 0]

    with purevk.compile(Chooses(), (torch.randn(6),)) as program:
        assert not program.method("forward").executable.takes_external


def test_exported_memory_has_a_descriptor(host: HostDevice) -> None:
    device = default_context().device
    buffer = api.Buffer(device, 100, MemoryKind.EXTERNAL)
    other = api.Buffer(device, 100, MemoryKind.EXTERNAL)
    assert buffer.allocation.block is not other.allocation.block
    descriptor = buffer.export_fd()
    assert os.fstat(descriptor)
    os.close(descriptor)
    plain = api.Buffer(device, 100)
    with pytest.raises(DeviceError, match="cannot be exported"):
        plain.export_fd()
    for each in (buffer, other, plain):
        each.destroy()


def test_tensors_of_another_device_pass_through_the_host(monkeypatch: Any) -> None:
    """`meta` has no elements; every other device is read by copying."""
    with purevk.load(DATA / "linear_relu.pte") as program:
        sizes = program.method("forward").inputs[0].sizes
        with pytest.raises(InputError, match="meta"):
            program(torch.empty([int(size) for size in sizes], device="meta"))


# -- CUDA ----------------------------------------------------------------------------------------
def models() -> dict[str, tuple[Any, Callable[[], tuple[Any, ...]]]]:
    nn = torch.nn
    return {
        "mlp": (
            nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)),
            lambda: (torch.randn(5, 64),),
        ),
        "conv": (
            nn.Sequential(
                nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2)
            ),
            lambda: (torch.randn(2, 3, 17, 17),),
        ),
        "encoder": (
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
            lambda: (torch.randn(2, 9, 32),),
        ),
        "embedding": (nn.EmbeddingBag(20, 8, mode="sum"), lambda: (torch.randint(0, 20, (3, 4)),)),
    }


def close(made: Any, expected: Any, tolerance: float = 2e-4) -> None:
    assert made.is_cuda and made.dtype == expected.dtype and made.shape == expected.shape
    torch.testing.assert_close(made, expected, atol=tolerance, rtol=tolerance)


@needs_cuda
@pytest.mark.parametrize("route", ["compile", "torch.compile", "load"])
@pytest.mark.parametrize("name", sorted(models()))
def test_cuda_models(name: str, route: str, tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, inputs = models()[name]
    plain = copy.deepcopy(model.eval())  # CUDA's own convolutions and matmuls may round to TF32
    model = model.cuda()
    args = tuple(each.cuda() for each in inputs())
    if route == "torch.compile":
        compiled = torch.compile(model, backend="purevk")
    elif route == "compile":
        compiled = purevk.compile(model, args)
    else:
        purevk.compile(model, args).save(tmp_path / "m.pvk")
        compiled = purevk.load(tmp_path / "m.pvk")
    with torch.no_grad():
        for _ in range(3):
            args = inputs()
            close(compiled(*(each.cuda() for each in args)), plain(*args).cuda())


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64])
def test_cuda_dtypes_strides_and_views(dtype: Any) -> None:
    def make(*sizes: int) -> Any:
        return (torch.randn(sizes) * 8).to(dtype).cuda()

    class Sum(torch.nn.Module):
        def forward(self, x: Any, y: Any) -> Any:
            return x + y, x > y

    with purevk.compile(Sum(), (make(6, 4), make(6, 4))) as program:
        x, y = make(4, 6).t(), make(6, 8)[:, ::2]
        total, larger = program(x, y)
        close(total, x + y)
        close(larger, x > y)
        expanded = make(1, 4).expand(6, 4)
        close(program(x, expanded)[0], x + expanded)
        out = torch.empty(4, 6, dtype=dtype, device="cuda").t()
        flags = np.empty((6, 4), np.bool_)
        made = program(x, y, out=[out, flags])
        assert made[0] is out and made[1] is flags
        close(out, x + y)
        assert (flags == (x > y).cpu().numpy()).all()
        mixed = program(x, y.cpu())
        close(mixed[0], x + y)


@needs_cuda
def test_cuda_calls_do_not_pass_through_the_host() -> None:
    with purevk.compile(torch.nn.ReLU(), (torch.randn(1 << 20, device="cuda"),)) as program:
        x = torch.randn(1 << 20, device="cuda")
        program(x)
        executable = program.method("forward").executable
        assert executable._external and executable._graph is None
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
        ) as profile:
            for _ in range(3):
                made = program(x)
            torch.cuda.synchronize()
        close(made, torch.relu(x))
        copies = [event.name for event in profile.events() if "Memcpy" in event.name]
        assert not [name for name in copies if "HtoD" in name or "DtoH" in name], copies


@needs_cuda
def test_cuda_streams() -> None:
    """Calls from several streams, each with work before and after it."""
    size = 1 << 22

    class Work(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.sin(x) * 2 + 1

    with purevk.compile(Work(), (torch.randn(size, device="cuda"),)) as program:
        streams = [torch.cuda.Stream() for _ in range(4)]
        made = []
        torch.cuda.synchronize()
        for turn in range(40):
            with torch.cuda.stream(streams[turn % 4]):
                x = torch.full((size,), float(turn), device="cuda")
                for _ in range(10):
                    x = x + 1
                made.append((turn, program(x) - 1))
        torch.cuda.synchronize()
        for turn, each in made:
            expected = 2 * np.sin(turn + 10.0)
            assert abs(each.min().item() - expected) < 1e-4
            assert abs(each.max().item() - expected) < 1e-4


@needs_cuda
def test_cuda_states_writes_and_submit() -> None:
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(4))

        def forward(self, x: Any, y: Any) -> Any:
            self.total.add_(x)
            y.mul_(2)
            return self.total * 1

    model = Counter().cuda()
    with purevk.compile(model, (torch.ones(4).cuda(), torch.ones(4).cuda())) as program:
        y = torch.ones(4, device="cuda")
        for step in (1, 2, 3):
            close(program(torch.ones(4, device="cuda"), y), torch.full((4,), float(step)).cuda())
        close(y, torch.full((4,), 8.0).cuda())
        future = program.submit(torch.ones(4, device="cuda"), y)
        close(future.result(), torch.full((4,), 4.0).cuda())
        close(y, torch.full((4,), 16.0).cuda())
        assert program.state["total"].tolist() == [4.0] * 4
        with pytest.raises(InputError, match="share memory"):
            program(y, y)


@needs_cuda
def test_cuda_where_the_host_takes_part() -> None:
    class Positive(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x[x > 0] * 2

    with purevk.compile(Positive(), (torch.randn(16, device="cuda"),)) as program:
        x = torch.randn(16, device="cuda")
        close(program(x), x[x > 0] * 2)


@needs_cuda
def test_cuda_weights_that_change() -> None:
    model = torch.nn.Linear(4, 4).cuda().eval()
    x = torch.randn(3, 4, device="cuda")
    compiled = torch.compile(model, backend="purevk")
    program = purevk.compile(model, (x,))
    with torch.no_grad():
        close(compiled(x), model(x))
        close(program(x), model(x))
        model.weight.mul_(3)
        close(compiled(x), model(x))
        close(program(x), model(x))


@needs_cuda
@pytest.mark.parametrize("kind", ["flash", "efficient", "masked", "grouped", "cudnn", "math"])
def test_cuda_attention_under_torch_compile(kind: str) -> None:
    """Tracing with CUDA gives one of several operators."""
    attention = torch.nn.functional.scaled_dot_product_attention
    dtype = torch.float32 if kind in ("efficient", "math") else torch.float16
    q = torch.randn(2, 4, 33, 32, dtype=dtype, device="cuda")
    k, v = torch.randn(2, 2, 2 if kind == "grouped" else 4, 33, 32, dtype=dtype, device="cuda")
    mask = None
    if kind == "masked":
        mask = torch.randn(2, 1, 33, 33, dtype=dtype, device="cuda")
    backends = {"cudnn": "CUDNN_ATTENTION", "math": "MATH", "flash": "FLASH_ATTENTION"}

    def run(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, mask, is_causal=mask is None, enable_gqa=kind == "grouped") * 2

    compiled = torch.compile(run, backend="purevk", fullgraph=True)
    with torch.no_grad():
        expected = run(q.double(), k.double(), v.double()) if mask is None else run(q, k, v)
        if kind in backends:
            chosen = getattr(torch.nn.attention.SDPBackend, backends[kind])
            with torch.nn.attention.sdpa_kernel([chosen]):
                made = compiled(q, k, v)
        else:
            made = compiled(q, k, v)
    close(made, expected.to(dtype), 4e-3)


@needs_cuda
def test_cuda_graphs_that_make_tensors() -> None:
    """Results of a graph without inputs are on the device that eager gives them."""

    def run(x: Any) -> Any:
        steps = torch.arange(x.shape[0], device=x.device)
        return steps + x, torch.zeros(3), x.cpu() + 1, x.t()

    x = torch.randn(4, 4, device="cuda")
    compiled = torch.compile(run, backend="purevk")
    made, expected = compiled(x), run(x)
    for one, other in zip(made, expected):
        assert one.device == other.device and one.stride() == other.stride()
        torch.testing.assert_close(one, other)
