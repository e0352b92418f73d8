"""Batch inference with Ray Data: how much noise a network can stand, measured on several workers.

    python examples/batch_inference.py --workers 2

The pictures are the handwritten digits that the training of classify_digits.py does not see, each
with noise of nine strengths. Ray spreads the batches over the workers, each of which loads the model
once. The script prints how many digits of each strength are right. Needs `ray[data]`, torch and scikit-learn: `make
test-engines` makes an environment with them, build/engines.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from classify_digits import TRAIN, digits, network, train

import purevk

try:
    import ray

    from purevk.integrations.ray import MapBatches
except ImportError as error:
    raise SystemExit(
        f"{error}: pip install 'ray[data]', or run this with build/engines/bin/python, which"
        " `make test-engines` makes"
    ) from None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    torch.manual_seed(0)

    images, labels = digits()
    model = network()
    train(model, images[:TRAIN], labels[:TRAIN], options.epochs)
    unseen, truth = images[TRAIN:], labels[TRAIN:].numpy()
    batch = torch.export.Dim("batch", min=1, max=256)
    file = Path(tempfile.mkdtemp()) / "digits.pvk"
    with purevk.compile(model.eval(), (unseen[:2],), [{0: batch}]) as program:
        program.save(file)
        (given,), (made,) = program.inputs, program.outputs

    strengths = [0.1 * step for step in range(9)]
    random = np.random.default_rng(0)
    rows = [
        {
            given.name: image + random.normal(0, strength, image.shape).astype(np.float32),
            "digit": digit,
            "strength": number,
        }
        for image, digit in zip(unseen.numpy(), truth)
        for number, strength in enumerate(strengths)
    ]
    ray.init(num_cpus=options.workers + 1, include_dashboard=False, logging_level="error")
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    start = time.perf_counter()
    results = (
        ray.data.from_items(rows, override_num_blocks=4 * options.workers)
        .map_batches(
            MapBatches,
            fn_constructor_args=(str(file),),
            fn_constructor_kwargs={"keep_inputs": False},
            batch_size=256,
            compute=ray.data.ActorPoolStrategy(size=options.workers),
        )
        .take_all()
    )
    seconds = time.perf_counter() - start
    ray.shutdown()

    print(
        f"{len(results)} pictures on {options.workers} workers in {seconds:.1f} s with their start"
    )
    print("noise  right")
    for number, strength in enumerate(strengths):
        mine = [row for row in results if row["strength"] == number]
        right = sum(int(row[made.name].argmax()) == row["digit"] for row in mine) / len(mine)
        print(f"{strength:5.1f}  {right:5.1%}  {'#' * round(40 * right)}")


if __name__ == "__main__":
    main()
