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


def older(data: bytes) -> list[bytes]:
    """The program of a .pt2 file in the layouts of torch 2.8 and 2.7."""
    import torch

    contents = members(data)
    program = torch.export.load(io.BytesIO(data))
    state, constants = io.BytesIO(), io.BytesIO()
    torch.save(dict(program.state_dict), state)
    torch.save(dict(program.constants), constants)
    middle = {name: each for name, each in contents.items() if "_config" not in name}
    middle = {name: each for name, each in middle.items() if "/weight_" not in name}
    middle = {name: each for name, each in middle.items() if "/tensor_" not in name}
    middle["archive/data/weights/model.pt"] = state.getvalue()
    middle["archive/data/constants/model.pt"] = constants.getvalue()
    first = {
        "serialized_exported_program.json": contents["archive/models/model.json"],
        "version": b"8.20",
        "serialized_state_dict.pt": state.getvalue(),
        "serialized_constants.pt": constants.getvalue(),
        "serialized_example_inputs.pt": b"",
        "extra_files/a.txt": b"text",
    }
    return [packed(middle), packed(first)]
