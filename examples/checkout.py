"""What the examples with transformers share."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent


def prepare_transformers() -> None:
    """Makes transformers importable beside a torchvision that was built for another torch, as in the
    environment of scripts/setup.sh, and keeps it from asking the hub and from drawing progress."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    if importlib.util.find_spec("torchvision"):
        sys.path.insert(0, str(CHECKOUT))
        from tests.models.zoo import import_torchvision

        import_torchvision()
    from transformers.utils import logging

    logging.disable_progress_bar()
