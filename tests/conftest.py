"""Settings for the whole test suite."""

from __future__ import annotations

import os
from pathlib import Path

# Verify the IR after every pass, show no progress bars, and leave the user's cache alone. Kernels are kept from one run of
# the tests to the next, as they are for a user.
os.environ.setdefault("PUREVK_VERIFY", "1")
os.environ.setdefault("PUREVK_PROGRESS", "0")
os.environ.setdefault("PUREVK_CACHE_DIR", str(Path(__file__).parent.parent / ".pytest_cache" / "purevk"))
