#!/bin/sh
# Links a libshaderc_shared.so in about a second from the static archives of Debian or Ubuntu, for machines where the
# distribution's own libshaderc.so.1 cannot be loaded (Debian 12's lacks a dependency). Needs the packages
# libshaderc-dev, glslang-dev, spirv-tools, binutils and a C compiler.
#
#   packaging/link_shaderc.sh [target file]
#
# Such a library knows only what the distribution's glslang knows: use build_shaderc.sh for the newer extensions.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
target=${1:-$here/../purevk/_lib/libshaderc_shared.so}
case $target in *.so) ;; *) echo "link_shaderc.sh: the target must be named *.so, not $target" >&2; exit 1 ;; esac
[ ! -e "$target" ] || [ -f "$target" ] || { echo "link_shaderc.sh: $target is no plain file" >&2; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

folder=
for candidate in "/usr/lib/$(cc -print-multiarch 2>/dev/null || true)" /usr/lib64 /usr/lib /usr/local/lib; do
    [ -r "$candidate/libshaderc_static.a" ] && { folder=$candidate; break; }
done
[ -n "$folder" ] || { echo "link_shaderc.sh: no libshaderc_static.a; install libshaderc-dev" >&2; exit 1; }

sed -n 's/^TWIN(.*, \(shaderc_[a-z_]*\),.*/\1 archive_\1/p; s/^TWIN_VOID(\(shaderc_[a-z_]*\),.*/\1 archive_\1/p' \
    "$here/shaderc_reexport.c" >"$work/renames"
objcopy --redefine-syms="$work/renames" "$folder/libshaderc_static.a" "$work/libarchive.a"
cc -O2 -fPIC -Wall -c "$here/shaderc_reexport.c" -o "$work/reexport.o"

# glslang and shaderc's helpers come in a different set of archives from release to release: take those that are there.
archives=
for name in shaderc_combined glslang SPIRV MachineIndependent GenericCodeGen OSDependent OGLCompiler HLSL \
    glslang-default-resource-limits SPIRV-Tools-opt SPIRV-Tools; do
    [ -r "$folder/lib$name.a" ] && archives="$archives $folder/lib$name.a"
done
mkdir -p "$(dirname "$target")"
# shellcheck disable=SC2086
c++ -shared -o "$target.new" "$work/reexport.o" -Wl,--start-group "$work/libarchive.a" $archives -Wl,--end-group \
    -static-libstdc++ -static-libgcc -Wl,--exclude-libs,ALL -Wl,--gc-sections -Wl,-z,defs -lpthread -s
mv "$target.new" "$target"
version() { # package
    dpkg-query --show --showformat='${Version}' "$1" 2>/dev/null || echo '(version unknown)'
}
echo "shaderc $(version libshaderc-dev), glslang $(version glslang-dev), SPIRV-Tools $(version spirv-tools)" \
    >"${target%.so}.txt"
for package in libshaderc-dev glslang-dev spirv-tools; do
    licence=/usr/share/doc/$package/copyright
    [ -r "$licence" ] || { echo "link_shaderc.sh: no $licence, which has to go with the library" >&2; exit 1; }
    printf '==== %s ====\n\n' "$package"
    cat "$licence"
done >"${target%.so}.LICENSES"
ls -l "$target"
