"""Inputs from the command line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from purevk.cli.inputs import make_inputs
from purevk.dtypes import DType
from purevk.errors import InputError, SizeConstraintError
from purevk.ir import Dim, Graph, Symbol, SymbolSource, TensorType, Value

LENGTH = Symbol("s0", 12)
STEP = Symbol("i0", is_size=False)
X = Value("x", TensorType(DType.float32, (2, Dim.of(LENGTH))))
IDS = Value("ids", TensorType(DType.int64, (Dim.of(LENGTH) * 2,)))
MASK = Value("mask", TensorType(DType.bool, (3,)))
GRAPH = Graph(
    "forward",
    (X, IDS, MASK, Dim.of(STEP), None),
    (),
    (),
    symbols={LENGTH: SymbolSource(X, 1), STEP: SymbolSource(None, None, 3)},
)


def make(*specs: str, size: list[tuple[str, int]] | None = None, seed: int = 0) -> list[Any]:
    return make_inputs(
        GRAPH, argparse.Namespace(input=list(specs), size=size or [], seed=seed), "here"
    )


def test_random_at_the_upper_bound() -> None:
    x, ids, mask, step, unused = make()
    assert (x.shape, ids.shape, mask.shape, step, unused) == ((2, 12), (24,), (3,), 0, None)
    assert (x.dtype, ids.dtype, mask.dtype) == (np.float32, np.int64, np.bool_)
    assert set(ids) == {0, 1} and len(np.unique(x)) == 24
    np.testing.assert_array_equal(x, make()[0])
    assert not np.array_equal(x, make(seed=1)[0])


def test_sizes_words_and_numbers() -> None:
    x, ids, mask, step, _ = make("zeros", "random:1000", "ones", "7", size=[("s0", 5)])
    assert x.shape == (2, 5) and not x.any()
    assert ids.shape == (10,) and 2 < ids.max() < 1000
    assert mask.all() and step == 7
    x, ids, _, step, _ = make("-0.5", "3")
    assert (x == -0.5).all() and (ids == 3).all() and step == 3  # the last one serves the rest


def test_files(tmp_path: Path) -> None:
    x, ids = np.arange(24, dtype=np.float32).reshape(2, 12), np.arange(24)
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "all.npz", in_0=x, in_1=ids, out_0=ids)
    made = make(str(tmp_path / "x.npy"), "ones")
    np.testing.assert_array_equal(made[0], x)
    assert (made[1] == 1).all()
    made = make(f"{tmp_path / 'all.npz'}:in_*")
    np.testing.assert_array_equal(made[0], x)
    np.testing.assert_array_equal(made[1], ids)
    assert made[3] == 0  # nothing was said: random


@pytest.mark.parametrize(
    "specs, size, what",
    [
        (["random"] * 6, [], "6 inputs were given, the method takes 5"),
        (["nothing"], [], "'nothing' is no input"),
        (["random:x"], [], "'random:x' is no input"),
        (["random:0"], [], "'random:0' is no input"),
        (["random:999999999999999999999"], [], "'random:999999999999999999999' is no input"),
        (["1e999", "inf"], [], "no int64[24] can be made of 'inf'"),
        (["0", "999999999999999999999"], [], "no int64[24] can be made of '999999999999999999999'"),
        (["0", "0", "0", "nan"], [], "'nan' is no input"),
        ([], [("s0", 13)], "--size s0=13 is above its bound"),
        ([], [("s0", 99999999999999999999)], "--size s0=99999999999999999999 is above its bound"),
        (["missing.npy"], [], "the input cannot be read"),
        ([], [("s1", 4)], "no size of the inputs is named s1"),
    ],
)
def test_what_is_refused(specs: list[str], size: list[tuple[str, int]], what: str) -> None:
    with pytest.raises(InputError) as caught:
        make(*specs, size=size)
    assert caught.value.what == what


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "photo.jpg"
    with pytest.raises(InputError, match="is no input") as caught:
        make(str(path))
    assert caught.value.why == "no such file"
    path.write_bytes(b"jpeg")
    with pytest.raises(InputError, match="is no input") as caught:
        make(str(path))
    assert caught.value.why == "only .npy and .npz files are read"


def test_sizes_without_a_bound() -> None:
    """They may grow, up to 32 bits; memory ends before."""
    length = Symbol("s0", open=True)
    value = Value("x", TensorType(DType.float32, (Dim.of(length), 1 << 40)))
    graph = Graph("forward", (value,), (), (), symbols={length: SymbolSource(value, 0)})

    def use(size: int) -> None:
        make_inputs(graph, argparse.Namespace(input=[], size=[("s0", size)], seed=0), "here")

    with pytest.raises(SizeConstraintError, match="above its bound"):
        use(10_000_000_000_000)
    with pytest.raises(InputError, match="no float32.* can be made of 'random'"):
        use(1 << 30)


def test_files_that_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", a=np.zeros(3))
    with pytest.raises(InputError, match="no array is named b"):
        make(f"{tmp_path / 'a.npz'}:b*")
    (tmp_path / "bad.npz").write_bytes(b"PK no archive")
    with pytest.raises(InputError, match="cannot be read"):
        make(str(tmp_path / "bad.npz"))
    np.save(tmp_path / "o.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match="cannot be read"):
        make(str(tmp_path / "o.npy"))


def test_bfloat16_needs_torch() -> None:
    torch = pytest.importorskip("torch")
    value = Value("x", TensorType(DType.bfloat16, (4,)))
    graph = Graph("forward", (value,), (), ())
    (made,) = make_inputs(graph, argparse.Namespace(input=["0.5"], size=[], seed=0), "here")
    assert made.dtype is torch.bfloat16 and made.tolist() == [0.5] * 4
