#!/usr/bin/env bash
# The whole test suite on lavapipe. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh --test
export PUREVK_DEVICE=${PUREVK_DEVICE-llvmpipe}
exec .venv/bin/python -m pytest -n "${TEST_JOBS:-auto}" -q "$@"
