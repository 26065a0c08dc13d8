#!/usr/bin/env bash
# Does a server that is installed this way work? smoke.sh BINARY starts it on a free port, asks the page, health, readiness, metrics, both endpoints,
# drafted against undrafted text, an error, and that SIGTERM ends it with 0. smoke.sh http://HOST:PORT asks a server that runs already.
set -euo pipefail
target=${1:?usage: smoke.sh BINARY | smoke.sh URL}
pid=
dir=$(mktemp -d)
cleanup() { [ -z "$pid" ] || kill "$pid" 2>/dev/null || true; rm -rf "$dir"; }
trap cleanup EXIT
fail() { echo "smoke: $*" >&2; exit 1; }

if [[ $target == http* ]]; then
    url=${target%/}
else
    "$target" --port 0 >"$dir/out" 2>"$dir/log" &
    pid=$!
    for _ in $(seq 600); do
        url=$(grep -oE 'http://[^ ]+' "$dir/out" | head -1 || true)
        [ -n "$url" ] && break
        kill -0 "$pid" 2>/dev/null || { cat "$dir/log" >&2; fail "the server ended"; }
        sleep 0.1
    done
    url=${url%/}
fi
[ -n "$url" ] || fail "no address"
auth=()
[ -z "${CANOPY_API_KEY:-}" ] || auth=(-H "authorization: Bearer $CANOPY_API_KEY")
get() { curl -fsS --max-time 30 "${auth[@]}" "$url$1"; }
post() { curl -sS --max-time 60 "${auth[@]}" -H 'content-type: application/json' -d "$2" "$url$1"; }

for _ in $(seq 300); do get /ready >/dev/null 2>&1 && break; sleep 0.2; done
get /ready >/dev/null || fail "not ready"
get /health >/dev/null || fail "not healthy"
models=$(get /v1/models)
grep -q '"object"' <<<"$models" || fail "no models"
page=$(get /)
grep -q '<title>canopy' <<<"$page" || fail "no page"
script=$(grep -oE '\./assets/[^"]+\.js' <<<"$page" | head -1 || true)
[ -n "$script" ] || fail "the page names no script"
get "/${script#./}" >/dev/null || fail "the page's script is missing"
text() { post /v1/completions "$1" | grep -oE '"text":"([^"\\]|\\.)*"' || fail "no text in the answer"; }
drafted=$(text '{"prompt": "def add(a, b):", "max_tokens": 24, "speculation": {"mode": "tree"}}')
plain=$(text '{"prompt": "def add(a, b):", "max_tokens": 24, "draft": false}')
[ "$drafted" = "$plain" ] || fail "drafted text differs: $drafted, $plain"
streamed=$(post /v1/chat/completions '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "stream": true}')
grep -q '^data: \[DONE\]' <<<"$streamed" || fail "the stream did not end"
refused=$(post /v1/completions '{"prompt": "x", "no_such_field": 1}')
grep -q invalid_request_error <<<"$refused" || fail "a bad request was taken"
metrics=$(get /metrics)
grep -q '^canopy_requests_total' <<<"$metrics" || fail "no metrics"
if [ -n "$pid" ]; then
    kill -TERM "$pid"
    wait "$pid" || fail "SIGTERM ended it with $?"
    pid=
fi
echo "smoke: ok"
