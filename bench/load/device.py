"""The server on another device, checked from outside: batching, leaving readers, grammars and prefix reuse against solo runs.

Starts the binary twice with the embedded pair. Without saved prefixes: every prompt alone and undrafted is the reference; then
the same prompts alone in every mode, CLIENTS x REQUESTS of them at once (whole, streamed, readers that leave, with and without
log-probabilities), and long prompts beside short ones. With saved prefixes: the same long prompts again, and continued. A text
may leave its reference only where the reference's own tokens lie within --tie of each other in ln p (0: nowhere, as on the
CPU). Slots, queue and memory, the device's too, must be as before. Only the standard library; under 90 s.

    python bench/load/device.py --binary target/release/canopy-server --device cuda --tie 0.1 [--out FILE.jsonl]
"""

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import time
import urllib.request

from load import PROMPTS, announced_port, head, idle, no_stream, percentiles, report, send

MODES = {
    "ar": {"draft": False}, "chain": {"speculation": {"mode": "chain"}}, "tree": {"speculation": {"mode": "tree", "budget": 16}},
    "auto": {"speculation": {"mode": "auto"}},
}
LENGTH = 32
LENGTHS = [1, 4, 8, 16, LENGTH]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "count": {"type": "integer", "maximum": 99, "minimum": 0}},
          "required": ["name", "count"], "additionalProperties": False}


class Checks:
    """How many texts were compared, how many left their reference at a near-tie, and how wide the widest was."""

    def __init__(self, tie):
        self.tie, self.compared, self.ties, self.widest, self.wrong = tie, 0, 0, 0.0, []

    def same(self, reference, text, what, tokens=None):
        self.compared += 1
        if text == reference["text"][: len(text)] and (tokens is None or tokens == reference["tokens"][: len(tokens)]):
            return
        gap = min(gaps(reference, text, tokens), default=float("inf"))
        if gap > self.tie:
            self.wrong.append(f"{what}: expected {reference['text']!r}, got {text!r}; its tokens there lie {gap} apart, allowed are {self.tie}")
        else:
            self.ties, self.widest = self.ties + 1, max(self.widest, gap)


def gaps(reference, text, tokens):
    """Of the place where a text leaves its reference: how far below the reference's token the other one was, in ln p."""
    if tokens is not None:
        at = next((i for i, (a, b) in enumerate(zip(reference["tokens"], tokens)) if a != b), None)
        if at is not None and tokens[at] in reference["top"][at]:
            yield reference["logprobs"][at] - reference["top"][at][tokens[at]]
        return
    differs = next((i for i, (a, b) in enumerate(zip(reference["text"], text)) if a != b), min(len(text), len(reference["text"])))
    end = 0
    for at, token in enumerate(reference["tokens"]):
        start, end = end, end + len(token)
        # The other token may begin like this one, so the place is this token or the one before it.
        if start - len(token) <= differs <= end:
            yield reference["logprobs"][at] - sorted(reference["top"][at].values())[-2]


def start(args, *flags):
    command = [args.binary, "--port", "0", "--log", "warn", "--device", args.device, "--slots", str(args.slots), "--max-waiting", "256",
               *args.flag, *flags]
    started = time.perf_counter()
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    port = announced_port(server)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/info") as answer:
        runs_on = json.load(answer)["config"]["device"]
    if runs_on != args.device:
        raise SystemExit(f"device: expected {args.device}, got {runs_on}")
    return server, port, time.perf_counter() - started


def stop(server):
    server.send_signal(signal.SIGTERM)
    if server.wait(timeout=60) != 0:
        raise SystemExit("the server did not exit with 0")


async def ask(port, body, leave=None, firsts=None):
    """Text, tokens (when `logprobs` is asked for) and usage of an answer, streamed or not; None when the reader leaves after so many chunks."""
    started = time.perf_counter()
    if body.get("stream"):
        body = {**body, "stream_options": {"include_usage": True}}
    reader, writer = await send(port, body)
    if leave == 0:
        writer.transport.abort()
        return None
    status = await head(reader)
    if status != 200 or not body.get("stream"):
        answer = json.loads(await reader.read())
        writer.close()
        if status != 200:
            raise RuntimeError(f"{status}: {answer}")
        return parts(answer["choices"], answer["usage"])
    choices, usage, done = [], None, False
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue
        if done := line.startswith(b"data: [DONE]"):
            break
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise RuntimeError(chunk["error"])
        usage = chunk["usage"] or usage
        if firsts is not None and chunk["choices"] and not choices:
            firsts.append(time.perf_counter() - started)
        choices += chunk["choices"]
        if leave is not None and len(choices) >= leave:
            writer.transport.abort()
            return None
    writer.close()
    if not done:
        raise RuntimeError("a stream ended without [DONE]")
    return parts(choices, usage)


def parts(choices, usage):
    told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    flat = lambda field: [item for logprobs in told for item in logprobs[field]]
    text = "".join(choice["text"] for choice in choices)
    return {"text": text, "tokens": flat("tokens") if told else None, "logprobs": flat("token_logprobs"), "top": flat("top_logprobs"), "usage": usage}


async def alone(port, checks):
    """The undrafted reference of every prompt, and the same prompts alone in the other modes."""
    references = {prompt: await ask(port, {"prompt": prompt, "max_tokens": LENGTH, "logprobs": 5, **MODES["ar"]}) for prompt in PROMPTS}
    drafts = 0
    for name, mode in MODES.items():
        for prompt, reference in references.items():
            got = await ask(port, {"prompt": prompt, "max_tokens": LENGTH, "logprobs": 5, **mode})
            checks.same(reference, got["text"], f"{prompt!r} alone, {name}", got["tokens"])
            plain = await ask(port, {"prompt": prompt, "max_tokens": LENGTH, **mode})
            checks.same(reference, plain["text"], f"{prompt!r} alone without log-probabilities, {name}")
            drafts += got["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] if name != "ar" else 0
    if drafts == 0:
        raise SystemExit("no draft was accepted")
    return references


async def client(port, seed, requests, references, checks, figures):
    rng = random.Random(seed)
    for _ in range(requests):
        prompt, (name, mode), kind = rng.choice(PROMPTS), rng.choice(list(MODES.items())), rng.random()
        body = {"prompt": prompt, "max_tokens": rng.choice(LENGTHS), "stream": kind < 0.7, **mode}
        if kind < 0.2:
            await ask(port, body, leave=rng.choice([0, 1, 2]))
            figures["left"] += 1
            continue
        if rng.random() < 0.5:
            body["logprobs"] = 5
        got = await ask(port, body, firsts=figures["first"])
        figures["tokens"] += got["usage"]["completion_tokens"]
        checks.same(references[prompt], got["text"], f"{body} beside others", got["tokens"])


def long_prompt(name, functions):
    return f"# {name}\n\n" + "".join(f"def add_{i}(x):\n    return x + {i}\n\n" for i in range(functions)) + "def add_"


async def long_beside_short(port, checks, references):
    """Long prompts share the rounds of short ones: each says what it says alone, and the short ones do not wait for the long."""
    prompts = [long_prompt(f"module {name}", 50) for name in "abc"]
    bodies = [{"prompt": prompt, "max_tokens": 16, "logprobs": 5, **MODES["ar"]} for prompt in prompts]
    known = [await ask(port, body) for body in bodies]
    longs, shorts = [], []
    asked = [ask(port, {**body, "stream": True}, firsts=longs) for body in bodies]
    asked += [ask(port, {"prompt": prompt, "max_tokens": 16, "stream": True, **MODES["ar"]}, firsts=shorts) for prompt in PROMPTS[:4]]
    got = await asyncio.gather(*asked)
    for want, answer in zip(known, got):
        checks.same(want, answer["text"], "a long prompt beside others", answer["tokens"])
    for prompt, answer in zip(PROMPTS, got[len(known):]):
        checks.same(references[prompt], answer["text"], f"{prompt!r} beside long prompts")
    return {"prompt_tokens": known[0]["usage"]["prompt_tokens"], "long_first_ms": round(1e3 * max(longs), 1), "short_first_ms": round(1e3 * max(shorts), 1)}


async def within_a_schema(port):
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    for prompt in PROMPTS[:5]:
        for mode in MODES.values():
            got = await ask(port, {"prompt": prompt, "max_tokens": 120, "response_format": form, **mode})
            value = json.loads(got["text"])
            if set(value) != {"name", "count"} or len(value["name"]) > 8 or not 0 <= value["count"] <= 99:
                raise SystemExit(f"{prompt!r}: {value} is not what the schema allows")


async def reuse(port, checks):
    """A prompt that comes again, and one that goes on, start from what was saved."""
    cached, fresh_seconds, again_seconds = [], 0.0, 0.0
    for name, mode in MODES.items():
        body = {"prompt": long_prompt(f"of {name}", 40), "max_tokens": 16, "logprobs": 5, **mode}
        begun = time.perf_counter()
        first = await ask(port, body)
        between = time.perf_counter()
        second = await ask(port, body)
        again_seconds, fresh_seconds = again_seconds + time.perf_counter() - between, fresh_seconds + between - begun
        checks.same(first, second["text"], f"a prompt that comes again, {name}", second["tokens"])
        longer = {**body, "prompt": body["prompt"] + "x(y):\n    return y\n\ndef ", "stream": True}
        third, fourth = await ask(port, longer), await ask(port, longer)
        checks.same(third, fourth["text"], f"a prompt that went on, {name}", fourth["tokens"])
        counts = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second, third, fourth)]
        least = first["usage"]["prompt_tokens"] // 2
        if counts[0] > least or min(counts[1:]) < least:
            raise SystemExit(f"{name}: cached tokens of a first, a second and two longer prompts: {counts}")
        cached.append(counts)
    return {"cached_tokens": cached, "fresh_ms": round(1e3 * fresh_seconds / len(MODES), 1), "again_ms": round(1e3 * again_seconds / len(MODES), 1)}


def device_memory():
    """Used memory of the first GPU in MB, None without one."""
    try:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
        return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout)
    except (OSError, subprocess.CalledProcessError):
        return None


async def nothing_left(port):
    after = await idle(port)
    no_stream(after)
    return after["process_resident_memory_bytes"] / 1e6


async def batching(port, args, checks):
    references = await alone(port, checks)
    figures, started, memory = {"left": 0, "tokens": 0, "first": []}, time.perf_counter(), []
    for part in range(2):
        seeds = range(part * args.clients, (part + 1) * args.clients)
        await asyncio.gather(*(client(port, seed, args.requests // 2, references, checks, figures) for seed in seeds))
        memory.append((await nothing_left(port), device_memory()))
    seconds = time.perf_counter() - started
    (host, device), (host_after, device_after) = memory
    if host_after > 1.1 * host or (device is not None and device_after > device + 64):
        raise SystemExit(f"memory grew in the second half: {memory} MB of the process and the device")
    long = await long_beside_short(port, checks, references)
    await within_a_schema(port)
    await nothing_left(port)
    return {
        "requests": args.clients * (args.requests // 2) * 2, "left": figures["left"], "seconds": round(seconds, 2),
        "tokens_per_second": round(figures["tokens"] / seconds, 1), "first_token": percentiles(figures["first"]),
        "memory_mb": [round(host, 1), round(host_after, 1)], "device_memory_mb": [device, device_after], "long_prompts": long,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tie", type=float, default=0.0, help="how far apart in ln p two tokens may be for a text to take the other one")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--requests", type=int, default=16, help="per client")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--flag", action="append", default=[], help="another flag of the server, as in --flag=--rows=f32")
    parser.add_argument("--out", help="JSONL file to append the figures to")
    args = parser.parse_args()
    compared, ties, wrong, started = 0, 0, [], time.perf_counter()
    for phase, flags in ((batching, ["--cache-mib", "0"]), (reuse, [])):
        checks = Checks(args.tie)
        server, port, loaded = start(args, *flags)
        try:
            row = asyncio.run(phase(port, args, checks) if phase is batching else phase(port, checks))
            stop(server)
        finally:
            if server.poll() is None:
                server.kill()
        command = "python bench/load/device.py " + " ".join(f"--{k} {v}" for k, v in vars(args).items() if k not in ("binary", "out", "flag"))
        report({
            "schema": 1, "case": f"server.device.{phase.__name__}", "device": args.device, "clients": args.clients, "slots": args.slots,
            "start_seconds": round(loaded, 2), **row, "compared": checks.compared, "near_ties": checks.ties, "widest_tie": round(checks.widest, 4),
            "wrong": len(checks.wrong),
            "command": " ".join([command, *(f"--flag={flag}" for flag in args.flag)]),
        }, args.out)
        compared, ties, wrong = compared + checks.compared, ties + checks.ties, wrong + checks.wrong
    if wrong:
        raise SystemExit("\n".join([f"{len(wrong)} of {compared} texts left their references without a near-tie:", *wrong[:10]]))
    print(f"device check: ok, {compared} texts compared, {ties} near-ties, {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    sys.exit(main())
