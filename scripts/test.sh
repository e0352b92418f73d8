#!/usr/bin/env bash
# The tests on lavapipe, in an environment that is set up if need be.
#
#   scripts/test.sh [--fast] [--validation] [arguments of pytest]
#
# --fast leaves out what is slow, such as exports of large models, and all but the first case of each operator's and kernel's test. --validation runs under the Khronos validation
# layer, synchronization validation included; each message fails a test. TEST_JOBS is the number of processes (default: one a
# core, 8 at most).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

options=()
while [ $# -gt 0 ]; do
    case $1 in
    --fast) options+=(-m 'not slow and not sweep') ;;
    --validation) export PUREVK_VALIDATION=1 ;;
    *) break ;;
    esac
    shift
done

scripts/setup.sh --test
cores=$(nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)
jobs=${TEST_JOBS:-$((cores < 8 ? cores : 8))}
export PUREVK_DEVICE=${PUREVK_DEVICE-llvmpipe}
# One torch thread a process: several processes with a thread for each core would only wait for one another.
export OMP_NUM_THREADS=${OMP_NUM_THREADS-$((cores > jobs ? cores / jobs : 1))}
exec .venv/bin/python -m pytest -q -n "$jobs" --dist worksteal "${options[@]}" "$@"
