#!/usr/bin/env bash
# purevk beside torch and ncnn, in one interleaved run; arguments go to bench.compare.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
.venv/bin/python -c 'import ncnn, pnnx' 2>/dev/null ||
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint scripts/constraints.txt ncnn pnnx
exec .venv/bin/python -m bench.compare "$@"
