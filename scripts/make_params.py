"""Writes purevk/glsl/core/params.glslh, the macros behind PARAM(number, name)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

PATH = Path(__file__).parent.parent / "purevk" / "glsl" / "core" / "params.glslh"
COUNT = 40  # parameters that a template can number; those from 32 on need PARAMS_BUFFER
HEAD = """\
// Made by scripts/make_params.py. Do not edit.
//
// PARAM_i(name), for PARAM(i, name) of common.glslh: word i of the push constants if the macro
// PUSH_i is defined, else specialization constant i.
#ifndef PUREVK_PARAMS_GLSLH
#define PUREVK_PARAMS_GLSLH
"""
ONE = """\
#ifdef PUSH_{i}
#define PARAM_{i}(name) int name = push.p[{i}];
#else
#define PARAM_{i}(name) layout(constant_id = {i}) const int name = PARAM_DEFAULT;
#endif
"""


def text() -> str:
    """What the file has to hold."""
    return HEAD + "".join(ONE.format(i=i) for i in range(COUNT)) + "#endif\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if it is not current"
    )
    if not parser.parse_args().check:
        PATH.write_text(text(), encoding="utf-8")
        return 0
    if PATH.read_text(encoding="utf-8") == text():
        return 0
    print(f"{PATH} is not current: run python scripts/make_params.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
