#!/usr/bin/env bash
# Tests purevk.integrations, deploy/serve.py and the examples that use them on the engines themselves, over loopback. They are in an environment of
# their own, build/engines, beside the packages of .venv: engines pin versions of packages that others need too.
#
#   scripts/engines.sh [arguments of pytest]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh --test
venv=build/engines
wanted=$(cat pyproject.toml scripts/engines.sh | sha256sum | cut -d' ' -f1)
if [ "$(cat $venv/.setup 2>/dev/null || true)" != "$wanted" ]; then
    echo "Installing Ray, LitServe and KServe into $venv, once"
    rm -rf $venv
    .venv/bin/python -m venv $venv
    site=$($venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    .venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' >"$site/purevk.pth"
    $venv/bin/python -m pip install --quiet --disable-pip-version-check \
        $($venv/bin/python -c '
try:
    import tomllib
except ImportError:
    import pip._vendor.tomli as tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["engines"])')
    echo "$wanted" >$venv/.setup
fi
export PUREVK_DEVICE=${PUREVK_DEVICE-llvmpipe} OMP_NUM_THREADS=${OMP_NUM_THREADS-1}
exec $venv/bin/python -m pytest -q tests/integrations tests/deploy/test_server.py \
    'tests/docs/test_examples.py::test_example[batch_inference]' 'tests/docs/test_examples.py::test_example[service]' "$@"
