#!/usr/bin/env python3
"""Train the tiny Qwen3.5-architecture target and its DFlash-style drafter; evaluate acceptance; export in the HF layout.

  train.py bench    --budget 170      checks of the GDN core on this device, step times (eager, compiled), batch sizes
  train.py target   --budget 560      trains the target            -> WORK/target,  $OUT/target.tar.NN
  train.py drafter  --budget 570      rollouts, drafter, evaluation -> WORK/drafter, $OUT/tiny.tar.NN (everything)
  train.py golden   --work W          golden vectors with transformers, fp32, on the CPU (drafter runs this too)
  train.py eval     --work W          acceptance evaluation only
  train.py smoke                      all phases at toy size on the CPU, a few steps each

The budget is wall-clock seconds from process start to exit; the learning-rate schedule follows the clock, so the run
ends on time whatever the machine's speed. Data: prepare_corpus.py's folder (--data). Nothing is downloaded.
"""
import argparse
import os

import torch

from drafter import run_drafter
from evaluate import run_eval
from golden import run_golden
from runtime import Data, log
from speed import run_bench
from target import run_target
from target_model import Config

HERE = os.path.dirname(os.path.abspath(__file__))


def main():
    ap = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    ap.add_argument("phase", choices=["bench", "target", "drafter", "golden", "eval", "smoke"])
    ap.add_argument("--data", default=os.path.join(HERE, "data"))
    ap.add_argument("--work", default="work")
    ap.add_argument("--target", default=None, help="folder of a trained target (default WORK/target)")
    ap.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    ap.add_argument("--budget", type=float, default=560)
    ap.add_argument("--reserve", type=float, default=None, help="seconds kept for saving, evaluation, golden vectors")
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--compile", choices=["auto", "on", "off"], default="auto")
    ap.add_argument("--long-frac", type=float, default=0.08, help="last fraction of the time on sequences of twice the length")
    ap.add_argument("--optim", choices=["muon", "adamw"], default="muon")
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--adam-lr", type=float, default=6e-3, help="for embeddings, norms, convolutions, time constants")
    ap.add_argument("--wd", type=float, default=0.1)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--seq", type=int, default=1024)
    ap.add_argument("--steps", type=int, default=0, help="stop after this many steps (default: by the clock)")
    ap.add_argument("--bench-batches", type=int, nargs="*", default=[64, 128])
    # target shape
    ap.add_argument("--hidden", type=int, default=256)
    ap.add_argument("--ffn", type=int, default=768)
    ap.add_argument("--layers", type=int, default=8)
    ap.add_argument("--heads", type=int, default=4)
    ap.add_argument("--kv", type=int, default=2)
    ap.add_argument("--head-dim", type=int, default=256)
    ap.add_argument("--gdn-k-heads", type=int, default=2)
    ap.add_argument("--gdn-v-heads", type=int, default=4)
    ap.add_argument("--gdn-dim", type=int, default=128)
    # drafter
    ap.add_argument("--block", type=int, default=16)
    ap.add_argument("--block-lengths", type=int, nargs="*", default=[4, 4, 6, 6, 8, 8, 12, 16, 16],
                    help="lengths of the blocks it trains on, one drawn a step: `auto` asks for short blocks too")
    ap.add_argument("--init-drafter", default=None, help="folder of a drafter to go on from")
    ap.add_argument("--gamma", type=float, default=None)
    ap.add_argument("--draft-layers", type=int, default=2)
    ap.add_argument("--draft-heads", type=int, default=4)
    ap.add_argument("--draft-kv", type=int, default=2)
    ap.add_argument("--draft-head-dim", type=int, default=128)
    ap.add_argument("--draft-ffn", type=int, default=768)
    ap.add_argument("--draft-lr", type=float, default=4e-3)
    ap.add_argument("--draft-steps", type=int, default=0)
    ap.add_argument("--draft-tokens", type=int, default=49152, help="target tokens per drafter step")
    ap.add_argument("--anchors", type=int, default=16)
    ap.add_argument("--layer-ids", type=int, nargs="*", default=[1, 3, 5, 6])
    ap.add_argument("--roll-seconds", type=float, default=110)
    ap.add_argument("--roll-batch", type=int, default=2048)
    ap.add_argument("--roll-batches", type=int, default=0)
    ap.add_argument("--roll-len", type=int, default=128)
    ap.add_argument("--prefixes", type=int, nargs="*", default=[12, 48, 160, 384, 24, 96, 256])
    ap.add_argument("--no-eval", dest="do_eval", action="store_false")
    ap.add_argument("--no-golden", dest="do_golden", action="store_false")
    ap.add_argument("--eval-prompts", type=int, default=400)
    ap.add_argument("--eval-len", type=int, default=640)
    ap.add_argument("--eval-new", type=int, default=256)
    ap.add_argument("--golden-new", type=int, default=64)
    args = ap.parse_args()
    if args.phase == "smoke":
        args.device, args.budget, args.work = "cpu", 3600, os.path.join(args.work, "smoke")
        args.batch, args.seq, args.steps, args.compile, args.long_frac = 4, 160, 6, "off", 0.4
        args.hidden, args.ffn, args.layers, args.heads, args.kv, args.head_dim, args.gdn_dim = 64, 96, 8, 4, 2, 32, 32
        args.draft_heads, args.draft_kv, args.draft_head_dim, args.draft_ffn, args.draft_steps, args.draft_tokens = 4, 2, 16, 96, 6, 800
        args.roll_batch, args.roll_batches, args.roll_len, args.prefixes, args.anchors = 8, 3, 40, [8, 24, 48], 4
        args.eval_prompts, args.eval_new, args.eval_len, args.golden_new, args.bench_batches = 25, 40, 200, 4, [2]
    if args.reserve is None:
        args.reserve = {"target": 25.0, "drafter": 90.0}.get(args.phase, 20.0)
    args.model_config = lambda vocab: Config(
        vocab_size=vocab, hidden_size=args.hidden, intermediate_size=args.ffn, num_hidden_layers=args.layers, num_attention_heads=args.heads,
        num_key_value_heads=args.kv, head_dim=args.head_dim, linear_key_head_dim=args.gdn_dim, linear_value_head_dim=args.gdn_dim,
        linear_num_key_heads=args.gdn_k_heads, linear_num_value_heads=args.gdn_v_heads)
    os.makedirs(args.work, exist_ok=True)
    device = torch.device(args.device)
    torch.set_float32_matmul_precision("high")
    data = Data(args.data, device, limit=2_000_000 if args.phase == "smoke" else None)
    if args.phase == "smoke":
        run_bench(args, device, data)
        run_target(args, device, data)
        run_drafter(args, device, data)
    elif args.phase == "golden":
        run_golden(args, data)
    else:
        dict(bench=run_bench, target=run_target, drafter=run_drafter, eval=run_eval)[args.phase](args, device, data)
    log("done")


if __name__ == "__main__":
    main()
