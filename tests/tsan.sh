#!/usr/bin/env bash
# ThreadSanitizer: unit tests of the threads of expertd and of both ends of shared memory, then end-to-end and expertd's fault tests with every
# daemon under it. tests/tsan.sh [BUILD_DIR [pytest options, instead of all that]]
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/tsan}
[ $# -eq 0 ] || shift
units="proto/test_shmring proto/test_shmring_shared proto/test_expertlink expertd/test_serve expertd/test_serve_inside expertd/test_order
  expertd/test_store expertd/test_store_files kernels/test_pool kernels/test_iq_run"
deploy/install-deps.sh test
cmake -G Ninja -S . -B "$build" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DBATON_SANITIZE=thread >/dev/null
# shellcheck disable=SC2046,SC2086
ninja -C "$build" --quiet baton baton-router baton-prefill baton-decode baton-expertd expert_load $(basename -a $units)
# GCC's runtime cannot live with much address randomisation, hence setarch; libraries that it does not instrument are left out.
export BATON_BUILD=$build BATON_TEST_SLOW=5 BATON_TEST_WRAP="setarch -R"
# UCX patches madvise, which a thread calls after the sanitizer has let go of it.
export UCX_MEM_MMAP_HOOK_MODE=none
export TSAN_OPTIONS="suppressions=$PWD/tests/tsan.supp ignore_noninstrumented_modules=1"
if [ $# -eq 0 ]; then
  for t in $units; do
    echo "$t"
    setarch -R "$build/tests/unit/$t" >"$build/unit.log" 2>&1 || { cat "$build/unit.log"; exit 1; }
  done
  set -- tests/e2e tests/fault/test_expertd.py tests/fault/test_two_shards.py
fi
exec build/venv/bin/python -m pytest -q -p no:cacheprovider "$@"
