"""Times flash-linear-attention's gated delta rule on chains beside canopy's sweep: same shapes, CUDA-graph replay, inputs rotated.

Needs a CUDA device, PyTorch, Triton, and the PyPI packages flash-linear-attention==0.6.0, fla-core==0.6.0, einops.
    python bench/peers/fla_cuda.py --json rows.jsonl            # short chains
    python bench/peers/fla_cuda.py --prefill --json rows.jsonl  # prompts: 16 key heads, final state kept, chunk form alone
"""

import argparse
import json
import statistics

import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

KEY_HEADS, VALUE_HEADS, DIM = 16, 32, 128
ROTATE = 240 << 20


# (batch, rows) as benches/prefill_cuda.rs has them
PROMPTS = [(1, 64), (1, 128), (1, 256), (1, 512), (1, 2048), (1, 8192), (1, 32768), (2, 2048), (4, 512), (4, 2048),
           (16, 64), (16, 128), (16, 256), (16, 2048)]
CHECKED = 256  # rows of a prompt that are compared with float64


def inputs(batch, nodes, key_heads=VALUE_HEADS, final=False):
    q, k, v = (torch.randn((batch, nodes, heads, DIM), device="cuda", dtype=torch.bfloat16)
               for heads in (key_heads, key_heads, VALUE_HEADS))
    g = -0.1 * torch.rand((batch, nodes, VALUE_HEADS), device="cuda")
    beta = torch.rand((batch, nodes, VALUE_HEADS), device="cuda")
    state = 0.1 * torch.randn(batch, VALUE_HEADS, DIM, DIM, device="cuda")
    return dict(q=q, k=k, v=v, g=g, beta=beta, initial_state=state, output_final_state=final, use_qk_l2norm_in_kernel=True)


def reference(q, k, v, g, beta, initial_state, **_):
    q, k, v, g, beta = (x[:, :CHECKED].double() for x in (q, k, v, g, beta))
    state = initial_state.double()
    q, k = (x.repeat_interleave(VALUE_HEADS // x.shape[2], 2) for x in (q, k))
    q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + 1e-6) * DIM**-0.5
    k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    out = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(out, 1)


def rotated(one):
    size = sum(x.numel() * x.element_size() for x in one.values() if torch.is_tensor(x))
    return [one] + [{k: x.clone() if torch.is_tensor(x) else x for k, x in one.items()} for _ in range(ROTATE // size + 1)]


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
    warm = min(25, repeats)
    for turn in range(warm + repeats):
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        if turn >= warm:
            times.append(start.elapsed_time(stop) * 1e3 / len(sets))
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--prefill", action="store_true", help="prompts instead of short chains")
    args = parser.parse_args()
    rows = []
    chunk = ("chunk", chunk_gated_delta_rule)
    if args.prefill:
        cases = [(batch, nodes, (chunk,)) for batch, nodes in PROMPTS]
    else:
        both = (("fused_recurrent", fused_recurrent_gated_delta_rule), chunk)
        cases = [(batch, nodes, both) for batch in (1, 16) for nodes in (16, 32, 64, 128, 256)]
    for batch, nodes, ops in cases:
        one = inputs(batch, nodes, KEY_HEADS, True) if args.prefill else inputs(batch, nodes)
        sets, truth = rotated(one), reference(**one)
        for name, op in ops:
            with torch.no_grad():
                got = op(**one)[0][:, :CHECKED].double()
                error = ((got - truth).norm() / truth.norm()).item()
                repeats = args.repeats if batch * nodes < 4096 else max(5, args.repeats // 10)
                median = measure(lambda **kw: op(**kw), sets, repeats)
            row = {"schema": 1, "case": "peer.fla", "variant": name, "shape": "chain", "batch": batch, "nodes": nodes,
                   "us_median": median, "relative_error": error, "device": torch.cuda.get_device_name(),
                   "torch": torch.__version__, "fla": "0.6.0", "repeats": repeats}
            if args.prefill:
                row |= {"key_heads": KEY_HEADS, "final_state": True}
            rows.append(row)
            print(json.dumps(row), flush=True)
        del one, sets, truth, got
    if args.json:
        with open(args.json, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
