"""Eager torch on the CPU with a fixed number of threads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.peers.base import Loaded, Peer, Unavailable


@dataclass(frozen=True)
class TorchCpu(Peer):
    """Eager torch with `threads` threads, float32 whatever the variant (half is slower on most
    CPUs)."""

    threads: int = 1

    def environment(self) -> dict[str, str]:
        """Bind the number of OpenMP threads, and let them sleep between calls of other peers."""
        return {"OMP_NUM_THREADS": str(self.threads), "OMP_WAIT_POLICY": "PASSIVE"}

    def load(self, model: str, variant: str, folder: Path) -> Loaded:
        """See `Peer.load`."""
        try:
            import torch
        except ImportError as error:
            raise Unavailable("torch is not installed") from error
        from tests.models.zoo import CASES

        torch.set_num_threads(self.threads)
        built = CASES[model].build()
        sample = built.samples[0]

        def run() -> list:
            with torch.inference_mode():
                results = built.module(*sample)
            return [
                tensor.numpy()
                for tensor in (results if isinstance(results, tuple | list) else (results,))
            ]

        return Loaded(
            run, f"CPU, {self.threads} thread{'s' if self.threads > 1 else ''}", "float32"
        )
