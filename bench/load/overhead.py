"""Tokens/s through HTTP beside the engine alone, on the same prompts.

    python bench/load/overhead.py --binary target/release/canopy-server --engine target/release/examples/engine_alone
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time

from load import PROMPTS, announced_port, metrics, report, streamed

SLOTS = 4


def requests(length, repeats):
    return [{"prompt": prompt, "max_tokens": length} for _ in range(repeats) for prompt in PROMPTS]


async def through_http(port, bodies):
    todo, tokens = list(reversed(bodies)), 0

    async def worker():
        nonlocal tokens
        while todo:
            _, count = await streamed(port, todo.pop(), {"first": [], "between": []})
            tokens += count

    started = time.perf_counter()
    # As many as run, and as many again that wait, so that no slot is ever without a stream.
    await asyncio.gather(*(worker() for _ in range(2 * SLOTS)))
    return tokens, time.perf_counter() - started


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", required=True)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--length", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="alternating measurements of each")
    parser.add_argument("--out")
    args = parser.parse_args()
    bodies = requests(args.length, args.repeats)
    flags = ["--slots", str(SLOTS), "--threads", "1", "--cache-mib", "0"]
    server = subprocess.Popen([args.binary, "--port", "0", "--log", "error", *flags], stdout=subprocess.PIPE, text=True)
    alone, http, cpu, counts = [], [], [], set()
    try:
        port = announced_port(server)
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            file.write("".join(json.dumps(body) + "\n" for body in bodies))
            file.flush()
            for _ in range(args.rounds):
                output = subprocess.run([args.engine, file.name, "--log", "error", *flags], stdout=subprocess.PIPE, text=True, check=True)
                row = json.loads(output.stdout)
                alone.append(row["tokens_per_second"])
                counts.add(row["tokens"])
                before = metrics(port)["process_cpu_seconds_total"]
                tokens, seconds = asyncio.run(through_http(port, bodies))
                cpu.append(1e3 * (metrics(port)["process_cpu_seconds_total"] - before) / tokens)
                http.append(tokens / seconds)
                counts.add(tokens)
    finally:
        server.kill()
    if len(counts) != 1:
        raise SystemExit(f"the two did not generate the same: {counts} tokens")
    row = {
        "schema": 1, "case": "server.overhead", "requests": len(bodies), "tokens": counts.pop(), "slots": SLOTS, "threads": 1,
        "engine_tokens_per_second": round(statistics.median(alone), 1), "http_tokens_per_second": round(statistics.median(http), 1),
        "ratio": round(statistics.median(http) / statistics.median(alone), 4), "server_cpu_ms_per_token": round(statistics.median(cpu), 4),
        "command": f"python bench/load/overhead.py --length {args.length} --repeats {args.repeats} --rounds {args.rounds}",
    }
    report(row, args.out)


if __name__ == "__main__":
    sys.exit(main())
