"""Files of `torch.export.save` (.pt2).

torch reads parts of such a file as pickles, and others as expressions of Python. So purevk reads the
archive itself: of pickles only tensors, and torch gets a program that `check.py` has checked."""

from __future__ import annotations

import functools
import io
import json
import math
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

from purevk.errors import FileFormatError, PurevkError, UnsupportedProgramError
from purevk.frontends.importer import InputSizes
from purevk.ir import Graph
from purevk.mapped import own, pieces
from purevk.pte.source import FileLike, Source

_SAVE_AGAIN = "save it again with torch.export.save, with the torch that is installed here"
_MOST_EXPANDED = 1 << 30  # bytes of tensors, whatever the file has
_PROGRAM = "models/model.json"
_OLD_PROGRAM = "serialized_exported_program.json"  # up to torch 2.7
# Members that are read, and those that are skipped, without the folder that all of them are in.
_READ = re.compile(
    r"models/model\.json"
    r"|data/(?:weights|constants)/(?:model_(?:weights|constants)_config\.json|(?:weight|tensor)_\d+)"
    r"|data/(?:weights|constants)/model\.pt"  # of torch 2.8
    r"|serialized_(?:exported_program\.json|(?:state_dict|constants)\.(?:pt|json))|version"  # up to torch 2.7
    r"|archive_(?:format|version)|byteorder"
)
_SKIPPED = re.compile(
    r"\.format_version|\.storage_alignment|\.data/\w+"
    r"|extra/.*|extra_files/.*"
    # Inputs that the program was traced with: a pickle.
    r"|data/sample_inputs/model\.pt|serialized_example_inputs\.(?:pt|json)"
)


class ExportedFile:
    """An exported program of torch from a file. Its tensors are copies in memory.

    Attributes:
        source: the bytes of the file.
        methods: "forward".

    Raises:
        UnsupportedProgramError: torch is not installed.
        FileFormatError: the file holds what could run code, or torch cannot load it.
        OSError: the path cannot be opened.
    """

    kind = "pt2"
    methods = ("forward",)

    def __init__(self, file: FileLike | Source) -> None:
        self.source = Source.of(file, ".pt2")
        try:
            import torch  # noqa: F401
        except ImportError as error:
            raise UnsupportedProgramError(
                "torch is not installed",
                where=self.source.name,
                why="torch reads .pt2 files",
                next='install torch; or save the program where it is: load("m.pt2").save("m.pvk")',
            ) from error
        from purevk.frontends.torch.exported import WrittenBuffers
        from purevk.frontends.torch.module import ProgramSource

        self._graphs = ProgramSource("forward", self._load(), WrittenBuffers(), trusted=False)

    def _load(self) -> Any:
        """The program, as a `torch.export.ExportedProgram`."""
        from purevk.frontends.torch.archive.check import check_program
        from purevk.frontends.torch.module import tracing

        try:
            members = _members(self.source)
            _check_stated(members, self.source.name)
            text = members[_PROGRAM if _PROGRAM in members else _OLD_PROGRAM]
            program = _read("ExportedProgram", text)
            check_program(program, self.source.name, len(text))
            weights, constants = (_tensors(members, kind) for kind in ("weights", "constants"))
            _check_expanded([*weights.values(), *constants.values()], self.source.size)
            with tracing:  # sizes are computed, which a trace of another thread would record
                return (
                    _torch().ExportedProgramDeserializer().deserialize(program, weights, constants)
                )
        except PurevkError:
            raise
        except Exception as error:  # torch raises errors of many classes
            raise FileFormatError(
                f"torch cannot load the file: {type(error).__name__}",
                where=self.source.name,
                why=str(error).strip().partition("\n")[0],
                next=_SAVE_AGAIN,
            ) from error

    def graph(self, method: str, sizes: InputSizes | None = None) -> Graph:
        """The graph, for the bounds of the export or for the sizes of a call."""
        return self._graphs(sizes)

    def close(self) -> None:
        """Closes the file."""
        self.source.close()


def _members(source: Source) -> dict[str, memoryview]:
    """The members that are read, by their names without the folder.

    Raises:
        FileFormatError: there is another member, or one is there twice, compressed or damaged.
    """
    with zipfile.ZipFile(source.stream()) as archive:
        infos = archive.infolist()
    old = any(info.filename == _OLD_PROGRAM for info in infos)
    folder = "" if old else infos[0].filename.partition("/")[0] + "/"
    members: dict[str, memoryview] = {}
    for info in infos:
        name = info.filename.removeprefix(folder)
        if _SKIPPED.fullmatch(name) or name.endswith("/"):
            continue
        why = None
        if not info.filename.startswith(folder) or not _READ.fullmatch(name):
            why = "graphs and plain tensors are read; other members can hold code"
        elif name in members:
            why = "it is there twice"
        elif info.compress_type != zipfile.ZIP_STORED:
            why = "it is compressed, which torch.export.save does not do"
        if why is not None:
            raise FileFormatError(
                f"the archive holds {info.filename!r}",
                where=source.name,
                why=why,
                next="export the module again, without compiled code, custom objects and"
                " delegates: torch.export.save(torch.export.export(module, inputs), path)",
            )
        header = source.slice(info.header_offset, 30, f"the header of {info.filename!r}")
        start = info.header_offset + 30 + sum(struct.unpack_from("<HH", header, 26))
        members[name] = source.slice(start, info.file_size, repr(info.filename))
        if (
            functools.reduce(lambda crc, piece: zlib.crc32(piece, crc), pieces(members[name]), 0)
            != info.CRC
        ):
            raise ValueError(f"{info.filename!r} has another checksum")
    return members


def _check_stated(members: Mapping[str, memoryview], name: str) -> None:
    """Raises `FileFormatError` for an archive of another kind, version or byte order. torch.export.load
    refuses other kinds and versions too, and takes the bytes of other machines for its own."""
    expected = {"archive_format": "pt2", "archive_version": "0"}
    if _OLD_PROGRAM in members:
        from torch._export.serde.schema import SCHEMA_VERSION

        expected = {"version": str(SCHEMA_VERSION[0])}
    for member, value in {**expected, "byteorder": "little"}.items():
        if member == "byteorder" and member not in members:
            continue
        stated = bytes(own(members[member][:99])).decode("ascii", "replace")
        if (stated.partition(".")[0] if member == "version" else stated) != value:
            raise FileFormatError(
                f"the archive states {stated!r} as its {member}",
                where=name,
                why=f"{value!r} is read",
                next=_SAVE_AGAIN,
            )


def _torch() -> Any:
    """What of torch makes programs of its records."""
    from torch._export.serde import serialize

    return serialize


def _read(kind: str, data: memoryview) -> Any:
    """A record of torch, from JSON."""
    from torch._export.serde import schema

    return _torch()._dict_to_dataclass(getattr(schema, kind), json.loads(bytes(own(data))))


def _tensors(members: Mapping[str, memoryview], kind: str) -> dict[str, Any]:
    """Parameters and buffers, or constants, by name.

    Args:
        kind: "weights" or "constants".
    """
    config = members.get(f"data/{kind}/model_{kind}_config.json")
    if config is None:
        older = "state_dict" if kind == "weights" else kind
        names = (f"data/{kind}/model.pt", f"serialized_{older}.pt", f"serialized_{older}.json")
        payload = unpickled(next(members[name] for name in names if name in members))
        if not isinstance(payload, dict):
            raise TypeError(f"the {kind} are a {type(payload).__name__}")
        return payload
    entries = _read("PayloadConfig", config).config
    shared: dict[str, Any] = {}  # tensors may share memory
    return {
        name: _tensor(entry, members[f"data/{kind}/{entry.path_name}"], shared)
        for name, entry in entries.items()
    }


def _check_expanded(tensors: list[Any], stored: int) -> None:
    """Raises ValueError for tensors that are much larger than the file: strides of 0 make much of few
    bytes, and what reads them copies them.

    Args:
        stored: bytes of the file.
    """
    import torch

    views = {
        (
            view.untyped_storage()._cdata,
            view.dtype,
            view.storage_offset(),
            view.shape,
            view.stride(),
        ): view.nbytes
        for view in tensors
        if isinstance(view, torch.Tensor) and view.layout is torch.strided and not view.is_nested
    }
    nbytes = sum(views.values())
    if nbytes > _MOST_EXPANDED + 16 * stored:
        raise ValueError(f"the tensors have {nbytes} bytes in memory, and the file {stored}")


def _tensor(entry: Any, data: memoryview, shared: dict[str, Any]) -> Any:
    """A tensor, from the bytes of its storage and what torch says of it."""
    import torch

    read = _torch()
    if entry.use_pickle:  # a subclass of torch.Tensor
        return unpickled(data)
    meta = entry.tensor_meta
    sizes: Any = read.deserialize_size(meta.sizes)
    dtype, device = read.deserialize_scalar_type(meta.dtype), read.deserialize_device(meta.device)
    storage = shared.get(entry.path_name)
    if storage is None:
        if not len(data) and math.prod(sizes):
            raise ValueError(f"a tensor of sizes {list(sizes)} has no bytes")
        storage = (
            torch.frombuffer(bytearray(own(data)), dtype=dtype)
            if len(data)
            else torch.empty(0, dtype=dtype)
        )
        shared[entry.path_name] = storage = storage.to(device)
    if storage.dtype != dtype:
        storage = storage.view(dtype)
    tensor = storage.as_strided(
        sizes,
        read.deserialize_stride(meta.strides),
        read.deserialize_storage_offset(meta.storage_offset),
    )
    return torch.nn.Parameter(tensor, meta.requires_grad) if entry.is_param else tensor


def unpickled(data: bytes | memoryview) -> Any:
    """Tensors of torch.save. No other classes are made and no code runs.

    Raises:
        FileFormatError: a part of it is compressed, so that it may be of any size; or torch refuses
            a class, as it does nested tensors from 2.15 on.
    """
    import torch

    stream = io.BytesIO(own(data) if isinstance(data, memoryview) else data)
    if zipfile.is_zipfile(stream):
        with zipfile.ZipFile(stream) as parts:
            for part in parts.infolist():
                if part.compress_type != zipfile.ZIP_STORED or part.file_size > part.compress_size:
                    raise FileFormatError(
                        "tensors in the file are compressed",
                        where=part.filename[:100],
                        why="torch.save stores them as they are",
                        next="write the file again",
                    )
    stream.seek(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.load(stream, weights_only=True)
        except Exception as error:
            if type(error).__name__ != "UnpicklingError":
                raise
            # torch's own text says how to load the file in an unsafe way; what it read comes before.
            why = str(error.__context__ or error).strip()
            raise FileFormatError(
                "the file holds what is no plain tensor",
                where="what torch.save wrote into it",
                why=re.split(r"\. |\n", why)[0],
                next="export the module again, with plain tensors as its weights:"
                " tensor.to_dense(), or torch.nested.to_padded_tensor",
            ) from error
