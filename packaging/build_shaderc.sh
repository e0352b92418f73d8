#!/bin/sh
# Builds libshaderc_shared.so from Debian's source packages and puts it into purevk/_lib.
#
#   packaging/build_shaderc.sh [work folder]
#
# Variables: SUITE (the Debian release that the sources are taken from), JOBS (parallel compile jobs), TARGET (the file
# to make instead).
# Needs: apt-get, tar, cmake, ninja, a C++17 compiler, python3. Nothing is installed, and the machine's own
# apt configuration is left alone.
set -eu

SUITE=${SUITE:-trixie}
JOBS=${JOBS:-$(nproc)}
here=$(cd "$(dirname "$0")" && pwd)
target=${TARGET:-$here/../purevk/_lib/libshaderc_shared.so}
case $target in *.so) ;; *) echo "build_shaderc.sh: the target must be named *.so, not $target" >&2; exit 1 ;; esac
[ ! -e "$target" ] || [ -f "$target" ] || { echo "build_shaderc.sh: $target is no plain file" >&2; exit 1; }
work=${1:-}
if [ -z "$work" ]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
fi
mkdir -p "$work/apt/lists/partial" "$work/apt/archives/partial" "$work/download"
work=$(cd "$work" && pwd)

for tool in apt-get tar cmake ninja c++ python3 strip; do
    command -v "$tool" >/dev/null || { echo "build_shaderc.sh: $tool is missing" >&2; exit 1; }
done

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

# HLSL stays on: without it the library has an undefined symbol, which -z defs turns into an error at link time.
cmake -S "$work/shaderc" -B "$work/build" -G Ninja \
    -DCMAKE_BUILD_TYPE=Release -DCMAKE_POSITION_INDEPENDENT_CODE=ON \
    -DSHADERC_SKIP_TESTS=ON -DSHADERC_SKIP_EXAMPLES=ON \
    -DSHADERC_SKIP_COPYRIGHT_CHECK=ON -DSPIRV_SKIP_EXECUTABLES=ON -DSPIRV_SKIP_TESTS=ON -DENABLE_GLSLANG_BINARIES=OFF \
    -DGLSLANG_TESTS=OFF -DENABLE_HLSL=ON -DSPIRV_WERROR=OFF \
    -DCMAKE_SHARED_LINKER_FLAGS="-static-libstdc++ -Wl,--exclude-libs,ALL -Wl,--gc-sections -Wl,-z,defs"
cmake --build "$work/build" --target libshaderc/libshaderc_shared.so --parallel "$JOBS"

mkdir -p "$(dirname "$target")"
strip --strip-unneeded -o "$target.new" "$(readlink -f "$work/build/libshaderc/libshaderc_shared.so")"
mv "$target.new" "$target"

# What the library is, for `Compiler.version`, and the licences that go with it.
upstream() { # source package
    find "$work/download" -name "$1_*.orig.tar.*" | sort | tail -n 1 | sed -e "s/.*\/$1_//" -e 's/\.orig\..*//'
}
echo "shaderc $(upstream shaderc), glslang $(upstream glslang), SPIRV-Tools $(upstream spirv-tools)," \
    "SPIRV-Headers $(upstream spirv-headers)" \
    >"${target%.so}.txt"
for licence in shaderc/LICENSE shaderc/third_party/glslang/LICENSE.txt shaderc/third_party/spirv-tools/LICENSE \
    shaderc/third_party/spirv-headers/LICENSE; do
    printf '==== %s ====\n\n' "${licence#shaderc/third_party/}"
    cat "$work/$licence"
done >"${target%.so}.LICENSES"

for archive in "$work"/download/*.orig.tar.*; do basename "$archive"; done
ls -l "$target"
python3 - "$target" <<'PY'
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
version, revision = ctypes.c_uint(), ctypes.c_uint()
library.shaderc_get_spv_version(ctypes.byref(version), ctypes.byref(revision))
print(f"SPIR-V {version.value >> 16}.{version.value >> 8 & 255}, revision {revision.value}")
PY
