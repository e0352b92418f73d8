"""Runs models with the purevk that is installed, with an empty cache: `try_wheel.py FOLDER`.

FOLDER has `dynamic_views.pte` and `counter.pte`. The expected results are computed with numpy. The
compiler has to be the one inside the wheel. No torch is needed.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path


def main(folder: Path) -> None:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["PUREVK_CACHE"] = cache
        os.environ.pop("PUREVK_SHADERC", None)
        import numpy as np

        import purevk
        from purevk.shaders import shaderc

        package = Path(purevk.__file__).resolve().parent
        assert not (package.parent / "setup.py").exists(), f"{package} is a checkout"
        compiler = shaderc.load()
        assert str(package) in compiler.origin, compiler.origin

        random = np.random.default_rng(0)
        with purevk.load(folder / "dynamic_views.pte") as program:
            for rows in (5, 1, 16):
                x = random.standard_normal((1, rows, 8)).astype(np.float32)
                y = x.reshape(1, rows, 2, 4) + 1
                np.testing.assert_allclose(program(x), np.concatenate([y, y * y], -1), rtol=1e-6)
            kernels = program.report()["kernels"]
            assert kernels["compiled"] > 0, kernels
        with purevk.load(folder / "counter.pte") as program:
            state = np.arange(8, dtype=np.float32).reshape(2, 4)
            for _ in range(3):
                x = random.standard_normal((2, 4)).astype(np.float32)
                state += x
                np.testing.assert_allclose(program(x), state * 2, rtol=1e-5, atol=1e-5)
            device = program.device.name
    version = ".".join(map(str, sys.version_info[:3]))
    print(
        f"Python {version}, {device}, {compiler.version}: right,"
        f" {kernels['compiled']} kernels compiled, {time.perf_counter() - start:.1f} s"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
