"""Trains the drafter on the target's own continuations."""
import json
import math
import os
import random
import shutil
import time

import torch
import torch.nn.functional as F

from blocks import draft_blocks, load_drafter, save_drafter
from drafter_model import Drafter, DraftConfig
from evaluate import run_eval
from generation import generate
from golden import run_golden
from runtime import LOG, T_START, Optim, bundle, log, round_bf16, schedule, tree_files
from target import Runner, load_target, valid_loss
from target_model import count, lin


def draft_loss(drafter, emb, ids, feats, anchors, gamma, length, dtype):
    """Cross-entropy of blocks of `length` rows with position weights exp(-i / gamma); accepted tokens of the chain."""
    bs = length
    weights = torch.exp(-torch.arange(bs - 1, device=ids.device).float() / gamma)
    h = draft_blocks(drafter, emb, ids, feats, anchors, dtype, length)[:, :, 1:]
    labels = ids.gather(1, (anchors[:, :, None] + torch.arange(1, bs, device=ids.device)).flatten(1))
    logits = lin(h.to(dtype), emb).float()
    ce = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), reduction="none").view(-1, bs - 1)
    with torch.no_grad():
        hit = (logits.argmax(-1).view(-1, bs - 1) == labels.view(-1, bs - 1)).float()
        acc = hit.cumprod(1).sum(1).mean()
    return (ce * weights).sum() / (weights.sum() * ce.shape[0]), acc


def rollouts(model, data, args, device, dtype, deadline):
    """Continuations by the target itself: list of (ids [B,P+G] int16, P)."""
    groups, n, t0, i = [], 0, time.time(), 0
    rng = random.Random(args.seed)
    while time.time() < deadline and (not args.roll_batches or i < args.roll_batches):
        P = args.prefixes[i % len(args.prefixes)]
        frac = 1.0 if P < 64 else 0.5
        temp = 0.0 if rng.random() < 0.75 else 0.7
        ids = generate(model, data.windows("train", args.roll_batch, P, frac), args.roll_len, temp, dtype)
        groups.append((ids.to(torch.int16), P))
        n += ids.shape[0] * args.roll_len
        i += 1
        if i % 10 == 1:
            log(f"rollouts: {n / 1e6:.2f} M generated tokens, {n / (time.time() - t0) / 1e3:.0f} k/s")
    log(f"rollouts: {n / 1e6:.2f} M generated tokens in {time.time() - t0:.0f} s")
    return groups


@torch.no_grad()
def tap_features(model, dc, ids, dtype, tokens):
    """Tap features [B,L,n*H] of every row of one rollout group, made in slices of about `tokens` tokens."""
    rows = max(1, tokens // ids.shape[1])
    parts = [model.hidden(ids[i:i + rows].long(), dtype, collect=list(dc.target_layer_ids))[1] for i in range(0, ids.shape[0], rows)]
    return torch.cat([torch.cat(p, -1).to(dtype) for p in parts])


def run_drafter(args, device, data):
    torch.manual_seed(args.seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model, cfg = load_target(args.target or os.path.join(args.work, "target"), device)
    if args.target and os.path.abspath(args.target) != os.path.abspath(os.path.join(args.work, "target")):
        shutil.copytree(args.target, os.path.join(args.work, "target"), dirs_exist_ok=True)
        for extra in ("target_log.json",):
            p = os.path.join(os.path.dirname(args.target.rstrip("/")), extra)
            if os.path.exists(p):
                shutil.copy(p, args.work)
    log("target loaded:", count(model), "parameters; valid loss", round(valid_loss(Runner(model, dtype), data, min(args.seq, 1024), 2), 4))
    dc = DraftConfig(hidden_size=cfg.hidden_size, intermediate_size=args.draft_ffn, num_hidden_layers=args.draft_layers, num_attention_heads=args.draft_heads,
                        num_key_value_heads=args.draft_kv, head_dim=args.draft_head_dim, block_size=args.block, target_layer_ids=tuple(args.layer_ids),
                        mask_token_id=data.special["<|mask|>"], vocab_size=cfg.vocab_size, num_target_layers=cfg.num_hidden_layers,
                        max_position_embeddings=cfg.max_position_embeddings)
    if args.init_drafter:
        drafter = load_drafter(args.init_drafter, device).train().requires_grad_(True)
        dc = drafter.c
    else:
        drafter = Drafter(dc).to(device)
    log("drafter parameters:", count(drafter), "block", dc.block_size, "target layers", dc.target_layer_ids)
    emb = model.model.embed_tokens.weight.detach()
    t_end = T_START + args.budget - args.reserve
    groups = rollouts(model, data, args, device, dtype, min(time.time() + args.roll_seconds, t_end - 20))
    opt = Optim(list(drafter.named_parameters()), args.draft_lr, args.wd, args.optim == "muon", args.adam_lr)
    gamma = args.gamma or {8: 4.0, 10: 5.0, 16: 7.0}.get(args.block, args.block / 2.3)
    groups = [(ids, P, tap_features(model, dc, ids, dtype, args.draft_tokens)) for ids, P in groups]
    log("features of every rollout kept")
    work = os.path.join(args.work, "drafter")
    t0, step, rng, last_save = time.time(), 0, random.Random(5), time.time()
    gen = torch.Generator(device=device)
    gen.manual_seed(7)
    while True:
        frac = (time.time() - t0) / max(1e-6, t_end - t0) if not args.draft_steps else step / args.draft_steps
        if frac >= 1.0:
            break
        ids, P, feats = groups[rng.randrange(len(groups))]
        length = rng.choice(args.block_lengths)
        L = ids.shape[1]
        rows = min(ids.shape[0], max(1, args.draft_tokens // L))
        pick = torch.randint(0, ids.shape[0], (rows,), device=device, generator=gen)
        ids, feats = ids[pick].long(), feats[pick]
        count_anchors = min(args.anchors * args.block // length, 3 * args.anchors)
        anchors = torch.randint(P, L - length + 1, (rows, count_anchors), device=device, generator=gen)
        loss, acc = draft_loss(drafter, emb, ids, feats, anchors, gamma, length, dtype)
        loss.backward()
        opt.step(schedule(frac))
        step += 1
        if step % 200 == 0 or step <= 3 or (args.draft_steps and args.draft_steps <= 30):
            log(f"draft step {step} block {length} loss {loss.item():.4f} accepted (chain, training batch) {acc.item():.2f} lr x{schedule(frac):.3f} {step / (time.time() - t0):.1f} steps/s")
            if not math.isfinite(loss.item()):
                log("loss is not finite, stopping")
                break
        if time.time() - last_save > 150:
            last_save = time.time()
            save_drafter(drafter, dc, data, work)
            bundle(tree_files(args.work, "drafter"), "drafter")
    log(f"trained the drafter for {step} steps on blocks of {sorted(set(args.block_lengths))}")
    round_bf16(drafter)
    save_drafter(drafter, dc, data, work)
    if args.do_eval:
        run_eval(args, device, data, model, drafter)
    finish_bundle(args, data)


def finish_bundle(args, data):
    try:
        if args.do_golden:
            run_golden(args, data)
    except Exception as e:
        log("golden vectors failed (run `train.py golden` on any machine):", type(e).__name__, str(e)[:300])
    shutil.copy(os.path.join(data.folder, "manifest.json"), os.path.join(args.work, "corpus_manifest.json"))
    json.dump(LOG, open(os.path.join(args.work, "drafter_log.json"), "w"), indent=1)
    bundle(tree_files(args.work, "target", "drafter", "golden.safetensors", "golden.json", "eval.json", "target_log.json", "drafter_log.json", "corpus_manifest.json"), "tiny")
