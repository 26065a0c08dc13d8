"""Times flex_attention, compiled, over committed keys and tree ancestors: the shapes and the method of sdpa_cuda.py.

Needs a CUDA device and PyTorch. Committed keys and ancestors are one mask_mod, of which create_block_mask makes the blocks that kernels skip.
Three ways: the defaults, the kernel options that decoding suits (split keys), and a group's query heads laid out as rows.
A shape that the file has in a way is not measured again, so that a run goes on where the last one ended; --against orders shapes by how near
the fastest other row is to canopy's, nearest first, and --seconds begins no shape after that time.
    python bench/peers/flex_cuda.py --ways flex-folded --json rows.jsonl --seconds 90 \\
        --against bench/results/h200-attention.jsonl,bench/results/h200-attention-peers.jsonl
"""

import argparse
import json
import os
import time

import torch
from sdpa_cuda import ROTATE, inputs, measure, numbers, tree_mask, truth

COMMAND = "python bench/peers/flex_cuda.py --json FILE"
MODELS = (((16, 4), 256), ((32, 8), 128))


def read(path):
    """The rows of this operation in a file; none where there is no file."""
    if not path or not os.path.exists(path):
        return []
    with open(path) as file:
        rows = [json.loads(line) for line in file if line.strip()]
    return [row for row in rows if row.get("case", "").endswith("tree_attention.verify")]


def shape_of(row):
    return row["head_dim"], row["batch"], row["nodes"], row["context"]


def done(rows):
    """(shape, way) of every row; a way that has no kernel for a shape is measured too."""
    return {(shape_of(row), row["variant"]) for row in rows}


def closeness(rows):
    """Of every shape: the fastest peer's time by canopy's newest, so that below 1 canopy is the slower one."""
    canopy, peers = {}, {}
    for row in rows:
        shape, us = shape_of(row), row.get("us_median")
        if us is None:
            continue
        if row["case"].startswith("peer."):
            peers[shape] = min(us, peers.get(shape, us))
        elif row["variant"] == "auto":
            canopy[shape] = us
    return {shape: us / canopy[shape] for shape, us in peers.items() if shape in canopy}


def plan(args):
    """Shapes that lack a way, nearest first."""
    known = [row for path in args.against for row in read(path)]
    have = done(known + read(args.json))
    near = closeness(known)
    shapes = [(width, batch, nodes, context) for context in args.contexts for batch in args.batch for nodes in args.nodes for _, width in MODELS]
    lacking = [(shape, [way for way in args.ways if (shape, way) not in have]) for shape in shapes]
    return sorted(((shape, ways) for shape, ways in lacking if ways), key=lambda item: near.get(item[0], float("inf")))


def masks(tree, context, rows, repeats):
    from torch.nn.attention.flex_attention import create_block_mask

    tree = tree.cuda().repeat(repeats, 1)

    def seen(b, h, row, key):
        return (key < context) | tree[row, (key - context).clamp(min=0)]

    return create_block_mask(seen, None, None, rows, context + tree.shape[1], device="cuda")


def ways(heads, tree, context):
    from torch.nn.attention.flex_attention import flex_attention

    nodes, group = tree.shape[0], heads[0] // heads[1]
    compiled = torch.compile(flex_attention, dynamic=False)
    per_head = masks(tree, context, nodes, 1)
    per_group = masks(tree, context, group * nodes, group)

    def folded(q, k, v):
        batch, _, _, width = q.shape
        out = compiled(q.view(batch, heads[1], group * nodes, width), k, v, block_mask=per_group)
        return out.view(batch, heads[0], nodes, width)

    return {
        "flex-gqa": lambda q, k, v: compiled(q, k, v, block_mask=per_head, enable_gqa=True),
        "flex-small-blocks": lambda q, k, v: compiled(
            q, k, v, block_mask=per_head, enable_gqa=True, kernel_options={"BLOCK_M": 64, "BLOCK_N": 32, "num_stages": 2}
        ),
        "flex-folded": folded,
    }


def rows(args, names, heads, width, batch, nodes, context):
    tree = tree_mask(nodes)
    seen = torch.cat([torch.ones(nodes, context, dtype=torch.bool), tree], 1)[None, None].cuda()
    size = 2 * 2 * batch * heads[1] * (context + nodes) * width
    sets = [inputs(heads, width, batch, nodes, context) for _ in range(min(ROTATE // size + 2, 64))]
    want = truth(*sets[0], seen)
    for name in names:
        row = {"schema": 1, "case": "peer.tree_attention.verify", "variant": name, "shape": "random",
               "heads": f"{heads[0]}/{heads[1]}", "head_dim": width, "dtype": "bf16", "batch": batch, "nodes": nodes, "context": context,
               "device": torch.cuda.get_device_name(), "torch": torch.__version__, "command": COMMAND}
        try:
            run = ways(heads, tree, context)[name]
            error = (run(*sets[0])[:1].double() - want).norm() / want.norm()
            times = measure(run, sets, args.repeats)
            at = [times[round((len(times) - 1) * share)] for share in (0.1, 0.5, 0.9)]
            row |= {"us_p10": at[0], "us_median": at[1], "us_p90": at[2], "relative_error": error.item(), "repeats": args.repeats}
        except Exception as why:  # a way that has no kernel for a shape is a result
            text = [line for line in str(why).strip().splitlines() if line.strip()] or [type(why).__name__]
            telling = [line for line in text if "rror" in line] or text
            row["error"] = f"{type(why).__name__}: {telling[0].strip()}"[:300]
            torch.cuda.synchronize()
        print(json.dumps(row), flush=True)
        if args.json:
            with open(args.json, "a") as file:
                file.write(json.dumps(row) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=numbers, default=[0, 512, 2048, 8192, 32768, 131072])
    parser.add_argument("--nodes", type=numbers, default=[16, 64, 128])
    parser.add_argument("--batch", type=numbers, default=[1, 4, 16])
    parser.add_argument("--ways", type=lambda text: text.split(","), default=["flex-gqa", "flex-small-blocks", "flex-folded"])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", help="appends the rows to this file, which is read first")
    parser.add_argument("--against", type=lambda text: text.split(","), default=[], help="files of rows: canopy's, and peers' that need no second time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begins no shape after so many")
    parser.add_argument("--list", action="store_true", help="prints the shapes in their order and measures nothing")
    args = parser.parse_args()
    begun = time.monotonic()
    todo = plan(args)
    if args.list:
        for shape, names in todo:
            print("width {}, {} streams, {} nodes, {} keys: ".format(*shape) + ", ".join(names))
        return
    torch.manual_seed(1)
    measured = 0
    for (width, batch, nodes, context), names in todo:
        if time.monotonic() - begun > args.seconds:
            break
        heads = next(heads for heads, of in MODELS if of == width)
        torch._dynamo.reset()
        with torch.no_grad():
            rows(args, names, heads, width, batch, nodes, context)
        torch.cuda.empty_cache()
        measured += 1
    print(f"{measured} shapes measured, {len(todo) - measured} left, {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
