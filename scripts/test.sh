#!/usr/bin/env bash
# Checks of one tier, in an environment that is set up if need be.
#
#   scripts/test.sh [tier] [--validation] [arguments of pytest]
#
# The tiers:
#   lint    ruff format, ruff check and mypy; changes nothing
#   unit    tests that need no device; no Vulkan driver is visible to them
#   fast    two minutes: what takes less than half a second, and of each operator's and kernel's test the first case
#   traits  the fast tests of operators, models and programs on lavapipe taken for a GPU, with the kernels and tiles of GPUs
#   full    everything, on lavapipe (the default)
#
# --validation runs under the Khronos validation layer, synchronization validation included; each message fails a test.
# TEST_JOBS is the number of processes (default: one a core, 8 at most).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tier=full
case ${1:-} in
lint | unit | fast | traits | full)
    tier=$1
    shift
    ;;
esac
if [ "${1:-}" = --validation ]; then
    export PUREVK_VALIDATION=1
    shift
fi

if [ "$tier" = lint ]; then
    scripts/setup.sh
    .venv/bin/ruff format --check .
    .venv/bin/ruff check .
    exec .venv/bin/mypy
fi

scripts/setup.sh --test
cores=$(nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)
jobs=${TEST_JOBS:-$((cores < 8 ? cores : 8))}
export PUREVK_DEVICE=${PUREVK_DEVICE-llvmpipe}
# One torch thread a process: several processes with a thread for each core would only wait for one another.
export OMP_NUM_THREADS=${OMP_NUM_THREADS-$((cores > jobs ? cores / jobs : 1))}

options=()
case $tier in
unit)
    options=(-m 'not device and not slow and not sweep')
    export VK_DRIVER_FILES=/dev/null VK_ICD_FILENAMES=/dev/null
    ;;
fast) options=(-m 'not slow and not sweep and not long') ;;
traits)
    options=(-m 'not slow and not sweep' tests/ops tests/models tests/program)
    export PUREVK_TEST_TRAITS=gpu
    ;;
esac
exec .venv/bin/python -m pytest -q -n "$jobs" --dist worksteal "${options[@]}" "$@"
