"""The runtimes that `bench.compare` times, each in a process of its own that waits between rounds."""

from __future__ import annotations

from bench.peers.base import Peer
from bench.peers.ncnn_vulkan import NcnnVulkan
from bench.peers.purevk_vulkan import PurevkVulkan
from bench.peers.torch_cpu import TorchCpu
from bench.peers.torch_cuda import TorchCuda

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        PurevkVulkan("purevk"),
        TorchCpu("torch-1", threads=1),
        TorchCpu("torch-2", threads=2),
        NcnnVulkan("ncnn", half=False),
        NcnnVulkan("ncnn-half", half=True),
        TorchCuda("cuda", graph=False, resident=False),
        TorchCuda("cuda-graph", graph=True, resident=False),
        TorchCuda("cuda-resident", graph=False, resident=True),
        TorchCuda("cuda-graph-resident", graph=True, resident=True),
    )
}

__all__ = ["PEERS", "Peer"]
