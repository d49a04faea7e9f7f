#!/usr/bin/env bash
# Installs the Debian packages that are missing: install-deps.sh build|test. Says which; uses apt as root or through sudo.
set -euo pipefail

build=(gcc libc6-dev cmake ninja-build pkg-config protobuf-c-compiler libuv1-dev libzmq3-dev libprotobuf-c-dev libucx-dev libhwloc-dev
  libmicrohttpd-dev libjansson-dev libinih-dev libpcre2-dev libsystemd-dev libxxhash-dev curl jq)
tests=(libcmocka-dev clang libclang-rt-14-dev clang-format python3-venv python3 ucx-utils iproute2 procps)

case ${1:-} in
  build) wanted=("${build[@]}") ;;
  test) wanted=("${build[@]}" "${tests[@]}") ;;
  *) echo "usage: install-deps.sh build|test" >&2; exit 2 ;;
esac

missing=()
for p in "${wanted[@]}"; do
  [ "$(dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null)" = installed ] || missing+=("$p")
done
[ ${#missing[@]} -eq 0 ] && exit 0

echo "installing: ${missing[*]}" >&2
as_root=()
if [ "$(id -u)" != 0 ]; then
  command -v sudo >/dev/null || { echo "these packages are missing and neither root nor sudo is at hand: ${missing[*]}" >&2; exit 1; }
  as_root=(sudo)
fi
"${as_root[@]}" apt-get update -qq >&2
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
