"""ncnn with its Vulkan kernels; models are converted from torch by pnnx and kept."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.peers.base import Loaded, Peer, Unavailable

if TYPE_CHECKING:
    from tests.models.zoo import Built


def convertible(module: Any) -> Any:
    """Return a module that computes the same and that pnnx turns into ncnn's own layers.

    The encoder's joint projection of queries, keys and values is taken apart, so that its attention
    becomes ncnn's `MultiHeadAttention`, its best for it; other modules are returned as they are.
    """
    import torch
    from torch import nn

    from tests.models.blocks import Encoder, EncoderLayer

    if not isinstance(module, Encoder):
        return module

    class Layer(nn.Module):
        def __init__(self, layer: EncoderLayer) -> None:
            super().__init__()
            self.heads, self.out = layer.heads, layer.out
            self.norm1, self.norm2, self.up, self.down = (
                layer.norm1,
                layer.norm2,
                layer.up,
                layer.down,
            )
            dim = layer.out.in_features
            for name, weight, bias in zip(
                "qkv", layer.qkv.weight.split(dim), layer.qkv.bias.split(dim), strict=True
            ):
                linear = nn.Linear(dim, dim)
                linear.weight.data, linear.bias.data = weight.clone(), bias.clone()
                setattr(self, name, linear)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, rows, dim = x.shape
            h = self.norm1(x)
            q, k, v = (
                f(h).view(batch, rows, self.heads, -1).transpose(1, 2)
                for f in (self.q, self.k, self.v)
            )
            attended = nn.functional.scaled_dot_product_attention(q, k, v)
            x = x + self.out(attended.transpose(1, 2).reshape(batch, rows, dim))
            return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

    class Twin(nn.Module):
        def __init__(self, encoder: Encoder) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer(layer) for layer in encoder.layers)
            self.norm = encoder.norm

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.norm(x)

    return Twin(module).eval().requires_grad_(False)


def convert(model: str, built: Built, folder: Path) -> Path:
    """Convert a model with pnnx, float32 weights; return the path of the `.ncnn.param` file.

    Raises:
        Unavailable: pnnx is not installed, or leaves operators that ncnn does not have.
    """
    try:
        import pnnx
    except ImportError as error:
        raise Unavailable("pnnx is not installed: pip install pnnx ncnn") from error
    folder = (folder / "ncnn" / model).resolve()
    param = folder / f"{model}.ncnn.param"
    if not param.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
            pnnx.export(
                convertible(built.module), str(folder / f"{model}.pt"), built.inputs, fp16=False
            )
    if not param.exists():
        raise Unavailable(f"pnnx wrote no {param.name}")
    kinds = {line.split()[0] for line in param.read_text().splitlines()[2:] if line.strip()}
    foreign = sorted(
        kind for kind in kinds if "." in kind or "::" in kind or kind.startswith("pnnx")
    )
    if foreign:
        raise Unavailable(f"ncnn has no layer for {', '.join(foreign)}")
    return param


@dataclass(frozen=True)
class NcnnVulkan(Peer):
    """ncnn on its default Vulkan device, float32 unless `half`."""

    half: bool = False

    def load(self, model: str, variant: str, folder: Path) -> Loaded:
        """See `Peer.load`."""
        try:
            import ncnn
            import numpy
        except ImportError as error:
            raise Unavailable("ncnn is not installed: pip install ncnn pnnx") from error
        from tests.models.zoo import CASES

        built = CASES[model].build()
        if len(built.inputs) != 1:
            raise Unavailable("only models with one float input are converted")
        param = convert(model, built, folder)
        if ncnn.get_gpu_count() == 0:
            raise Unavailable("ncnn finds no Vulkan device")
        net = ncnn.Net()
        net.opt.use_vulkan_compute = True
        net.opt.use_fp16_packed = net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = self.half
        if net.load_param(str(param)) or net.load_model(str(param.with_suffix(".bin"))):
            raise Unavailable(f"ncnn does not load {param.name}")
        array = built.samples[0][0].numpy()
        array = numpy.ascontiguousarray(array.reshape(array.shape[1:]))  # ncnn has no batch dim

        def run() -> list:
            extractor = net.create_extractor()
            extractor.input("in0", ncnn.Mat(array))
            code, result = extractor.extract("out0")
            if code:
                raise RuntimeError(f"ncnn's extract answered {code}")
            return [numpy.array(result)]

        device = ncnn.get_gpu_info(ncnn.get_default_gpu_index()).device_name()
        return Loaded(run, device, "half storage and arithmetic" if self.half else "")
