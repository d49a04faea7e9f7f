#!/usr/bin/env bash
# deploy/demo.sh --once prints only the answer, exits 0 and leaves no process; a port in use is named and the status is not 0; Ctrl-C and TERM stop
# everything that the serving demo started.
set -euo pipefail
cd "$(dirname "$0")/../.."
fail() { echo "FAILED: $*" >&2; exit 1; }
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
running() { pgrep -f 'build/demo/[a-z]*/baton-' || true; }

[ -z "$(running)" ] || fail "a demo runs already"
answer=$(deploy/demo.sh --port "$port" --once "What is the capital of France?")
[ "$answer" = "The capital of France is Paris." ] || fail "answer: $answer"
[ -z "$(running)" ] || fail "left behind: $(running)"

# The port is taken by another server.
python3 -m http.server --bind 127.0.0.1 "$port" >/dev/null 2>&1 &
server=$!
sleep 1
text=$(deploy/demo.sh --port "$port" --once "Hi" 2>&1) && fail "started on a port in use"
kill $server
echo "$text" | grep -q "$port" || fail "the port is not named: $text"
[ -z "$(running)" ] || fail "left behind after a failed start"

# Serves until a signal.
deploy/demo.sh --port "$port" >/tmp/baton-demo.$$ 2>&1 &
demo=$!
for ((n = 0; n < 300; n++)); do grep -q '^serving' /tmp/baton-demo.$$ && break; sleep 0.2; done
grep -q 'The capital of France is Paris.' /tmp/baton-demo.$$ || fail "no answer: $(cat /tmp/baton-demo.$$)"
kill -TERM $demo
wait $demo || true
rm -f /tmp/baton-demo.$$
[ -z "$(running)" ] || fail "left behind after TERM"
echo "demo: ok"
