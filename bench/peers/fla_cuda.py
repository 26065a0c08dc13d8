"""Times flash-linear-attention's gated delta rule on chains beside canopy's sweep: same shapes, CUDA-graph replay, inputs rotated.

Needs a CUDA device, PyTorch, Triton, and the PyPI packages flash-linear-attention==0.6.0, fla-core==0.6.0, einops.
    python bench/peers/fla_cuda.py --json rows.jsonl            # short chains
    python bench/peers/fla_cuda.py --prefill --json rows.jsonl  # prompts: 16 key heads, final state kept, chunk form alone
    python bench/peers/fla_cuda.py --outputs target/release/canopy-bench --json rows.jsonl
        # the same f32 chains through the recurrent form and through canopy-bench op (built with feature cuda), outputs side by side; then
        # canopy-bench sweep on chains in the same run. Exit code 1 where outputs are further apart than the f32 bounds.
"""

import argparse
import json
import pathlib
import statistics
import struct
import subprocess
import sys
import tempfile

import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

KEY_HEADS, VALUE_HEADS, DIM = 16, 32, 128
ROTATE = 240 << 20


# (batch, rows) as benches/prefill_cuda.rs has them
PROMPTS = [(1, 64), (1, 128), (1, 256), (1, 512), (1, 2048), (1, 8192), (1, 32768), (2, 2048), (4, 512), (4, 2048),
           (16, 64), (16, 128), (16, 256), (16, 2048)]
CHECKED = 256  # rows of a prompt that are compared with float64
# what takes f32 rows, and the bounds of DESIGN.md 5 for f32 kernels: relative Frobenius, largest difference
DESIGNS = ("serial-chain-v32", "split-f32", "split-dense", "fused-wide-v32")
RELATIVE, MOST = 1e-5, 1e-4


def inputs(batch, nodes, key_heads=VALUE_HEADS, final=False, dtype=torch.bfloat16):
    q, k, v = (torch.randn((batch, nodes, heads, DIM), device="cuda", dtype=dtype)
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


def save(path, tensors):
    """A safetensors file of f32 and i32 tensors."""
    header, body = {}, b""
    for name, tensor in tensors.items():
        data = tensor.cpu().contiguous().view(torch.uint8).flatten().tolist()
        kind = {torch.float32: "F32", torch.int32: "I32"}[tensor.dtype]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += bytes(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def load(path, name):
    """An f32 tensor of a safetensors file."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    entry = json.loads(data[8:8 + size])[name]
    begin, end = (8 + size + at for at in entry["data_offsets"])
    return torch.frombuffer(bytearray(data[begin:end]), dtype=torch.float32).reshape(entry["shape"])


def as_canopy(q, k, v, g, beta, initial_state, **_):
    """The tensors that canopy-bench op tree_gdn reads: packed rows, k last in the state."""
    batch, nodes = q.shape[:2]
    flat = [x.reshape(batch * nodes, -1) for x in (q, k, v)]
    steps = torch.arange(nodes, dtype=torch.int32) - 1
    return {"qkv": torch.cat(flat, 1), "gates": torch.stack([g, beta], 2).reshape(batch * nodes, 2, -1),
            "state": initial_state.transpose(2, 3), "parents": steps.repeat(batch),
            "cu_nodes": torch.arange(batch + 1, dtype=torch.int32) * nodes, "slots": torch.arange(batch, dtype=torch.int32)}


def outputs(binary, emit):
    """Whether every design's outputs are the recurrent form's within the f32 bounds."""
    within = True
    for batch, nodes in ((1, 16), (1, 64), (1, 128), (1, 256), (4, 128)):
        one = inputs(batch, nodes, KEY_HEADS, dtype=torch.float32)
        truth = reference(**one)
        with torch.no_grad():
            peer = fused_recurrent_gated_delta_rule(**one)[0].double()
        far = lambda a, b: (((a - b).norm() / b.norm()).item(), (a - b).abs().max().item())
        with tempfile.TemporaryDirectory() as folder:
            source, target = (pathlib.Path(folder, name) for name in ("in.safetensors", "out.safetensors"))
            save(source, as_canopy(**one))
            for design in DESIGNS:
                if design == "fused-wide-v32" and nodes > 64:
                    continue  # a chain's paths do not fit beside its rows
                subprocess.run([binary, "op", "tree_gdn", "--input", source, "--out", target, "--device", "cuda",
                                "--design", design], check=True)
                own = load(target, "o").cuda().double().reshape(peer.shape)
                (relative, most), error, peers = far(own, peer), far(own, truth)[0], far(peer, truth)[0]
                good = relative <= RELATIVE and most <= MOST
                within = within and good
                emit({"case": "peer.fla.outputs", "variant": design, "peer": "fused_recurrent", "shape": "chain", "dtype": "f32",
                      "batch": batch, "nodes": nodes, "relative_to_peer": relative, "max_abs_to_peer": most,
                      "relative_error": error, "relative_error_peer": peers, "within": good})
    return within


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--prefill", action="store_true", help="prompts instead of short chains")
    parser.add_argument("--outputs", metavar="BINARY", help="compares outputs with this canopy-bench")
    args = parser.parse_args()
    rows = []

    def emit(row):
        rows.append({"schema": 1} | row | {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "fla": "0.6.0",
                                           "command": " ".join(["python", *sys.argv])})
        print(json.dumps(rows[-1]), flush=True)

    within = outputs(args.outputs, emit) if args.outputs else True
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
            row = {"case": "peer.fla", "variant": name, "shape": "chain", "batch": batch, "nodes": nodes, "us_median": median,
                   "relative_error": error, "repeats": repeats}
            emit(row | ({"key_heads": KEY_HEADS, "final_state": True} if args.prefill else {}))
        del one, sets, truth, got
    if args.json:
        with open(args.json, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    if args.outputs:
        sweep = [args.outputs, "sweep", "--shapes", "chain", "--nodes", "16,32,64,128,256", "--batch", "1,16",
                 "--only", "serial-chain,blocked,fused-a"]
        subprocess.run(sweep + (["--json", args.json] if args.json else []), check=True)
    sys.exit(0 if within else 1)


if __name__ == "__main__":
    main()
