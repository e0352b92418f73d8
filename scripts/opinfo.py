"""Runs PyTorch's own operator samples (`torch.testing`'s op_db) through purevk and counts what agrees with eager torch.

    python scripts/opinfo.py [--ops REGEX] [--dtypes float32,int64] [--limit N] [--json FILE] [--verbose]

Every sample is exported with torch.export and takes the way of a model. A sample counts as *passed* if its results agree
and no node ran on the CPU, as *fallback* if they agree and some did, as *failed* otherwise.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import traceback
import warnings
from collections import Counter, defaultdict
from pathlib import Path

import torch
from torch.utils import _pytree

sys.path.insert(0, str(Path(__file__).parent.parent))

import purevk  # noqa: E402
from purevk.errors import PurevkError  # noqa: E402
from purevk.graph.context import default_context  # noqa: E402

warnings.filterwarnings("ignore")

# Operators whose results are random, or that are no functions of tensors.
_SKIP = re.compile(
    r"rand|dropout|bernoulli|multinomial|normal$|normal\.|empty|new_|uniform|exponential|geometric|cauchy|log_normal"
    r"|jiterator|_foreach|_fw|_native|sparse|to_sparse|fft\.|complex|polar|view_as_|resolve_|linalg\.(?!norm|vector_norm|matrix_norm)"
    r"|special\.|stft|istft|item|equal$|tolist|is_|nonzero|unique|masked_select|argwhere|stress|chalf|cdouble|cfloat|double"
)


class _Call(torch.nn.Module):
    """One application of an operator to the tensors among its arguments."""

    def __init__(self, op, spec, leaves):
        super().__init__()
        self.op, self.spec, self.leaves = op, spec, leaves
        self.places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def forward(self, *tensors):
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors):
            leaves[place] = tensor
        args, kwargs = _pytree.tree_unflatten(leaves, self.spec)
        made = self.op(*args, **kwargs)
        return [leaf for leaf in _pytree.tree_leaves(made) if isinstance(leaf, torch.Tensor)]


def run_sample(context, op, sample) -> tuple[str, str]:
    """"passed", "fallback", "failed" or "skipped", and why."""
    args, kwargs = (sample.input, *sample.args), dict(sample.kwargs)
    leaves, spec = _pytree.tree_flatten((args, kwargs))
    call = _Call(op, spec, leaves)
    tensors = [leaves[n].detach().clone() for n in call.places]
    if kwargs.get("dropout_p"):
        return "skipped", "random"
    if not tensors or any(t.is_complex() or t.is_sparse for t in tensors):
        return "skipped", "no dense real tensor"
    try:
        with torch.no_grad():
            wanted = call(*[t.clone() for t in tensors])
        exported = torch.export.export(call, tuple(tensors), strict=False)
    except Exception as error:
        return "skipped", f"export: {str(error).splitlines()[0][:120] if str(error) else type(error).__name__}"
    try:
        with purevk.compile(exported, context=context) as program:
            cpu = [s.nodes[0].args[0] for s in program.method("forward").executable.plan.steps if not s.on_device]
            made = program.forward(*tensors)
    except PurevkError as error:
        return "failed", f"{type(error).__name__}: {error.what} {error.why}"[:300]
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return "failed", f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"[:300]
    made = made if isinstance(made, tuple) else (made,)
    for number, (a, b) in enumerate(zip(made, wanted)):
        try:
            torch.testing.assert_close(a, b, rtol=2e-5 if b.dtype is torch.float32 else None,
                                       atol=2e-5 if b.dtype is torch.float32 else None, equal_nan=True)  # fmt: skip
        except AssertionError as error:
            return "failed", f"result {number}: " + " ".join(str(error).split())[:200]
    return ("fallback", ", ".join(sorted(set(cpu)))) if cpu else ("passed", "")


def main() -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="")
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument("--limit", type=int, default=0, help="samples of each operator and dtype (0: all)")
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--json", default="")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    context = default_context()
    counts: dict[str, Counter] = defaultdict(Counter)
    reasons: dict[str, Counter] = defaultdict(Counter)
    shard, shards = map(int, options.shard.split("/"))
    chosen = [op for op in op_db if re.search(options.ops, op.name) and not _SKIP.search(op.name)]
    for op in chosen[shard::shards]:
        start = time.perf_counter()
        for name in options.dtypes.split(","):
            dtype = getattr(torch, name)
            if dtype not in op.dtypes:
                continue
            torch.manual_seed(0)
            try:
                samples = list(op.sample_inputs("cpu", dtype, requires_grad=False))
            except Exception as error:
                counts[op.name]["skipped"] += 1
                reasons[op.name][f"samples: {error}"[:100]] += 1
                continue
            for sample in samples[: options.limit or None]:
                outcome, why = run_sample(context, op.op, sample)
                counts[op.name][outcome] += 1
                if outcome != "passed":
                    reasons[op.name][f"{outcome}: {why}"] += 1
        total = counts[op.name]
        print(f"{op.name:45} {dict(total)} {time.perf_counter() - start:.1f} s", flush=True)
        if options.verbose:
            for why, number in reasons[op.name].most_common(4):
                print(f"      {number} x {why}", flush=True)
        if options.json:
            Path(options.json).write_text(
                json.dumps({n: {**counts[n], "why": reasons[n].most_common(3)} for n in counts}, indent=1)
            )
    whole = sum(counts.values(), Counter())
    print("all:", dict(whole))


if __name__ == "__main__":
    main()
