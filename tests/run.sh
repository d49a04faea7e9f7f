#!/usr/bin/env bash
# Everything that needs no GPU: installs what is missing, builds with ASan and UBSan, runs all tests, and ends with "N passed, M failed".
# tests/run.sh [BUILD_DIR] [ctest options, such as -R forward]
set -euo pipefail
cd "$(dirname "$0")/.."
build=build/asan
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
  build=$1
  shift
fi

deploy/install-deps.sh test
mkdir -p "$build"
build=$(cd "$build" && pwd)
cmake -G Ninja -S . -B "$build" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DBATON_SANITIZE=address,undefined >/dev/null
ninja -C "$build" -j "$(nproc)" --quiet

venv=$PWD/build/venv
if ! "$venv/bin/python" -c 'import openai, pytest' 2>/dev/null; then
  echo "installing: openai pytest (into build/venv)" >&2
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check openai pytest
fi

# Leaks inside UCX's own start-up are not ours to mend.
export LSAN_OPTIONS=suppressions=$PWD/tests/lsan.supp:print_suppressions=0
export UBSAN_OPTIONS=print_stacktrace=1
set +e
ctest --test-dir "$build" --output-on-failure --output-junit junit.xml "$@"
set -e
count() { grep -o "$1=\"[0-9]*\"" "$build/junit.xml" | head -n 1 | tr -dc 0-9; }
total=$(count tests) failed=$(count failures) skipped=$(( $(count disabled) + $(count skipped) ))
echo "$((total - failed - skipped)) passed, $failed failed"
[ "$failed" = 0 ] && [ "$total" -gt 0 ]
