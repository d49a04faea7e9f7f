#!/usr/bin/env bash
# Every fuzz target for a while, with clang's ASan and UBSan: tests/fuzz.sh [SECONDS] [BUILD_DIR]
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-60} build=${2:-build/fuzz}
deploy/install-deps.sh test
cmake -G Ninja -S . -B "$build" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_C_COMPILER=clang -DBATON_FUZZ=ON -DBATON_SANITIZE=address,undefined >/dev/null
ninja -C "$build" --quiet
bad=0
for t in "$build"/tests/fuzz/fuzz_*; do
  [ -x "$t" ] && [ -f "$t" ] || continue
  if "$t" -max_total_time="$seconds" -rss_limit_mb=4096 -artifact_prefix="$build/" >"$build/$(basename "$t").log" 2>&1; then
    echo "$(basename "$t"): $(tail -n 1 "$build/$(basename "$t").log")"
  else
    echo "$(basename "$t"): FAILED, see $build/$(basename "$t").log"
    bad=1
  fi
done
exit $bad
