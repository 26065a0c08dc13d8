"""Checks of the GDN core on this device, and step times."""
import time

import torch

import gdn
from generation import generate
from runtime import T_START, Optim, log, sync, time_steps
from target import Runner, choose_step
from target_model import TinyQwen


def check_core(core, device, tag):
    """Relative errors of the chunked core (values, gradients) against the fp64 recurrence on this device."""
    torch.manual_seed(0)
    B, T, Hk, Hv, d = 2, 200, 2, 4, 128
    worst = 0.0
    for trial in range(3):
        q, k, v = (torch.randn(B, T, h, d, device=device).to(torch.bfloat16).float() for h in (Hk, Hk, Hv))
        if trial == 2:
            k = (torch.randn(1, 1, Hk, d, device=device) + 0.3 * k).to(torch.bfloat16).float()
        g = -torch.rand(B, T, Hv, device=device) * (0.3, 2.0, 0.01)[trial]
        beta = torch.rand(B, T, Hv, device=device).to(torch.bfloat16).float()
        leaves = [x.clone().requires_grad_() for x in (q, k, v, g, beta)]
        o, _ = core(*leaves, 64)
        w = torch.randn(o.shape, device=device)
        (o.float() * w).sum().backward()
        ref = [x.double().clone().requires_grad_() for x in (q, k, v, g, beta)]
        o2, _ = gdn.gdn_naive(*ref)
        (o2 * w.double()).sum().backward()
        rel = [((a.double() - b).norm() / b.norm()).item() for a, b in [(o, o2)] + [(x.grad, y.grad) for x, y in zip(leaves, ref)]]
        worst = max(worst, max(rel))
        log(f"  {tag} trial {trial}: relative errors o,dq,dk,dv,dg,db " + " ".join(f"{r:.1e}" for r in rel))
    return worst


def run_bench(args, device, data):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    log("torch", torch.__version__, "device", torch.cuda.get_device_name() if device.type == "cuda" else "cpu")
    log("own GDN core, worst relative error", f"{check_core(gdn.gdn_chunk, device, 'own'):.1e}", "(TF32 matmuls: expect below 5e-3)")
    deadline = T_START + args.budget
    for B in args.bench_batches:
        if time.time() > deadline - 60 and device.type == "cuda":
            break
        torch.manual_seed(0)
        model = TinyQwen(args.model_config(data.vocab)).to(device)
        runner = Runner(model, dtype)
        log(f"--- batch {B} x {args.seq}")
        if B != args.bench_batches[0]:
            args.compile = "off"
        choose_step(runner, data.windows("train", B, args.seq + 1), device, args)
        opt = Optim(list(model.named_parameters()), args.lr, args.wd, True)

        def full():
            runner.loss(data.windows("train", B, args.seq + 1)).backward()
            opt.step(0.1)
        t = time_steps(full, 5, device)
        log(f"whole step with the optimizer: {t * 1e3:.1f} ms = {B * args.seq / t / 1e3:.0f} k tokens/s; peak memory "
            + (f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if device.type == "cuda" else "-"))
        runner.uncompile()
    t0 = time.time()
    P, n = 64, min(64, args.roll_len)
    generate(model.eval(), data.windows("train", args.roll_batch, P), 4, 0.0, dtype)
    sync(device)
    t0 = time.time()
    generate(model, data.windows("train", args.roll_batch, P), n, 0.0, dtype)
    sync(device)
    log(f"rollouts: {args.roll_batch * n / (time.time() - t0) / 1e3:.0f} k tokens/s at batch {args.roll_batch}")
