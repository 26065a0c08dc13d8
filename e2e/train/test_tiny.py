"""CPU checks: python test_tiny.py. Chunked GDN against the recurrence (values and gradients), model against transformers,
decode steps against teacher forcing, drafter block attention against a loop."""
import json
import os
import tempfile

import torch
from blocks import draft_blocks
from drafter_model import Drafter, DraftConfig
from evaluate import best_first_tree, tree_accept
from gdn import gdn_chunk, gdn_naive
from target_model import Config, TinyQwen

torch.manual_seed(0)


def check_gdn():
    B, T, Hk, Hv, d = 2, 150, 2, 4, 16
    worst = 0
    for trial in range(3):
        q, k, v = (torch.randn(B, T, h, d) for h in (Hk, Hk, Hv))
        if trial == 2:      # the hard case: identical keys, beta near 1, no decay
            k = torch.randn(1, 1, Hk, d).expand(B, T, Hk, d).clone()
        g = -torch.rand(B, T, Hv) * (0.5 if trial == 0 else 0.0 if trial == 2 else 8.0)
        beta = torch.rand(B, T, Hv) if trial < 2 else torch.full((B, T, Hv), 0.98)
        leaves = [x.clone().requires_grad_() for x in (q, k, v, g, beta)]
        o, S = gdn_chunk(*leaves, C=64)
        refl = [x.double().clone().requires_grad_() for x in (q, k, v, g, beta)]
        o2, S2 = gdn_naive(*refl)
        wgt, wS = torch.randn_like(o), torch.randn_like(S)
        ((o * wgt).sum() + (S * wS).sum()).backward()
        ((o2 * wgt).sum() + (S2 * wS).sum()).backward()
        errs = [((o - o2).abs().max() / o2.abs().max()).item(), ((S - S2).abs().max() / S2.abs().max()).item()]
        errs += [((a.grad - b.grad).abs().max() / b.grad.abs().max()).item() for a, b in zip(leaves, refl)]
        worst = max(worst, max(errs))
        print("  gdn trial", trial, " ".join(f"{e:.1e}" for e in errs))
    assert worst < 2e-4, worst


def small():
    return Config(vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
                     head_dim=32, linear_key_head_dim=16, linear_value_head_dim=16)


SPEC = {"<|endoftext|>": 316, "<|im_start|>": 317, "<|im_end|>": 318, "<|mask|>": 319}


def to_hf(model, cfg):
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    d = tempfile.mkdtemp()
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, os.path.join(d, "model.safetensors"), metadata={"format": "pt"})
    j = cfg.hf_dict(SPEC)
    j["dtype"] = "float32"
    json.dump(j, open(os.path.join(d, "config.json"), "w"))
    hf, info = AutoModelForCausalLM.from_pretrained(d, dtype=torch.float32, output_loading_info=True)
    assert not info["unexpected_keys"] and not info["mismatched_keys"] and set(info["missing_keys"]) <= {"lm_head.weight"}, info
    return hf.eval()


def check_hf():
    for cfg in (small(), Config(num_hidden_layers=4)):
        torch.manual_seed(1)
        m = TinyQwen(cfg).eval()
        with torch.no_grad():
            for p in m.parameters():
                p.add_(torch.randn_like(p) * 0.05)
        hf = to_hf(m, cfg)
        ids = torch.randint(0, 300, (2, 150))
        with torch.no_grad():
            a, b = m(ids, torch.float32), hf(ids).logits
        err = ((a - b).abs().max() / b.abs().max()).item()
        print("  logits vs transformers:", f"{err:.1e}", type(hf).__name__)
        assert err < 2e-4


def check_step():
    cfg = small()
    m = TinyQwen(cfg).eval()
    ids = torch.randint(0, 300, (3, 100))
    with torch.no_grad():
        full = m(ids, torch.float32)
        cache = m.new_cache(3, 100, "cpu", torch.float32)
        h = m.hidden(ids[:, :70], torch.float32, cache=cache)
        errs = [(m.logits(h, torch.float32) - full[:, :70]).abs().max().item()]
        for t in range(70, 100):
            errs.append((m.step(ids[:, t], cache, torch.float32) - full[:, t]).abs().max().item())
    print("  prefill + steps vs teacher forcing:", f"{max(errs):.1e}")
    assert max(errs) < 1e-4


def check_draft():
    """The packed training form (many anchors at once, with a mask) equals one plain forward per anchor."""
    dc = DraftConfig(hidden_size=64, intermediate_size=96, head_dim=16, block_size=8, target_layer_ids=(1, 3), mask_token_id=319, vocab_size=320)
    d = Drafter(dc).eval()
    emb = torch.randn(320, 64)
    ids, feats = torch.randint(0, 300, (2, 60)), torch.randn(2, 60, 128)
    anchors = torch.tensor([[5, 20, 44], [1, 2, 51]])
    with torch.no_grad():
        h = draft_blocks(d, emb, ids, feats, anchors, torch.float32)
        worst = 0
        for b in range(2):
            for j, a in enumerate(anchors[b].tolist()):
                blk = torch.full((1, 8), 319)
                blk[0, 0] = ids[b, a]
                mask = torch.ones(1, 1, 8, a + 8, dtype=torch.bool)
                one = d(feats[b:b + 1, :a], emb[blk], torch.arange(a)[None], torch.arange(a, a + 8)[None], mask, torch.float32)
                worst = max(worst, (one[0] - h[b, j]).abs().max().item())
    print("  packed anchors vs one forward each:", f"{worst:.1e}")
    assert worst < 1e-4


def check_tree():
    """The best-first tree holds the most probable prefixes, and acceptance follows the truth down the tree."""
    import itertools
    import random
    rng = random.Random(0)
    for _ in range(50):
        D, K, budget = 4, 3, rng.choice([1, 5, 12, 30])
        logp = [sorted((-rng.random() * 3 for _ in range(K)), reverse=True) for _ in range(D)]
        toks = [rng.sample(range(100), K) for _ in range(D)]
        nodes = best_first_tree(logp, toks, budget)
        every = sorted((sum(logp[d][r] for d, r in enumerate(path)) for n in range(1, D + 1) for path in itertools.product(range(K), repeat=n)), reverse=True)
        score, depth = {0: 0.0}, {0: 0}
        for i, (parent, d, tok) in enumerate(nodes):
            assert parent <= i and d == depth[parent] + 1
            depth[i + 1] = d
            score[i + 1] = score[parent] + logp[d - 1][toks[d - 1].index(tok)]
        got = [score[i + 1] for i in range(len(nodes))]
        assert all(abs(a - b) < 1e-9 for a, b in zip(got, every)), (got[:5], every[:5])
        pick = rng.randrange(len(nodes)) + 1
        path, at = [], pick
        while at:
            path.append(nodes[at - 1][2])
            at = nodes[at - 1][0]
        assert tree_accept(nodes, path[::-1] + [1000]) == len(path)
    print("  trees equal brute force")


if __name__ == "__main__":
    for f in (check_gdn, check_hf, check_step, check_draft, check_tree):
        print(f.__name__)
        f()
    print("5 passed, 0 failed")
