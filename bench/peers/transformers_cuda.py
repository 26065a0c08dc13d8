"""Hugging Face transformers at the 9B's sizes on a GPU, random weights: one decoded token, and a forward of 16 rows behind a context.

  python bench/peers/transformers_cuda.py --model e2e/models/qwen3.5-9b --context 128 --json peers.jsonl

The counterpart of `canopy rounds --nodes 1,16`: the same shapes in bf16, weights of its own seed (a time does not depend on their values).
Eager first, as `generate` runs it; then one decode step captured in a CUDA graph over a static cache. What does not work is a row with the error.
"""
import argparse
import json
import statistics
import time

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM


def timed(step, repeats):
    """Milliseconds of each call, the device finished."""
    for _ in range(3):
        step()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return times


@torch.no_grad()
def eager(model, context, rows, repeats, vocab):
    """Consecutive forwards of `rows` tokens behind `context` committed ones; the cache grows by them, as in decoding."""
    ids = torch.randint(vocab, (1, context), device="cuda")
    cache = model(ids, use_cache=True).past_key_values
    more = torch.randint(vocab, (1, rows), device="cuda")

    def step():
        model(more, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1).item()

    return timed(step, repeats)


@torch.no_grad()
def graphed(model, context, repeats, vocab):
    """One decoded token over a static cache, replayed from a CUDA graph."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=context + 64)
    ids = torch.randint(vocab, (1, context), device="cuda")
    model(ids, past_key_values=cache, cache_position=torch.arange(context, device="cuda"), use_cache=True)
    token, position = torch.randint(vocab, (1, 1), device="cuda"), torch.tensor([context], device="cuda")

    def step():
        return model(token, past_key_values=cache, cache_position=position, use_cache=True).logits[:, -1].argmax(-1)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        best = step()

    def replay():
        graph.replay()
        best.item()

    return timed(replay, repeats)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", required=True, help="directory with config.json")
    ap.add_argument("--context", type=int, default=128)
    ap.add_argument("--repeats", type=int, default=10)
    ap.add_argument("--json")
    args = ap.parse_args()
    config = AutoConfig.from_pretrained(args.model)
    torch.manual_seed(1)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    vocab = config.vocab_size
    cases = [
        ("eager", 1, lambda: eager(model, args.context, 1, args.repeats, vocab)),
        ("eager", 16, lambda: eager(model, args.context, 16, args.repeats, vocab)),
        ("static cache, CUDA graph", 1, lambda: graphed(model, args.context, args.repeats, vocab)),
    ]
    for variant, rows, run in cases:
        record = dict(schema=1, case="peer.transformers_cuda", variant=variant, rows=rows, context=args.context, model="qwen3.5-9b sizes, random weights",
                      dtype="bfloat16", transformers=transformers.__version__, torch=torch.__version__, device=torch.cuda.get_device_name())
        try:
            times = sorted(run())
            record.update(ms_median=statistics.median(times), ms_p10=times[len(times) // 10], ms_p90=times[-1 - len(times) // 10], repeats=len(times))
        except Exception as error:  # whatever the library says is the result
            record.update(error=f"{type(error).__name__}: {error}"[:400])
        print(json.dumps(record), flush=True)
        if args.json:
            with open(args.json, "a") as f:
                f.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
