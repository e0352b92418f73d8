"""Some of PyTorch's own operator samples through torch.export and purevk, others every day;
scripts/opinfo.py runs them all."""

from __future__ import annotations

import datetime
import json
import random
import warnings
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.device

ROOT = Path(__file__).parent.parent.parent
OPERATORS, SAMPLES = 16, 2


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_samples_of_the_day(dtype, monkeypatch):
    """Operators of which every sample passed still pass on the device; the day is the seed."""
    from torch.testing._internal.common_methods_invocations import op_db

    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import opinfo

    known = json.loads(opinfo.DATA.read_text(encoding="utf-8"))["operators"]
    sound = {name for name, entry in known.items() if len(entry.get(dtype, (0, 0))) == 1}
    day = datetime.date.today().toordinal()
    infos = sorted((info for info in op_db if opinfo.title_of(info) in sound), key=opinfo.title_of)
    chosen = random.Random(day).sample(infos, OPERATORS)
    runner = opinfo.Runner()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            counts, samples = opinfo.Counts(), []
            for info in chosen:
                samples += opinfo.samples_of(info, getattr(torch, dtype), SAMPLES, counts)
            runner.run(samples, counts, (1e-4, 1e-4))
    finally:
        runner.close()
    told = f"day {day}, operators {sorted(opinfo.title_of(info) for info in chosen)}: {dict(counts.reasons)}"
    assert not counts.outcomes["failed"] and not counts.outcomes["fallback"], told
    assert counts.outcomes["passed"] >= OPERATORS // 2, told
