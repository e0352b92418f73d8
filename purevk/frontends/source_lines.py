"""Where nodes of torch.fx stand in the user's code and in the module."""

from __future__ import annotations

import functools
import os
import re
import sys
from typing import Any

_FRAME = re.compile(r'File "(.*)", line (\d+), in (.*)')


@functools.lru_cache(maxsize=4096)
def line_of(stack_trace: str) -> str:
    """The line of a traced call in the user's code: "model.py:12, in forward". It is the innermost
    one outside of torch. A path is relative to the working folder or to the installed packages, else
    the file's name alone, so that a saved program tells no folders."""
    frames = _FRAME.findall(stack_trace)
    if not frames:
        return ""
    own = [frame for frame in frames if not _is_of_torch(frame[0])]
    path, number, function = (own or frames)[-1]
    _, packages, inside = path.replace(os.sep, "/").rpartition("/site-packages/")
    if packages:
        path = inside
    else:
        local = os.path.relpath(path) if os.path.isabs(path) else path
        path = os.path.basename(path) if local.startswith(os.pardir) else local
    return f"{path}:{number}, in {function}"


def _is_of_torch(path: str) -> bool:
    """Whether a file is one of torch: where it was installed, or is loaded from here."""
    folder = os.path.dirname(getattr(sys.modules.get("torch"), "__file__", None) or "")
    return "/site-packages/torch/" in path.replace(os.sep, "/") or bool(
        folder and path.startswith(folder + os.sep)
    )


def path_of(node: Any) -> str:
    """The name of an FX node after that of the module which called it: "layers.0.fc.linear"."""
    stack = node.meta.get("nn_module_stack")
    path = next(reversed(stack.values()))[0] if stack else ""
    return f"{path}.{node.name}" if path else f"{node.name}"
