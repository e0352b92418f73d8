"""What the examples with transformers share."""

from __future__ import annotations

import os


def prepare_transformers() -> None:
    """Keeps transformers from asking the hub and from drawing progress."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    from transformers.utils import logging

    logging.disable_progress_bar()
