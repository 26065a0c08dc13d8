"""Batched generation by the target: rollouts for the drafter, samples for the log."""
import json
import os

import torch

from runtime import log


@torch.no_grad()
def generate(model, prefix, n, temperature=0.0, dtype=torch.bfloat16, gen=None):
    """prefix [B,P] -> [B,P+n]; one temperature for the whole batch, 0 is greedy."""
    B, P = prefix.shape
    cache = model.new_cache(B, P + n, prefix.device, dtype)
    h = model.hidden(prefix, dtype, cache=cache)
    logits = model.logits(h[:, -1], dtype)
    out = [prefix]
    for i in range(n):
        if temperature <= 0:
            nxt = logits.argmax(-1)
        else:
            nxt = torch.multinomial(torch.softmax(logits.float() / temperature, -1), 1, generator=gen)[:, 0]
        out.append(nxt[:, None])
        if i + 1 < n:
            logits = model.step(nxt, cache, dtype)
    return torch.cat(out, 1)


@torch.no_grad()
def generate_ragged(model, prompts, total, device, dtype):
    """Greedy continuation of prompts of different lengths, all to `total` tokens. Every row starts at position 0 and is
    fed its prompt token by token, so no padding is needed."""
    B = len(prompts)
    out = torch.zeros(B, total, dtype=torch.long, device=device)
    lens = torch.tensor([len(p) for p in prompts], device=device)
    for i, p in enumerate(prompts):
        out[i, :len(p)] = torch.tensor(p, device=device)
    cache = model.new_cache(B, total, device, dtype)
    for layer, kind in zip(cache["layers"], model.c.layer_types()):
        if kind == "linear_attention":
            c = model.c
            layer["conv"] = torch.zeros(B, c.linear_conv_kernel_dim - 1, 2 * c.linear_num_key_heads * c.linear_key_head_dim
                                        + c.linear_num_value_heads * c.linear_value_head_dim, device=device, dtype=dtype)
            layer["S"] = torch.zeros(B, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim, device=device)
    for t in range(total - 1):
        nxt = model.step(out[:, t], cache, dtype).argmax(-1)
        out[:, t + 1] = torch.where(t + 1 < lens, out[:, t + 1], nxt)
    return out


def show_samples(model, data, dtype, device, n=120, k=7):
    path = os.path.join(data.folder, "prompts.json")
    prompts = [p["text"] for p in json.load(open(path)) if p["kind"] == "fixed"]
    picks = prompts[:k] + prompts[-3:]
    ids = [data.tok.encode(p).ids for p in picks]
    out = generate_ragged(model, ids, max(map(len, ids)) + n, device, dtype).tolist()
    stop = {data.special["<|endoftext|>"], data.special["<|im_end|>"]}
    for row, p in zip(out, ids):
        cut = next((i for i in range(len(p), len(row)) if row[i] in stop), len(row))
        log("sample\n" + "-" * 60 + "\n" + data.tok.decode(row[:cut], skip_special_tokens=False) + "\n" + "-" * 60)
