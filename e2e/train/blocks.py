"""Draft blocks of many anchors in one pass, and the drafter's files."""
import json
import os

import torch
import torch.nn.functional as F

from drafter_model import Drafter, DraftConfig


def draft_blocks(drafter, emb, ids, feats, anchors, dtype, length=None):
    """ids [B,L], feats [B,L,n*H], anchors [B,A] -> hidden states [B,A,bs,H] of one block per anchor, all in one pass;
    bs is `length`, by default the drafter's block size.

    The block of anchor a is [ids[a], mask, mask, ...] at positions a .. a+bs-1. It sees the context features of the
    positions below a, and all of its own block, nothing else."""
    bs, mask_id = length or drafter.c.block_size, drafter.c.mask_token_id
    B, L = ids.shape
    A = anchors.shape[1]
    tokens = torch.full((B, A, bs), mask_id, dtype=torch.long, device=ids.device)
    tokens[:, :, 0] = ids.gather(1, anchors)
    pos = anchors[:, :, None] + torch.arange(bs, device=ids.device)
    block = torch.arange(A, device=ids.device).repeat_interleave(bs)
    see_ctx = torch.arange(L, device=ids.device)[None, None] < anchors.repeat_interleave(bs, 1)[:, :, None]
    see_own = (block[:, None] == block[None, :])[None].expand(B, -1, -1)
    mask = torch.cat([see_ctx, see_own], -1)[:, None]
    h = drafter(feats, F.embedding(tokens.view(B, A * bs), emb), torch.arange(L, device=ids.device)[None], pos.view(B, A * bs), mask, dtype)
    return h.view(B, A, bs, -1)


def save_drafter(drafter, dc, data, folder):
    from safetensors.torch import save_file
    os.makedirs(folder, exist_ok=True)
    sd = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in drafter.state_dict().items()}
    save_file(sd, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    json.dump(dc.hf_dict(data.special), open(os.path.join(folder, "config.json"), "w"), indent=2)


def load_drafter(folder, device):
    from safetensors.torch import load_file
    j = json.load(open(os.path.join(folder, "config.json")))
    kw = {f: j[f] for f in DraftConfig.__dataclass_fields__ if f in j}
    kw.update(target_layer_ids=tuple(j["dflash_config"]["target_layer_ids"]), mask_token_id=j["dflash_config"]["mask_token_id"])
    d = Drafter(DraftConfig(**kw))
    d.load_state_dict({k: v.float() for k, v in load_file(os.path.join(folder, "model.safetensors")).items()})
    return d.to(device).eval().requires_grad_(False)
