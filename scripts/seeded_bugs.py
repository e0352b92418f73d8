"""Seeds small bugs one at a time, and says which of them the tests find.

    .venv/bin/python scripts/seeded_bugs.py --check        does each bug still apply? (a second)
    .venv/bin/python scripts/seeded_bugs.py TIER           seed each bug and run a tier of the tests
    .venv/bin/python scripts/seeded_bugs.py TIER NAME ...  some bugs
    .venv/bin/python scripts/seeded_bugs.py --map TIER     renew seeded_bugs.json

A bug is a text in one file that is replaced by another. The script works on a copy of HEAD, so the
checkout stays as it is. For each bug it runs up to the first failure:

1. the tests that seeded_bugs.json lists for it: those that found it, that execute the changed
   statement, or that ask for a kernel from the changed file;
2. the tests of the tier that mirror the changed file;
3. the whole tier.

A test that finds a bug becomes the first in the list. The exit status is 1 if more bugs survive than
`--survivors` allows, and 2 if a bug no longer applies.
"""

from __future__ import annotations

import argparse
import ast
import collections
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MAP = Path(__file__).with_suffix(".json")
TESTS_PER_BUG = 12
# It fails with each bug: its texts are no longer there.
NOT_THIS = "--deselect=tests/architecture/test_seeded_bugs.py"


class Bug(NamedTuple):
    """A text that occurs once in a file of `purevk/`, and the wrong text in its place."""

    name: str
    kind: str
    path: str
    right: str
    wrong: str


BUGS = (
    # -- kernels
    Bug(
        "scan-missing-barrier",
        "missing barrier in a kernel",
        "glsl/reduce/scan.comp",
        "        barrier();\n        mine = joined(other, mine);\n",
        "        mine = joined(other, mine);\n",
    ),
    Bug(
        "scan-lost-carry",
        "state lost between iterations",
        "glsl/reduce/scan.comp",
        "carry = joined(carry, all);",
        "carry = all;",
    ),
    Bug(
        "conv-padding",
        "off-by-one bound",
        "glsl/conv/conv2d.comp",
        "inside[g] = y >= 0 && y < H && x >= 0 && x < W;",
        "inside[g] = y >= 0 && y < H && x >= 0 && x <= W;",
    ),
    Bug(
        "matmul-outer-batches",
        "swapped stride",
        "glsl/matmul/matmul.comp",
        "base_b = offset_b + inner * batch_b + outer * outer_b;",
        "base_b = offset_b + inner * batch_b + outer * outer_a;",
    ),
    Bug(
        "conv-dilation",
        "swapped dims",
        "glsl/conv/conv2d.comp",
        "at[g] = at0[g] + (ky * dilation_y * W + kx * dilation_x) * pixel_a;",
        "at[g] = at0[g] + (ky * dilation_x * W + kx * dilation_y) * pixel_a;",
    ),
    Bug(
        "pool-identity",
        "wrong identity of a reduction",
        "glsl/image/pool.comp",
        "best[j] = ACC(LOWEST);",
        "best[j] = ACC(0);",
    ),
    Bug(
        "attention-rescaling",
        "state lost between iterations",
        "glsl/attention/attention.comp",
        "            UNROLL for (int d = 0; d < DV4; d++) acc[r][d] *= shrink;\n",
        "",
    ),
    Bug(
        "scatter-last-entry",
        "off-by-one bound",
        "glsl/index/scatter.comp",
        "            for (int e = abreast; e < m; e += 4 * ABREAST) {",
        "            for (int e = abreast; e < m - 1; e += 4 * ABREAST) {",
    ),
    Bug(
        "sort-kept-ranks",
        "off-by-one bound",
        "glsl/sort/sort_rows.comp",
        "if (rank < keep) put(",
        "if (rank < keep - 1) put(",
    ),
    Bug(
        "philox-rounds",
        "wrong constant",
        "glsl/random/philox.glslh",
        "for (int n = 0; n < 10; n++)",
        "for (int n = 0; n < 9; n++)",
    ),
    Bug(
        "all-identity",
        "wrong identity of a reduction",
        "ops/reduce/reduction.py",
        '"all": Reduction("ACC(1)", "((a) & (b))", logical=True),',
        '"all": Reduction("ACC(0)", "((a) & (b))", logical=True),',
    ),
    # -- shape functions, dtypes, layouts
    Bug(
        "transposed-convolution-size",
        "wrong shape",
        "ops/conv/shapes.py",
        "+ 1 + extra - 2 * padding)",
        "+ 1 - 2 * padding)",
    ),
    Bug(
        "promotion-of-bytes",
        "wrong dtype",
        "ops/promotion.py",
        "_SIGNED_ABOVE_UINT8 = {DType.int8: DType.int16}",
        "_SIGNED_ABOVE_UINT8 = {DType.int8: DType.int8}",
    ),
    Bug(
        "promotion-of-scalars",
        "wrong dtype",
        "ops/promotion.py",
        "level, dtype = (0 if operand.rank else 1), operand.dtype",
        "level, dtype = 0, operand.dtype",
    ),
    Bug(
        "quantization-axis",
        "swapped dims",
        "ops/quantized/quantize.py",
        'axis = wrap(node.int("axis"), type.rank)',
        "axis = 0",
    ),
    # -- passes, planning
    Bug(
        "permute-order",
        "swapped composition in a pass",
        "passes/simplify.py",
        "tuple(inner[d] for d in order)",
        "tuple(order[d] for d in inner)",
    ),
    Bug(
        "merge-signed-zeros",
        "pass merges what differs",
        "passes/simplify.py",
        "return (kind, repr(arg)) if",
        "return (kind, arg) if",
    ),
    Bug(
        "merge-across-writes",
        "pass ignores a write",
        "passes/simplify.py",
        "            or not moving.isdisjoint(node.inputs)\n            or not node.results\n",
        "            or not node.results\n",
    ),
    Bug(
        "cast-to-half-and-back",
        "pass drops a rounding",
        "passes/simplify.py",
        "return wide.itemsize > narrow.itemsize",
        "return wide.itemsize >= narrow.itemsize",
    ),
    Bug(
        "fold-into-transposed-convolution",
        "pass without one of its conditions",
        "passes/matmul/batch_norm.py",
        'if convolution.op == _CONVOLUTION and convolution.bool("transposed"):',
        'if convolution.op != _CONVOLUTION and convolution.bool("transposed"):',
    ),
    Bug(
        "memory-of-the-last-step",
        "lifetimes that are too short",
        "memory_planner.py",
        "start : bisect.bisect_left(self._by_start, (block.last + 1,), start)",
        "start : bisect.bisect_left(self._by_start, (block.last,), start)",
    ),
    # -- run time
    Bug(
        "barrier-after-reads",
        "missing barrier between dispatches",
        "graph/compute_graph.py",
        "for start, end in (touched if write else written).get(buffer, ())",
        "for start, end in written.get(buffer, ())",
    ),
    Bug(
        "states-after-a-replan",
        "state not restored",
        "graph/executable.py",
        "            self.states.upload(saved)\n",
        "",
    ),
    Bug(
        "free-list-neighbours",
        "memory lost",
        "api/memory.py",
        "            size += self._sizes[after]\n",
        "",
    ),
    # -- guards, caches
    Bug(
        "guards-of-sizes",
        "dropped guard",
        "program/variants/specialization.py",
        "            serves = serves and all(guard.holds(env) for guard in self._outer)\n",
        "",
    ),
    Bug(
        "fixed-integers",
        "dropped guard",
        "program/variants/specialization.py",
        "return all(arrays[position] == number for position, number in self._fixed_integers)",
        "return True",
    ),
    Bug(
        "key-without-includes",
        "stale cache key",
        "shaders/cache_entry.py",
        "tuple((name, text_hash(text)) for name, text in files.items()),",
        "tuple((name, text_hash(text)) for name, text in files.items())[:1],",
    ),
    # -- front ends, arguments
    Bug(
        "swapped-buffers",
        "aliases in a front end",
        "frontends/executorch/delegates.py",
        "        outputs = [copies.get(value, value) for value in outputs]  # type: ignore[arg-type]\n",
        "",
    ),
    Bug(
        "random-state-of-eager-torch",
        "state not restored",
        "dynamo.py",
        "            if random_state is not None:\n"
        "                torch.set_rng_state(random_state)\n",
        "",
    ),
    Bug(
        "written-arguments-on-the-cpu",
        "a caller's tensor is written",
        "fallback.py",
        "values = {name: _copied(value) if name in spared else value",
        "values = {name: value",
    ),
    Bug(
        "index-of-an-input",
        "off-by-one bound",
        "program/arguments.py",
        "if least >= lowest and greatest < below:",
        "if least >= lowest and greatest <= below:",
    ),
    Bug(
        "inputs-that-share-memory",
        "dropped check of arguments",
        "program/arguments.py",
        "            if overlap(arrays[written], array):\n",
        "            if arrays[written] is array:\n",
    ),
)


def problems(root: Path = ROOT) -> list[str]:
    """Why bugs no longer apply to a checkout."""
    lines = []
    for bug in BUGS:
        path = root / "purevk" / bug.path
        count = path.read_text(encoding="utf-8").count(bug.right) if path.is_file() else 0
        if count != 1:
            lines.append(f"{bug.name}: its text occurs {count} times in purevk/{bug.path}")
    names = [bug.name for bug in BUGS]
    lines += [f"{name}: two bugs have this name" for name in names if names.count(name) > 1]
    return sorted(set(lines))


class Copy:
    """A copy of HEAD in a temporary folder, with the environment and the compiler of the checkout."""

    def __init__(self, folder: str) -> None:
        self.root = Path(folder) / "purevk"
        subprocess.run(["git", "clone", "-q", "--shared", ROOT, self.root], check=True)
        (self.root / ".venv").symlink_to((ROOT / ".venv").resolve())
        library = self.root / "purevk" / "_lib"
        library.mkdir(exist_ok=True)
        for path in (ROOT / "purevk" / "_lib").glob("libshaderc*"):
            (library / path.name).symlink_to(path.resolve())
        kernels = Path(folder) / "kernels"
        kept = Path(os.environ.get("PUREVK_CACHE") or ROOT / ".pytest_cache" / "purevk")
        for name in ("spirv", "validated"):  # by the hash of what they are compiled from
            if (kept / name).is_dir():
                shutil.copytree(kept / name, kernels / name)
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(self.root),
            "PUREVK_CACHE": str(kernels),
            "PUREVK_DEVICE": os.environ.get("PUREVK_DEVICE", "llvmpipe"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def seed(self, bug: Bug) -> None:
        path = self.root / "purevk" / bug.path
        path.write_text(
            path.read_text(encoding="utf-8").replace(bug.right, bug.wrong), encoding="utf-8"
        )

    def restore(self) -> None:
        subprocess.run(["git", "checkout", "-q", "--", "purevk"], cwd=self.root, check=True)

    def run(self, command: list[str], limit: float | None = None) -> tuple[bool, str]:
        """Runs tests up to the first failure: whether one failed, and its line."""
        try:
            done = subprocess.run(
                command,
                cwd=self.root,
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=limit,
            )
        except subprocess.TimeoutExpired:
            return False, f"no test failed in {limit:.0f} s; stopped"
        lines = done.stdout.splitlines()
        failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
        if "ERROR: not found: " in done.stdout + done.stderr:
            return False, "a listed test is gone"
        if done.returncode not in (0, 1, 2, 5):
            failed = failed or [f"exit status {done.returncode}: {done.stderr.strip()[-200:]}"]
        return bool(failed) or done.returncode in (1, 2), (failed or lines[-1:] or [""])[0][:160]

    def run_tests(self, *args: str, limit: float | None = None) -> tuple[bool, str]:
        return self.run(
            [".venv/bin/python", "-m", "pytest", "-q", "-x", "--no-header", NOT_THIS, *args],
            limit,
        )


def mirrors(bug: Bug) -> list[str]:
    """The tests of what a bug changes: files or folders, the nearest first."""
    path = Path(bug.path)
    if path.parts[0] == "glsl":
        found = [f"tests/{folder}/{path.parts[1]}" for folder in ("glsl", "ops")]
    else:
        found = [f"tests/{path.parent / f'test_{path.stem}.py'}", f"tests/{path.parent}"]
    return [each for each in found if (ROOT / each).exists() and each != "tests/."]


def seed_each(
    tier: str, bugs: list[Bug], tests: dict[str, list[str]], limit: float | None
) -> list[Bug]:
    """Seeds bugs one at a time. Prints a line for each, and returns those that no test finds. Puts a
    test that finds a bug first in the list of its tests."""
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(folder)
        for bug in bugs:
            start = time.monotonic()
            copy.seed(bug)
            listed, chosen = (
                tests.get(bug.name, []),
                [] if tier == "nightly" else [f"--tier={tier}"],
            )
            failed, line = copy.run_tests(*chosen, *listed, limit=limit) if listed else (False, "")
            for each in mirrors(bug):
                if not failed and each not in listed:
                    failed, line = copy.run_tests(*chosen, each, limit=limit)
            if not failed:
                failed, line = copy.run(
                    ["scripts/test.sh", tier, "-x", "--no-header", NOT_THIS], limit
                )
            copy.restore()
            survivors += [] if failed else [bug]
            name = line.removeprefix("FAILED ").partition(" - ")[0]
            if failed and name.startswith("tests/") and listed[:1] != [name]:
                tests[bug.name] = [name, *(each for each in listed if each != name)]
            verdict = "found" if failed else "SURVIVES"
            print(
                f"{bug.name:34} {verdict:9} {time.monotonic() - start:6.0f} s  {line}", flush=True
            )
    return survivors


# -- which tests execute a bug's statement -------------------------------------------------------
_PLUGIN = '''
"""Writes which test reached which seeded bug."""
import json, os, time
_test, _reached = "", set()


def reached(name):
    if _test and (name, _test) not in _reached:
        _reached.add((name, _test))


def pytest_configure(config):
    from purevk.shaders import cache_entry

    files = json.loads(os.environ["SEEDED_BUGS_FILES"])
    of = cache_entry.CacheKey.of.__func__

    def key_of(cls, job):
        key = of(cls, job)
        for name, _ in key.files:
            for bug in files.get(name, ()):
                reached(bug)
        return key

    cache_entry.CacheKey.of = classmethod(key_of)


def pytest_runtest_logstart(nodeid, location):
    global _test
    _test = nodeid


def pytest_runtest_logreport(report):
    if report.when == "call" and report.passed:
        seconds[report.nodeid] = report.duration


seconds = {}


def pytest_sessionfinish(session):
    path = os.environ["SEEDED_BUGS_OUT"] + f"/{os.getpid()}.json"
    rows = [(bug, test, seconds[test]) for bug, test in _reached if test in seconds]
    with open(path, "w") as file:
        json.dump(rows, file)
'''


def _insert_probe(path: Path, text: str, name: str) -> None:
    """Puts a call before the innermost statement that holds a text."""
    source = path.read_text(encoding="utf-8")
    line = source[: source.index(text)].count("\n") + 1 + (len(text) - len(text.lstrip("\n")))
    inside = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    lines = source.splitlines(keepends=True)
    # An `elif` is a statement too, and nothing can stand before it.
    inside = [node for node in inside if not lines[node.lineno - 1].lstrip().startswith("elif")]
    node = max(inside, key=lambda node: (node.lineno, node.col_offset))
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1
    probe = f"{' ' * node.col_offset}import seeded_probe; seeded_probe.reached({name!r})\n"
    path.write_text("".join([*lines[:first], probe, *lines[first:]]), encoding="utf-8")


def renew_map(tier: str) -> None:
    """Runs a tier once with a probe at each bug, and writes the quickest tests that reach each."""
    files: dict[str, list[str]] = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(folder)
        for bug in BUGS:
            if bug.path.startswith("glsl/"):
                files[bug.path.removeprefix("glsl/")].append(bug.name)
            else:
                _insert_probe(copy.root / "purevk" / bug.path, bug.right, bug.name)
        (Path(folder) / "seeded_probe.py").write_text(_PLUGIN, encoding="utf-8")
        copy.environment["PYTHONPATH"] += os.pathsep + folder
        copy.environment["SEEDED_BUGS_FILES"] = json.dumps(files)
        copy.environment["SEEDED_BUGS_OUT"] = folder
        subprocess.run(
            ["scripts/test.sh", tier, "-p", "seeded_probe"], cwd=copy.root, env=copy.environment
        )
        rows = [row for path in Path(folder).glob("*.json") for row in json.loads(path.read_text())]
    tests: dict[str, list[str]] = {}
    for bug in BUGS:
        reached = sorted((seconds, test) for name, test, seconds in rows if name == bug.name)
        tests[bug.name] = [test for _, test in reached[:TESTS_PER_BUG]]
    write_map(tests)


def write_map(tests: dict[str, list[str]]) -> None:
    MAP.write_text(json.dumps(tests, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("tier", nargs="?", default="landing")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--check", action="store_true", help="only see whether the bugs apply")
    parser.add_argument("--map", action="store_true", help="renew the list of tests of each bug")
    parser.add_argument("--limit", type=float, help="seconds after which to stop a run of tests")
    parser.add_argument("--survivors", type=int, default=0, help="how many bugs may survive")
    args = parser.parse_args()
    stale = problems()
    if stale:
        print("\n".join(stale), file=sys.stderr)
        return 2
    if args.check:
        print(f"{len(BUGS)} bugs apply")
        return 0
    if args.map:
        renew_map(args.tier)
        return 0
    unknown = set(args.names) - {bug.name for bug in BUGS}
    if unknown:
        print(f"no bug is named {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    chosen = [bug for bug in BUGS if not args.names or bug.name in args.names]
    tests = json.loads(MAP.read_text(encoding="utf-8")) if MAP.is_file() else {}
    survivors = seed_each(args.tier, chosen, tests, args.limit)
    write_map(tests)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} bugs found by the tier {args.tier}")
    return int(len(survivors) > args.survivors)


if __name__ == "__main__":
    sys.exit(main())
