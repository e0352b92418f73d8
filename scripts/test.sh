#!/usr/bin/env bash
# Checks of one tier, in an environment that is set up if need be.
#
#   scripts/test.sh [tier] [--validation] [arguments of pytest]
#
# The tiers:
#   lint     ruff format, ruff check and mypy; changes nothing
#   unit     tests of the landing tier that need no device; no Vulkan driver is visible to them
#   fast     two minutes: what takes less than a second, and of each operator's and kernel's test the first case
#   traits   tests of operators, models and programs of the landing tier, with the kernels and tiles of GPUs
#   landing  20 minutes on two cores: all but what tests/budget.txt leaves to the nightly tier (the default)
#   nightly  everything
#
# --validation runs under the Khronos validation layer, synchronization validation included; each message fails a test.
# --slice=TEXT adds a tenth of the nightly tier, which the text chooses.
# TEST_JOBS is the number of processes (default: one a core, 8 at most).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tier=landing
case ${1:-} in
lint | unit | fast | traits | landing | nightly)
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
# Hundreds of child processes import the package.
unset PYTHONDONTWRITEBYTECODE
# nproc answers with the threads of OpenMP where these are set.
cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)
jobs=${TEST_JOBS:-$((cores < 8 ? cores : 8))}
export PUREVK_DEVICE=${PUREVK_DEVICE-llvmpipe}
# One torch thread a process: several processes with a thread for each core would only wait for one another.
export OMP_NUM_THREADS=${OMP_NUM_THREADS-$((cores > jobs ? cores / jobs : 1))}

options=()
case $tier in
unit)
    options=(--tier=landing -m 'not device')
    export VK_DRIVER_FILES=/dev/null VK_ICD_FILENAMES=/dev/null
    ;;
traits)
    options=(--tier=landing tests/ops tests/models tests/program)
    export PUREVK_TEST_TRAITS=gpu
    ;;
fast) options=(--tier=fast) ;;
landing) options=(--tier=landing --budget) ;;
esac
exec .venv/bin/python -m pytest -q -n "$jobs" --dist worksteal ${options[@]+"${options[@]}"} "$@"
