"""Fourier transforms, beside torch's in double precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

import purevk
from purevk.ops.fft import choice
from purevk.program import Program
from purevk.tuning import DeviceTraits
from purevk.tuning.families import default
from tests.ops.harness import Recorder, context, host_nodes, program_of, tensor

pytestmark = pytest.mark.device
fft = torch.fft
# The relative rms error of pocketfft in single precision is about as large; Bluestein's algorithm
# has two transforms.
SINGLE, DOUBLE = 3e-7, 1e-15


def numbers(*shape: int, double: bool = False, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.complex128 if double else torch.complex64
    return torch.randn(shape, dtype=dtype, generator=generator)


def wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def error(made: torch.Tensor, wanted: torch.Tensor) -> float:
    """The relative rms error."""
    made, wanted = wide(made), wide(wanted)
    return float((made - wanted).abs().square().mean().sqrt() / wanted.abs().square().mean().sqrt())


Calls = Sequence[tuple[Callable[..., torch.Tensor], torch.Tensor]]


def agrees(calls: Calls, limit: float = SINGLE) -> None:
    """Compares calls with torch in double precision, all of them in one program."""

    def both(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(fn(x) for (fn, _), x in zip(calls, given))

    given = tuple(x for _, x in calls)
    with program_of(both, given) as program:
        assert host_nodes(program) == []
        made = program.forward(*given)
    for number, ((fn, x), have) in enumerate(zip(calls, made if len(calls) > 1 else [made])):
        want = fn(wide(x))
        assert have.shape == want.shape and have.dtype is fn(x).dtype, number
        assert error(have, want) < limit, f"call {number}: {error(have, want)}"


@pytest.mark.parametrize(
    "lengths",
    [(1, 2, 3, 4, 8, 12, 16), (5, 7, 11, 13, 60), (64, 100, 210, 1024), (17, 97)],
    ids=str,
)
def test_lengths(lengths):
    agrees([(fft.fft, numbers(5, length)) for length in lengths])


@pytest.mark.slow
def test_long_rows():
    agrees([(fft.fft, numbers(2, 8192)), (fft.ifft, numbers(2, 5000)), (fft.rfft, tensor(3, 8192))])
    agrees([(lambda x: fft.irfft(x, n=8192), fft.rfft(tensor(3, 8192)))])


@pytest.mark.slow
@pytest.mark.parametrize("length", [65536, 100003, 59049])
def test_very_long_rows(length):
    """Beside numpy in double precision."""
    x = numbers(1, length)
    with program_of(fft.fft, (x,)) as program:
        made = program.forward(x)
    wanted = torch.from_numpy(np.fft.fft(x.numpy().astype(np.complex128)))
    assert error(made, wanted) < 4e-7


@pytest.mark.slow
def test_rows_of_rows():
    """A factor of a long row that does not fit a workgroup either is cut again."""
    shared = context()
    small = dataclasses.replace(shared.traits, max_shared_memory=512)
    x, real = numbers(2, 4096), tensor(2, 4096)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "traits", small)
        assert choice.choose(small, 64, 4, 1 << 16, False) is not None
        assert choice.choose(small, 256, 4, 1 << 16, False) is None
        agrees([(fft.ifft, x), (fft.rfft, real)])
        agrees([(lambda x: fft.irfft(x, n=4096), fft.rfft(real))])


@pytest.mark.slow
def test_kernels_of_a_gpu(monkeypatch):
    """Radices up to 16, several rows in a workgroup, and columns, of which one part after the other
    goes through shared memory."""
    shared = context()
    traits = dataclasses.replace(shared.traits, profile=default.DEFAULT, max_shared_memory=32768)
    monkeypatch.setattr(shared, "traits", traits)
    assert choice.choose(traits, 512, 4, 1 << 16, True).halves
    agrees([(fft.fft, numbers(7, 256)), (fft.fft2, numbers(1, 512, 20))])


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
def test_norms(norm):
    x, half = numbers(3, 12), numbers(3, 7)
    agrees(
        [
            (lambda x: fft.fft(x, norm=norm), x),
            (lambda x: fft.ifft(x, norm=norm), x),
            (lambda x: fft.rfft(x, norm=norm), tensor(3, 12)),
            (lambda x: fft.irfft(x, norm=norm), half),
            (lambda x: fft.hfft(x, norm=norm), half),
            (lambda x: fft.ihfft(x, norm=norm), tensor(3, 12)),
            (lambda x: fft.fft2(x, norm=norm), numbers(4, 6, 8)),
        ]
    )


@pytest.mark.slow
def test_sizes():
    """`n` pads or cuts; odd lengths of real transforms."""
    x = numbers(3, 10)
    agrees(
        [
            (lambda x: fft.fft(x, n=6), x),
            (lambda x: fft.fft(x, n=16), x),
            (lambda x: fft.fft(x, n=5, dim=0), x),
            (lambda x: fft.irfft(x, n=9), numbers(3, 10)),
            (lambda x: fft.irfft(x, n=19), numbers(3, 10)),
            (fft.rfft, tensor(3, 9)),
            (fft.rfft, tensor(3, 1)),
            (lambda x: fft.irfft(x, n=1), numbers(3, 1)),
            (fft.fft, tensor(3, 10)),  # all of the spectrum of real numbers
            (lambda x: fft.irfft(x, n=17), numbers(3, 9)),
        ]
    )


@pytest.mark.slow
def test_dims():
    x = numbers(6, 5, 8)
    agrees(
        [
            (lambda x: fft.fft(x, dim=0), x),
            (lambda x: fft.ifft(x, dim=1), x),
            (fft.fftn, x),
            (lambda x: fft.ifftn(x, s=(4, 10), dim=(0, 2)), x),
            (fft.rfft2, tensor(3, 6, 8)),
            (fft.rfftn, tensor(4, 6, 5)),
            (lambda x: fft.irfft2(x, s=(6, 9)), numbers(3, 6, 5)),
            (fft.fft, x.mT),
            (lambda x: fft.fft(x[1:, :, ::2]), x),
            (lambda x: fft.fftshift(fft.fft2(x)), x),
            (lambda x: fft.ifft2(fft.ifftshift(x, dim=(1, 2))), x),
            (lambda x: fft.fft(x.permute(1, 2, 0)), x),
        ]
    )


@pytest.mark.slow
def test_columns():
    """Neighbouring columns go through a workgroup together; some workgroups are not full."""
    agrees(
        [
            (lambda x: fft.fft(x, dim=1), numbers(2, 32, 21)),
            (lambda x: fft.rfft(x, dim=0), tensor(24, 50)),
        ]
    )


@pytest.mark.slow
def test_double_precision():
    x = numbers(3, 60, double=True)
    agrees([(fft.fft, x), (lambda x: fft.irfft(x, norm="ortho"), x)], DOUBLE)


@pytest.mark.slow
def test_conjugated_pairs_of_a_view():
    """Pairs that start at an odd element, or are not neighbours, are copied first."""

    def odd(x: torch.Tensor) -> torch.Tensor:
        return fft.fft(torch.view_as_complex(x[:, 1:9].reshape(3, 4, 2).clone()).conj())

    x = tensor(3, 10)
    with program_of(odd, (x,)) as program:
        assert error(program.forward(x), odd(x.double())) < SINGLE


def test_without_elements():
    """Eager torch refuses it; an exported program may have it."""
    recorder, x = Recorder(), numbers(0, 4)
    made = recorder.call(torch.ops.aten._fft_c2c.default, (recorder.input(x), [1], 0, True), {})
    graph = recorder.importer.finish([made])
    with Program("test", {"forward": lambda sizes: graph}, context()) as program:
        assert tuple(program.forward(x).shape) == (0, 4)


@pytest.mark.slow
def test_dynamic_batch():
    """Sizes along the other dims need no second lowering."""

    class Filter(torch.nn.Module):
        def forward(self, x):
            return fft.irfft(fft.rfft(x) * 0.5, n=24)

    x = tensor(9, 24)
    batch = torch.export.Dim("batch", min=2, max=9)
    with purevk.compile(Filter(), (x,), ({0: batch},)) as program:
        for rows in (9, 2, 5):
            torch.testing.assert_close(
                program.forward(x[:rows]), x[:rows] * 0.5, rtol=1e-5, atol=1e-5
            )
        assert len(program.method("forward").specializations) == 1


@pytest.mark.slow
def test_dynamic_length():
    """Each length gets a specialization."""

    class Spectrum(torch.nn.Module):
        def forward(self, x):
            return fft.fft(x)

    x = numbers(3, 48)
    length = torch.export.Dim("length", min=2, max=48)
    with purevk.compile(Spectrum(), (x,), ({1: length},)) as program:
        for size in (48, 20, 9):
            assert error(program.forward(x[:, :size]), fft.fft(wide(x[:, :size]))) < SINGLE


@pytest.mark.slow
@pytest.mark.parametrize("center", [True, False])
def test_short_time_transforms(center):
    window = torch.hann_window(32) + 0.1

    class Changed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("window", window)

        def forward(self, x):
            spectrum = torch.stft(x, 32, 8, window=self.window, center=center, return_complex=True)
            back = torch.istft(spectrum * 2, 32, 8, window=self.window, center=center)
            both = torch.stft(x, 30, onesided=False, window=self.window[:30], return_complex=True)
            return spectrum, back, both.abs()

    x = tensor(2, 200)
    with purevk.compile(Changed(), (x,)) as program:
        assert program.report()["cpu_nodes"] == 0
        made = program.forward(x)
    for have, want in zip(made, Changed()(x)):
        torch.testing.assert_close(have, want, rtol=1e-5, atol=2e-5)


# -- the choice of kernels, without a device ------------------------------------------------------
LARGE = DeviceTraits(
    frozenset(), max_shared_memory=49152, max_invocations=1024, profile=default.DEFAULT
)


@pytest.mark.parametrize("length", [1, 2, 6, 32, 512, 1000, 2048, 4096, 6561, 8192])
def test_stages_make_the_length(length):
    for columns in (False, True):
        work = choice.choose(LARGE, length, 4, 1 << 16, columns)
        assert work is not None and work.length == length
        assert work.values <= 26 and work.threads * work.rows <= 1024
        assert all(
            count * work.threads * radix >= length
            for count, radix in zip(work.counts, work.radices)
        )


def test_few_stages():
    assert choice.radices_of(4096) == (16, 16, 16)
    assert choice.radices_of(1024) == (16, 8, 8)
    assert choice.radices_of(512) == (16, 8, 4)
    assert choice.radices_of(17) is None and choice.choose(LARGE, 34, 4, 1, False) is None
    assert choice.split(LARGE, 65536, 4) == (256, 256)
    assert choice.split(LARGE, 1 << 26, 4) == (8192, 8192)
