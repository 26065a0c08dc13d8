"""Times flash-linear-attention's gated delta rule on chains beside canopy's sweep: same shapes, CUDA-graph replay, inputs rotated.

Needs a CUDA device, PyTorch, Triton, and the PyPI packages flash-linear-attention==0.6.0, fla-core==0.6.0, einops.
    python bench/peers/fla_cuda.py --json rows.jsonl
"""

import argparse
import json
import statistics

import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

KEY_HEADS, VALUE_HEADS, DIM = 16, 32, 128
ROTATE = 240 << 20


def inputs(batch, nodes):
    shape = (batch, nodes, VALUE_HEADS, DIM)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    g = -0.1 * torch.rand(shape[:3], device="cuda")
    beta = torch.rand(shape[:3], device="cuda")
    state = 0.1 * torch.randn(batch, VALUE_HEADS, DIM, DIM, device="cuda")
    return dict(q=q, k=k, v=v, g=g, beta=beta, initial_state=state, output_final_state=False, use_qk_l2norm_in_kernel=True)


def reference(q, k, v, g, beta, initial_state, **_):
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, initial_state))
    q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + 1e-6) * DIM**-0.5
    k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    out = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(out, 1)


def measure(run, sets, repeats):
    for args in sets[:3]:
        run(**args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for args in sets:
            run(**args)
    times = []
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for turn in range(25 + repeats):
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        if turn >= 25:
            times.append(start.elapsed_time(stop) * 1e3 / len(sets))
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--repeats", type=int, default=100)
    args = parser.parse_args()
    rows = []
    for batch in (1, 16):
        for nodes in (16, 32, 64, 128, 256):
            one = inputs(batch, nodes)
            size = sum(x.numel() * x.element_size() for x in one.values() if torch.is_tensor(x))
            sets = [one] + [{k: x.clone() if torch.is_tensor(x) else x for k, x in one.items()} for _ in range(ROTATE // size + 1)]
            truth = reference(**one)
            for name, op in (("fused_recurrent", fused_recurrent_gated_delta_rule), ("chunk", chunk_gated_delta_rule)):
                with torch.no_grad():
                    error = ((op(**one)[0].double() - truth).norm() / truth.norm()).item()
                    median = measure(lambda **kw: op(**kw), sets, args.repeats)
                row = {"schema": 1, "case": "peer.fla", "variant": name, "shape": "chain", "batch": batch, "nodes": nodes,
                       "us_median": median, "relative_error": error, "device": torch.cuda.get_device_name(),
                       "torch": torch.__version__, "fla": "0.6.0", "repeats": args.repeats}
                rows.append(row)
                print(json.dumps(row), flush=True)
    if args.json:
        with open(args.json, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
