"""purevk itself, from numpy to numpy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.peers.base import Loaded, Peer, Unavailable


@dataclass(frozen=True)
class PurevkVulkan(Peer):
    """`purevk.load(path).forward(...)` on the default device."""

    def load(self, model: str, variant: str, folder: Path) -> Loaded:
        """See `Peer.load`."""
        try:
            import purevk
        except ImportError as error:
            raise Unavailable(f"purevk does not import: {error}") from error
        from tests.models.export import export_pte, load_samples

        path = export_pte(model, variant, folder)
        inputs, _ = load_samples(path)[0]
        program = purevk.load(path)

        def run() -> list:
            results = program.forward(*inputs)
            return list(results) if isinstance(results, list | tuple) else [results]

        return Loaded(run, program.device.name)
