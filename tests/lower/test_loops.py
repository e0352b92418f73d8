"""Loops: what templates declare of them, against a device that ends them, and operators on a device
that ends them early."""

from __future__ import annotations

import random
import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from purevk.dtypes import DType
from purevk.errors import KernelInterfaceError, UnsupportedOperatorError
from purevk.ir import Dim, Symbol, TensorType, Value
from purevk.lower.lowering import Lowering
from purevk.shaders.code_size import loops_of_functions
from purevk.shaders.source import GLSL_FOLDER, source_files
from purevk.shaders.templates import template_interface
from purevk.tuning import SOFTWARE, DeviceTraits
from tests.lower.loops import LOOP, ends_loops
from tests.ops.harness import Case, context, run_cases

TEMPLATES = sorted(path.relative_to(GLSL_FOLDER).as_posix() for path in GLSL_FOLDER.rglob("*.comp"))
COMMENT = re.compile(r"//[^\n]*")
FUNCTION = re.compile(r"^\w[^;{}#]*\)\s*\{\n(?:.*\n)*?\}\n", re.MULTILINE)


def test_every_template_declares_its_loops() -> None:
    """What core/ has in functions is declared there, and what macros of statements have, where they are
    used."""
    for template in TEMPLATES:
        text = (GLSL_FOLDER / template).read_text(encoding="utf-8")
        files = source_files(text, name=template)
        elsewhere = ("core/", "elementwise/statements.glslh")
        own = [each for name, each in files.items() if not name.startswith(elsewhere)]
        if any(LOOP.search(COMMENT.sub("", each)) for each in own):
            assert "\nLOOPS(" in text, template
            assert template_interface(template).kernel({}).loops or "#if" in text, template


def test_every_function_of_core_declares_its_loops() -> None:
    data = {"fn_polynomial"}  # as many as an element says
    for name in ("math", "composed", "special", "functions", "double", "double_functions"):
        text = COMMENT.sub("", (GLSL_FOLDER / f"core/{name}.glslh").read_text(encoding="utf-8"))
        for match in FUNCTION.finditer(text):
            called = re.search(r"(\w+)\(", match[0])
            if LOOP.search(match[0]) and called is not None and called[1] not in data:
                assert "FUNCTION_LOOPS(" in match[0], called[1]
    assert loops_of_functions("pv_exp(x) + 1.0") == 0
    assert loops_of_functions("pv_lgamma(x)") > 0
    # Overloads for double precision count only where they can be called.
    assert loops_of_functions("fn_igamma(a, x)", double=False) < 2000
    assert loops_of_functions("fn_igamma(a, x)") > 20000


X = Value("x", TensorType(DType.float32, (4,)))


def _matmul(depth: object) -> Lowering:
    lowering = Lowering(DeviceTraits(frozenset(), profile=SOFTWARE), {}, {})
    takes = template_interface("matmul/matmul.comp").kernel({})
    lowering.dispatch(
        "matmul/matmul.comp",
        {name: (X, slot.access) for name, slot in takes.buffers.items()},
        params={**dict.fromkeys(takes.params, 1), "K": depth},
        grid=(1, 1, 1),
    )
    return lowering


def test_a_loop_that_is_too_long_raises() -> None:
    assert not _matmul(200_000).requirements
    with pytest.raises(UnsupportedOperatorError, match="more than 60000 iterations"):
        _matmul(400_000)


def test_a_loop_that_may_be_too_long_is_checked_at_each_call() -> None:
    size = Dim.of(Symbol("s0", 1, 2**30))
    (rule,) = _matmul(size).requirements
    assert rule.right == 60000
    assert not _matmul(Dim.of(Symbol("s0", 1, 2**16))).requirements


def test_a_text_with_a_loop_declares_it() -> None:
    lowering = Lowering(DeviceTraits(frozenset()), {}, {})
    body = {"BODY": "for (int k = 0; k < 9; k++) r += X(k);"}
    arguments = {
        "params": {"work": 1},
        "constants": {"local_size_x": 1},
        "grid": (1, 1, 1),
    }
    buffers = {"x": (X, "r"), "r": (X, "w")}
    with pytest.raises(KernelInterfaceError, match="does not declare"):
        lowering.dispatch("elementwise/map.comp", buffers, macros=body, **arguments)
    lowering.dispatch(
        "elementwise/map.comp",
        buffers,
        macros={"BODY": f"LOOPS(loop(9)) {body['BODY']}"},
        **arguments,
    )


# -- on a device ---------------------------------------------------------------------------------
def _cases(limit: int) -> list[Case]:
    """Operators of each family, over rows that are longer than a device runs that ends loops after
    `limit` iterations, with random sizes and dtypes."""
    pick = random.Random(limit)
    torch.manual_seed(limit)

    def some(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*sizes).to(dtype)

    def pairs(*sizes: int) -> torch.Tensor:
        return torch.complex(some(*sizes), some(*sizes))

    def in_groups(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, weight, groups=2)

    long = pick.randint(limit * 180, limit * 240)
    short, rows = pick.randint(limit, 4 * limit), pick.randint(1, 3)
    deep = pick.randint(4 * limit, 9 * limit)
    half = pick.choice((torch.float16, torch.bfloat16))
    classes = torch.randint(0, long, (rows,))
    return [
        Case(lambda x: x.softmax(-1), (some(rows, long),)),
        Case(lambda x: x.log_softmax(-1), (some(rows, long, dtype=half),)),
        Case(lambda x: x.softmax(0), (some(long // 8, 3),)),
        Case(lambda x: x.softmax(0), (some(short, 40),)),
        Case(F.cross_entropy, (some(rows, long), classes)),
        Case(lambda x: F.layer_norm(x, (long,)), (some(rows, long),), atol=1e-4),
        Case(lambda x: F.rms_norm(x, (long,)), (some(rows, long // 4 * 4),), atol=1e-4)
        if long % 4 == 0
        else Case(lambda x: F.layer_norm(x, (short,)), (some(rows, short),), atol=1e-4),
        Case(lambda x: torch.linalg.vector_norm(x, 3, -1), (some(rows, long // 10),)),
        Case(lambda x: x.sum(0), (some(long // 10, 3),), atol=1e-3),
        Case(lambda x: x.logsumexp(-1), (some(rows, long),)),
        Case(lambda x: x.amax(-1), (some(rows, long),)),
        Case(torch.mm, (some(5, deep), some(deep, 7)), atol=1e-2),
        Case(torch.mm, (some(5, deep, dtype=half), some(deep, 7, dtype=half)), atol=0.5),
        Case(F.linear, (some(rows, deep), some(9, deep), some(9)), constants=(1, 2), atol=1e-2),
        Case(torch.mv, (some(6, deep), some(deep)), atol=1e-2),
        Case(torch.mm, (torch.randint(-9, 9, (3, deep)), torch.randint(-9, 9, (deep, 5)))),
        Case(torch.mm, (some(3, deep).double(), some(deep, 5).double())),
        Case(torch.mm, (pairs(3, deep), pairs(deep, 4)), atol=1e-2),
        Case(F.conv2d, (some(1, limit, 5, 6), some(4, limit, 3, 3), some(4)), constants=(1, 2), atol=1e-2),
        Case(in_groups, (some(1, 2 * limit, 4, 5), some(4, limit, 2, 3)), constants=(1,), atol=1e-2),
        Case(F.conv1d, (some(2, limit, 19), some(3, limit, 9)), constants=(1,), atol=1e-2),
        Case(F.conv_transpose2d, (some(1, limit, 4, 5), some(limit, 3, 3, 3)), constants=(1,), atol=1e-2),
        Case(lambda x: x.cumsum(-1), (some(rows, short),), atol=1e-3),
        Case(lambda x: x.topk(3)[0], (some(rows, short),)),
    ]  # fmt: skip


@pytest.mark.device
@pytest.mark.parametrize("limit", [1000, pytest.param(1777, marks=pytest.mark.slow)])
def test_operators_on_a_device_that_ends_loops_early(limit: int) -> None:
    with ends_loops(context(), limit) as seen:
        problems = {
            str(case): found for case in _cases(limit) for found in run_cases([case]) if found
        }
    assert not problems, "\n".join(f"{case}: {found}" for case, found in problems.items())
    assert max(count for _, count in seen) <= limit


# -- code that is unrolled -----------------------------------------------------------------------
def _kernels(case: Case) -> list[dict[str, str]]:
    """The macros of a case's kernels, which are compared with torch."""
    noted: list[dict[str, str]] = []
    dispatch = Lowering.dispatch

    def note(self: Lowering, *args: object, **options: object) -> None:
        dispatch(self, *args, **options)
        noted.append(dict(self.dispatches[-1].kernel.macros))

    with mock.patch.object(Lowering, "dispatch", note):
        assert run_cases([case]) == [""]
    return noted


@pytest.mark.device
def test_large_windows_and_heads_stay_loops() -> None:
    """Compilers would take seconds for what these unroll to. Random sizes above and below."""
    pick = random.Random(3)
    torch.manual_seed(3)
    for high, wide, rolled in ((5, 7, "0"), (pick.randint(23, 40), 31, "1"), (1, 700, "2")):
        channels, stride = 4 * pick.randint(1, 3), pick.randint(1, 2)
        image = torch.randn(1, channels, high + 3, wide + 9)
        weight = torch.randn(channels, 1, high, wide)

        def depthwise(x: torch.Tensor, w: torch.Tensor, stride: int = stride) -> torch.Tensor:
            return F.conv2d(x, w, stride=stride, groups=len(w))

        made = _kernels(Case(depthwise, (image, weight), constants=(1,), atol=1e-3))
        assert rolled in [each.get("ROLLED", "0") for each in made]
    for width, plain in ((64, False), (4 * pick.randint(44, 64), True)):
        some = [torch.randn(1, 2, 9, width) for _ in range(3)]
        if pick.random() < 0.5:
            some = [each.bfloat16() for each in some]
        made = _kernels(Case(F.scaled_dot_product_attention, tuple(some), atol=2e-2))
        if context().traits.has("subgroup_shuffle") and not context().traits.coopmat_shape:
            assert any("PUREVK_UNOPTIMIZED" in each for each in made) == plain
