#!/usr/bin/env bash
# KV hand-over beside UCX's own benchmark, in one run: bench/kvlink.sh BUILD_DIR
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:?usage: bench/kvlink.sh BUILD_DIR}
echo "| what | size | GB/s |"
echo "|---|---|---|"
for tls in "" tcp; do
  "$build/bench/bench_kvlink" "$tls"
  # One put of a page at a time, many in flight; the server's end first.
  export UCX_TLS=${tls:-all}
  ucx_perftest -p 13990 >/dev/null 2>&1 &
  sleep 1
  line=$(ucx_perftest 127.0.0.1 -p 13990 -t ucp_put_bw -s 41984 -n 20000 -w 2000 -f 2>/dev/null | tail -n 1)
  wait
  unset UCX_TLS
  # The overall bandwidth in MB/s (2^20) is the fifth number.
  echo "$line" | awk -v t="${tls:-all}" '{ printf "| ucx_perftest ucp_put_bw, UCX_TLS=%s | 41984 bytes | %.2f |\n", t, $6 * 1.048576e-3 }'
done
