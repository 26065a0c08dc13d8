"""Golden vectors, computed with transformers in float32 on the CPU from the shipped bf16 weights."""
import json
import os
import sys

import torch

from blocks import draft_blocks, load_drafter
from evaluate import best_first_tree
from runtime import log
from target import load_target


GOLDEN_PROMPTS = ["def fibonacci(n):", "import numpy as np\n\n\ndef", "class Stack:\n    \"\"\"A simple stack.\"\"\"\n",
                  "<|im_start|>user\nReverse a string.<|im_end|>\n<|im_start|>assistant\n"]


@torch.no_grad()
def run_golden(args, data):
    """Golden vectors, computed with transformers in fp32 on the CPU from the shipped bf16 weights."""
    sys.modules["fla"] = None                  # the reference is transformers' plain PyTorch path, whatever is installed
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    import transformers
    torch.set_num_threads(min(8, os.cpu_count() or 1))
    tdir, ddir = os.path.join(args.work, "target"), os.path.join(args.work, "drafter")
    hf = AutoModelForCausalLM.from_pretrained(tdir, dtype=torch.float32).eval()
    mine, cfg = load_target(tdir, torch.device("cpu"))
    out, meta = {}, dict(transformers=transformers.__version__, torch=torch.__version__, dtype="float32 on CPU from bf16 weights", prompts=[])
    long_text = data.tok.decode(data.streams["valid"][:150].tolist())
    for i, text in enumerate(GOLDEN_PROMPTS + [long_text]):
        ids = data.tok.encode(text).ids
        x = torch.tensor([ids])
        grabbed = {}
        hooks = [hf.model.embed_tokens.register_forward_hook(lambda m, a, o: grabbed.__setitem__("embed", o))]
        for li, layer in enumerate(hf.model.layers):
            hooks.append(layer.register_forward_hook(lambda m, a, o, li=li: grabbed.__setitem__(f"layer{li}", o[0] if isinstance(o, tuple) else o)))
        hooks.append(hf.model.norm.register_forward_hook(lambda m, a, o: grabbed.__setitem__("final_norm", o)))
        logits = hf(x, use_cache=False).logits[0]
        for h in hooks:
            h.remove()
        diff = (mine(x, torch.float32)[0] - logits).abs().max().item()
        out[f"p{i}.ids"] = x[0].to(torch.int32)
        if i < len(GOLDEN_PROMPTS):
            out[f"p{i}.logits"] = logits.contiguous()
        else:                                   # longer than two chunks: only the last 4 positions and the argmax everywhere
            out[f"p{i}.logits_last4"] = logits[-4:].contiguous()
            out[f"p{i}.argmax"] = logits.argmax(-1).to(torch.int32)
        if i == 0:
            for k, v in grabbed.items():
                out[f"p0.{k}"] = v[0].contiguous()
        # greedy continuation, by full recomputation (no cache), fp32
        cur, margins = list(ids), []
        for _ in range(args.golden_new):
            lg = hf(torch.tensor([cur]), use_cache=False).logits[0, -1]
            top = lg.topk(2).values
            margins.append((top[0] - top[1]).item())
            cur.append(int(lg.argmax()))
        out[f"p{i}.greedy"] = torch.tensor(cur[len(ids):], dtype=torch.int32)
        out[f"p{i}.greedy_margin"] = torch.tensor(margins)
        meta["prompts"].append(dict(text=text, tokens=len(ids), own_vs_transformers_max_abs=diff, greedy_text=data.tok.decode(cur[len(ids):], skip_special_tokens=False)))
    if os.path.exists(os.path.join(ddir, "model.safetensors")):
        d = load_drafter(ddir, torch.device("cpu"))
        seq = torch.cat([out["p2.ids"], out["p2.greedy"][:8]]).long()[None]
        a = len(out["p2.ids"]) + 3
        _, feats = mine.hidden(seq, torch.float32, collect=list(d.c.target_layer_ids))
        feats = torch.cat(feats, -1)
        h = draft_blocks(d, mine.model.embed_tokens.weight, seq, feats, torch.tensor([[a]]), torch.float32)[0, 0]
        lg = mine.logits(h, torch.float32)
        lp, tk = torch.log_softmax(lg[1:], -1).topk(16, -1)
        out.update({"draft.ids": seq[0].to(torch.int32), "draft.anchor": torch.tensor([a], dtype=torch.int32), "draft.features": feats[0, :a].contiguous(),
                    "draft.hidden": h.contiguous(), "draft.logits": lg.contiguous()})
        for b in (16, 32):
            nodes = best_first_tree(lp.tolist(), tk.tolist(), b)
            out[f"draft.tree{b}"] = torch.tensor(nodes, dtype=torch.int32)        # rows: parent (0 is the root), depth, token
        meta["draft"] = dict(anchor=a, block=[int(seq[0, a])] + [d.c.mask_token_id] * (d.c.block_size - 1))
    save_file(out, os.path.join(args.work, "golden.safetensors"))
    json.dump(meta, open(os.path.join(args.work, "golden.json"), "w"), indent=1)
    log("golden vectors:", len(out), "tensors; largest difference to transformers", max(p["own_vs_transformers_max_abs"] for p in meta["prompts"]))
