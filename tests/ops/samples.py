"""What torch's own operator tests call: the samples of `op_db`, with the ATen calls that purevk
has definitions for."""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo import core as opinfo_core
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import purevk.ops  # noqa: F401
from purevk.ops import registry

DTYPES = (torch.float32, torch.float16, torch.int64, torch.bool)
SAMPLES = 10  # of each operator and dtype
# Families of operators that call only the plainest operators that purevk defines, and take long.
WITHOUT = (
    "linalg",
    "fft",
    "masked",
    "sparse",
    "svd",
    "lu",
    "stft",
    "istft",
    "histogram",
    "signal",
    "unique",
    "pca_lowrank",
    "cholesky",
    "qr",
)


# ... but for these.
WITH = (
    "linalg.vector_norm",
    *(info.name for info in op_db if info.name.startswith("fft.")),
    "stft",
    "istft",
)


# Operators that no sample calls: no test of samples is collected for them.
WITHOUT_SAMPLES = Path(__file__).parents[1] / "data" / "operators_without_samples.txt"


def sampled() -> list[str]:
    """The names of torch's operators that samples call."""
    without = set(WITHOUT_SAMPLES.read_text(encoding="utf-8").splitlines())
    names = [each.name for each in registry.definitions() if each.name.startswith("aten.")]
    return [name for name in names if name not in without]


@dataclass(frozen=True)
class Call:
    """One call of an overload, and its results."""

    overload: Any
    args: tuple
    kwargs: dict
    results: Any

    @property
    def key(self) -> str:
        """Equal for calls whose types and other arguments are equal."""
        shown = [
            (str(a.dtype), tuple(a.shape)) if isinstance(a, torch.Tensor) else repr(a)
            for a in pytree.tree_leaves((self.args, self.kwargs))
        ]
        return f"{self.overload}{shown}"


class _Recorder(TorchDispatchMode):
    def __init__(self, found: dict[str, dict[str, Call]]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        definition = registry.find(str(func))
        if definition is None:
            return func(*args, **kwargs)
        copied, copied_kwargs = pytree.tree_map(
            lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf,
            (args, kwargs),
        )
        made = func(*args, **kwargs)
        call = Call(
            func,
            copied,
            copied_kwargs,
            pytree.tree_map(
                lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, made
            ),
        )
        known = self.found.setdefault(definition.name, {})
        if _is_plain(call):
            known.setdefault(call.key, call)
        return made


def _is_plain(call: Call) -> bool:
    """Dense tensors of types that purevk has, and not many elements. Complex ones are not conjugated
    or negated lazily: a call takes the elements."""
    tensors = [
        leaf
        for leaf in pytree.tree_leaves((call.args, call.kwargs, call.results))
        if isinstance(leaf, torch.Tensor)
    ]
    return all(
        t.layout is torch.strided
        and t.dtype is not torch.complex32
        and t.device.type == "cpu"
        and t.numel() <= 100_000
        for t in tensors
    )


@functools.lru_cache
def calls(dtypes: tuple[torch.dtype, ...] = DTYPES) -> dict[str, list[Call]]:
    """The calls of each operator definition, by its name, in the samples of these dtypes."""
    found: dict[str, dict[str, Call]] = {}
    torch.manual_seed(0)
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        # torch looks through the stack for a unittest at every sample, and writes the stack down for
        # every kind of device whose seed it sets. Below pytest that takes minutes.
        patch = mock.patch.object
        for module in (common_utils, opinfo_core):
            stack.enter_context(patch(module, "extract_test_fn", lambda: None))
        for backend in (torch.cuda.random, torch.xpu.random, torch.mtia):
            stack.enter_context(patch(backend, "_lazy_call", lambda *_, **__: None))
        for info in op_db:
            if info.name.startswith(WITHOUT) and info.name not in WITH:
                continue
            for dtype in dtypes:
                if dtype not in info.supported_dtypes("cpu"):
                    continue
                try:
                    samples = list(itertools.islice(info.sample_inputs("cpu", dtype), SAMPLES))
                except Exception:  # samples of a few operators need what a machine may lack
                    continue
                for sample in samples:
                    try:
                        with torch.no_grad(), _Recorder(found):
                            info.op(sample.input, *sample.args, **sample.kwargs)
                    except Exception:  # samples that torch itself refuses here
                        continue
    return {name: list(made.values()) for name, made in sorted(found.items())}
