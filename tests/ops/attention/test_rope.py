"""The rotation of executorch's native backend, against those of transformers."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
glm = pytest.importorskip("transformers.models.glm.modeling_glm")
neox = pytest.importorskip("transformers.models.gpt_neox.modeling_gpt_neox")

from tests.ops.harness import tensor  # noqa: E402
from tests.ops.quantized.harness import run  # noqa: E402

pytestmark = pytest.mark.device


def expected(
    x: Any, positions: Any, frequencies: Any, interleaved: bool = False, scale: float = 1.0
) -> Any:
    angles = positions.float()[..., None] * frequencies
    angles = torch.cat((angles, angles), -1)
    cos, sin = ((each * scale).to(x.dtype) for each in (angles.cos(), angles.sin()))
    return (glm if interleaved else neox).apply_rotary_pos_emb(x, x, cos, sin)[0]


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize(
    "batch, positions, width, rotary, dtype",
    [
        (1, 1, 16, 16, torch.float32),
        (3, 1, 20, 12, torch.float32),
        (3, 3, 20, 20, torch.float32),
        (2, 2, 16, 8, torch.float16),
        (2, 1, 16, 16, torch.bfloat16),
    ],
)
def test_rotation_at_positions(
    interleaved: bool, batch: int, positions: int, width: int, rotary: int, dtype: Any
) -> None:
    x = tensor(batch, 3, 5, width).to(dtype)
    at = torch.arange(5 * positions).reshape(positions, 5) * 7 % 40
    frequencies = 1 / 100 ** (torch.arange(0, rotary, 2) / rotary)
    args = (x, at, frequencies, interleaved, 1.25)
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}[dtype]
    have = run("native.rope.default", args, constants=(2,))
    assert have.dtype == dtype
    torch.testing.assert_close(have, expected(*args), rtol=tolerance, atol=tolerance)
