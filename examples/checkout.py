"""What examples share. Importing it hides what other packages report about themselves."""

from __future__ import annotations

import logging
import os
import warnings
from functools import partialmethod

warnings.filterwarnings("ignore", ".*treespec, LeafSpec", FutureWarning)  # torch calls it itself
for _name in ("torchao", "torch.utils._pytree"):  # libraries for other machines; torchao's enums
    logging.getLogger(_name).setLevel(logging.ERROR)


def prepare_transformers() -> None:
    """Keeps transformers from asking the hub, and from drawing progress but on a terminal."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from tqdm.auto import tqdm
    from transformers.utils import logging

    tqdm.__init__ = partialmethod(tqdm.__init__, disable=None)  # None: if this is no terminal
    logging.disable_progress_bar()
