"""Times flex_attention, compiled, over committed keys and tree ancestors: the shapes and the method of sdpa_cuda.py.

Needs a CUDA device and PyTorch. Committed keys and ancestors are one mask_mod, of which create_block_mask makes the blocks that kernels skip.
Three ways: the defaults, the kernel options that decoding suits (split keys), and a group's query heads laid out as rows.
    python bench/peers/flex_cuda.py --json rows.jsonl
"""

import argparse
import json

import torch
from sdpa_cuda import ROTATE, inputs, measure, numbers, tree_mask, truth


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


def rows(args, heads, width, batch, nodes, context):
    tree = tree_mask(nodes)
    seen = torch.cat([torch.ones(nodes, context, dtype=torch.bool), tree], 1)[None, None].cuda()
    size = 2 * 2 * batch * heads[1] * (context + nodes) * width
    sets = [inputs(heads, width, batch, nodes, context) for _ in range(min(ROTATE // size + 2, 64))]
    want = truth(*sets[0], seen)
    for name in args.ways:
        row = {"schema": 1, "case": "peer.tree_attention.verify", "variant": name, "shape": "random",
               "heads": f"{heads[0]}/{heads[1]}", "head_dim": width,
               "batch": batch, "nodes": nodes, "context": context, "device": torch.cuda.get_device_name(), "torch": torch.__version__}
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
    parser.add_argument("--contexts", type=numbers, default=[2048, 8192, 32768])
    parser.add_argument("--nodes", type=numbers, default=[64])
    parser.add_argument("--batch", type=numbers, default=[1, 16])
    parser.add_argument("--ways", type=lambda text: text.split(","), default=["flex-gqa", "flex-small-blocks", "flex-folded"])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", help="appends the rows to this file")
    args = parser.parse_args()
    torch.manual_seed(1)
    for context in args.contexts:
        for batch in args.batch:
            for nodes in args.nodes:
                for heads, width in (((16, 4), 256), ((32, 8), 128)):
                    torch._dynamo.reset()
                    with torch.no_grad():
                        rows(args, heads, width, batch, nodes, context)


if __name__ == "__main__":
    main()
