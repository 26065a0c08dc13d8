"""Tokens per round of chain and best-first tree against the target's own greedy text, teacher-forced."""
import heapq
import json
import os
import time

import torch

from blocks import draft_blocks, load_drafter
from generation import generate_ragged
from runtime import T_START, log
from target import load_target


def best_first_tree(logp, toks, budget):
    """Per-position top-k log-probabilities logp [D][K] (descending) and tokens -> list of (parent, depth, token), at most
    `budget` nodes, in order of decreasing path probability. Node 0 is the root and not in the list; parents are indices
    into the list plus one."""
    D, K = len(logp), len(logp[0])
    nodes, heap, tie = [], [(-logp[0][0], 0, 0, 1, 0, 0.0)], 1     # (-score, tie, parent, depth, rank, parent score)
    while heap and len(nodes) < budget:
        neg, _, parent, depth, rank, pscore = heapq.heappop(heap)
        nodes.append((parent, depth, toks[depth - 1][rank]))
        me = len(nodes)
        if rank + 1 < K:
            heapq.heappush(heap, (-(pscore + logp[depth - 1][rank + 1]), tie, parent, depth, rank + 1, pscore))
            tie += 1
        if depth < D:
            heapq.heappush(heap, (neg - logp[depth][0], tie, me, depth + 1, 0, -neg))
            tie += 1
    return nodes


def tree_accept(nodes, truth):
    """Length of the longest root path whose tokens are truth[0], truth[1], ..."""
    at, n = 0, 0
    kids = {}
    for i, (parent, _, tok) in enumerate(nodes):
        kids[(parent, tok)] = i + 1
    while n < len(truth) and (at, truth[n]) in kids:
        at = kids[(at, truth[n])]
        n += 1
    return n


@torch.no_grad()
def run_eval(args, device, data, model=None, drafter=None):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if model is None:
        model, _ = load_target(os.path.join(args.work, "target"), device)
        drafter = load_drafter(os.path.join(args.work, "drafter"), device)
    prompts = json.load(open(os.path.join(data.folder, "prompts.json")))
    for p in prompts:
        p["ids"] = data.tok.encode(p["text"]).ids
    prompts = [p for p in prompts if 1 <= len(p["ids"]) <= args.eval_len - args.eval_new][:args.eval_prompts]
    groups = {}
    for p in prompts:
        groups.setdefault(p["kind"], []).append(p)
    bs, K = drafter.c.block_size, 16
    lengths = sorted({bs, *(n for n in args.block_lengths if n <= bs)})
    emb = model.model.embed_tokens.weight
    budgets = [16, 32, 64]
    report = {}
    stop = {data.special["<|endoftext|>"], data.special["<|im_end|>"]}
    for kind, plist in groups.items():
        total = max(len(p["ids"]) for p in plist) + args.eval_new
        seq = generate_ragged(model, [p["ids"] for p in plist], total, device, dtype)
        hfin, feats = model.hidden(seq, dtype, collect=list(drafter.c.target_layer_ids))
        feats = torch.cat(feats, -1).to(dtype)
        agree = [(model.logits(hfin[i], dtype).argmax(-1)[len(p["ids"]) - 1:-1] == seq[i, len(p["ids"]):]).float().mean().item() for i, p in enumerate(plist)]
        # draft every anchor of the generated part
        tau = {"chain": [], **{f"tree{b}": [] for b in budgets}}
        pos_hit, pos_n = {n: torch.zeros(n - 1, device=device) for n in lengths}, 0
        for i, p in enumerate(plist):
            start = len(p["ids"])
            row = seq[i].tolist()
            end = next((j for j in range(start, min(start + args.eval_new, total)) if row[j] in stop), min(start + args.eval_new, total)) + 1
            end = min(end, total)
            last = end - 2                                   # anchors need at least one token after them
            if last < start:
                continue
            A = torch.arange(start, last + 1, device=device)
            tops = []
            for length in lengths:
                for lo in range(0, len(A), 64):
                    a = A[lo:lo + 64]
                    h = draft_blocks(drafter, emb, seq[i:i + 1], feats[i:i + 1], a[None], dtype, length)[0, :, 1:]
                    lp = torch.log_softmax(model.logits(h, dtype).float(), -1)
                    v, t = lp.topk(K, -1)
                    if length == bs:
                        tops.append((v.cpu(), t.cpu()))
                    whole = a[a + bs <= end]                 # anchors whose block lies inside the text
                    if len(whole):
                        truth = seq[i][whole[:, None] + torch.arange(1, length, device=device)]
                        pos_hit[length] += (t[:len(whole), :, 0] == truth).float().sum(0)
                        if length == bs:
                            pos_n += len(whole)
            V, Tk = torch.cat([x[0] for x in tops]), torch.cat([x[1] for x in tops])
            for name in tau:
                a = start
                while a <= last:
                    truth = row[a + 1:min(a + bs, end)]
                    j = a - start
                    if name == "chain":
                        n = 0
                        top = Tk[j, :, 0].tolist()
                        while n < len(truth) and top[n] == truth[n]:
                            n += 1
                    else:
                        n = tree_accept(best_first_tree(V[j].tolist(), Tk[j].tolist(), int(name[4:])), truth)
                    tau[name].append(n + 1)
                    a += n + 1
        report[kind] = dict(prompts=len(plist), rounds=len(tau["chain"]), step_vs_teacher_forcing_agreement=sum(agree) / len(agree),
                            tokens_per_round={k: round(sum(v) / max(1, len(v)), 3) for k, v in tau.items()},
                            position_accuracy={n: [round(x, 3) for x in (hit / max(1, pos_n)).tolist()] for n, hit in pos_hit.items()})
        log("eval", kind, json.dumps(report[kind]))
        if time.time() > T_START + args.budget - 25:
            log("no time for more groups")
            break
    json.dump(report, open(os.path.join(args.work, "eval.json"), "w"), indent=1)
    return report
