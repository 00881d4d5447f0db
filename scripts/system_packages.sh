#!/usr/bin/env bash
# Installs the Debian packages that the workspace needs, where it may; else says which they are.
set -euo pipefail
PATH="$PATH:/usr/sbin:/sbin" # where Debian keeps ldconfig and ip, for ordinary users too

missing=()
"${PYTHON:-python3}" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
command -v redis-server >/dev/null || missing+=(redis-server)
ldconfig -p | grep -q 'libibverbs\.so\.1' || missing+=(libibverbs1) # Mooncake's engine needs it, over TCP too
command -v ip >/dev/null || missing+=(iproute2)                     # the tests on two hosts make network namespaces
command -v chromium >/dev/null || missing+=(chromium)               # the test of the page that `dataplane read` writes

[ "${#missing[@]}" -eq 0 ] && exit 0
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    echo "installing Debian packages: ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
else
    echo "missing system packages; install them with: apt-get install ${missing[*]}" >&2
    exit 1
fi
