"""The gated delta rule for training: chunked on batched matrix products, and token by token in any dtype."""
import torch
import torch.nn.functional as F


class TriInverse(torch.autograd.Function):
    """T = (I + A)^-1 for strictly lower triangular A [..., C, C], C a power of two.

    Doubles the size of the inverted diagonal blocks: with T_s the inverse of the block diagonal of size s, the next one
    is T_s - T_s (A . M_s) T_s where M_s keeps the lower left quarter of each 2s block. No inverse is ever multiplied by
    itself, so this is as stable as forward substitution. dA = -T^T dT T^T.
    """

    @staticmethod
    def forward(ctx, A):
        C = A.shape[-1]
        r = torch.arange(C, device=A.device)
        T = torch.eye(C, device=A.device, dtype=A.dtype).expand_as(A)
        s = 1
        while s < C:
            same2 = (r[:, None] // (2 * s)) == (r[None, :] // (2 * s))
            quarter = same2 & ((r[:, None] // s) % 2 == 1) & ((r[None, :] // s) % 2 == 0)
            off = A * quarter.to(A.dtype)
            T = T - (off if s == 1 else T @ off @ T)
            s *= 2
        ctx.save_for_backward(T)
        return T

    @staticmethod
    def backward(ctx, dT):
        (T,) = ctx.saved_tensors
        Tt = T.transpose(-1, -2)
        return (-(Tt @ dT @ Tt)).tril(-1)


def l2norm(x, eps=1e-6):
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def gdn_chunk(q, k, v, g, beta, C=64, state=None):
    """Gated delta rule. q, k [B,T,Hk,dk], v [B,T,Hv,dv], g (log decay) and beta [B,T,Hv]; returns o [B,T,Hv,dv], state.

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T ;  o_t = S_t^T q_t
    q and k are l2-normalized here and q is scaled by dk^-0.5. Value head h reads key head h // (Hv // Hk).
    All of it in fp32 (matrix products may use TF32).
    """
    B, T, Hk, dk = k.shape
    Hv, dv = v.shape[2], v.shape[3]
    R = Hv // Hk
    pad = (-T) % C
    q, k, v, g, beta = (x.float() for x in (q, k, v, g, beta))
    q, k = l2norm(q) * dk ** -0.5, l2norm(k)
    if pad:
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, pad)) for x in (q, k, v))
        g, beta = (F.pad(x, (0, 0, 0, pad)) for x in (g, beta))
    N = (T + pad) // C
    # [B, Hk, 1, N, C, d] and [B, Hk, R, N, C, d]
    q = q.view(B, N, C, Hk, dk).permute(0, 3, 1, 2, 4)[:, :, None]
    k = k.view(B, N, C, Hk, dk).permute(0, 3, 1, 2, 4)[:, :, None]
    v = v.view(B, N, C, Hk, R, dv).permute(0, 3, 4, 1, 2, 5)
    g = g.view(B, N, C, Hk, R).permute(0, 3, 4, 1, 2)
    beta = beta.view(B, N, C, Hk, R).permute(0, 3, 4, 1, 2).unsqueeze(-1)
    G = g.cumsum(-1)
    low = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
    D = torch.exp((G.unsqueeze(-1) - G.unsqueeze(-2)).masked_fill(~low, -1e9))          # [B,Hk,R,N,C,C]
    kt = k.transpose(-1, -2)
    A = (k @ kt) * D * beta
    Tm = TriInverse.apply(A.tril(-1))
    eG = G.exp().unsqueeze(-1)
    u = Tm @ (v * beta)
    w = Tm @ (k * (beta * eG))
    kd = k * (G[..., -1:] - G).exp().unsqueeze(-1)                                      # keys decayed to the chunk's end
    last = G[..., -1].exp()[..., None, None]                                            # [B,Hk,R,N,1,1]
    S = torch.zeros(B, Hk, R, dk, dv, device=q.device) if state is None else state.view(B, Hk, R, dk, dv).float()
    states, news = [], []
    u_c, w_c, kd_c, last_c = u.unbind(3), w.unbind(3), kd.transpose(-1, -2).unbind(3), last.unbind(3)
    for i in range(N):
        states.append(S)
        vn = u_c[i] - w_c[i] @ S
        news.append(vn)
        S = S * last_c[i] + kd_c[i] @ vn
    S_all, v_new = torch.stack(states, 3), torch.stack(news, 3)
    o = (q * eG) @ S_all + ((q @ kt) * D) @ v_new
    o = o.permute(0, 3, 4, 1, 2, 5).reshape(B, N * C, Hv, dv)[:, :T]
    return o, S.reshape(B, Hv, dk, dv)


def gdn_naive(q, k, v, g, beta, state=None):
    """Token by token reference of the same recurrence (any dtype)."""
    B, T, Hk, dk = k.shape
    Hv, dv = v.shape[2], v.shape[3]
    q, k = l2norm(q) * dk ** -0.5, l2norm(k)
    q, k = (x.repeat_interleave(Hv // Hk, 2) for x in (q, k))
    S = torch.zeros(B, Hv, dk, dv, dtype=v.dtype, device=v.device) if state is None else state
    outs = []
    for t in range(T):
        S = S * g[:, t].exp()[..., None, None]
        delta = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
        S = S + k[:, t].unsqueeze(-1) * delta.unsqueeze(-2)
        outs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return torch.stack(outs, 1), S
