"""Runs torch functions through purevk, and compares the results with torch's. A function is traced
to ATen operators, imported node by node, and lowered."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from purevk import knobs
from purevk.dtypes import DType
from purevk.frontends.importer import Importer
from purevk.graph.context import Context, default_context
from purevk.ir import Graph, TensorType, Value
from purevk.ops import registry
from purevk.program import Program
from purevk.testing import assert_close

# The dtypes of operators that move elements and do not compute with them.
TYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


# Operators that ran on the CPU where a case allows it, with the reasons.
ran_on_host: list[str] = []


def context() -> Context:
    """The device of the tests."""
    return default_context()


@dataclass
class Case:
    """One call of a torch function, and how close the results must be.

    Attributes:
        fn: a function of tensors, or an overload of `torch.ops`, which is then one node.
        args: its arguments; tensors become inputs of the graph, those in `constants` (by position)
            constants.
        rtol, atol: tolerances; None: those of the dtype. A looser one needs a reason where it is
            given.
        name: shown on failure.
    """

    fn: Callable[..., Any]
    args: tuple
    kwargs: dict = field(default_factory=dict)
    constants: tuple[int, ...] = ()
    rtol: float | None = None
    atol: float | None = None
    name: str = ""
    host: bool = False  # whether nodes may run on the CPU
    zeros: bool = False  # whether zeros must have the sign of torch's
    expected: Any = None

    def __str__(self) -> str:
        shown = [
            f"{str(a.dtype)[6:]}{list(a.shape)}" if isinstance(a, torch.Tensor) else repr(a)
            for a in pytree.tree_leaves(self.args)
        ]
        return f"{self.name or getattr(self.fn, '__name__', self.fn)}({', '.join(shown)}{self.kwargs or ''})"


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


class Recorder:
    """Collects cases in one graph."""

    def __init__(self, sizes: Sequence | None = None) -> None:
        self.importer = Importer("forward", "test", sizes)
        self.importer.trusted = True  # the operators are those of the test itself
        self.outputs: list[Any] = []

    def input(self, tensor: torch.Tensor, dynamic: bool = False) -> Value:
        return self.importer.input(DType.from_torch(tensor.dtype), tuple(tensor.shape), dynamic)

    def constant(self, tensor: torch.Tensor) -> Value:
        data = tensor.detach().contiguous()
        raw = (
            bytearray(data.view(torch.uint8).numpy().tobytes())
            if data.numel() and data.dim()
            else bytearray(
                data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""
            )
        )
        type = TensorType(DType.from_torch(tensor.dtype), tuple(tensor.shape))
        return self.importer.constant(memoryview(raw), type)

    def call(self, overload: Any, args: tuple, kwargs: dict) -> Any:
        """One node for an ATen overload, its arguments in the order of the schema."""
        if overload is aten.squeeze_.dim:  # what torch.matmul does with its own result
            overload = aten.squeeze.dim
        name = str(overload)
        if registry.find(name) is None:
            raise NotImplementedError(f"no definition of {name}")
        full = []
        for position, argument in enumerate(overload._schema.arguments):
            if position < len(args):
                full.append(args[position])
            elif argument.name in kwargs:
                full.append(kwargs[argument.name])
            else:
                full.append(argument.default_value if argument.has_default_value() else None)
        made = self.importer.emit(name, tuple(_plain(arg) for arg in full), [], [], name)
        returns = overload._schema.returns
        return made[0] if len(returns) == 1 and "List" not in str(returns[0].type) else made


def _plain(arg: Any) -> Any:
    if isinstance(arg, (list, tuple)):
        return tuple(_plain(item) for item in arg)
    if isinstance(arg, torch.dtype):
        return DType.from_torch(arg)
    if isinstance(arg, (torch.layout, torch.device, torch.memory_format)):
        return None
    return arg


def trace(fn: Callable[..., Any], args: tuple, dynamic: bool = False) -> torch.fx.GraphModule:
    """The ATen operators of a function of tensors: composite ones such as `linear` as they are, if
    all have definitions."""
    mode = "symbolic" if dynamic else "real"
    with torch.no_grad():
        module = make_fx(fn, tracing_mode=mode, pre_dispatch=True, _allow_non_fake_inputs=True)(
            *args
        )
        targets = [
            node.target
            for node in module.graph.nodes
            if isinstance(node.target, torch._ops.OpOverload)
        ]
        if all(registry.find(str(target)) or "sym_size" in str(target) for target in targets):
            return module
        module = make_fx(fn, _decompositions(), tracing_mode=mode, _allow_non_fake_inputs=True)(
            *args
        )
        module.graph.eliminate_dead_code()
        return module


@functools.lru_cache
def _decompositions() -> dict:
    """What torch.export does with operators that have no definition."""
    table = {
        op: made
        for op, made in torch._decomp.core_aten_decompositions().items()
        if not registry.find(str(op))
    }
    table[aten.native_batch_norm.default] = _inference_batch_norm
    return table


def _inference_batch_norm(
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    assert not training
    return aten._native_batch_norm_legit_no_training.default(
        x, weight, bias, mean, variance, momentum, eps
    )


def play(recorder: Recorder, module: torch.fx.GraphModule, values: Sequence[Any]) -> Any:
    """Imports a traced function for the values of its inputs; returns its output."""
    env: dict[Any, Any] = {}
    waiting = list(values)

    def read(arg: Any) -> Any:
        return pytree.tree_map(
            lambda leaf: env[leaf] if isinstance(leaf, torch.fx.Node) else leaf, arg
        )

    for node in module.graph.nodes:
        if node.op == "placeholder":
            env[node] = waiting.pop(0)
        elif node.op == "get_attr":
            env[node] = recorder.constant(getattr(module, node.target))
        elif node.op == "output":
            return read(node.args[0])
        elif node.target is torch.ops.aten.sym_size.int:
            env[node] = read(node.args[0]).type.dims[node.args[1]]
        elif isinstance(node.target, torch._ops.OpOverload):
            env[node] = recorder.call(
                node.target,
                tuple(read(arg) for arg in node.args),
                {k: read(v) for k, v in node.kwargs.items()},
            )
        elif "torch" in getattr(node.target, "__module__", ""):
            continue  # grad mode
        else:
            env[node] = node.target(*(read(arg) for arg in node.args))
    raise AssertionError("the traced function has no output")


def record(recorder: Recorder, case: Case) -> list[Value]:
    """Adds a case to a graph; returns its results."""
    given = {}
    leaves, spec = pytree.tree_flatten((case.args, case.kwargs))
    fixed = {id(case.args[n]) for n in case.constants}
    values = []
    for leaf in leaves:
        if _is_tensor(leaf):
            if id(leaf) not in given:
                given[id(leaf)] = (
                    recorder.constant(leaf) if id(leaf) in fixed else recorder.input(leaf)
                )
            values.append(given[id(leaf)])
        else:
            values.append(leaf)
    if isinstance(case.fn, torch._ops.OpOverload):
        args, kwargs = pytree.tree_unflatten(values, spec)
        made = recorder.call(case.fn, args, kwargs)
    else:
        tensors = [leaf for leaf in leaves if _is_tensor(leaf)]

        def flat(*inputs: torch.Tensor) -> Any:
            rest = list(inputs)
            args, kwargs = pytree.tree_unflatten(
                [rest.pop(0) if _is_tensor(leaf) else leaf for leaf in leaves], spec
            )
            return case.fn(*args, **kwargs)

        made = play(
            recorder,
            trace(flat, tuple(tensors)),
            [v for leaf, v in zip(leaves, values) if _is_tensor(leaf)],
        )
    return [value for value in pytree.tree_leaves(made) if value is not None]


def inputs_of(case: Case) -> list[torch.Tensor]:
    fixed = {id(case.args[n]) for n in case.constants}
    found = {}
    for leaf in pytree.tree_leaves((case.args, case.kwargs)):
        if _is_tensor(leaf) and id(leaf) not in fixed:
            found.setdefault(id(leaf), leaf)
    return list(found.values())


def host_nodes(program: Program) -> list[str]:
    """Operators of a program that run on the CPU, with the reasons."""
    steps = program.methods["forward"].executable.plan.steps
    return [
        f"{step.nodes[0].args[0]}: {step.nodes[0].args[1]}" for step in steps if not step.on_device
    ]


def dispatches(program: Program) -> list[str]:
    """The templates that a program runs at each call."""
    return [
        dispatch.kernel.template
        for dispatch in program.methods["forward"].executable.plan.dispatches
    ]


def expected_of(case: Case) -> list[torch.Tensor]:
    """What torch computes."""
    if case.expected is not None:
        made = case.expected
    else:
        with torch.no_grad():
            made = case.fn(*case.args, **case.kwargs)
    return [value for value in pytree.tree_leaves(made) if value is not None]


def compare(case: Case, results: Sequence[Any], wanted: Sequence[Any]) -> str:
    """What is wrong with the results; empty if nothing is."""
    if len(results) != len(wanted):
        return f"{len(results)} results, {len(wanted)} are expected"
    for number, (have, want) in enumerate(zip(results, wanted)):
        if not _is_tensor(want):
            want = torch.tensor(want)
        if not _is_tensor(have):
            have = torch.tensor(have)
        if have.dtype is not want.dtype or have.shape != want.shape:
            return f"result {number} is {have.dtype}{list(have.shape)}, not {want.dtype}{list(want.shape)}"
        try:
            assert_close(have, want, rtol=case.rtol, atol=case.atol)
        except AssertionError as error:
            return f"{number}: {error}"
        if case.zeros and want.is_floating_point():
            differs = (have == 0) & (want == 0) & (have.signbit() != want.signbit())
            wrong = [
                at
                for at in differs.nonzero().tolist()
                if _of_one_element(case, number, want.shape, at).signbit()
                != have[tuple(at)].signbit()
            ]
            if wrong:
                return f"{number}: zeros have the wrong sign at {wrong[:4]}"
    return ""


def _of_one_element(case: Case, number: int, shape: torch.Size, at: Sequence[int]) -> torch.Tensor:
    """What torch computes for one element alone. On some processors its vectors give zeros another
    sign, such as those of gelu by MKL on AMD's."""
    args = [
        arg[tuple(at)].reshape(1) if _is_tensor(arg) and arg.shape == shape else arg
        for arg in case.args
    ]
    return expected_of(replace(case, args=tuple(args), expected=None))[number].flatten()[0]


def build(cases: Sequence[Case]) -> Graph:
    recorder = Recorder()
    outputs: list[Value] = []
    for case in cases:
        outputs += record(recorder, case)
    return recorder.importer.finish(outputs)


def results_of(cases: Sequence[Case]) -> list[torch.Tensor]:
    """The results of cases with one each, all of them in one program."""
    graph = build(cases)
    with Program("test", {"forward": lambda sizes: graph}, context()) as program:
        assert not host_nodes(program), host_nodes(program)
        made = program.forward(*[tensor for case in cases for tensor in inputs_of(case)])
    return list(made) if isinstance(made, tuple) else [made]


def run_cases(cases: Sequence[Case]) -> list[str]:
    """What is wrong with each case, all of them in one program."""
    graph = build(cases)
    wanted = [expected_of(case) for case in cases]
    with Program("test", {"forward": lambda sizes: graph}, context()) as program:
        on_host = host_nodes(program)
        # With features switched off, what needs them is right on the CPU.
        if on_host and not all(case.host for case in cases) and not knobs.DISABLE():
            return [f"runs on the CPU: {on_host}"] * len(cases)
        ran_on_host.extend(on_host)
        given = [tensor for case in cases for tensor in inputs_of(case)]
        made = program.forward(*given)
    made = list(made) if isinstance(made, tuple) else [made]
    if not any(_is_tensor(item) for item in given):
        made = [torch.from_numpy(item) if hasattr(item, "shape") else item for item in made]
    problems = []
    for case, want in zip(cases, wanted):
        have, made = made[: len(want)], made[len(want) :]
        problems.append(compare(case, have, want))
    return problems


def failures(cases: Sequence[Case]) -> list[str]:
    """A line for each case that fails. One by one where all together cannot be lowered."""
    try:
        problems = run_cases(cases)
    except Exception as error:  # the culprit is looked for, and reported
        if len(cases) == 1:
            return [f"{cases[0]}: {type(error).__name__}: {' '.join(str(error).split())[:600]}"]
        half = len(cases) // 2
        return failures(cases[:half]) + failures(cases[half:])
    if len(cases) > 1 and any(problem.startswith("runs on the CPU") for problem in problems):
        half = len(cases) // 2
        return failures(cases[:half]) + failures(cases[half:])
    return [f"{case}: {problem}" for case, problem in zip(cases, problems) if problem]


def check(*cases: Case | Sequence[Case]) -> None:
    """Fails with a line for each case that goes wrong."""
    flat = [
        case for item in cases for case in (item if isinstance(item, (list, tuple)) else [item])
    ]
    assert flat, "no case"
    found = failures(flat)
    assert not found, f"{len(found)} of {len(flat)} cases:\n" + "\n".join(found)


@functools.lru_cache
def keeps_subnormal_numbers() -> bool:
    """Whether the device computes with numbers below the normal ones. Others take them for 0."""
    x = torch.tensor([1e-40])
    with program_of(lambda x: x * 0.5, (x,)) as program:
        return bool(program.forward(x) == x * 0.5)


def flushed() -> float:
    """The largest float32 that the device may take for 0: what results may differ by."""
    return 0.0 if keeps_subnormal_numbers() else torch.finfo(torch.float32).smallest_normal


def program_of(fn: Callable[..., Any], args: tuple, dynamic: bool = False) -> Program:
    """A program of a torch function; with `dynamic`, the sizes of `args` above 1 are the bounds of
    symbols."""
    module = trace(fn, args, dynamic)

    def source(sizes: Sequence | None) -> Graph:
        recorder = Recorder(sizes)
        values = [recorder.input(arg, dynamic) for arg in args]
        made = play(recorder, module, values)
        return recorder.importer.finish(
            [value for value in pytree.tree_leaves(made) if value is not None]
        )

    return Program("test", {"forward": source}, context(), bounds="grow")


def tensor(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    low: float = -3.0,
    high: float = 3.0,
) -> torch.Tensor:
    """Numbers in [low, high], the same for the same arguments."""
    generator = torch.Generator().manual_seed(
        seed * 1000003 + sum((n + 1) * 31**k for k, n in enumerate(shape)) % 2**31
    )
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if dtype.is_floating_point:
        return (torch.rand(shape, generator=generator) * (high - low) + low).to(dtype)
    low, high = int(low), int(high)
    if dtype is torch.uint8:
        low = max(low, 0)
    return torch.randint(low, high + 1, shape, generator=generator).to(dtype)


aten = torch.ops.aten


def works(fn, *args, **kwargs):
    """What torch gives for the arguments; None if it does not take them."""
    try:
        return fn(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None


HALF = 1e-2  # absolute: sums of up to 70 products of numbers below 1, rounded once to float16
SINGLE = 2e-5  # absolute: the order of the sum differs from torch's


def unit(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Numbers in [-1, 1]."""
    return tensor(*shape, dtype=dtype, seed=seed, low=-1, high=1)


def sum_case(
    fn: Callable[..., Any],
    *args: Any,
    name: str = "",
    constants: Sequence[int] = (),
    **kwargs: Any,
) -> Case:
    """A case whose results are sums of up to 70 products of numbers in [-1, 1], in the dtype of the
    first argument."""
    rtol, atol = (1e-5, SINGLE) if args[0].dtype is torch.float32 else (4e-3, HALF)
    return Case(fn, args, kwargs, constants=constants, name=name, rtol=rtol, atol=atol)
