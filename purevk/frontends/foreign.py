"""Files that are no programs of purevk: what they are, by their first bytes, and what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from purevk.errors import FileFormatError
from purevk.pte.source import Source

_ZIP = b"PK\x03\x04"
_FROM_WEIGHTS = (
    "make the module in Python, load the weights into it{how}, then purevk.compile(module, inputs)"
)
_DOWNLOAD = "download the file itself: such a page may say that it is not there, or ask for a login"
# The first bytes at an offset, what such a file is, and what to do with it.
_KNOWN: tuple[tuple[int, bytes, str, str], ...] = (
    (
        0, b"GGUF", "a GGUF file: the weights of a language model",
        "load it with purevk.llm.load; or with transformers:"
        " AutoModelForCausalLM.from_pretrained(folder, gguf_file=name),"
        " then purevk.compile(model, inputs)",
    ),
    (8, b'{"', "a safetensors file: weights without a program", _FROM_WEIGHTS.format(
        how=" (safetensors.torch.load_model)")),
    (0, b"\x89HDF", "an HDF5 file, such as one of Keras", "export the model from PyTorch"),
    (4, b"TFL3", "a TensorFlow Lite file", "export the model from PyTorch"),
    (0, b"version https://", "a pointer of Git LFS, in place of the file", "fetch the file: git lfs pull"),
    (0, b"<!DOCTYPE", "a web page", _DOWNLOAD),
    (0, b"<!doctype", "a web page", _DOWNLOAD),
    (0, b"<html", "a web page", _DOWNLOAD),
    (0, b"\x93NUMPY", "an .npy file of numpy", "pass its array to a program"),
    (0, b"<?xml", "an XML file, such as one of OpenVINO", "export the model from PyTorch"),
    (0, b"PTD0", "a .ptd file: weights of a .pte file",
     "load the .pte file, and pass this one: purevk.load(program, [weights])"),
    (4, b"FT01", "a .ptd file: weights of a .pte file",
     "load the .pte file, and pass this one: purevk.load(program, [weights])"),
)  # fmt: skip


def is_exported(members: Sequence[str]) -> bool:
    """Whether the members of a zip archive are those of torch.export.save."""
    return any(map(_is_graph, members))


def is_native(members: Sequence[str]) -> bool:
    """Whether the members of a zip archive are those of a .ptn file of executorch."""
    return "program.ptg" in members


def is_pte(source: Source) -> bool:
    """Whether a file begins as one of executorch."""
    return source.head[4:6] == b"ET"


def _is_graph(name: str) -> bool:
    # Since torch 2.8: models/NAME.json in a folder; before: a file of this name.
    *folders, last = name.split("/")
    return last == "serialized_exported_program.json" or (
        folders[-1:] == ["models"] and last.endswith(".json")
    )


def refuse_foreign(source: Source, label: str) -> None:
    """Raises `FileFormatError` for a file of a format that is known and that purevk does not load."""
    head = source.head
    for offset, magic, what, next in _KNOWN:
        if head[offset : offset + len(magic)] == magic:
            raise _refused(label, what, next)
    if head.startswith(_ZIP):
        names = [name.rpartition("/")[2] for name in members(source)]
        if "constants.pkl" in names:
            raise _refused(
                label, "a TorchScript program", "export the module that it was scripted from"
            )
        if "data.pkl" in names:
            raise _refused(label, *_PICKLED)
        if any(name.endswith(".npy") for name in names):
            raise _refused(label, "an .npz file of numpy", "pass its arrays to a program")
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        raise _refused(label, *_PICKLED)
    # Protocol buffers have no magic number: ir_version comes first, then a text or the graph.
    named = label.lower().endswith(".onnx") and not is_pte(source)  # a renamed .pte file is none
    if named or (head[:1] == b"\x08" and head[2:3] in (b"\x12", b"\x3a")):
        raise _refused(
            label,
            "an ONNX file",
            "export the PyTorch model that it was made from; without it, onnx2torch.convert makes"
            " a module for purevk.compile",
        )


_PICKLED = (
    "a file of torch.save: weights, or a pickled module",
    _FROM_WEIGHTS.format(how=" (module.load_state_dict(torch.load(path)))"),
)


def _refused(label: str, what: str, next: str) -> FileFormatError:
    return FileFormatError(
        f"this is {what}",
        where=label,
        why="programs are accepted: .pte and .ptn files of executorch, .pt2 files of torch.export.save, and"
        " .pvk files of Program.save",
        next=next,
    )


def members(source: Source) -> list[str]:
    """The names in a zip file; none if it is no zip file, or damaged."""
    if not source.head.startswith(_ZIP):
        return []
    import zipfile  # few files come here

    with (
        contextlib.suppress(zipfile.BadZipFile, OSError, ValueError, NotImplementedError),
        zipfile.ZipFile(source.stream()) as opened,
    ):
        return opened.namelist()
    return []
