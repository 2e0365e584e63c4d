#!/usr/bin/env bash
# Makes DIR/root and DIR/site: Python 3.11 and LiteRT for 64-bit ARM, which qemu-user runs.
# Takes packages of Debian 12 (or what has its Python 3.11) and PyPI; needs root for apt, a minute.
set -euo pipefail
dir=$(mkdir -p "$1" && cd "$1" && pwd)
apt="apt-get -qq -o APT::Sandbox::User=root -o DPkg::Lock::Timeout=60"
"$(dirname "$0")/../install_qemu.sh" qemu-aarch64
dpkg --add-architecture arm64
$apt update
mkdir -p "$dir/debs" "$dir/wheels" "$dir/root/proc"
cd "$dir/debs"
libraries="libc6 libpython3.11-minimal libpython3.11-stdlib libexpat1 zlib1g libffi8 libssl3 libstdc++6"
libraries+=" libgcc-s1 libbz2-1.0 liblzma5 libuuid1 libsqlite3-0 libcrypt1"
$apt download $(printf '%s:arm64 ' python3.11-minimal $libraries) 2>/dev/null
for deb in *.deb; do dpkg -x "$deb" "$dir/root"; done
platforms=$(printf -- '--platform %s_aarch64 ' manylinux_2_27 manylinux_2_28 manylinux2014)
${PYTHON:-python3} -m pip download --quiet $platforms --python-version 3.11 --implementation cp \
  --only-binary=:all: --dest "$dir/wheels" ai-edge-litert numpy
for wheel in "$dir"/wheels/*.whl; do ${PYTHON:-python3} -m zipfile -e "$wheel" "$dir/site"; done
touch "$dir/.complete"
