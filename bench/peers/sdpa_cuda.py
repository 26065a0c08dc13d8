"""Times PyTorch's attention over a tree mask beside canopy's attention_cuda bench: same shapes, CUDA-graph replay, inputs rotated.

Needs a CUDA device and PyTorch. Two ways: scaled_dot_product_attention with grouped KV heads, and the same with the query heads of a group
laid out as rows (which shares the keys, as canopy does). flex_cuda.py beside it times flex_attention.
    python bench/peers/sdpa_cuda.py --json rows.jsonl
"""

import argparse
import json
import random

import torch
import torch.nn.functional as F

ROTATE = 240 << 20
BF16 = torch.bfloat16


def tree_mask(nodes, seed=3):
    """[nodes, nodes], true for ancestors and self of a random tree."""
    draw = random.Random(seed)
    mask = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        mask[node] |= mask[draw.randrange(node)]
    return mask


def inputs(heads, width, batch, nodes, context):
    def noise(*shape):
        return torch.randn(shape, device="cuda", dtype=BF16)

    keys = context + nodes
    return noise(batch, heads[0], nodes, width), noise(batch, heads[1], keys, width), noise(batch, heads[1], keys, width)


def truth(q, k, v, mask):
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k[:1], v[:1]))
    scores = (q[:1].double() @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


def grouped(mask):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def folded(mask, heads):
    group = heads[0] // heads[1]
    rows = mask.repeat(1, 1, group, 1)

    def run(q, k, v):
        batch, _, nodes, width = q.shape
        out = F.scaled_dot_product_attention(q.view(batch, heads[1], group * nodes, width), k, v, attn_mask=rows)
        return out.view(batch, heads[0], nodes, width)

    return run


def measure(run, sets, repeats):
    """Sorted microseconds of one call over rotated inputs."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run(*sets[0])
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for some in sets:
                run(*some)
        times = []
        for turn in range(3 + repeats):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            graph.replay()
            stop.record(stream)
            stop.synchronize()
            if turn >= 3:
                times.append(start.elapsed_time(stop) * 1e3 / len(sets))
    return sorted(times)


def rows(args, heads, width, batch, nodes, context):
    tree = tree_mask(nodes)
    mask = torch.cat([torch.ones(nodes, context, dtype=torch.bool), tree], 1)[None, None].cuda()
    size = 2 * 2 * batch * heads[1] * (context + nodes) * width
    sets = [inputs(heads, width, batch, nodes, context) for _ in range(min(ROTATE // size + 2, 64))]
    want = truth(*sets[0], mask)
    ways = {"sdpa-gqa": grouped(mask), "sdpa-folded": folded(mask, heads)}
    for name, run in ways.items():
        row = {"schema": 1, "case": "peer.tree_attention.verify", "variant": name, "shape": "random",
               "heads": f"{heads[0]}/{heads[1]}", "head_dim": width,
               "batch": batch, "nodes": nodes, "context": context, "device": torch.cuda.get_device_name(), "torch": torch.__version__}
        try:
            error = (run(*sets[0])[:1].double() - want).norm() / want.norm()
            times = measure(run, sets, args.repeats)
            at = [times[round((len(times) - 1) * share)] for share in (0.1, 0.5, 0.9)]
            row |= {"us_p10": at[0], "us_median": at[1], "us_p90": at[2], "relative_error": error.item(), "repeats": args.repeats}
        except Exception as why:  # a way that has no kernel for a shape is a result
            row["error"] = str(why).strip().splitlines()[0][:200]
            torch.cuda.synchronize()
        print(json.dumps(row), flush=True)
        if args.json:
            with open(args.json, "a") as file:
                file.write(json.dumps(row) + "\n")


def numbers(text):
    return [int(part) for part in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=numbers, default=[0, 512, 2048, 8192, 32768, 131072])
    parser.add_argument("--nodes", type=numbers, default=[16, 64, 128])
    parser.add_argument("--batch", type=numbers, default=[1, 4, 16])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", help="appends the rows to this file")
    args = parser.parse_args()
    torch.manual_seed(1)
    for heads, width in (((16, 4), 256), ((32, 8), 128)):
        for batch in args.batch:
            for nodes in args.nodes:
                for context in args.contexts:
                    with torch.no_grad():
                        rows(args, heads, width, batch, nodes, context)


if __name__ == "__main__":
    main()
