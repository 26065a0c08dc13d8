#!/usr/bin/env bash
# On the pod, in a checkout of this repository: builds with CUDA, runs parity first, then the sweep, and leaves the rows in bench/results.
#   tar of the working tree over ssh, then: MAX_POD_HOURS=3 bash deploy/pod/bootstrap.sh [COMMAND ...]
# COMMAND replaces the sweep. The watchdog here is the second one: `pod.py watch` on the renting machine is the first.
set -euo pipefail
cd "$(dirname "$0")/../.."
hours=${MAX_POD_HOURS:?set MAX_POD_HOURS}
seconds=$(awk -v h="$hours" 'BEGIN { printf "%d", h * 3600 }')
if command -v runpodctl >/dev/null && [ -n "${RUNPOD_POD_ID:-}" ]; then
    nohup bash -c "sleep $seconds; runpodctl stop pod $RUNPOD_POD_ID" >/dev/null 2>&1 &
else
    echo "bootstrap: no runpodctl here; only pod.py watch ends this pod" >&2
fi
command -v cargo >/dev/null || {
    apt-get update -q
    DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends build-essential git rustup
    # Ubuntu's rustup wants a name.
    rustup toolchain install "$(sed -n 's/^channel = "\(.*\)"$/\1/p' rust-toolchain.toml)"
}
export CUDA_COMPUTE_CAP=${CUDA_COMPUTE_CAP:-$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)}
nvidia-smi
CANOPY_REQUIRE_GPU=1 cargo test --release --locked -p canopy-kernels --features cuda
cargo build --release --locked -p canopy-bench --features cuda
rows=bench/results/pod-$(date -u +%Y%m%dT%H%M).jsonl
target/release/canopy-bench env >>"$rows"
if [ $# -gt 0 ]; then "$@"; else target/release/canopy-bench sweep --json "$rows"; fi
