"""A compact, trainable PyTorch implementation of the Qwen3.5 text architecture (hybrid Gated DeltaNet + gated attention).

Parameter names are those of transformers' Qwen3_5ForCausalLM, so a state dict loads there unchanged (golden.py checks
the logits against it). Three execution forms share the weights:
  forward(ids)            whole sequences, for training and teacher forcing
  forward(ids, cache=c)   the same, and fills a decode cache (prefill)
  step(ids, cache)        one token for each sequence of a batch (recurrent form)
"""
import math
from dataclasses import dataclass, field

import torch
import torch.nn as nn
import torch.nn.functional as F

from gdn import gdn_chunk, gdn_naive


@dataclass
class Config:
    vocab_size: int = 6144
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 256
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    full_attention_interval: int = 4
    partial_rotary_factor: float = 0.25
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    chunk: int = field(default=64)

    def layer_types(self):
        return ["full_attention" if (i + 1) % self.full_attention_interval == 0 else "linear_attention" for i in range(self.num_hidden_layers)]

    def hf_dict(self, specials):
        """config.json in the layout transformers reads (and writes) for model_type qwen3_5_text."""
        return {
            "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "dtype": "bfloat16",
            "vocab_size": self.vocab_size, "hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers, "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads, "head_dim": self.head_dim, "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings, "initializer_range": self.initializer_range,
            "rms_norm_eps": self.rms_norm_eps, "use_cache": True, "tie_word_embeddings": True, "attention_bias": False,
            "attention_dropout": 0.0, "attn_output_gate": True, "full_attention_interval": self.full_attention_interval,
            "layer_types": self.layer_types(), "linear_conv_kernel_dim": self.linear_conv_kernel_dim,
            "linear_key_head_dim": self.linear_key_head_dim, "linear_value_head_dim": self.linear_value_head_dim,
            "linear_num_key_heads": self.linear_num_key_heads, "linear_num_value_heads": self.linear_num_value_heads,
            "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 0, "partial_rotary_factor": self.partial_rotary_factor,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta, "partial_rotary_factor": self.partial_rotary_factor,
                                "mrope_section": self.mrope_section(), "mrope_interleaved": True},
            "bos_token_id": None, "eos_token_id": specials["<|endoftext|>"], "pad_token_id": specials["<|endoftext|>"],
        }

    def mrope_section(self):
        half = int(self.head_dim * self.partial_rotary_factor) // 2
        hw = half // 3
        return [half - 2 * hw, hw, hw] if half != 32 else [11, 11, 10]


def lin(x, *ws):
    """x @ cat(ws)^T in x's dtype."""
    w = ws[0] if len(ws) == 1 else torch.cat(ws, 0)
    return F.linear(x, w.to(x.dtype))


def norm1(x, w, eps):
    """RMSNorm with a zero-centred weight, fp32 inside."""
    xf = x.float()
    return xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + w.float())


class W(nn.Module):
    """A bare weight, for the HF parameter names."""

    def __init__(self, *shape, std=0.02, fill=None):
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, float(fill)) if fill is not None else torch.randn(*shape) * std)


class GatedDeltaNet(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        self.c = c
        self.Hk, self.Hv, self.dk, self.dv = c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
        self.kd, self.vd = self.Hk * self.dk, self.Hv * self.dv
        std, out_std = c.initializer_range, c.initializer_range / math.sqrt(2 * c.num_hidden_layers)
        self.in_proj_qkv = W(2 * self.kd + self.vd, c.hidden_size, std=std)
        self.in_proj_z = W(self.vd, c.hidden_size, std=std)
        self.in_proj_b = W(self.Hv, c.hidden_size, std=std)
        self.in_proj_a = W(self.Hv, c.hidden_size, std=std)
        self.out_proj = W(c.hidden_size, self.vd, std=out_std)
        self.conv1d = W(2 * self.kd + self.vd, 1, c.linear_conv_kernel_dim, std=0.3)
        self.norm = W(self.dv, fill=1.0)
        # time constants spread over the heads of a layer: decay per step from about exp(-0.001) to exp(-0.5)
        A = torch.linspace(1.0, 8.0, self.Hv)
        dt = torch.exp(torch.linspace(math.log(1e-3), math.log(6e-2), self.Hv))
        self.A_log = nn.Parameter(A.log())
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.core = gdn_chunk

    def project(self, x, conv_state):
        c = self.c
        proj = lin(x, self.in_proj_qkv.weight, self.in_proj_z.weight, self.in_proj_b.weight, self.in_proj_a.weight)
        mixed, z, b, a = proj.split([2 * self.kd + self.vd, self.vd, self.Hv, self.Hv], -1)
        K = c.linear_conv_kernel_dim
        padded = F.pad(mixed, (0, 0, K - 1, 0)) if conv_state is None else torch.cat([conv_state.to(mixed.dtype), mixed], 1)
        T, w = mixed.shape[1], self.conv1d.weight[:, 0, :]
        acc = padded[:, 0:T].float() * w[:, 0]
        for j in range(1, K):
            acc = acc + padded[:, j:j + T].float() * w[:, j]
        y = F.silu(acc).to(mixed.dtype)
        q, k, v = y.split([self.kd, self.kd, self.vd], -1)
        B = x.shape[0]
        q, k = q.reshape(B, T, self.Hk, self.dk), k.reshape(B, T, self.Hk, self.dk)
        v = v.reshape(B, T, self.Hv, self.dv)
        beta = b.float().sigmoid()
        g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias.float())
        return q, k, v, g, beta, z, padded[:, -(K - 1):]

    def finish(self, o, z):
        B, T = o.shape[:2]
        of = o.float()
        of = of * torch.rsqrt(of.pow(2).mean(-1, keepdim=True) + self.c.rms_norm_eps) * self.norm.weight.float()
        of = of * F.silu(z.float().view(B, T, self.Hv, self.dv))
        return lin(of.reshape(B, T, self.vd).to(z.dtype), self.out_proj.weight)

    def forward(self, x, cache=None):
        q, k, v, g, beta, z, conv = self.project(x, None if cache is None else cache.get("conv"))
        if cache is None:
            o, _ = self.core(q, k, v, g, beta, self.c.chunk)
        else:
            o, S = gdn_chunk(q, k, v, g, beta, self.c.chunk, cache.get("S"))
            cache["conv"], cache["S"] = conv, S
        return self.finish(o, z)

    def step(self, x, cache):
        q, k, v, g, beta, z, conv = self.project(x, cache["conv"])
        cache["conv"] = conv
        o, cache["S"] = gdn_naive(q.float(), k.float(), v.float(), g, beta, cache["S"])
        return self.finish(o, z)


class GatedAttention(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        self.c = c
        H, Hkv, d = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        std, out_std = c.initializer_range, c.initializer_range / math.sqrt(2 * c.num_hidden_layers)
        self.q_proj = W(H * d * 2, c.hidden_size, std=std)
        self.k_proj = W(Hkv * d, c.hidden_size, std=std)
        self.v_proj = W(Hkv * d, c.hidden_size, std=std)
        self.o_proj = W(c.hidden_size, H * d, std=out_std)
        self.q_norm, self.k_norm = W(d, fill=0.0), W(d, fill=0.0)

    def qkv(self, x, cos, sin):
        c, (B, T) = self.c, x.shape[:2]
        H, Hkv, d = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        qg, k, v = lin(x, self.q_proj.weight, self.k_proj.weight, self.v_proj.weight).split([H * d * 2, Hkv * d, Hkv * d], -1)
        q, gate = qg.view(B, T, H, 2 * d).chunk(2, -1)          # per head: d query values, then d gate values
        q = rope(norm1(q, self.q_norm.weight, c.rms_norm_eps), cos, sin).to(x.dtype)
        k = rope(norm1(k.view(B, T, Hkv, d), self.k_norm.weight, c.rms_norm_eps), cos, sin).to(x.dtype)
        return q.transpose(1, 2), k.transpose(1, 2), v.view(B, T, Hkv, d).transpose(1, 2), gate.reshape(B, T, H * d)

    def out(self, o, gate):
        B, _, T, _ = o.shape
        o = o.transpose(1, 2).reshape(B, T, -1)
        return lin(o * torch.sigmoid(gate), self.o_proj.weight)

    def attend(self, q, k, v, mask=None, causal=False):
        R = q.shape[1] // k.shape[1]
        k, v = (t[:, :, None].expand(-1, -1, R, -1, -1).reshape(q.shape[0], q.shape[1], -1, t.shape[-1]) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)

    def forward(self, x, cos, sin, cache=None):
        q, k, v, gate = self.qkv(x, cos, sin)
        if cache is not None:                                    # prefill from empty
            T = k.shape[2]
            cache["k"][:, :, :T], cache["v"][:, :, :T] = k, v
        return self.out(self.attend(q, k, v, causal=True), gate)

    def step(self, x, cos, sin, cache, pos):
        q, k, v, gate = self.qkv(x, cos, sin)
        cache["k"][:, :, pos], cache["v"][:, :, pos] = k[:, :, 0], v[:, :, 0]
        B, H, _, d = q.shape                                    # the query heads of one group become query rows: no copy of K, V
        o = F.scaled_dot_product_attention(q.view(B, k.shape[1], -1, d), cache["k"][:, :, :pos + 1], cache["v"][:, :, :pos + 1])
        return self.out(o.reshape(B, H, 1, d), gate)


def rope_table(positions, dim, theta):
    inv = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim)
    ang = positions.float()[..., None] * inv
    ang = torch.cat([ang, ang], -1)
    return ang.cos(), ang.sin()


def rope(x, cos, sin):
    """x [B,T,H,d]; cos, sin [T,r] or [B,T,r] with r <= d: the first r values of each head are rotated (half split)."""
    r = cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    xr, xp = x[..., :r], x[..., r:]
    x1, x2 = xr.chunk(2, -1)
    xr = xr * cos + torch.cat([-x2, x1], -1) * sin
    return torch.cat([xr, xp], -1) if xp.shape[-1] else xr


class MLP(nn.Module):
    def __init__(self, c, n_layers):
        super().__init__()
        std = c.initializer_range
        self.gate_proj = W(c.intermediate_size, c.hidden_size, std=std)
        self.up_proj = W(c.intermediate_size, c.hidden_size, std=std)
        self.down_proj = W(c.hidden_size, c.intermediate_size, std=std / math.sqrt(2 * n_layers))

    def forward(self, x):
        g, u = lin(x, self.gate_proj.weight, self.up_proj.weight).chunk(2, -1)
        return lin(F.silu(g) * u, self.down_proj.weight)


class Layer(nn.Module):
    def __init__(self, c, i):
        super().__init__()
        self.c = c
        self.kind = c.layer_types()[i]
        if self.kind == "linear_attention":
            self.linear_attn = GatedDeltaNet(c, i)
        else:
            self.self_attn = GatedAttention(c, i)
        self.mlp = MLP(c, c.num_hidden_layers)
        self.input_layernorm, self.post_attention_layernorm = W(c.hidden_size, fill=0.0), W(c.hidden_size, fill=0.0)

    def forward(self, h, cos, sin, dtype, cache=None):
        x = norm1(h, self.input_layernorm.weight, self.c.rms_norm_eps).to(dtype)
        h = h + (self.linear_attn(x, cache) if self.kind == "linear_attention" else self.self_attn(x, cos, sin, cache))
        return h + self.mlp(norm1(h, self.post_attention_layernorm.weight, self.c.rms_norm_eps).to(dtype))

    def step(self, h, cos, sin, dtype, cache, pos):
        x = norm1(h, self.input_layernorm.weight, self.c.rms_norm_eps).to(dtype)
        h = h + (self.linear_attn.step(x, cache) if self.kind == "linear_attention" else self.self_attn.step(x, cos, sin, cache, pos))
        return h + self.mlp(norm1(h, self.post_attention_layernorm.weight, self.c.rms_norm_eps).to(dtype))


class Backbone(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = W(c.vocab_size, c.hidden_size, std=c.initializer_range)
        self.layers = nn.ModuleList([Layer(c, i) for i in range(c.num_hidden_layers)])
        self.norm = W(c.hidden_size, fill=0.0)


class TinyQwen(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.model = Backbone(c)

    def rope_dim(self):
        return int(self.c.head_dim * self.c.partial_rotary_factor)

    def hidden(self, ids, dtype=torch.bfloat16, collect=None, cache=None):
        """Final normed hidden states [B,T,H] (fp32); collect: list of layer indices whose outputs are returned too."""
        c = self.c
        h = F.embedding(ids, self.model.embed_tokens.weight).float()
        cos, sin = rope_table(torch.arange(ids.shape[1], device=ids.device), self.rope_dim(), c.rope_theta)
        kept = {}
        for i, layer in enumerate(self.model.layers):
            h = layer(h, cos, sin, dtype, None if cache is None else cache["layers"][i])
            if collect is not None and i in collect:
                kept[i] = h
        if cache is not None:
            cache["pos"] = ids.shape[1]
        out = norm1(h, self.model.norm.weight, c.rms_norm_eps)
        return (out, [kept[i] for i in collect]) if collect is not None else out

    def logits(self, hidden, dtype=torch.bfloat16):
        return lin(hidden.to(dtype), self.model.embed_tokens.weight)

    def forward(self, ids, dtype=torch.bfloat16):
        return self.logits(self.hidden(ids, dtype), dtype)

    def new_cache(self, B, max_len, device, dtype):
        c = self.c
        layers = []
        for kind in c.layer_types():
            if kind == "linear_attention":
                layers.append({})
            else:
                shape = (B, c.num_key_value_heads, max_len, c.head_dim)
                layers.append({"k": torch.zeros(shape, device=device, dtype=dtype), "v": torch.zeros(shape, device=device, dtype=dtype)})
        return {"layers": layers, "pos": 0}

    def step(self, ids, cache, dtype=torch.bfloat16, collect=None):
        """ids [B]; returns logits [B,V]. The cache advances by one."""
        c, pos = self.c, cache["pos"]
        h = F.embedding(ids[:, None], self.model.embed_tokens.weight).float()
        cos, sin = rope_table(torch.tensor([pos], device=ids.device), self.rope_dim(), c.rope_theta)
        kept = {}
        for i, layer in enumerate(self.model.layers):
            h = layer.step(h, cos, sin, dtype, cache["layers"][i], pos)
            if collect is not None and i in collect:
                kept[i] = h
        cache["pos"] = pos + 1
        out = self.logits(norm1(h, self.model.norm.weight, c.rms_norm_eps), dtype)[:, 0]
        return (out, [kept[i] for i in collect]) if collect is not None else out


def count(m):
    return sum(p.numel() for p in m.parameters())
