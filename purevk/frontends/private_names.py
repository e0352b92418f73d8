"""The private names of torch that purevk uses, and the versions of torch that were checked.

torch may change such a name in any release. A test compares the list with the source, and with the
torch that is installed.
"""

from __future__ import annotations

import importlib
import re
import threading
import warnings
from typing import Any

# Versions whose names were checked, and in which models were exported and compiled.
CHECKED = ("2.9.1", "2.10.0", "2.11.0", "2.12.0", "2.13.0", "2.14.1", "2.15.0")
NEWEST = CHECKED[-1]

NAMES = {
    "torch._C.DispatchKey.Autograd": "whether torch decomposes an operator",
    "torch._C.DispatchKey.CompositeImplicitAutograd": "the same",
    "torch._C.DisableTorchFunction": "plain tensors under tensor subclasses",
    "torch._C._disabled_torch_dispatch_impl": "the same",
    "torch._C._disabled_torch_function_impl": "the same",
    "torch._C._dispatch_has_kernel": "whether an operator exists",
    "torch._C._dispatch_has_kernel_for_dispatch_key": "whether torch decomposes an operator",
    "torch._C._functorch.is_functorch_wrapped_tensor": "tensors within torch.func transforms",
    "torch._VF": "recurrent layers, which torch.nn calls there",
    "torch._check": "conditions of sizes",
    "torch._decomp.decomposition_table": "recurrent layers in a trace of a traced program",
    "torch._dynamo.backends.common.aot_autograd": "torch.compile with gradients",
    "torch._dynamo.config.allow_rnn": "recurrent layers in a trace",
    "torch._dynamo.convert_frame.compile_lock": "traces of several threads",
    "torch._dynamo.exc.RestartAnalysis": "how dynamo steers a trace",
    "torch._dynamo.exc.SkipFrame": "the same",
    "torch._dynamo.list_backends": "the backend of torch.compile",
    "torch._dynamo.register_backend": "the same",
    "torch._dynamo.symbolic_convert.InstructionTranslator": "whether dynamo traces for purevk",
    "torch._dynamo.trace_rules": "functions that a trace keeps whole",
    "torch._dynamo.variables.tensor.TensorVariable": "fills with the number of a tensor",
    "torch._dynamo.variables.torch.TorchInGraphFunctionVariable": "the same",
    "torch._export.serde.schema": "the graph of a .pt2 file",
    "torch._export.serde.schema.SCHEMA_VERSION": "the same",
    "torch._export.serde.serialize": "the same",
    "torch._export.verifier": "operators that a graph of torch.export may have",
    "torch._guards.TracingContext": "the context of a trace",
    "torch._guards.detect_fake_mode": "the fake mode of a trace",
    "torch._higher_order_ops.flex_attention.math_attention": "flex_attention as plain operators",
    "torch._neg_view": "results that are negated lazily",
    "torch._ops.HigherOrderOperator": "the classes of operators",
    "torch._ops.OpOverload": "the same",
    "torch._ops.OpOverloadPacket": "the same",
    "torch._prims_common.is_contiguous_or_false": "strides of symbolic sizes",
    "torch._subclasses.FakeTensor": "fake tensors",
    "torch._subclasses.FakeTensorMode": "the same",
    "torch.export._trace": "the trace of torch.export",
    "torch.fx._pytree": "classes that torch.fx flattens",
    "torch.utils._python_dispatch._disable_current_modes": "real numbers within a trace",
    "torch.utils._pytree": "nested arguments and results",
    "torch.utils._pytree.keystr": "the same",
    "torch.utils._pytree.tree_flatten": "the same",
    "torch.utils._pytree.tree_flatten_with_path": "the same",
    "torch.utils._pytree.tree_leaves": "the same",
    "torch.utils._pytree.tree_map": "the same",
    "torch.utils._pytree.tree_unflatten": "the same",
    "torch.utils._sympy.functions": "expressions of sizes",
    "torch.utils._sympy.functions.FloatTrueDiv": "the same",
    "torch.utils._sympy.functions.FloorDiv": "the same",
    "torch.utils._sympy.functions.IntTrueDiv": "the same",
    "torch.utils._sympy.functions.Mod": "the same",
}

_warned = False
_lock = threading.Lock()


def missing() -> tuple[str, ...]:
    """The names that the installed torch does not have."""
    return tuple(name for name in NAMES if not _exists(name))


def is_newer(version: str) -> bool:
    """Whether a version of torch is newer than all that were checked: 2.14.9 is not, if 2.14.1
    was."""
    return _minor(version) > _minor(NEWEST)


def warn_once() -> None:
    """Warns, the first time, if torch is newer than all versions that were checked."""
    global _warned
    if _warned:
        return
    import torch

    with _lock:
        if _warned:
            return
        _warned = True
    version = str(torch.__version__)
    if is_newer(version):
        absent = missing()
        lost = f" It lacks {', '.join(absent)}." if absent else ""
        warnings.warn(
            f"torch {version} is newer than {NEWEST}, the last one that purevk was checked"
            f" with.{lost}",
            RuntimeWarning,
            stacklevel=3,
        )


def _minor(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else (0, 0)


def _exists(name: str) -> bool:
    """Whether a dotted name can be imported, or is an attribute of what can be."""
    parts = name.split(".")
    value: Any = importlib.import_module(parts[0])
    for index, part in enumerate(parts[1:], 2):
        try:  # first: an operator of the same name hides a module
            value = importlib.import_module(".".join(parts[:index]))
        except ImportError:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
    return True
