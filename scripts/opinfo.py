"""Runs PyTorch's own operator samples (`torch.testing`'s op_db) through purevk and counts the samples
that agree with eager torch.

    python scripts/opinfo.py --update [--ops REGEX] [--dtypes float32,int64] [--limit N] [--again]

Every sample is exported with torch.export and compiled like a model. To save time, one program holds
several samples. If such a program cannot be made, its samples are split by bisection. A sample
counts as

* *passed* if its results agree and all its nodes ran on the device,
* *fallback* if they agree and some nodes ran on the CPU,
* *failed* if they differ, or purevk refuses the program,
* *skipped* if there is nothing to compare. The reason is kept.

Results agree by the tolerances of `torch.testing.assert_close`, or by those of the operator's OpInfo.
Eager torch rounds too. So a result also agrees if it agrees with the float64 result of eager torch,
or if its error to that is at most twice the error of eager torch. Indices of equal elements may
differ (sort, topk and the like). Of vectors whose signs are free, what the samples call unique is
compared: magnitudes, or products.

`--update` keeps the counts in docs/data/opinfo.json, from which scripts/make_docs.py makes
docs/reference/op_samples.md. Operators that are in the file are not run again without `--again`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from purevk import api  # noqa: E402
from purevk.errors import PurevkError  # noqa: E402
from purevk.frontends.torch.decompose import decompose  # noqa: E402
from purevk.frontends.torch.exported import read_exported  # noqa: E402
from purevk.graph.context import Context  # noqa: E402
from purevk.ir import Graph, Value  # noqa: E402
from purevk.program import Program  # noqa: E402

DATA = ROOT / "docs" / "data" / "opinfo.json"
OUTCOMES = ("passed", "fallback", "failed", "skipped")
BUNDLE = 24  # samples in one program
REASONS = 4  # kept of each operator and dtype
ELEMENTS = 1 << 20  # of all inputs of one program
# Operators that give indices of elements, and the position of their argument `dim`.
_TIES = {"sort": 1, "argsort": 1, "topk": 2, "kthvalue": 2, "median": 1, "nanmedian": 1, "mode": 1}
# Operators without a result to compare.
WITHOUT = {
    "random": r"^(rand|randn|randint|normal|bernoulli|multinomial|uniform|exponential|geometric|cauchy|log_normal)\b|^(rand\w*|randn?_like|randint_like)$"  # noqa: E501
    r"|dropout|\.rrelu$|fractional_max_pool|pca_lowrank|svd_lowrank",
    "uninitialized": r"(^|_)empty(_|$)|^resize",
    "no ATen operator": r"jiterator",
}

# Operators whose samples say what of their results is unique: the magnitudes of vectors, products.
FREE_SIGNS = ("linalg.eigh", "linalg.svd", "svd")


@dataclass
class Sample:
    """One call of an operator: its tensors, and what eager torch makes of them."""

    name: str
    number: int
    spec: Any
    leaves: list[Any]
    op: Any
    process: Callable[[Any], Any] | None = None
    wanted: list[torch.Tensor] = field(default_factory=list)

    @property
    def positions(self) -> list[int]:
        """The leaves that are tensors."""
        return [n for n, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.leaves[n] for n in self.positions]

    def __call__(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        leaves = list(self.leaves)
        for position, tensor in zip(self.positions, tensors):
            leaves[position] = tensor
        args, kwargs = _pytree.tree_unflatten(leaves, self.spec)
        made = self.op(*args, **kwargs)
        return [
            leaf
            for leaf in _pytree.tree_leaves(self.process(made) if self.process else made)
            if isinstance(leaf, torch.Tensor)
        ]

    def eager(self, wide: bool = False) -> list[torch.Tensor]:
        """What torch makes of copies of the tensors; `wide`: computed in float64."""
        fresh = [t.double() if wide and t.is_floating_point() else t.clone() for t in self.tensors]
        with torch.no_grad():
            return [t.clone() for t in self(fresh)]


class Bundle(torch.nn.Module):
    """Samples as one module, of all their tensors."""

    def __init__(self, samples: list[Sample]) -> None:
        super().__init__()
        self.samples = samples

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        waiting = list(tensors)
        made: list[torch.Tensor] = []
        for sample in self.samples:
            count = len(sample.positions)
            made += sample([t for t in waiting[:count]])
            del waiting[:count]
        return made


@dataclass
class Counts:
    """The outcomes of an operator's samples of one dtype."""

    outcomes: Counter = field(default_factory=Counter)
    reasons: Counter = field(default_factory=Counter)  # (outcome, reason) -> samples

    def add(self, outcome: str, why: str = "", count: int = 1) -> None:
        self.outcomes[outcome] += count
        if why:
            self.reasons[outcome, why] += count

    def keep(self, entry: dict[str, Any], dtype: str) -> None:
        """Writes the outcomes into an operator's entry of the file: under the dtype its counts, in
        the order of `OUTCOMES`, and under "why" the commonest reasons: [outcome, reason, [dtype,
        ...]]."""
        counts = [self.outcomes[name] for name in OUTCOMES]
        while counts and not counts[-1]:
            counts.pop()
        entry[dtype] = counts
        reasons = {
            (outcome, why): [each for each in dtypes if each != dtype]
            for outcome, why, dtypes in entry.pop("why", [])
        }
        for key, _ in self.reasons.most_common(REASONS):
            reasons.setdefault(key, []).append(dtype)
        kept = [[*key, dtypes] for key, dtypes in reasons.items() if dtypes]
        if kept:
            entry["why"] = kept


class Runner:
    """Runs samples on a device, which is opened anew now and then: a device keeps its kernels."""

    def __init__(self) -> None:
        self.context: Context | None = None
        self.programs = 0

    def run(
        self, samples: list[Sample], counts: Counts, tolerance: tuple[float, float] | None
    ) -> None:
        """Counts the outcomes of samples, in one program if it can be made."""
        bundle = Bundle(samples)
        tensors = tuple(t.clone() for sample in samples for t in sample.tensors)
        try:
            with torch.no_grad():
                exported = torch.export.export(bundle, tensors, strict=False)
        except Exception as error:  # whatever torch refuses to export
            self._smaller(samples, counts, tolerance, "skipped", f"torch.export: {_short(error)}")
            return
        try:
            exported = decompose(exported)
        except Exception as error:
            self._smaller(
                samples,
                counts,
                tolerance,
                "skipped",
                f"torch.export, decompositions: {_short(error)}",
            )
            return
        try:
            graph = read_exported(exported)
            with Program(
                "opinfo",
                {"forward": lambda sizes: read_exported(exported, sizes) if sizes else graph},
                self._context(),
            ) as program:
                hosts = {
                    step.nodes[0].source: (step.nodes[0].args[0], step.nodes[0].args[1])
                    for step in program.method("forward").executable.plan.steps
                    if not step.on_device
                }
                made = program.method("forward").run_flat(tensors)
        except PurevkError as error:
            self._smaller(
                samples,
                counts,
                tolerance,
                "failed",
                f"{type(error).__name__}: {error.what}" + (f" ({error.why})" if error.why else ""),
            )
            return
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            self._smaller(
                samples,
                counts,
                tolerance,
                "failed",
                f"{_short(error)} ({Path(where.filename).name}:{where.lineno})",
            )
            return
        made = list(made)
        sources = _sources(graph)
        at = 0
        for sample in samples:
            many = len(sample.wanted)
            if not tensors:  # arrays, and numpy has no bfloat16
                halves = [want.dtype is torch.bfloat16 for want in sample.wanted]
                made[at : at + many] = [
                    torch.from_numpy(each).view(torch.bfloat16) if half else each
                    for each, half in zip(made[at:], halves)
                ]
            wrong = compare(sample, made[at : at + many], tolerance)
            where = {
                source
                for output in graph.outputs[at : at + many]
                if isinstance(output, Value)
                for source in sources[output]
            }
            cpu = {hosts[source] for source in where if source in hosts}
            at += many
            if wrong:
                counts.add("failed", wrong)
            else:
                counts.add("fallback" if cpu else "passed", _on_cpu(cpu))

    def _smaller(
        self, samples: list[Sample], counts: Counts, tolerance: Any, outcome: str, why: str
    ) -> None:
        if len(samples) == 1:
            counts.add(outcome, why[:160])
            return
        half = len(samples) // 2
        self.run(samples[:half], counts, tolerance)
        self.run(samples[half:], counts, tolerance)

    def _context(self) -> Context:
        self.programs += 1
        if self.context is None or self.programs % 200 == 0:
            self.close()
            self.context = Context(api.open_device())
        return self.context

    def close(self) -> None:
        if self.context is not None:
            self.context.close()
            self.context = None


def _on_cpu(nodes: set[tuple[str, str]]) -> str:
    """The operators that ran on the CPU, with the reasons; those that had to because others did are
    left out."""
    following = ("no kernel for complex numbers", "between nodes on the CPU")
    causes = {node for node in nodes if node[1] not in following} or nodes
    return ", ".join(
        sorted(name if why == "no kernel" else f"{name}: {why}" for name, why in causes)
    )


def _sources(graph: Graph) -> dict[Value, frozenset[str]]:
    """For each value, the nodes of the program that it depends on, by their sources."""
    found: dict[Value, frozenset[str]] = {}
    for value in (*graph.inputs, *graph.constants, *graph.states):
        found[value] = frozenset()
    for node in graph.nodes:
        made = frozenset({node.source}).union(*(found[value] for value in node.inputs))
        for value in node.results:
            found[value] = made
    return found


def compare(sample: Sample, made: list[Any], tolerance: tuple[float, float] | None) -> str:
    """What differs from eager torch; empty if nothing does."""
    for number, (have, want) in enumerate(zip(made, sample.wanted)):
        if not isinstance(have, torch.Tensor):
            have = torch.as_tensor(have)
        if _differs(have, want, tolerance):
            if _same_elements(sample, have, want):
                continue
            exact = _exact(sample, number, want)
            if exact is None:
                return _differs(have, want, tolerance)
            if _differs(have, exact.to(want.dtype), tolerance) and not _as_near(have, want, exact):
                return _differs(have, want, tolerance)
    return ""


def _same_elements(sample: Sample, have: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether two results are indices of equal elements. Among equal elements, torch may choose any."""
    at = _TIES.get(sample.name.partition(".")[0])
    if (
        at is None
        or want.dtype is not torch.int64
        or have.shape != want.shape
        or have.dtype is not want.dtype
    ):
        return False
    args, kwargs = _pytree.tree_unflatten(sample.leaves, sample.spec)
    if kwargs.get("stable"):
        return False
    x = args[0]
    dim = kwargs.get("dim", args[at] if len(args) > at else -1)
    if (
        not isinstance(dim, int)
        or not x.dim()
        or not bool(((have >= 0) & (have < x.shape[dim])).all())
    ):
        return False
    indices = [each if each.dim() == x.dim() else each.unsqueeze(dim) for each in (have, want)]
    found = [torch.gather(x, dim, each) for each in indices]
    return bool(((found[0] == found[1]) | (found[0].isnan() & found[1].isnan())).all())


def _exact(sample: Sample, number: int, want: torch.Tensor) -> torch.Tensor | None:
    """The result computed in float64, if the operator can be."""
    if not want.is_floating_point() or want.dtype is torch.float64:
        return None
    try:
        exact = sample.eager(wide=True)[number]
    except Exception:  # not every operator takes float64
        return None
    return exact if exact.shape == want.shape and exact.is_floating_point() else None


def _as_near(have: torch.Tensor, want: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether the largest error is at most twice that of eager torch, and infinities and NaNs are
    at the same indices."""
    if have.dtype is not want.dtype or have.shape != want.shape:
        return False
    fine = exact.to(want.dtype).isfinite() & want.isfinite()
    if not torch.equal(have[~fine].nan_to_num(), want[~fine].nan_to_num()) or not torch.equal(
        have.isnan(), want.isnan()
    ):
        return False
    errors = [
        (each.double() - exact)[fine].abs().max() if fine.any() else torch.zeros(())
        for each in (have, want)
    ]
    return bool(errors[0] <= 2 * errors[1])


def _differs(have: torch.Tensor, want: torch.Tensor, tolerance: tuple[float, float] | None) -> str:
    if have.dtype is not want.dtype or have.shape != want.shape:
        return f"gives {str(have.dtype)[6:]}{list(have.shape)}, not {str(want.dtype)[6:]}{list(want.shape)}"
    rtol, atol = tolerance if tolerance and want.is_floating_point() else (None, None)
    try:
        torch.testing.assert_close(have, want, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        text = " ".join(str(error).split())
        found = re.search(
            r"[Gg]reatest relative difference: (\S+)|Relative difference: (\S+)|Absolute difference: (\S+)",
            text,
        )
        number = next((each for each in found.groups() if each), "") if found else ""
        try:
            size = float(number.rstrip(",()"))
        except ValueError:
            return "differs"
        return "differs by a rounding" if size < 1e-3 else "differs"
    return ""


def _short(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:120]}" if text else type(error).__name__


def tolerance_of(info: Any, dtype: torch.dtype) -> tuple[float, float] | None:
    """The loosest (rtol, atol) that an OpInfo states for its tests of a dtype, on whatever device,
    if any."""
    found = []
    for each in info.decorators:
        for decorator in getattr(each, "decorators", [each]):
            if type(decorator).__name__ == "toleranceOverride" and dtype in decorator.d:
                found.append((decorator.d[dtype].rtol, decorator.d[dtype].atol))
    if not found:
        return None
    usual = torch.testing._comparison._DTYPE_PRECISIONS.get(dtype, (0.0, 0.0))
    return max(usual[0], *(each[0] for each in found)), max(usual[1], *(each[1] for each in found))


def title_of(info: Any) -> str:
    """The name of an operator and of its variant."""
    return info.name + (f".{info.variant_test_name}" if info.variant_test_name else "")


def samples_of(info: Any, dtype: torch.dtype, limit: int, counts: Counts) -> list[Sample]:
    """The samples that can be compared; the others are counted as skipped."""
    torch.manual_seed(0)
    try:
        found = list(info.sample_inputs("cpu", dtype, requires_grad=False))
    except Exception as error:  # samples of a few operators need what a machine may lack
        counts.add("skipped", f"samples: {_short(error)}")
        return []
    if limit and len(found) > limit:  # from all over the list
        found = [found[n * len(found) // limit] for n in range(limit)]
    kept = []
    for number, sample in enumerate(found):
        leaves, spec = _pytree.tree_flatten(((sample.input, *sample.args), dict(sample.kwargs)))
        why = next((why for why, names in WITHOUT.items() if re.search(names, info.name)), "")
        drops = sample.kwargs.get("dropout_p") or sample.kwargs.get("dropout")
        if drops or (
            info.name.endswith("multi_head_attention_forward")
            and sample.kwargs.get("training")
            and any(isinstance(arg, float) and arg for arg in sample.args)
        ):
            why = "random"
        if any(
            isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided for leaf in leaves
        ):
            why = "sparse tensors"
        if why:
            counts.add("skipped", why)
            continue
        leaves = [
            leaf.detach().clone(memory_format=torch.contiguous_format)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in leaves
        ]
        process = sample.output_process_fn_grad if info.name in FREE_SIGNS else None
        made = Sample(info.name, number, spec, leaves, info.op, process)
        try:
            made.wanted = made.eager()
        except Exception as error:
            counts.add("skipped", f"eager torch: {_short(error)}")
            continue
        if not made.wanted:
            counts.add("skipped", "no tensor is made")
        elif any(t.layout is not torch.strided for t in made.wanted):
            counts.add("skipped", "sparse tensors")
        else:
            kept.append(made)
    return kept


def bundles(samples: list[Sample]) -> list[list[Sample]]:
    """Samples that share a program."""
    found: list[list[Sample]] = []
    room = 0
    for sample in samples:
        size = sum(t.numel() for t in sample.tensors)
        if not found or len(found[-1]) == BUNDLE or size > room:
            found.append([])
            room = ELEMENTS
        found[-1].append(sample)
        room -= size
    return found


def main() -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ops", default="", help="a regular expression; operators are named name or name.variant"
    )
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument(
        "--limit", type=int, default=0, help="samples of each operator and dtype (0: all)"
    )
    parser.add_argument("--again", action="store_true", help="run also what the file has")
    parser.add_argument(
        "--update", action="store_true", help=f"keep the counts in {DATA.relative_to(ROOT)}"
    )
    parser.add_argument("--json", default="", help="keep the counts in this file instead")
    options = parser.parse_args()
    path = Path(options.json) if options.json else DATA if options.update else None
    table = (
        json.loads(path.read_text(encoding="utf-8"))
        if path is not None and path.is_file()
        else {"limits": {}, "operators": {}}
    )
    operators = table["operators"]
    whole: Counter = Counter()
    runner = Runner()
    for name in options.dtypes.split(","):
        dtype = getattr(torch, name)
        for info in op_db:
            title = title_of(info)
            if dtype not in info.dtypes or not re.search(options.ops, title):
                continue
            if name in operators.get(title, {}) and not options.again:
                continue
            start = time.perf_counter()
            counts = Counts()
            for bundle in bundles(samples_of(info, dtype, options.limit, counts)):
                runner.run(bundle, counts, tolerance_of(info, dtype))
            whole += counts.outcomes
            print(
                f"{title:45} {name} {dict(counts.outcomes)} {time.perf_counter() - start:.1f} s",
                flush=True,
            )
            for (outcome, why), number in counts.reasons.most_common(6):
                print(f"      {number} x {outcome}: {why}", flush=True)
            counts.keep(operators.setdefault(title, {}), name)
            if path is not None:
                if not options.ops:
                    table["limits"][name] = options.limit
                write({**table, "torch": torch.__version__.partition("+")[0]}, path)
    runner.close()
    print("all:", dict(whole))


def write(table: dict[str, Any], path: Path) -> None:
    """The file of counts, a line an operator."""
    compact = lambda value: json.dumps(value, separators=(",", ":"))  # noqa: E731
    operators = table["operators"]
    lines = [f"{compact(name)}:{compact(operators[name])}" for name in sorted(operators)]
    head = f'"torch":{compact(table["torch"])},\n"limits":{compact(table["limits"])},\n'
    path.write_text(
        "{\n" + head + '"operators":{\n' + ",\n".join(lines) + "\n}\n}\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
