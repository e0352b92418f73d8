"""How well Ray Data spreads a job over workers: `python bench/spread.py --out FILE.json`.

A job runs a network over many images of bytes. It is timed in one process with `Worker` alone, and
with `purevk.integrations.ray.MapBatches` over several workers, each of which has one core of the
CPU, or with `--gpu` one GPU. `--seconds` is how long one worker needs for the job, `--alone` how
long the one process is timed. The table has the whole job, with the start of Ray's workers, and the
rate after the first tenth of the results. The efficiency is that rate over the rate of the one
process, for each worker.

- `--model`: a small network of convolutions, as lavapipe can take it; ResNet-50, ViT-B/16 or
  ViT-L/16 in half precision. The default with `--gpu` is ViT-L/16: with less work for each image,
  the copies of Ray take longer than the GPU.
- With `--gpu`, tasks on other cores make the images while the job runs, in place of reading and
  decoding files: all of them would not fit into memory. Else they are there before the job begins.
- `--models` keeps the exported model in a folder, and `--prepare` does nothing else.

Needs Ray: `scripts/engines.sh` makes build/engines, whose Python has it.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
BLOCK = 4
"""Batches of a block, in which Ray hands images from task to task. All blocks are of whole batches:
a task of Ray makes a batch of the rows that are left."""
OBJECT_STORE = 8 << 30
"""Bytes for such blocks with GPUs. More would hold images that wait, in memory that is new."""


# -- the model -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Model:
    """A network to run.

    Attributes:
        build: makes it.
        side: of an image, in pixels.
        half: computes in half precision.
    """

    build: Callable[[], Any]
    side: int
    half: bool = True


def _convolutions() -> Any:
    import torch

    layers: list[Any] = []
    for channels, more in ((3, 64), (64, 128), (128, 128), (128, 256), (256, 256)):
        stride = 1 if channels == more else 2
        layers += [torch.nn.Conv2d(channels, more, 3, stride, 1), torch.nn.ReLU()]
    return torch.nn.Sequential(
        *layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(256, 10)
    )


def _resnet() -> Any:
    from bench.networks import ResNet, normalized

    return normalized(ResNet((3, 4, 6, 3), 64, 1000), 128)


def _vit(layers: int, width: int, heads: int) -> Any:
    from bench.networks import ViT

    return ViT(layers, width, heads, 224, 1000)


MODELS = {
    "convolutions": Model(_convolutions, 96, half=False),
    "resnet50": Model(_resnet, 224),
    "vit_b_16": Model(functools.partial(_vit, 12, 768, 12), 224),
    "vit_l_16": Model(functools.partial(_vit, 24, 1024, 16), 224),
}


def model_file(folder: Path, name: str, batch: int) -> Path:
    """The model with a dynamic batch, from bytes to classes; exported if the folder lacks it."""
    import torch

    import purevk

    path = folder / f"{name}-{batch}.pvk"
    if path.exists():
        return path
    model = MODELS[name]

    class OfBytes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = model.build()

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            pixels = image.to(torch.float16 if model.half else torch.float32)
            return self.network((pixels - 127.5) / 64)

    torch.manual_seed(0)
    module = OfBytes().eval().requires_grad_(False)
    dynamic = torch.export.Dim("batch", min=1, max=batch)
    x = torch.zeros(2, 3, model.side, model.side, dtype=torch.uint8)
    if model.half:
        module.half()
    with purevk.compile(module, (x,), dynamic_shapes=({0: dynamic},)) as program:
        program.save(path)
    return path


def images(count: int, side: int, seed: int = 0) -> np.ndarray:
    """Random images of bytes."""
    return np.random.default_rng(seed).integers(0, 256, (count, 3, side, side), np.uint8)


# -- jobs ----------------------------------------------------------------------------------------
def one_process(file: Path, side: int, batch: int, seconds: float) -> tuple[int, float]:
    """How many images this process runs in about so many seconds, and these seconds."""
    from purevk.integrations.worker import Worker

    worker = Worker(file, batch_sizes=(batch,))
    batches = [{"image": images(batch, side, seed)} for seed in range(8)]
    end = time.perf_counter() + min(seconds / 4, 5)
    worker.columns(batches[0])
    while time.perf_counter() < end:
        worker.columns(batches[0])
    start, done = time.perf_counter(), 0
    while time.perf_counter() < start + seconds:
        worker.columns(batches[done % len(batches)])
        done += 1
    taken = time.perf_counter() - start
    worker.close()
    return done * batch, taken


def dataset(count: int, side: int, batch: int, lazy: bool) -> Any:
    """A dataset of images: in the object store, or made by tasks while a job runs."""
    import ray

    blocks = count // (BLOCK * batch)
    if not lazy:
        made = np.split(images(count, side), blocks)
        return ray.data.from_numpy(made).rename_columns({"data": "image"})

    def make(ids: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"image": images(len(ids["id"]), side, int(ids["id"][0]))}

    return ray.data.range(count, override_num_blocks=blocks).map_batches(make, batch_size=None)


def with_ray(
    file: Path, side: int, count: int, workers: int, options: argparse.Namespace
) -> tuple[float, float]:
    """Seconds of the whole job, and images a second after the first tenth of the results."""
    import ray

    from purevk.integrations.ray import MapBatches

    on_gpu, batch = options.gpu, options.batch
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    ray.init(
        # Beside the workers, one core reads; with GPUs, all others make images.
        num_cpus=max(os.cpu_count() or 1, workers + 1) if on_gpu else workers + 1,
        num_gpus=workers if on_gpu else 0,
        object_store_memory=OBJECT_STORE if on_gpu else None,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="warning",
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}},
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    try:
        results = dataset(count, side, batch, on_gpu).map_batches(
            MapBatches,
            fn_constructor_args=(str(file),),
            fn_constructor_kwargs={"batch_sizes": (batch,), "keep_inputs": False},
            batch_size=batch,
            # On a GPU, Ray makes the next batch ready meanwhile.
            compute=ray.data.ActorPoolStrategy(
                size=workers, max_concurrent_calls_per_actor=2 if on_gpu else None
            ),
            **({"num_gpus": 1} if on_gpu else {"num_cpus": 1}),
        )
        start, done, times = time.perf_counter(), 0, [(0, 0.0)]
        for made in results.iter_batches(batch_size=None, prefetch_batches=0):
            done += len(next(iter(made.values())))
            times.append((done, time.perf_counter() - start))
        assert done == count, f"{done} of {count} images came back"
        early, since = next(each for each in times if each[0] >= count / 10)
        total = times[-1][1]
        return total, (count - early) / (total - since)
    finally:
        ray.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=60.0, help="of the job with one worker")
    parser.add_argument("--alone", type=float, help="seconds in one process; default: --seconds")
    parser.add_argument("--gpu", action="store_true", help="give each worker a GPU of Ray")
    parser.add_argument("--model", choices=tuple(MODELS), help="default: see above")
    parser.add_argument("--batch", type=int, help="default: 32, with --gpu 64")
    parser.add_argument("--models", type=Path, help="folder that keeps the exported model")
    parser.add_argument("--prepare", action="store_true", help="export the model, and end")
    parser.add_argument("--out", type=Path, help="write all figures there, as JSON")
    options = parser.parse_args()
    os.environ.setdefault("LP_NUM_THREADS", "1")  # a core for each worker on lavapipe
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options.model = options.model or ("vit_l_16" if options.gpu else "convolutions")
    options.batch = options.batch or (64 if options.gpu else 32)
    side, batch = MODELS[options.model].side, options.batch
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.models or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        file = model_file(folder, options.model, batch)
        if options.prepare:
            return 0
        done, alone = one_process(file, side, batch, options.alone or options.seconds)
        rate = done / alone
        count = max(int(rate * options.seconds / (BLOCK * batch)), 1) * BLOCK * batch
        print(
            f"{options.model}, batches of {batch}; one process: {done} images in {alone:.1f} s,"
            f" {rate:.1f} a second; a job has {count}"
        )
        rows: list[dict[str, Any]] = [
            {"model": options.model, "batch": batch, "workers": 0, "images": done, "seconds": alone}
        ]
        print("| workers | job, s | images a second | efficiency |")
        print("|--:|--:|--:|--:|", flush=True)
        for workers in options.workers:
            seconds, found = with_ray(file, side, count, workers, options)
            row = {"workers": workers, "seconds": seconds, "rate": found}
            rows.append({**row, "efficiency": found / rate / workers})
            print(
                f"| {workers} | {seconds:.1f} | {found:.1f} | {found / rate / workers:.1%} |",
                flush=True,
            )
            if options.out:
                options.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
