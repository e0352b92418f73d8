"""How well Ray Data spreads a job over workers: `python bench/spread.py --workers 1 2 --out FILE.json`.

A job runs a network of convolutions over many images. It is timed in one process with `Worker` alone,
and with `purevk.integrations.ray.MapBatches` over several workers, each of which has one core
(lavapipe) or one device. `--seconds` is how long the one process takes, without its start. The table
has the whole job, with the start of Ray's workers, and the rate after the first tenth of the results.
The efficiency is that rate over the rate of the one process, for each worker.

Needs Ray: `scripts/engines.sh` makes build/engines, whose Python has it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("LP_NUM_THREADS", "1")  # a core for each worker on lavapipe
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

SIZE = 96
BATCH = 32


def model_file(folder: Path) -> Path:
    """A network of convolutions with a dynamic batch, saved."""
    import torch

    import purevk

    torch.manual_seed(0)
    layers: list[Any] = []
    for channels, more in ((3, 64), (64, 128), (128, 128), (128, 256), (256, 256)):
        stride = 1 if channels == more else 2
        layers += [torch.nn.Conv2d(channels, more, 3, stride, 1), torch.nn.ReLU()]
    model = torch.nn.Sequential(
        *layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(256, 10)
    ).eval()
    path = folder / "model.pvk"
    batch = torch.export.Dim("batch", min=1, max=BATCH)
    x = torch.zeros(2, 3, SIZE, SIZE)
    with purevk.compile(model, (x,), dynamic_shapes=({0: batch},)) as program:
        program.save(path)
    return path


def images(count: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((count, 3, SIZE, SIZE), np.float32)


def one_process(file: Path, seconds: float) -> tuple[int, float]:
    """Images of a job of about so many seconds, and how long it takes in this process."""
    from purevk.integrations.worker import Worker

    worker = Worker(file, batch_sizes=(BATCH,))
    (name,) = (spec.name for spec in worker.program.inputs)
    batch = {name: images(BATCH)}
    worker.columns(batch)
    start, runs = time.perf_counter(), 0
    while time.perf_counter() - start < min(seconds / 4, 5):
        worker.columns(batch)
        runs += 1
    count = BATCH * max(int(runs * seconds / (time.perf_counter() - start)), 1)
    data = images(count)
    start = time.perf_counter()
    for first in range(0, count, BATCH):
        worker.columns({name: data[first : first + BATCH]})
    taken = time.perf_counter() - start
    worker.close()
    return count, taken


def with_ray(file: Path, count: int, workers: int, on_gpu: bool) -> tuple[float, float]:
    """Seconds of the whole job, and images a second after the first tenth of the results."""
    import ray

    from purevk.integrations.ray import MapBatches

    ray.init(
        num_cpus=workers + 1,  # one for reading
        num_gpus=workers if on_gpu else 0,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="warning",
        runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)}},
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    try:
        blocks = np.array_split(images(count), max(count // (4 * BATCH), workers))
        results = (
            ray.data.from_numpy(blocks)
            .rename_columns({"data": "input"})
            .map_batches(
                MapBatches,
                fn_constructor_args=(str(file),),
                fn_constructor_kwargs={"batch_sizes": (BATCH,), "keep_inputs": False},
                batch_size=BATCH,
                compute=ray.data.ActorPoolStrategy(size=workers),
                **({"num_gpus": 1} if on_gpu else {"num_cpus": 1}),
            )
        )
        start, done, times = time.perf_counter(), 0, [(0, 0.0)]
        for batch in results.iter_batches(batch_size=None, prefetch_batches=0):
            done += len(next(iter(batch.values())))
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
    parser.add_argument("--seconds", type=float, default=60.0, help="of the job in one process")
    parser.add_argument("--gpu", action="store_true", help="give each worker a GPU of Ray")
    parser.add_argument("--out", type=Path, help="write all figures there, as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = model_file(Path(folder))
        count, alone = one_process(file, options.seconds)
        rate = count / alone
        print(f"one process: {count} images in {alone:.1f} s, {rate:.1f} a second")
        rows: list[dict[str, Any]] = [{"workers": 0, "images": count, "seconds": alone}]
        print("| workers | job, s | images a second | efficiency |")
        print("|--:|--:|--:|--:|")
        for workers in options.workers:
            seconds, found = with_ray(file, count, workers, options.gpu)
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
