"""Many clients at once against a real server: every greedy reply must equal its solo run, and nothing may leak.

Starts the binary on a free port with the embedded pair, runs each distinct request alone, then CLIENTS x REQUESTS of
them at once: random lengths, stop strings, whole and streamed, some readers that leave in mid-stream or before the
first token. Checks texts byte for byte, that running, waiting, admitted and free slots are as before, and that memory
is flat; reports time to first token, time between tokens, tokens/s and CPU time per token. Only the standard library.

    python bench/load/load.py --binary target/release/canopy-server --clients 64 --requests 200 [--out FILE.jsonl]
"""

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request

PROMPTS = [
    "def fibonacci(n):", "import os\nimport sys\n", "class Stack:", 'def is_prime(n):\n    """', "x = [", "for i in range(10):\n",
    "def add(a, b):", "class Node:\n    def __init__", "The quick brown fox", "def read_file(path):", "# Sort a list\n",
    "def reverse(s):\n    return", "SELECT name FROM", "if __name__ ==", "while True:\n    ", "def gcd(a, b):", "try:\n    value = int(",
    "from collections import", "def mean(values):", "print(",
]
STREAMS = ["canopy_streams_admitted", "canopy_streams_running", "canopy_streams_waiting"]
LENGTHS = [1, 4, 8, 16, 32]
STOPS = [None, None, "\n\n", ["return", ":"], ["(", "zzz-never"]]


def announced_port(server):
    """The port that a server started with `--port 0` and a piped stdout says it listens on."""
    return int(re.search(r":(\d+)\s*$", server.stdout.readline()).group(1))


def report(row, path):
    """Prints a row, and appends it to `path` when there is one."""
    print(json.dumps(row))
    if path:
        with open(path, "a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")


def cases():
    return [
        {"prompt": prompt, "max_tokens": length, **({"stop": stop} if stop else {})}
        for prompt in PROMPTS for length in LENGTHS for stop in {json.dumps(s): s for s in STOPS}.values()
    ]


async def send(port, body):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    payload = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n"
    writer.write(head.encode() + payload)
    await writer.drain()
    return reader, writer


async def head(reader):
    status = int((await reader.readline()).split()[1])
    while (await reader.readline()).strip():
        pass
    return status


async def whole(port, case):
    reader, writer = await send(port, case)
    status = await head(reader)
    body = json.loads(await reader.read())
    writer.close()
    if status != 200:
        raise RuntimeError(f"{status}: {body}")
    return body["choices"][0]["text"], body["usage"]["completion_tokens"]


async def streamed(port, case, figures, leave_after=None):
    """The text of a stream, or None when the reader leaves after some chunks."""
    started = last = time.perf_counter()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    reader, writer = await send(port, {**case, **options})
    if leave_after == 0:
        writer.transport.abort()
        return None, 0
    status = await head(reader)
    if status != 200:
        raise RuntimeError(f"{status}: {await reader.read()}")
    text, tokens, chunks, done = [], 0, 0, False
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            done = True
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise RuntimeError(chunk["error"])
        if not chunk["choices"]:
            tokens = chunk["usage"]["completion_tokens"]
        elif chunk["choices"][0]["text"]:
            now = time.perf_counter()
            figures["first" if not text else "between"].append(now - (started if not text else last))
            last = now
            text.append(chunk["choices"][0]["text"])
            chunks += 1
            if leave_after is not None and chunks >= leave_after:
                writer.transport.abort()
                return None, 0
    writer.close()
    if not done:
        raise RuntimeError("a stream ended without [DONE]")
    return "".join(text), tokens


async def client(port, seed, requests, expected, figures):
    rng = random.Random(seed)
    known = list(expected)
    for _ in range(requests):
        key = rng.choice(known)
        case, kind = json.loads(key), rng.random()
        if kind < 0.2:
            await streamed(port, case, figures, leave_after=rng.choice([0, 1, 2]))
            figures["left"] += 1
            continue
        text, tokens = await (whole(port, case) if kind < 0.35 else streamed(port, case, figures))
        figures["tokens"] += tokens
        if (text, tokens) != expected[key]:
            figures["different"].append((key, text, tokens, expected[key]))


def metrics(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    values = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            values[name] = float(value)
    return values


def percentiles(values):
    values = sorted(values)
    at = lambda p: round(1e3 * values[min(len(values) - 1, int(p * len(values)))], 3)
    return {"p50_ms": at(0.5), "p95_ms": at(0.95), "p99_ms": at(0.99), "samples": len(values)}


async def run(port, args):
    expected = {}
    for case in cases():
        expected[json.dumps(case)] = await whole(port, case)
    before, started = metrics(port), time.perf_counter()
    figures = {"first": [], "between": [], "tokens": 0, "left": 0, "different": []}
    half = None
    for part in range(2):
        seeds = range(part * args.clients, (part + 1) * args.clients)
        await asyncio.gather(*(client(port, s, args.requests // 2, expected, figures) for s in seeds))
        half = half or metrics(port)["process_resident_memory_bytes"]
    seconds = time.perf_counter() - started
    after = await idle(port)
    return expected, figures, before, half, after, seconds


async def idle(port):
    """The metrics once no stream and no other connection is left, or those of a minute later."""
    for _ in range(3000):
        after = metrics(port)
        if all(after[name] == 0 for name in STREAMS) and after["canopy_connections"] <= 1:
            break
        await asyncio.sleep(0.02)
    return after


def no_stream(after):
    """Nothing runs, waits or holds a place or a slot."""
    for name in STREAMS:
        if after[name] != 0:
            raise SystemExit(f"{name}: expected 0, got {after[name]}")
    if after["canopy_slots_free"] != after["canopy_slots"]:
        raise SystemExit(f"a slot leaked: {after['canopy_slots_free']} of {after['canopy_slots']} are free")


def check(figures, before, half, after):
    no_stream(after)
    if figures["different"]:
        raise SystemExit(f"{len(figures['different'])} replies differ from their solo runs, as {figures['different'][0]}")
    grown = after["process_resident_memory_bytes"] / half
    if grown > 1.1:
        raise SystemExit(f"memory grew by {grown:.3f} in the second half")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", required=True)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=200, help="per client")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--out", help="JSONL file to append the figures to")
    args = parser.parse_args()
    command = [args.binary, "--port", "0", "--log", "warn", "--slots", str(args.slots), "--max-waiting", "256"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        port = announced_port(server)
        expected, figures, before, half, after, seconds = asyncio.run(run(port, args))
        check(figures, before, half, after)
        server.send_signal(signal.SIGTERM)
        if server.wait(timeout=300) != 0:
            raise SystemExit("the server did not exit with 0")
    finally:
        if server.poll() is None:
            server.kill()
    cpu = after["process_cpu_seconds_total"] - before["process_cpu_seconds_total"]
    row = {
        "schema": 1, "case": "server.load", "clients": args.clients, "requests": args.clients * (args.requests // 2) * 2, "slots": args.slots,
        "distinct": len(expected), "left": figures["left"], "different": 0, "seconds": round(seconds, 2),
        "tokens_per_second": round(figures["tokens"] / seconds, 1), "first_token": percentiles(figures["first"]),
        "between_chunks": percentiles(figures["between"]), "server_cpu_ms_per_token": round(1e3 * cpu / figures["tokens"], 4),
        "memory_mb": [round(m / 1e6, 1) for m in (before["process_resident_memory_bytes"], half, after["process_resident_memory_bytes"])],
        "command": "python " + " ".join(["bench/load/load.py", *(f"--{k} {v}" for k, v in vars(args).items() if k not in ("binary", "out"))]),
    }
    report(row, args.out)


if __name__ == "__main__":
    sys.exit(main())
