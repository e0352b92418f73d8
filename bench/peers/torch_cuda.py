"""torch on a CUDA device: eager, or one captured CUDA graph."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.peers.base import Loaded, Peer, Unavailable
from bench.timing import captured, exact_float32


@dataclass(frozen=True)
class TorchCuda(Peer):
    """torch on CUDA device 0.

    Attributes:
        graph: replay a CUDA graph instead of calling the module.
        resident: inputs and outputs stay on the device; a call ends when the device has finished.
    """

    graph: bool = False
    resident: bool = False

    def load(self, model: str, variant: str, folder: Path) -> Loaded:
        """See `Peer.load`."""
        try:
            import torch
        except ImportError as error:
            raise Unavailable("torch is not installed") from error
        if not torch.cuda.is_available():
            raise Unavailable("torch finds no CUDA device")
        from tests.models.zoo import CASES

        exact_float32()
        dtype = torch.float16 if variant == "fp16" else torch.float32
        case = CASES[model].build()
        if case.stateful:
            raise Unavailable("the model's operators have no CUDA kernels")
        module = case.module.to("cuda", dtype)
        host = [t.to(dtype) if t.is_floating_point() else t for t in case.samples[0]]
        host = [t.contiguous().pin_memory() for t in host]
        device = [t.to("cuda") for t in host]

        def call() -> tuple:
            results = module(*device)
            return tuple(results) if isinstance(results, tuple | list) else (results,)

        with torch.inference_mode():
            replay = None
            if self.graph:
                replay, results = captured(call)
            else:
                results = call()
        landing = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in results]

        def run() -> list:
            nonlocal results
            with torch.inference_mode():
                if not self.resident:
                    for source, target in zip(host, device, strict=True):
                        target.copy_(source, non_blocking=True)
                if replay is None:
                    results = call()
                else:
                    replay()
                if self.resident:
                    torch.cuda.synchronize()
                    return list(results)
                for source, target in zip(results, landing, strict=True):
                    target.copy_(source, non_blocking=True)
                torch.cuda.synchronize()
            return landing

        note = "no copies between host and device" if self.resident else ""
        return Loaded(run, torch.cuda.get_device_name(0), note)
