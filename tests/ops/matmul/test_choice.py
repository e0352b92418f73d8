"""The kernels that GPUs get: every choice keeps the templates' conditions and the device's limits,
and is right."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
import torch.nn.functional as F

from purevk.graph.context import default_context
from purevk.lower.gpu_kernels import Dot, Problem, TileBounds, Tiled, Vector
from purevk.lower.gpu_tiles import candidates, choose_gpu, prefers_columns
from purevk.lower.matrix_core_kernels import Coopmat, WorkgroupCoopmat
from purevk.ops.conv import choice as convolution_choice
from purevk.ops.matmul import choice as matmul_choice
from purevk.ops.matmul.grouped import choose_grouped
from purevk.tuning import DEFAULT, DeviceTraits
from tests.ops.harness import Case, check, dispatches, program_of, tensor

SMALLEST = DeviceTraits(frozenset())  # what every Vulkan device has
LARGE = DeviceTraits(
    frozenset(), 32, 132, max_shared_memory=49152, max_invocations=1024, coopmat_shape=(16, 16, 16)
)
WIDE = dataclasses.replace(LARGE, subgroup_size=64, cores=40, max_shared_memory=65536)
NARROW = dataclasses.replace(
    LARGE,
    subgroup_size=16,
    cores=0,
    max_shared_memory=32768,
    max_invocations=512,
    coopmat_shape=(8, 16, 16),
)
WORKGROUPS = dataclasses.replace(
    LARGE, workgroup_matrices=((32, 16, 16, 128), (32, 32, 16, 256)), max_workgroup_matrix=256
)
SUBGROUPS = dataclasses.replace(
    LARGE, features=frozenset({"subgroup_arithmetic", "subgroup_size_control"})
)
TRAITS = {
    "subgroups": SUBGROUPS,
    "smallest": SMALLEST,
    "large": LARGE,
    "wide": WIDE,
    "narrow": NARROW,
    "workgroups": WORKGROUPS,
}


def problems(count, seed):
    dice = random.Random(seed)

    def size(most):
        return dice.choice([1, 2, 3, 7, 16, 31, 49, 64, 196, 197, 1024, dice.randint(1, most)])

    for _ in range(count):
        window = dice.random() < 0.3
        m, n, k = size(70000), size(5000), size(9000)
        yield Problem(
            m,
            n,
            k,
            dice.choice([1, 1, 1, 3, 12, 96]),
            dice.random() < 0.5,
            not window and dice.random() < 0.3,
            (dice.random() < 0.7, dice.random() < 0.7),
            window,
            None if dice.random() < 0.3 else TileBounds(dice.choice([1, m]), n, k),
            dice.random() < 0.7,
        )


def holds(choice, traits, problem):
    """The conditions as matmul_shared.glslh, matmul_coopmat.glslh, matmul_vec.comp and
    matmul_dot.comp state them, and the limits."""
    threads, shared = 0, 0
    if isinstance(choice, Dot):
        assert problem.transposed and problem.wide and not problem.window
        assert choice.rows <= 8 and choice.lanes % traits.subgroup_size == 0
        assert traits.has("subgroup_arithmetic", "subgroup_size_control")
        threads, shared = choice.lanes, 16 * choice.rows * choice.lanes // traits.subgroup_size
        assert 0 < threads <= traits.max_invocations and 2 * shared <= traits.max_shared_memory
        return
    if isinstance(choice, Vector):
        assert not problem.window and choice.rows % choice.chunk == 0
        assert choice.slices & (choice.slices - 1) == 0 and (
            choice.lanes == 1 or not problem.transposed
        )
        threads = choice.lanes * choice.slices
        staged = choice.rows > 8 and not problem.transposed
        shared = 16 * max(
            choice.chunk * threads,
            choice.depth * choice.slices * (choice.rows + 4) if staged else 0,
        )
    elif isinstance(choice, WorkgroupCoopmat):
        m, n, k, threads = choice.tile_m, choice.tile_n, choice.tile_k, choice.invocations
        assert problem.half and not problem.window and traits.takes_matrices(m, n, k, threads)
        assert problem.tiles.m >= m and problem.tiles.n >= n and problem.tiles.k % k == 0
        assert problem.transposed or problem.n % n == 0
    else:
        m, n, k, slices = choice.tile_m, choice.tile_n, choice.tile_k, choice.slices
        assert m % 4 == n % 4 == k % 4 == 0 and k // 4 % slices == 0
        if isinstance(choice, Coopmat):
            fm, fn, fk = choice.shape
            assert (
                problem.half
                and choice.shape == traits.coopmat_shape
                and choice.subgroup == traits.subgroup_size
            )
            assert choice.sub_m % fm == choice.sub_n % fn == 0 and k % (fk * slices) == 0
            subgroups = (m // choice.sub_m) * (n // choice.sub_n)
            threads = traits.subgroup_size * subgroups * slices
            shared = 2 * (m * (k + 8) + (n * (k + 8) if problem.transposed else k * (n + 8)))
            results = 4 * (slices * m * n if slices > 1 else fm * (choice.sub_n + 4) * subgroups)
            shared = max(shared, results) if choice.width == 8 else shared + results
            width = choice.width
            assert width == 4 or problem.wide
        else:
            width = 4
            assert (
                m % choice.thread_m
                == n % choice.thread_n
                == choice.thread_m % 4
                == choice.thread_n % 4
                == 0
            )
            threads = (m // choice.thread_m) * (n // choice.thread_n) * slices
            shared = 4 * k * (m + n + (8 if problem.transposed else 4) * (32 // k if k < 32 else 1))
            shared = max(shared, 4 * slices * m * n if slices > 1 else 0)
        assert threads % (k // width) == 0
        assert m * k // width % threads == n * k // width % threads == 0
    assert 0 < threads <= traits.max_invocations and shared <= traits.max_shared_memory
    if choice.splits > 1:
        assert problem.k >= choice.splits and not (problem.window and problem.batches > 1)


@pytest.mark.parametrize("name", TRAITS)
def test_every_candidate_keeps_the_conditions(name):
    for problem in problems(300, 1):
        found = list(candidates(TRAITS[name], problem))
        assert any(isinstance(choice, Tiled) for choice in found), problem
        for choice in found:
            holds(choice, TRAITS[name], problem)


@pytest.mark.parametrize("name", TRAITS)
def test_the_grid_covers_the_result_and_is_within_the_limits(name):
    traits = TRAITS[name]
    for problem in problems(300, 2):
        choice = choose_gpu(traits, problem)
        x, y, z = choice.grid(problem.m, problem.n, problem.batches)
        if isinstance(choice, Dot):
            rows, columns = choice.rows, 4
        else:
            rows = choice.rows if isinstance(choice, Vector) else choice.tile_m
            columns = 4 * choice.lanes if isinstance(choice, Vector) else choice.tile_n
        assert (
            problem.m <= y * rows < problem.m + rows
            and problem.n <= x * columns < problem.n + columns
        )
        assert z == problem.batches * choice.splits and max(x, y, z) <= 65535


def test_matrix_cores_need_the_device_and_halves():
    for problem in problems(300, 3):
        if isinstance(choose_gpu(LARGE, problem), Coopmat):
            assert problem.half
        assert not isinstance(
            choose_gpu(dataclasses.replace(LARGE, coopmat_shape=None), problem), Coopmat
        )
    assert isinstance(choose_gpu(LARGE, Problem(512, 512, 512, half=True)), Coopmat)


def test_sizes_decide():
    """One row: each invocation reads its own part of B. Few tiles with a long K: all multiprocessors
    share them. Many rows: large tiles."""
    assert isinstance(choose_gpu(LARGE, Problem(1, 4096, 4096)), Vector)
    assert choose_gpu(LARGE, Problem(49, 512, 4608, window=True)).splits > 1
    large = choose_gpu(LARGE, Problem(4096, 4096, 4096))
    assert large.tile_m * large.tile_n >= 4096 and large.splits == 1


def test_matrices_of_a_workgroup_need_the_device_and_whole_tiles():
    large = Problem(2048, 4096, 4096, half=True, tiles=TileBounds(2048, 4096, 4096))
    assert isinstance(choose_gpu(WORKGROUPS, large), WorkgroupCoopmat)
    for traits, tiles in (
        (LARGE, large.tiles),
        (WORKGROUPS, None),
        (WORKGROUPS, TileBounds(1, 4096, 4096)),
        (WORKGROUPS, TileBounds(2048, 4096, 16)),
        (WORKGROUPS, TileBounds(2048, 2048, 4096)),
        (dataclasses.replace(WORKGROUPS, max_workgroup_matrix=32), large.tiles),
    ):
        choice = choose_gpu(traits, dataclasses.replace(large, tiles=tiles))
        assert not isinstance(choice, WorkgroupCoopmat)


def test_few_rows_take_columns_16_bytes_at_a_time():
    decode = Problem(1, 2048, 2048, half=True, transposed=True, wide=True)
    assert isinstance(choose_gpu(SUBGROUPS, decode), Dot)
    for change in ({"m": 16}, {"transposed": False}, {"wide": False}, {"k": 128}):
        assert not isinstance(choose_gpu(SUBGROUPS, dataclasses.replace(decode, **change)), Dot)
    assert not isinstance(choose_gpu(LARGE, decode), Dot)


def test_weights_of_halves_are_dense_along_k_on_matrix_cores():
    """For many rows as for few, so that both share them."""
    assert prefers_columns(LARGE, 1, 2048, True)
    assert prefers_columns(LARGE, 2048, 2048, True)
    assert prefers_columns(LARGE, 6304, 64, True)
    assert not prefers_columns(LARGE, 1, 64, True)
    assert not prefers_columns(LARGE, 2048, 2044, True)
    assert not prefers_columns(LARGE, 1, 2048, False)
    assert not prefers_columns(dataclasses.replace(LARGE, coopmat_shape=None), 1, 2048, True)


def test_matrix_cores_read_16_bytes_where_rows_are_aligned():
    problem = Problem(6304, 768, 768, half=True, transposed=True, wide=True)
    assert choose_gpu(LARGE, problem).width == 8
    assert choose_gpu(LARGE, dataclasses.replace(problem, wide=False)).width == 4


FORCED = [
    Tiled(16, 32, 64, 4, 4, 4),
    Tiled(32, 32, 32, 4, 4, 1, 3),
    Tiled(32, 32, 64, 4, 4, 2, 8),
    Vector(1, 8, 16),
    Vector(4, 8, 16, 4),
    Vector(8, 4, 32, 4),
    Vector(16, 8, 32, 8),
]
SIZES = [(1, 67, 131), (5, 37, 509), (49, 64, 196), (33, 40, 128)]


@pytest.fixture
def gpu(monkeypatch):
    """The device of the tests as a GPU of 132 multiprocessors; what it is asked to choose."""
    context = default_context()
    monkeypatch.setattr(
        context,
        "traits",
        dataclasses.replace(context.traits, profile=DEFAULT, cores=132, max_texels=0),
    )

    def use(choice):
        for module in (matmul_choice, convolution_choice):
            monkeypatch.setattr(module, "choose_gpu", lambda traits, problem: choice)

    return use


def templates(case):
    with program_of(case.fn, case.args) as program:
        return dispatches(program)


@pytest.mark.device
@pytest.mark.parametrize("choice", FORCED, ids=str)
def test_matmuls(gpu, choice):
    gpu(choice)
    cases = []
    for m, n, k in SIZES:
        x, w, b, r = tensor(m, k), tensor(n, k, seed=1), tensor(n, seed=2), tensor(m, n, seed=3)
        cases.append(
            Case(
                lambda x, w, b, r: F.gelu(F.linear(x, w, b) / 8) + r,
                (x, w, b, r),
                constants=(1, 2),
                atol=2e-4,
                name=f"{m}x{n}x{k}",
            )
        )
    m, n, k = SIZES[1]
    cases.append(
        Case(
            lambda x, y: (x @ y) * 0.5,
            (tensor(3, m, k), tensor(3, k, n, seed=1)),
            atol=2e-4,
            name="batches",
        )
    )
    check(cases)
    assert ("matmul/matmul_reduce.comp" in templates(cases[0])) == (choice.splits > 1)


class Elements(WorkgroupCoopmat):
    """Without matrix cores, which software devices lack."""

    def macros(self):
        return {**super().macros(), "COOPMAT": 0}


@pytest.mark.device
@pytest.mark.parametrize("splits", [1, 3])
def test_matmuls_of_whole_tiles(gpu, splits):
    """Tiles that overlap their neighbours, and results in which each element has a place of its
    own."""
    gpu(Elements(64, 32, 32, 128, 1, splits))
    half = torch.float16
    x, w, b = (
        tensor(97, 96, dtype=half),
        tensor(72, 96, dtype=half, seed=1),
        tensor(72, dtype=half, seed=2),
    )
    image, kernel = tensor(2, 96, 9, 8, dtype=half), tensor(72, 96, 1, 1, dtype=half, seed=1)
    check(
        Case(
            lambda x, w, b, r: F.gelu(F.linear(x, w, b) / 8) + r,
            (x, w, b, tensor(97, 72, dtype=half, seed=3)),
            constants=(1, 2),
            atol=5e-3,
        ),
        Case(
            lambda x, y: (x @ y) * 0.5,
            (tensor(3, 64, 96, dtype=half), tensor(3, 96, 40, dtype=half, seed=1)),
            atol=5e-2,
        ),
        Case(lambda x, w: F.conv2d(x, w).relu(), (image, kernel), constants=(1,), atol=5e-2),
    )


@pytest.mark.device
@pytest.mark.parametrize(
    "choice", [choice for choice in FORCED if not isinstance(choice, Vector)], ids=str
)
def test_convolutions(gpu, choice):
    gpu(choice)
    cases = []
    for channels, out, kernel, stride in [(3, 7, 3, 2), (20, 36, 3, 1), (64, 40, 1, 2)]:
        x, w, b = (
            tensor(2, channels, 9, 7),
            tensor(out, channels, kernel, kernel, seed=1),
            tensor(out, seed=2),
        )
        r = F.conv2d(x, w, b, stride, kernel // 2)
        cases.append(
            Case(
                lambda x, w, b, r, s=stride, p=kernel // 2: F.relu(F.conv2d(x, w, b, s, p)) + r,
                (x, w, b, r),
                constants=(1, 2),
                atol=2e-4,
            )
        )
    check(cases)


@pytest.mark.device
def test_chosen_kernels_are_right():
    """What the cost model picks, for a device of many multiprocessors."""
    context = default_context()
    kept, context.traits = (
        context.traits,
        dataclasses.replace(context.traits, profile=DEFAULT, cores=132, max_texels=0),
    )
    try:
        x = tensor(1, 64, 5, 5)
        cases = [
            Case(
                lambda x, w: F.relu(F.conv2d(x, w, None, 1, 1)),
                (x, tensor(48, 64, 3, 3, seed=1)),
                constants=(1,),
                atol=2e-4,
            )
        ]
        cases += [
            Case(
                F.conv2d,
                (tensor(1, 24, 13, 11), tensor(24, 1, 3, 3), tensor(24), 1, 1, 1, 24),
                atol=2e-5,
            )
        ]
        cases += [
            Case(F.linear, (tensor(m, k), tensor(n, k, seed=1)), constants=(1,), atol=3e-4)
            for m, n, k in [(1, 96, 1021), (17, 33, 640)]
        ]
        check(cases)
    finally:
        context.traits = kept


@pytest.mark.parametrize("name", TRAITS)
def test_groups_of_rows_keep_the_conditions(name):
    """Tiles are not split along K, and rows that are not sorted come one by one."""
    traits = TRAITS[name]
    for m, n, k, groups in [(1, 64, 64, 8), (8, 1536, 2048, 128), (4096, 5760, 2880, 32)]:
        for half in (False, True):
            for transposed in (False, True):
                for ordered in (False, True):
                    vectors = (True, True)
                    choice = choose_grouped(
                        traits, (m, n, k), groups, half, transposed, vectors, ordered
                    )
                    used = min(m, groups)
                    rows = -(-m // used) if ordered else 1
                    if not isinstance(choice, matmul_choice.Registers):  # as software devices get
                        holds(choice, traits, Problem(rows, n, k, used, half, transposed))
                    assert choice.splits == 1
                    assert ordered or choice.rows_per_group == 1


def test_prompts_take_matrix_cores_and_steps_take_vectors():
    large = TRAITS["large"]
    sizes = (4096 * 4, 5760, 2880)
    assert isinstance(choose_grouped(large, sizes, 32, True, True, (True, True), True), Coopmat)
    step = choose_grouped(large, (4, 5760, 2880), 32, True, True, (True, True), True)
    assert isinstance(step, Vector) and step.rows == 1
