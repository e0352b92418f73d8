#!/bin/sh
# Tries a wheel in a Debian that has python3, pip and a Vulkan driver, and no compiler. Needs root and debootstrap.
#
#   packaging/bare_root.sh WHEEL MODELS
#
# WHEEL is the file, MODELS the folder that packaging/try_wheel.py takes. SUITE names the release (bookworm), ROOT the
# folder to use, which is removed at the end unless KEEP is set.
set -eu

wheel=$1 models=$2
suite=${SUITE:-bookworm}
here=$(cd "$(dirname "$0")" && pwd)
command -v debootstrap >/dev/null || { echo "bare_root.sh: debootstrap is missing" >&2; exit 1; }
[ "$(id -u)" = 0 ] || { echo "bare_root.sh: chroot needs root" >&2; exit 1; }
mirror=$(apt-get indextargets --format '$(REPO_URI) $(ORIGIN) $(COMPONENT)' | awk '$2 == "Debian" && $3 == "main" { print $1; exit }')
root=${ROOT:-$(mktemp -d)}
clean() {
    umount "$root/proc" "$root/dev/pts" "$root/dev" 2>/dev/null || true
    [ -n "${KEEP:-}" ] || rm -rf --one-file-system "$root"
}
trap clean EXIT

echo "Making a bare Debian $suite"
[ -x "$root/usr/bin/pip3" ] || debootstrap --variant=minbase \
    --include=python3,python3-pip,python3-venv,libvulkan1,mesa-vulkan-drivers,ca-certificates \
    "$suite" "$root" "$mirror" >"$root.log" 2>&1 || { tail -n 20 "$root.log" >&2; exit 1; }
rm -f "$root.log"
for tool in cc gcc c++ clang glslc glslangValidator; do
    [ ! -e "$root/usr/bin/$tool" ] || { echo "bare_root.sh: the root has $tool" >&2; exit 1; }
done
mount -t proc proc "$root/proc"
mount --bind /dev "$root/dev"
version=$(chroot "$root" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')

# What the wheel needs is fetched here, so that the root needs no network.
rm -rf "$root/srv/wheels" "$root/srv/models"
mkdir -p "$root/srv/wheels" "$root/srv/models"
python3 -m pip download --quiet --disable-pip-version-check --only-binary :all: --python-version "$version" \
    --dest "$root/srv/wheels" "$wheel"
cp "$models"/*.pte "$root/srv/models/"
cp "$here/try_wheel.py" "$root/srv/"

echo "Three commands: make an environment, install, run"
chroot "$root" sh -euc '
    start=$(date +%s)
    python3 -m venv /srv/env
    /srv/env/bin/pip install --quiet --no-index --find-links /srv/wheels purevk
    cd /srv && HOME=/root /srv/env/bin/python try_wheel.py models
    /srv/env/bin/purevk doctor || true
    echo "$(($(date +%s) - start)) s in all"
'
