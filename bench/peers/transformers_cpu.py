"""Hugging Face transformers on the embedded target, on the CPU: greedy decoding, tokens per second.

  python bench/peers/transformers_cpu.py --model e2e/models/canopy-tiny/target --prompts e2e/models/canopy-tiny/prompts.json \
      --threads 2 --tokens 128 --json peers.jsonl

Same weights, prompts and token count as `canopy bench`; decode rate without the prompt, median over the prompts of each kind.
Both dtypes are tried: bf16 as stored, and float32, which transformers runs faster on processors without bf16 units.
"""
import argparse
import json
import platform
import statistics
import time

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer


@torch.no_grad()
def decode_rate(model, ids, tokens):
    """Seconds of the prompt pass, and tokens per second after it."""
    start = time.perf_counter()
    out = model(ids, use_cache=True)
    next_id = out.logits[:, -1].argmax(-1, keepdim=True)
    prompt = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(tokens - 1):
        out = model(next_id, past_key_values=out.past_key_values, use_cache=True)
        next_id = out.logits[:, -1].argmax(-1, keepdim=True)
    return prompt, (tokens - 1) / (time.perf_counter() - start)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", required=True)
    ap.add_argument("--prompts", required=True)
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--tokens", type=int, default=128)
    ap.add_argument("--per-kind", type=int, default=4)
    ap.add_argument("--kinds", nargs="*", default=["fixed", "code", "chat"])
    ap.add_argument("--json")
    args = ap.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    with open(args.prompts) as f:
        prompts = json.load(f)
    for dtype in (torch.bfloat16, torch.float32):
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).eval()
        for kind in args.kinds:
            texts = [p["text"] for p in prompts if p["kind"] == kind][:args.per_kind]
            rates = []
            for text in texts:
                ids = tokenizer(text, return_tensors="pt").input_ids
                rates.append(decode_rate(model, ids, args.tokens)[1])
            record = dict(case="peer.transformers_cpu", kind=kind, dtype=str(dtype).removeprefix("torch."), threads=args.threads, prompts=len(texts),
                          tokens=args.tokens, tokens_per_s=round(statistics.median(rates), 1), min=round(min(rates), 1), max=round(max(rates), 1),
                          transformers=transformers.__version__, torch=torch.__version__, machine=platform.processor() or platform.machine())
            print(json.dumps(record))
            if args.json:
                with open(args.json, "a") as f:
                    f.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
