"""The DFlash block drafter: one block of masked positions over the target's tap features."""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from target_model import MLP, Config, W, lin, rope, rope_table


@dataclass
class DraftConfig:
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    block_size: int = 16
    target_layer_ids: tuple = (1, 3, 5, 6)
    mask_token_id: int = 0
    vocab_size: int = 6144
    num_target_layers: int = 8
    max_position_embeddings: int = 2048

    def hf_dict(self, specials):
        return {
            "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dtype": "bfloat16",
            "block_size": self.block_size, "num_target_layers": self.num_target_layers,
            "dflash_config": {"mask_token_id": self.mask_token_id, "target_layer_ids": list(self.target_layer_ids)},
            "vocab_size": self.vocab_size, "hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers, "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads, "head_dim": self.head_dim, "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings, "rms_norm_eps": self.rms_norm_eps, "rope_theta": self.rope_theta,
            "rope_scaling": None, "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02,
            "layer_types": ["full_attention"] * self.num_hidden_layers, "sliding_window": None, "use_sliding_window": False,
            "max_window_layers": self.num_hidden_layers, "tie_word_embeddings": False, "use_cache": True,
            "bos_token_id": None, "eos_token_id": specials["<|endoftext|>"], "pad_token_id": specials["<|endoftext|>"],
        }


def norm0(x, w, eps):
    """RMSNorm with a plain weight, fp32 inside."""
    xf = x.float()
    return xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + eps) * w.float()


class DraftAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        std = 0.02
        self.q_proj = W(c.num_attention_heads * c.head_dim, c.hidden_size, std=std)
        self.k_proj = W(c.num_key_value_heads * c.head_dim, c.hidden_size, std=std)
        self.v_proj = W(c.num_key_value_heads * c.head_dim, c.hidden_size, std=std)
        self.o_proj = W(c.hidden_size, c.num_attention_heads * c.head_dim, std=std / math.sqrt(2 * c.num_hidden_layers))
        self.q_norm, self.k_norm = W(c.head_dim, fill=1.0), W(c.head_dim, fill=1.0)

    def forward(self, x, ctx, cs_x, cs_c, mask):
        """x [B,Q,H] block tokens; ctx [B,L,H] fused target features; mask [B,1,Q,L+Q] bool."""
        c = self.c
        B, Q, L = x.shape[0], x.shape[1], ctx.shape[1]
        H, Hkv, d = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        q = rope(norm0(lin(x, self.q_proj.weight).view(B, Q, H, d), self.q_norm.weight, c.rms_norm_eps), *cs_x).to(x.dtype)
        kx, vx = lin(x, self.k_proj.weight, self.v_proj.weight).view(B, Q, 2, Hkv, d).unbind(2)
        kc, vc = lin(ctx, self.k_proj.weight, self.v_proj.weight).view(B, L, 2, Hkv, d).unbind(2)
        kx = rope(norm0(kx, self.k_norm.weight, c.rms_norm_eps), *cs_x).to(x.dtype)
        kc = rope(norm0(kc, self.k_norm.weight, c.rms_norm_eps), *cs_c).to(x.dtype)
        k, v = torch.cat([kc, kx], 1).transpose(1, 2), torch.cat([vc, vx], 1).transpose(1, 2)
        R = H // Hkv
        k, v = (t[:, :, None].expand(-1, -1, R, -1, -1).reshape(B, H, L + Q, d) for t in (k, v))
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask)
        return lin(o.transpose(1, 2).reshape(B, Q, H * d), self.o_proj.weight)


class DraftLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.self_attn, self.mlp = DraftAttention(c), None
        mc = Config(hidden_size=c.hidden_size, intermediate_size=c.intermediate_size)
        self.mlp = MLP(mc, c.num_hidden_layers)
        self.input_layernorm, self.post_attention_layernorm = W(c.hidden_size, fill=1.0), W(c.hidden_size, fill=1.0)

    def forward(self, h, ctx, cs_x, cs_c, mask, dtype):
        e = self.c.rms_norm_eps
        h = h + self.self_attn(norm0(h, self.input_layernorm.weight, e).to(dtype), ctx, cs_x, cs_c, mask)
        return h + self.mlp(norm0(h, self.post_attention_layernorm.weight, e).to(dtype))


class Drafter(nn.Module):
    """DFlash style block drafter: embedding and LM head are the target's; the context enters through K and V only."""

    def __init__(self, c):
        super().__init__()
        self.c = c
        self.fc = W(c.hidden_size, len(c.target_layer_ids) * c.hidden_size, std=0.02)
        self.hidden_norm, self.norm = W(c.hidden_size, fill=1.0), W(c.hidden_size, fill=1.0)
        self.layers = nn.ModuleList([DraftLayer(c) for _ in range(c.num_hidden_layers)])

    def forward(self, feats, embeds, pos_ctx, pos_x, mask, dtype=torch.bfloat16):
        """feats [B,L,n*H] raw target features, embeds [B,Q,H] of the block tokens; returns normed hidden states [B,Q,H]."""
        c = self.c
        ctx = norm0(lin(feats.to(dtype), self.fc.weight), self.hidden_norm.weight, c.rms_norm_eps).to(dtype)
        cs_x, cs_c = rope_table(pos_x, c.head_dim, c.rope_theta), rope_table(pos_ctx, c.head_dim, c.rope_theta)
        h = embeds.float()
        for layer in self.layers:
            h = layer(h, ctx, cs_x, cs_c, mask, dtype)
        return norm0(h, self.norm.weight, c.rms_norm_eps)
