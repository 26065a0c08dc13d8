"""What every phase shares: the log, the token streams, the optimizer, the learning-rate schedule, saving and bundling."""
import glob
import io
import lzma
import math
import os
import tarfile
import time

import numpy as np
import torch

T_START = time.time()
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]


def log(*a):
    line = f"[{time.time() - T_START:7.1f}s] " + " ".join(str(x) for x in a)
    print(line, flush=True)
    LOG.append(line)


LOG = []


class Data:
    def __init__(self, folder, device, limit=None):
        from tokenizers import Tokenizer
        self.folder = folder
        self.tok = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
        self.vocab = self.tok.get_vocab_size()
        assert self.vocab < 32768
        self.special = {s: self.tok.token_to_id(s) for s in SPECIALS}
        self.streams, self.starts = {}, {}
        opens = [self.tok.token_to_id(t) for t in ("def", "class", "import", "from")]
        for name in ("train", "valid"):
            with lzma.open(os.path.join(folder, name + ".bin.xz")) as f:
                raw = f.read() if limit is None else f.read(2 * limit)
            arr = np.frombuffer(raw, dtype=np.uint16).astype(np.int16)
            after_eot = np.flatnonzero(arr[:-1] == self.special["<|endoftext|>"]) + 1
            line_open = np.flatnonzero(np.isin(arr, [o for o in opens if o is not None]))
            self.streams[name] = torch.from_numpy(arr).to(device)
            self.starts[name] = [torch.from_numpy(x.astype(np.int64)).to(device) for x in (after_eot, line_open) if len(x)]
        self.device = device
        self.gen = torch.Generator(device=device)
        self.gen.manual_seed(1234)
        log("data:", {k: int(v.numel()) for k, v in self.streams.items()}, "vocab", self.vocab)

    def windows(self, name, B, L, starts_frac=0.5):
        """B windows of L tokens: some from anywhere, some from a document's start or a line that opens a definition."""
        s = self.streams[name]
        hi = s.numel() - L
        pos = torch.randint(0, hi, (B,), device=self.device, generator=self.gen)
        if starts_frac > 0 and self.starts[name]:
            k = int(B * starts_frac)
            lists = self.starts[name]
            for j, lst in enumerate(lists):
                sel = slice(j * k // len(lists), (j + 1) * k // len(lists))
                n = sel.stop - sel.start
                pos[sel] = lst[torch.randint(0, lst.numel(), (n,), device=self.device, generator=self.gen)].clamp(max=hi - 1)
        idx = pos[:, None] + torch.arange(L, device=self.device)
        return s[idx].long()


def newton_schulz(G, steps=5):
    """Approximate orthogonalization of a stack of matrices [n, r, c] by a quintic iteration."""
    dtype = torch.bfloat16 if G.is_cuda else torch.float32
    X = G.to(dtype)
    tall = X.shape[-2] > X.shape[-1]
    if tall:
        X = X.transpose(-1, -2)
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(steps):
        A = X @ X.transpose(-1, -2)
        X = a * X + (b * A + c * (A @ A)) @ X
    if tall:
        X = X.transpose(-1, -2)
    return X.float()


class Optim:
    """Muon for the hidden matrices (stacked by shape), AdamW for everything else."""

    def __init__(self, named, lr, wd=0.1, use_muon=True, adam_lr=None):
        self.lr, self.wd = lr, wd
        mats, rest = {}, []
        for n, p in named:
            big = p.ndim == 2 and min(p.shape) >= 32 and "embed_tokens" not in n
            if big and use_muon:
                mats.setdefault(tuple(p.shape), []).append(p)
            else:
                rest.append((n, p))
        self.mats = [dict(params=ps, buf=torch.zeros(len(ps), *s, device=ps[0].device), scale=0.2 * math.sqrt(max(s))) for s, ps in mats.items()]
        decay = [p for n, p in rest if p.ndim >= 2 and "conv1d" not in n]
        plain = [p for n, p in rest if not (p.ndim >= 2 and "conv1d" not in n)]
        fused = rest[0][1].is_cuda
        self.base = adam_lr or lr
        groups = [dict(params=g, weight_decay=w) for g, w in ((decay, wd), (plain, 0.0)) if g]
        self.adam = torch.optim.AdamW(groups, lr=self.base, betas=(0.9, 0.97), eps=1e-9, fused=fused)
        self.params = [p for _, p in named]

    @torch.no_grad()
    def step(self, factor, clip=1.0):
        norm = torch.nn.utils.clip_grad_norm_(self.params, clip, foreach=True)
        for g in self.adam.param_groups:
            g["lr"] = self.base * factor
        self.adam.step()
        lr = self.lr * factor
        for m in self.mats:
            grad = torch.stack([p.grad for p in m["params"]])
            m["buf"].lerp_(grad, 0.05)
            upd = newton_schulz(grad.lerp(m["buf"], 0.95))
            torch._foreach_mul_(m["params"], 1 - lr * self.wd)
            torch._foreach_add_(m["params"], list(upd.unbind(0)), alpha=-lr * m["scale"])
        for p in self.params:
            p.grad = None
        return norm


def schedule(frac, warm=0.02, hold=0.45, floor=0.01):
    """Linear warm-up, constant, then linear decay; frac is the fraction of the time that has passed."""
    if frac < warm:
        return max(frac / warm, 0.02)
    if frac < hold:
        return 1.0
    return max(floor, 1.0 - (1.0 - floor) * (frac - hold) / (1.0 - hold))


def sync(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def time_steps(fn, n, device):
    fn()
    sync(device)
    t = time.time()
    for _ in range(n):
        fn()
    sync(device)
    return (time.time() - t) / n


def round_bf16(model):
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(torch.bfloat16).float())


def bundle(files, name, part=15 << 20):
    """Write files (arcname -> path) as $OUT/name.tar.00, .01, ... of at most 15 MiB each (no file over 16 MiB comes back)."""
    out = os.environ.get("OUT")
    if not out:
        return
    buf = io.BytesIO()
    with tarfile.open(fileobj=buf, mode="w") as tar:
        for arc, path in sorted(files.items()):
            tar.add(path, arcname=arc)
    raw = buf.getvalue()
    for old in glob.glob(os.path.join(out, name + ".tar.*")):
        os.remove(old)
    for i in range(0, len(raw), part):
        with open(os.path.join(out, f"{name}.tar.{i // part:02d}"), "wb") as f:
            f.write(raw[i:i + part])
    log(f"wrote {len(raw) / 1e6:.1f} MB as {name}.tar.* to $OUT")


def tree_files(work, *subs):
    files = {}
    for s in subs:
        p = os.path.join(work, s)
        if os.path.isfile(p):
            files["tiny/" + s] = p
        for root, _, fs in os.walk(p):
            for f in fs:
                full = os.path.join(root, f)
                files["tiny/" + os.path.relpath(full, work)] = full
    return files
