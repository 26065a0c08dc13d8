"""Three replicas behind a public OpenAI-aware router, one of them killed under load.

Starts three servers and `vllm-router` (PyPI), sends whole and streamed completions from many clients, kills one replica
with SIGKILL in the middle, and counts what the clients saw: every reply that came whole must equal its solo run; after
the kill the router must have come back to answering everything.

    pip install vllm-router==0.1.17
    python bench/load/replicas.py --binary target/release/canopy-server --router vllm-router [--out FILE.jsonl]
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
import urllib.request

from load import announced_port, cases, metrics, report, streamed, whole

SECONDS = 20


async def client(port, number, expected, seen, until):
    keys = list(expected)
    at = number * 7
    while time.perf_counter() < until:
        key = keys[at % len(keys)]
        at += 1
        started = time.perf_counter()
        figures = {"first": [], "between": []}
        try:
            case = json.loads(key)
            call = whole(port, case) if at % 2 else streamed(port, case, figures)
            text, tokens = await asyncio.wait_for(call, 30)
        except Exception as error:
            seen["failed"].append((started, repr(error)[:200]))
            await asyncio.sleep(0.05)
            continue
        seen["answered"].append(time.perf_counter())
        seen["tokens"] += tokens
        if (text, tokens) != expected[key]:
            seen["different"].append((key, text, expected[key]))


async def run(router, replicas, clients):
    expected = {json.dumps(case): await whole(replicas[0][1], case) for case in cases()[::5]}
    seen = {"answered": [], "failed": [], "different": [], "tokens": 0}
    started = time.perf_counter()
    until = started + SECONDS

    async def killer():
        await asyncio.sleep(SECONDS / 3)
        replicas[1][0].kill()
        return time.perf_counter()

    killed, *_ = await asyncio.gather(killer(), *(client(router, n, expected, seen, until) for n in range(clients)))
    return expected, seen, started, killed


def free_port():
    import socket
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(url, seconds=60):
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"{url} is not there after {seconds} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", required=True)
    parser.add_argument("--router", required=True, help="the vllm-router command")
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--out")
    args = parser.parse_args()
    replicas, router = [], None
    try:
        for _ in range(3):
            server = subprocess.Popen([args.binary, "--port", "0", "--log", "error", "--threads", "1"], stdout=subprocess.PIPE, text=True)
            replicas.append((server, announced_port(server)))
        port, prometheus = free_port(), free_port()
        urls = [f"http://127.0.0.1:{port}" for _, port in replicas]
        command = [args.router, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(prometheus), "--policy", "cache_aware",
                   "--health-check-interval-secs", "1", "--health-failure-threshold", "1", "--log-level", "error", "--worker-urls", *urls]
        router = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_for(f"http://127.0.0.1:{port}/v1/models")
        expected, seen, started, killed = asyncio.run(run(port, replicas, args.clients))
        shares = [metrics(port)['canopy_prompt_tokens_total'] for server, port in replicas if server.poll() is None]
    finally:
        for process in [router, *(server for server, _ in replicas)]:
            if process and process.poll() is None:
                process.kill()
    if seen["different"]:
        raise SystemExit(f"replies differ from their solo runs: {seen['different'][0]}")
    late = [when for when, _ in seen["failed"] if when > killed + 5]
    row = {
        "schema": 1, "case": "server.replicas", "replicas": 3, "router": "vllm-router", "clients": args.clients, "seconds": SECONDS, "distinct": len(expected),
        "answered": len(seen["answered"]), "failed": len(seen["failed"]), "failed_later_than_5_s_after_the_kill": len(late),
        "answered_after_the_kill": sum(when > killed for when in seen["answered"]), "tokens_per_second": round(seen["tokens"] / SECONDS, 1),
        "prompt_tokens_of_the_survivors": shares, "first_failures": [error for _, error in seen["failed"][:2]],
        "command": f"python bench/load/replicas.py --clients {args.clients}",
    }
    report(row, args.out)
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
