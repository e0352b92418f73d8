#!/bin/sh
# Builds shaderc as a shared library and puts it into purevk/_lib.
#
#   packaging/build_shaderc.sh [work folder]
#
# Variables: SOURCES (debian, the default: Debian's source packages, which apt checks; git: the tags below from GitHub, on
# any system), SUITE (the Debian release), GIT_BASE (where the repositories are), JOBS (parallel compile jobs), TARGET (the
# file to make instead), VALIDATOR (1: puts spirv-val of the same version beside it).
# Needs: cmake, ninja, a C++17 compiler, python3; apt-get and tar, or git. Nothing is installed, and the machine's own apt
# configuration is left alone.
set -eu

SOURCES=${SOURCES:-debian}
SUITE=${SUITE:-trixie}
GIT_BASE=${GIT_BASE:-https://github.com}
SHADERC_TAG=v2025.4
SDK_TAG=vulkan-sdk-1.4.328.1 # of glslang, SPIRV-Tools and SPIRV-Headers
JOBS=${JOBS:-$(nproc 2>/dev/null || sysctl -n hw.ncpu)}
here=$(cd "$(dirname "$0")" && pwd)
case $(uname -s) in
Darwin) name=libshaderc_shared.dylib ;;
MINGW* | MSYS* | CYGWIN*) name=shaderc_shared.dll ;;
*) name=libshaderc_shared.so ;;
esac
suffix=.${name##*.}
target=${TARGET:-$here/../purevk/_lib/$name}
case $target in *"$suffix") ;; *) echo "build_shaderc.sh: the target must be named *$suffix, not $target" >&2; exit 1 ;; esac
[ ! -e "$target" ] || [ -f "$target" ] || { echo "build_shaderc.sh: $target is no plain file" >&2; exit 1; }
work=${1:-}
if [ -z "$work" ]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
fi
mkdir -p "$work"
work=$(cd "$work" && pwd)

case $SOURCES in
debian) tools='apt-get tar' ;;
git) tools=git ;;
*) echo "build_shaderc.sh: SOURCES is debian or git, not $SOURCES" >&2; exit 1 ;;
esac
for tool in $tools cmake ninja python3; do
    command -v "$tool" >/dev/null || { echo "build_shaderc.sh: $tool is missing" >&2; exit 1; }
done

from_git() {
    clone() { # repository, tag, folder
        rm -rf "$3"
        git -c advice.detachedHead=false clone --quiet --depth 1 --branch "$2" "$GIT_BASE/$1" "$3"
    }
    clone google/shaderc $SHADERC_TAG "$work/shaderc"
    clone KhronosGroup/glslang $SDK_TAG "$work/shaderc/third_party/glslang"
    clone KhronosGroup/SPIRV-Tools $SDK_TAG "$work/shaderc/third_party/spirv-tools"
    clone KhronosGroup/SPIRV-Headers $SDK_TAG "$work/shaderc/third_party/spirv-headers"
    versions="shaderc ${SHADERC_TAG#v}, glslang $SDK_TAG, SPIRV-Tools $SDK_TAG, SPIRV-Headers $SDK_TAG"
}

from_debian() {
    mkdir -p "$work/apt/lists/partial" "$work/apt/archives/partial" "$work/download"
    # The mirror is the one that this machine already uses for Debian itself.
    mirror=$(apt-get indextargets --format '$(REPO_URI) $(ORIGIN) $(CODENAME) $(COMPONENT)' 2>/dev/null |
        awk '$2 == "Debian" && $3 !~ /-/ && $4 == "main" { print $1; exit }')
    if [ -z "$mirror" ]; then
        mirror=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null |
            sed -n -e 's/^URIs:[ ]*\([^ ]*\/debian\)\/\{0,1\}$/\1/p' \
                   -e 's/^deb \(\[[^]]*\] \)\{0,1\}\([^ ]*\/debian\)\/\{0,1\} .*/\2/p' | head -n 1)
    fi
    [ -n "$mirror" ] || { echo "build_shaderc.sh: no Debian mirror among this machine's apt sources" >&2; exit 1; }
    keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    [ -r "$keyring" ] || { echo "build_shaderc.sh: $keyring is missing (package debian-archive-keyring)" >&2; exit 1; }
    echo "deb-src [signed-by=$keyring] $mirror $SUITE main" >"$work/apt/sources.list"

    apt() {
        apt-get -q \
            -o Dir::Etc::SourceList="$work/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null \
            -o Dir::State::Lists="$work/apt/lists" -o Dir::Cache="$work/apt" -o APT::Sandbox::User=root "$@"
    }
    apt update
    (cd "$work/download" && apt source --download-only --tar-only shaderc glslang spirv-tools spirv-headers)

    # Only the upstream archives are wanted (apt checks their hashes): Debian's patches swap the bundled dependencies for
    # packages, and here they are bundled.
    unpack() { # source package, folder
        rm -rf "$2"
        mkdir -p "$2"
        tar -xf "$(find "$work/download" -name "$1_*.orig.tar.*" | sort | tail -n 1)" -C "$2" --strip-components=1
    }
    unpack shaderc "$work/shaderc"
    for part in glslang spirv-tools spirv-headers; do
        unpack "$part" "$work/shaderc/third_party/$part"
    done
    upstream() { # source package
        find "$work/download" -name "$1_*.orig.tar.*" | sort | tail -n 1 | sed -e "s/.*\/$1_//" -e 's/\.orig\..*//'
    }
    versions="shaderc $(upstream shaderc), glslang $(upstream glslang), SPIRV-Tools $(upstream spirv-tools),"
    versions="$versions SPIRV-Headers $(upstream spirv-headers)"
}

from_$SOURCES

# HLSL stays on: without it the library has an undefined symbol, which -z defs turns into an error at link time.
targets=shaderc_shared
skip_executables=ON
if [ -n "${VALIDATOR:-}" ]; then
    targets="$targets spirv-val"
    skip_executables=OFF
fi
case $suffix in
.so) flags='-static-libstdc++ -Wl,--exclude-libs,ALL -Wl,--gc-sections -Wl,-z,defs' ;;
*) flags= ;;
esac
cmake -S "$work/shaderc" -B "$work/build" -G Ninja \
    -DCMAKE_BUILD_TYPE=Release -DCMAKE_POSITION_INDEPENDENT_CODE=ON \
    -DSHADERC_SKIP_TESTS=ON -DSHADERC_SKIP_EXAMPLES=ON \
    -DSHADERC_SKIP_COPYRIGHT_CHECK=ON -DSPIRV_SKIP_EXECUTABLES=$skip_executables -DSPIRV_SKIP_TESTS=ON -DENABLE_GLSLANG_BINARIES=OFF \
    -DGLSLANG_TESTS=OFF -DENABLE_HLSL=ON -DSPIRV_WERROR=OFF \
    -DCMAKE_SHARED_LINKER_FLAGS="$flags"
cmake --build "$work/build" --target $targets --parallel "$JOBS"

mkdir -p "$(dirname "$target")"
if [ -n "${VALIDATOR:-}" ]; then
    cp "$(find "$work/build" -name spirv-val -type f | head -n 1)" "$(dirname "$target")/"
fi
cp -L "$work/build/libshaderc/$name" "$target.new"
[ "$suffix" != .so ] || strip --strip-unneeded "$target.new"
mv "$target.new" "$target"

# What the library is, for `Compiler.version`, and the licences that go with it.
echo "$versions" >"${target%"$suffix"}.txt"
for licence in shaderc/LICENSE shaderc/third_party/glslang/LICENSE.txt shaderc/third_party/spirv-tools/LICENSE \
    shaderc/third_party/spirv-headers/LICENSE; do
    printf '==== %s ====\n\n' "${licence#shaderc/third_party/}"
    cat "$work/$licence"
done >"${target%"$suffix"}.LICENSES"

ls -l "$target"
python3 - "$target" <<'PY'
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
version, revision = ctypes.c_uint(), ctypes.c_uint()
library.shaderc_get_spv_version(ctypes.byref(version), ctypes.byref(revision))
print(f"SPIR-V {version.value >> 16}.{version.value >> 8 & 255}, revision {revision.value}")
PY
