"""Times PyTorch's bf16 products (cuBLAS) at the 9B's shapes and a prefill pass's rows: CUDA-graph replay, weights rotated past the L2.

Needs a CUDA device and PyTorch. Beside canopy's linear_cuda bench, which rounds f32 rows and writes f32 outputs; here both are bf16.
    python bench/peers/products_cuda.py --json rows.jsonl
"""

import argparse
import json

import torch

ROTATE = 240 << 20
BF16 = torch.bfloat16
# name, inputs, outputs
MATRICES = [
    ("gate and up", 4096, 24576),
    ("down", 12288, 4096),
    ("delta rule's projections", 4096, 12352),
    ("o", 4096, 4096),
    ("the drafter's features", 32768, 4096),
]


def measure(inputs, outputs, rows, repeats):
    """Sorted microseconds of one product."""
    count = ROTATE // (2 * inputs * outputs) + 2
    weights = [torch.randn(outputs, inputs, device="cuda", dtype=BF16) for _ in range(count)]
    x = torch.randn(rows, inputs, device="cuda", dtype=BF16)
    y = torch.empty(rows, outputs, device="cuda", dtype=BF16)

    def run():
        for weight in weights:
            torch.mm(x, weight.t(), out=y)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / count)
    return sorted(times[2:])


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--json")
    args.add_argument("--rows", default="256,512,1024,2048,4096")
    args = args.parse_args()
    for name, inputs, outputs in MATRICES:
        for rows in map(int, args.rows.split(",")):
            times = measure(inputs, outputs, rows, 11)
            us = times[len(times) // 2]
            tflops = 2e-6 * inputs * outputs * rows / us
            print(f"{name:26} {rows:5} rows {us:9.1f} us {tflops:6.0f} TFLOP/s", flush=True)
            if args.json:
                line = {
                    "schema": 1,
                    "case": "peer.products",
                    "peer": f"PyTorch {torch.__version__}",
                    "matrix": name,
                    "inputs": inputs,
                    "outputs": outputs,
                    "rows": rows,
                    "us_median": us,
                    "us_p10": times[1],
                    "us_p90": times[-2],
                    "tflop_per_s": tflops,
                    "device": torch.cuda.get_device_name(),
                    "command": "python bench/peers/products_cuda.py --json FILE",
                }
                with open(args.json, "a") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
