"""Which operators of torch a model file may run on the CPU, over all of ATen."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from purevk import fallback, pure_operators
from purevk.dtypes import DType
from purevk.errors import FallbackError
from purevk.ir import TensorType

torch = pytest.importorskip("torch")

# What must never run for a file, whatever the rules become.
DANGEROUS = """
aten.from_file.default aten.from_file.out
aten.set_.source_Storage aten.set_.source_Tensor aten.set_.source_Storage_storage_offset
aten.set_data.default aten.resize_.default aten.resize_as_.default aten.as_strided_.default
aten._resize_output_.default aten._reshape_alias.default aten._lazy_clone.default
aten._cummax_helper.default aten._cummin_helper.default aten._print.default
aten._assert_async.msg aten._linalg_check_errors.default aten._propagate_xla_data.default
aten._sparse_coo_tensor_unsafe.default aten._sparse_compressed_tensor_unsafe.default
aten.sparse_coo_tensor.size aten.record_stream.default aten.pin_memory.default
aten._fused_sgd_.default aten._foreach_add_.Scalar aten._backward.default aten.retain_grad.default
aten.requires_grad_.default aten._make_dual.default aten._test_string_default.default
aten._cufft_set_plan_cache_max_size.default aten._sobol_engine_scramble_.default
aten._pack_padded_sequence.default aten.quantized_lstm.input aten.fbgemm_pack_gemm_matrix_fp16.default
aten.mkldnn_rnn_layer.default aten.ctc_loss.IntList aten._ctc_loss.default
aten.max_pool2d_with_indices_backward.default aten.segment_reduce.default
prims.device_put.default prims.copy_to.default prims.resize.default prims.as_strided.default
prims._make_token.default
""".split()

# What the models of the test suite run there.
NEEDED = """
aten._softmax.default aten._log_softmax.default aten._native_batch_norm_legit_no_training.default
aten._fft_r2c.default aten._fft_c2r.default aten._to_copy.default aten._local_scalar_dense.default
aten.linalg_svd.default aten._linalg_eigh.default aten.nonzero.default aten.index_put_.default
aten.add.out aten.split_copy.Tensor_out aten.native_layer_norm_backward.default
aten.convolution_backward.default aten.view_as_complex.default aten.__and__.Tensor
prims.convert_element_type.default
""".split()

NO_NAMES = (
    "", "aten", "aten.add", "aten.add.Tensor.x", "aten..Tensor", "aten.__class__.__base__", "aten.add.__init__",
    "__class__.__init__.__globals__", "load_library.x.default", "os.system.default", "aten.add.Tensor\n",
    " aten.add.Tensor", "aten::add.Tensor", "higher_order.cond.default", "aten.\uff41dd.Tensor",
)  # fmt: skip


def overloads(*spaces: str) -> Iterator[Any]:
    for full in torch._C._dispatch_get_all_op_names():
        space, _, rest = full.partition("::")
        if space in spaces:
            base, _, overload = rest.partition(".")
            yield getattr(getattr(getattr(torch.ops, space), base), overload or "default")


def overload(name: str) -> Any:
    space, base, kind = name.split(".")
    return getattr(getattr(getattr(torch.ops, space), base), kind)


def test_every_overload_of_aten() -> None:
    """The rules say yes or no to each, and what they accept keeps what they promise. This reads the
    printed schemas, not the rules."""
    accepted, refused = [], []
    for each in overloads("aten", "prims"):
        reason = pure_operators.refusal(each)
        assert reason is None or reason
        (accepted if reason is None else refused).append(each)
    assert len(accepted) > 1500 and len(refused) > 500
    words = ("Storage", "Stream", "Dict", "QScheme", "__torch__", "filename", "Pybind", "Future")
    for each in accepted:
        text, base = str(each._schema), each._opname
        assert not any(word in text for word in words), text
        assert not any(word in base for word in ("sparse", "file", "storage", "cuda", "pin_")), base
        assert "-> ()" not in text or "!" in text, text
        if base.startswith("_") and not base.startswith("__"):
            assert base in pure_operators._PRIVATE, base
        if base.endswith("_") and not base.startswith("__"):
            assert "(a!) self" in text and "-> Tensor(a!)" in text, text


@pytest.mark.parametrize("name", DANGEROUS)
def test_dangerous(name: str) -> None:
    assert pure_operators.refusal(overload(name))


@pytest.mark.parametrize("name", NEEDED)
def test_needed(name: str) -> None:
    assert pure_operators.refusal(overload(name)) is None


def test_reviewed_lists_name_operators() -> None:
    known = {each._opname for each in overloads("aten")}
    assert pure_operators._PRIVATE <= known
    assert pure_operators._CHECK_THEMSELVES <= known
    texts = {
        argument.name
        for each in overloads("aten")
        for argument in each._schema.arguments
        if "str" in str(argument.real_type)
    }
    assert pure_operators._CHOICES <= texts


@pytest.mark.parametrize("name", NO_NAMES)
def test_names_are_no_paths(name: str) -> None:
    with pytest.raises(FallbackError, match="torch does not know it"):
        fallback.run(name, [], {}, [], "here")


def test_a_file_is_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(64)))
    wanted = [TensorType(DType.uint8, (64,))]
    args = [str(secret), False, 64, DType.uint8, None, None, None]
    with pytest.raises(FallbackError, match="it reads or writes a file"):
        fallback.run("aten.from_file.default", args, {}, wanted, "here")
    (array,) = fallback.run("aten.from_file.default", args, {}, wanted, "here", True)
    np.testing.assert_array_equal(array, np.arange(64))  # what a module of the caller gets


def test_results_are_not_larger_than_stated() -> None:
    args = [(1 << 44,), 1.0, DType.float32, None, None, None]
    with pytest.raises(FallbackError, match="need 70368744177664 bytes"):
        fallback.run("aten.full.default", args, {}, [TensorType(DType.float32, (2,))], "here")


# Operators that crash the process, or do so for arguments like these if nobody checks them first.
CRASHES = {
    "_cummax_helper": """
        x = tensor(torch.randn(8))
        run("aten._cummax_helper.default", [x, tensor(torch.zeros(1)), tensor(torch.zeros(1)), 0])
    """,
    "max_pool2d_with_indices_backward": """
        g, at = tensor(torch.ones(1, 4, 4)), tensor(torch.full((1, 4, 4), 1 << 40))
        run("aten.max_pool2d_with_indices_backward.default",
            [g, tensor(torch.ones(1, 8, 8)), (2, 2), (2, 2), (0, 0), (1, 1), False, at])
    """,
}


@pytest.mark.parametrize("name", CRASHES)
def test_no_crash(name: str) -> None:
    setup = """
        import torch
        from purevk import fallback
        from purevk.dtypes import DType
        from purevk.errors import FallbackError
        from purevk.ir import TensorType, Value
        arrays = {}
        def tensor(t):
            v = Value(f"v{len(arrays)}", TensorType(DType.from_torch(t.dtype), tuple(t.shape)))
            arrays[v] = fallback.to_numpy(t)
            return v
        def run(name, args):
            try:
                fallback.run(name, args, arrays, [], "here")
            except FallbackError as error:
                print("refused:", error.what)
    """
    script = textwrap.dedent(setup) + textwrap.dedent(CRASHES[name])
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "refused:" in done.stdout, done.stderr
