"""Pickles that run code, and zip files to put them in."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from typing import Any


class Evil:
    """A pickle of it makes a folder."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


def pickles(mark: str) -> list[bytes]:
    """Pickles that run code: plain ones, and as torch.save writes them."""
    import torch

    data, old = io.BytesIO(), io.BytesIO()
    torch.save({"x": Evil(mark)}, data)
    torch.save(Evil(mark), old, _use_new_zipfile_serialization=False)
    return [pickle.dumps(Evil(mark)), data.getvalue(), old.getvalue()]


def members(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(contents: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", method) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return data.getvalue()
