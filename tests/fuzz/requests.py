"""Requests to a server, changed as files are, and the program that they are for."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from purevk.errors import InputError
from purevk.integrations.values import read_values
from purevk.integrations.worker import Worker
from tests.fuzz.mutations import with_description

REQUEST = json.dumps({"x": [1.0, -2.5, 3.0], "ids": [2, 0, 1]}).encode()
_SIZES = [[[1, ["b"]]], [[1, ["n"]]]]
# {"rows": torch.gather(x, 1, ids), "by": x.sum(1)}; `ids` by name only.
_PROGRAM = {
    "producer": "fuzz", "name": "served", "tensors": [],
    "methods": {"forward": {
        "symbols": [["b", 4, 2, True, False, False], ["n", 6, 2, True, False, False],
                    ["b1", 4, 0, True, False, False], ["n1", 6, 0, True, False, False]],
        "values": [["x", "float32", _SIZES], ["ids", "int64", _SIZES], ["rows", "float32", _SIZES],
                   ["by", "float32", _SIZES[:1]]],
        "graph": {
            "name": "forward", "inputs": [{"value": 0}, {"value": 1}], "constants": [], "states": [],
            "nodes": [
                ["aten.gather.default", [{"value": 0}, 1, {"value": 1}, False], [{"value": 2}], "gather",
                 "aten.gather.default"],
                ["aten.sum.dim_IntList", [{"value": 0}, [1], False, {"dtype": "float32"}], [{"value": 3}],
                 "sum", "aten.sum.dim_IntList"],
            ],
            "outputs": [{"value": 2}, {"value": 3}],
            "sources": [["b", {"value": 0}, 0, 0], ["n", {"value": 0}, 1, 0],
                        ["b1", {"value": 1}, 0, 0], ["n1", {"value": 1}, 1, 0]],
            "checks": [], "outer": [], "updates": [], "labels": [],
            "constraints": [[[[1, ["b1"]]], "==", [[1, ["b"]]], True],
                            [[[1, ["n1"]]], "==", [[1, ["n"]]], True]],
            "ranges": [["b", 1, 4], ["n", 1, 6]],
            "signature": {"parameters": [["x", None, True], ["ids", None, False]], "order": ["x"],
                          "defaults": {}, "outputs": ["dict", ["rows", "by"], [None, None], ""],
                          "numbers": [], "free": [], "exact": True, "layouts": []},
            "lines": [],
        },
        "guards": [], "kept_guards": [],
    }},
}  # fmt: skip


@cache
def worker(any_program: bytes) -> Worker:
    """What serves the requests. `any_program` is a .pvk file, for its header."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "served.pvk"
        path.write_bytes(with_description(any_program, _PROGRAM))
        return Worker(path)


def decode(data: bytes) -> Any:
    """The values of a body, as servers read it. Raises `InputError` if there are none."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError("the body is no JSON") from error


def read(data: bytes) -> None:
    """Reads the values of a request, without a device."""
    values = decode(data)
    if isinstance(values, dict) and values.keys() == {"x", "ids"}:
        read_values("x", values["x"], np.dtype(np.float32))
        read_values("ids", values["ids"], np.dtype(np.int64))


def ask(data: bytes, any_program: bytes) -> None:
    """Serves a request in a batch with sound ones, whose answers must be right whatever it is.

    Raises:
        InputError: the request is refused.
    """
    served = worker(any_program)
    sound = [served.sample(decode(REQUEST)) for _ in range(2)]
    try:
        sample = served.sample(decode(data))
        samples = [sound[0], sample, sound[1]]
    except InputError:
        _compare(sound, served.batch(sound))
        raise
    results = served.batch(samples)
    _compare(sound, results[::2])
    if isinstance(results[1], Exception):
        raise results[1]
    _compare([sample], results[1:2])


def _compare(samples: list[list[np.ndarray]], results: list[Any]) -> None:
    for (x, ids), result in zip(samples, results, strict=True):
        np.testing.assert_array_equal(result["rows"], x[ids])
        with np.errstate(all="ignore"):
            np.testing.assert_allclose(result["by"], x.sum(), 1e-5)
        json.dumps({name: values.tolist() for name, values in result.items()})
