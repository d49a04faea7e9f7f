#!/usr/bin/env bash
# The whole of Baton on one machine with the tiny model: installs what is missing, builds, starts every service, asks a question, serves.
#   deploy/demo.sh                     asks one question, then serves http://127.0.0.1:8080/v1 until Ctrl-C
#   deploy/demo.sh --once QUESTION     prints only the answer to standard output, stops everything, exits 0
#   --port N                           another port for the router
set -euo pipefail
cd "$(dirname "$0")/.."

once= question="What is the capital of France?" port=8080
while [ $# -gt 0 ]; do
  case $1 in
    --once) once=1 question=${2:?--once needs a question}; shift 2 ;;
    --port) port=${2:?--port needs a number}; shift 2 ;;
    *) sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
  esac
done

say() { echo "$*" >&2; }

deploy/install-deps.sh build
say "building (Release, into build/demo)"
cmake -G Ninja -S . -B build/demo -DCMAKE_BUILD_TYPE=Release -DBATON_TESTS=OFF >/dev/null
ninja -C build/demo --quiet >&2

logs=build/demo/log
mkdir -p "$logs"
pids=() names=()

start() { # NAME BINARY [options]
  local name=$1 binary=$2
  shift 2
  "build/demo/$binary" --config "deploy/conf/demo/$name.conf" "$@" >"$logs/$name.log" 2>&1 &
  pids+=($!) names+=("$name")
}

# TERM first; whoever has not ended after ten seconds is killed.
stop_all() {
  trap - EXIT INT TERM
  for ((i = ${#pids[@]} - 1; i >= 0; i--)); do kill -TERM "${pids[i]}" 2>/dev/null || true; done
  for ((n = 0; n < 100; n++)); do
    alive=0
    for p in "${pids[@]}"; do kill -0 "$p" 2>/dev/null && alive=1; done
    [ $alive = 0 ] && break
    sleep 0.1
  done
  for p in "${pids[@]}"; do kill -KILL "$p" 2>/dev/null || true; done
  wait 2>/dev/null || true
}
trap stop_all EXIT
trap 'exit 0' INT
trap 'exit 143' TERM

start expertd-0 expertd/baton-expertd
start expertd-1 expertd/baton-expertd
start prefill prefill/baton-prefill
start decode decode/baton-decode
start router router/baton-router --set "http.port=$port"

say "starting router, prefill (TP=4), decode (TP=4) and two expertd; their logs are in $logs/"
url=http://127.0.0.1:$port
for ((n = 0; ; n++)); do
  for i in "${!pids[@]}"; do
    kill -0 "${pids[i]}" 2>/dev/null || { say "${names[i]} did not start:"; tail -n 3 "$logs/${names[i]}.log" >&2; exit 1; }
  done
  curl -sf -o /dev/null "$url/ready" && break
  [ $n -lt 600 ] || { say "not ready after 60 s: $(curl -s "$url/ready")"; exit 1; }
  sleep 0.1
done

# Prints the answer as it comes; fails when the stream carries an error or breaks off.
ask() {
  jq -n --arg q "$1" '{model: "tiny-glm52", stream: true, temperature: 0, messages: [{role: "user", content: $q}]}' |
    curl -sSN --fail-with-body "$url/v1/chat/completions" -H 'Content-Type: application/json' -d @- |
    jq --unbuffered -Rrj 'select(startswith("data: {")) | ltrimstr("data: ") | fromjson |
      if .error then "error: \(.error.message)\n" | halt_error(1) else .choices[0].delta.content // empty end'
  echo
}

[ -n "$once" ] || say "ready; asking: $question"
ask "$question"
[ -z "$once" ] || exit 0
say "serving $url/v1 (model tiny-glm52) until Ctrl-C"
wait -n "${pids[@]}" && status=0 || status=$?
say "a service ended with status $status; stopping"
exit 1
