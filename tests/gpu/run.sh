#!/usr/bin/env bash
# Runs what tests/gpu/build.sh made: tests/gpu/run.sh [tests|model|serve|bench|all]. One line per program;
# logs and tables go to $OUT (default build/gpu/out). Fails when a test does.
set -uo pipefail
cd "$(dirname "$0")/../.."
what=${1:-all} bin=build/gpu/bin out=${OUT:-build/gpu/out} bad=0
mkdir -p "$bin"
tar -C "$bin" -xJf build/gpu/gpu.tar.xz || python3 -m tarfile -e build/gpu/gpu.tar.xz "$bin" || exit 2
export LD_LIBRARY_PATH="$PWD/$bin/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
mkdir -p "$out"
cat "$bin/commit"
: >"$out/tests.log"
cat "$bin/commit" >"$out/bench.md"

# check NAME SECONDS COMMAND...: a skipped test counts as failed here, where there must be a GPU
check() {
  local name=$1 limit=$2 begin=$SECONDS rc=0 log
  shift 2
  log=$(timeout "$limit" "$@" 2>&1) || rc=$?
  printf '==== %s\n%s\n' "$name" "$log" >>"$out/tests.log"
  if [ $rc -eq 0 ] && ! grep -q SKIPPED <<<"$log"; then
    printf 'ok      %-40s %3d s  %s\n' "$name" $((SECONDS - begin)) "$(tail -n 1 <<<"$log")"
  else
    printf 'FAILED  %-40s %3d s  exit status %d\n' "$name" $((SECONDS - begin)) $rc
    grep -E 'FAILED|ERROR|LINE|differs|the GPU|rank|SKIPPED' <<<"$log" | head -n 12 | sed 's/^/        /'
    bad=1
  fi
}

if [ "$what" = tests ] || [ "$what" = all ]; then
  for t in "$bin"/test_cuda_*; do
    check "$(basename "$t")" 120 "$t"
  done
fi
# Every checkpoint and number of ranks against the reference; stored KV is coarser and is judged by
# its answers to the held-out questions.
if [ "$what" = model ] || [ "$what" = all ]; then
  model=tests/models/tiny-glm52
  for variant in fp8 mixed; do
    for tp in 1 2 4; do
      check "model $variant, tp $tp" 200 "$bin/model_check" $model/$variant $model/oracle/$variant \
        --backend cuda --tp $tp
    done
    check "model $variant, steps of 8 rows" 200 "$bin/model_check" $model/$variant $model/oracle/$variant \
      --backend cuda --step-rows 8 --chunk 100
    for kv in f32 bf16 fp8; do
      check "answers $variant, kv $kv" 200 "$bin/model_eval" $model/$variant $model/eval $variant \
        --backend cuda --kv $kv
    done
  done
fi
# The daemons themselves, when they have travelled along.
if [ "$what" = serve ] || { [ "$what" = all ] && [ -x "$bin/baton-decode" ]; }; then
  for d in router prefill decode expertd; do
    mkdir -p "$bin/daemons/$d" && ln -sf "../../baton-$d" "$bin/daemons/$d/baton-$d"
  done
  timeout 400 python3 tests/gpu/serve.py "$PWD/$bin/daemons" "$out/serve" || bad=1
fi
if [ "$what" = bench ] || [ "$what" = all ]; then
  for b in "$bin"/bench_gpu_*; do
    timeout 200 "$b" >>"$out/bench.md" 2>&1 || { echo "FAILED  $(basename "$b")"; bad=1; }
  done
  cat "$out/bench.md"
fi
exit $bad
