#!/usr/bin/env bash
# The end-to-end tests with every daemon under ThreadSanitizer: tests/tsan.sh [BUILD_DIR] [pytest options]
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/tsan}
[ $# -eq 0 ] || shift
deploy/install-deps.sh test
cmake -G Ninja -S . -B "$build" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DBATON_SANITIZE=thread >/dev/null
ninja -C "$build" --quiet baton baton-router baton-prefill baton-decode baton-expertd
# GCC's runtime cannot live with much address randomisation, hence setarch; libraries that it does not instrument are left out.
export BATON_BUILD=$build BATON_TEST_SLOW=5 BATON_TEST_WRAP="setarch -R"
# UCX patches madvise, which a thread calls after the sanitizer has let go of it.
export UCX_MEM_MMAP_HOOK_MODE=none
export TSAN_OPTIONS="suppressions=$PWD/tests/tsan.supp ignore_noninstrumented_modules=1"
exec build/venv/bin/python -m pytest -q -p no:cacheprovider "${@:-tests/e2e}"
