"""Lets torchvision be imported beside a torch that its own library was not built for.

At import, torchvision registers shape functions for operators of its C++ library. If the library
does not load, as that of a CUDA build beside a torch for the CPU, these operators are unknown and
the import fails. Nearly all of torchvision needs none of them, and nor does transformers.

`scripts/setup.sh` installs this file, and a .pth file that calls `install()` at start, into an
environment in which `import torchvision` fails. The operators get their schemas, and no kernels: a
call raises NotImplementedError. Delete both files once torchvision's own library loads.
"""

from __future__ import annotations

import importlib.abc
import sys

# The operators that torchvision/_meta_registrations.py and the like name without looking first.
SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_libraries: list[object] = []  # a Library takes its operators with it when it is collected


class _Before(importlib.abc.MetaPathFinder):
    """Finds nothing. When torchvision is about to be imported, it defines what is missing."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "torchvision._meta_registrations":
            sys.meta_path.remove(self)
            define_missing()


def define_missing() -> None:
    """Defines the schemas of operators that no library has registered."""
    import torch

    known = {schema.name for schema in torch._C._jit_get_all_schemas()}
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in SCHEMAS.items():
        if f"torchvision::{name}" not in known:
            library.define(schema)
    _libraries.append(library)


def install() -> None:
    """Has `import torchvision` define the schemas first."""
    if not any(type(each).__name__ == "_Before" for each in sys.meta_path):
        sys.meta_path.insert(0, _Before())
