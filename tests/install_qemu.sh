#!/usr/bin/env bash
# Installs qemu-user with apt if its command $1 is missing; needs root.
set -euo pipefail
command -v "$1" >/dev/null && exit
apt="apt-get -qq -o APT::Sandbox::User=root -o DPkg::Lock::Timeout=60"
$apt update
$apt install -y qemu-user >/dev/null
