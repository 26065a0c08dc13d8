"""Trains the target; the schedule follows the clock, so that the run ends on time whatever the machine's speed."""
import contextlib
import json
import math
import os
import shutil
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from generation import show_samples
from runtime import LOG, T_START, Optim, bundle, log, round_bf16, schedule, time_steps, tree_files
from target_model import Config, Layer, TinyQwen, count, lin

CHAT_TEMPLATE = (Path(__file__).resolve().parents[1] / "models/canopy-tiny/target/chat_template.jinja").read_text()


def ce_loss(h, emb, y, dtype):
    logits = lin(h.to(dtype), emb).float()
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))


class Runner:
    """The target's training step, eager or with compiled layers."""

    def __init__(self, model, dtype):
        self.model, self.dtype = model, dtype
        self.ce = ce_loss
        self.compiled = False

    def compile(self):
        import torch._dynamo
        torch._dynamo.config.cache_size_limit = 64
        fn = torch.compile(Layer.forward, dynamic=False)
        for layer in self.model.model.layers:
            layer.forward = fn.__get__(layer)
        self.ce = torch.compile(ce_loss, dynamic=False)
        self.compiled = True

    def uncompile(self):
        if self.compiled:
            for layer in self.model.model.layers:
                layer.__dict__.pop("forward", None)
            self.ce, self.compiled = ce_loss, False

    @contextlib.contextmanager
    def eager(self):
        """Evaluation with other shapes or without gradients must not make the compiled layers recompile."""
        saved = [layer.__dict__.pop("forward", None) for layer in self.model.model.layers]
        try:
            yield
        finally:
            for layer, f in zip(self.model.model.layers, saved):
                if f is not None:
                    layer.forward = f

    def loss(self, batch):
        h = self.model.hidden(batch[:, :-1], self.dtype)
        return self.ce(h, self.model.model.embed_tokens.weight, batch[:, 1:], self.dtype)


def choose_step(runner, batch, device, args):
    """Pick the fastest correct form of the training step on this machine: eager or compiled layers.

    A form is taken only if it runs, agrees with the eager loss."""
    def step():
        loss = runner.loss(batch)
        loss.backward()
        for p in runner.model.parameters():
            p.grad = None
        return loss
    tok = batch.shape[0] * (batch.shape[1] - 1)
    eager_loss = step().item()
    best, form = time_steps(step, 3, device), "eager"
    log(f"eager: {best * 1e3:.1f} ms per forward+backward of {tok} tokens = {tok / best / 1e3:.0f} k tokens/s, loss {eager_loss:.4f}")
    if args.compile != "off":
        try:
            t0 = time.time()
            runner.compile()
            loss = step().item()
            log(f"compiled in {time.time() - t0:.0f} s, loss {loss:.4f}")
            if not abs(loss - eager_loss) < 0.02 * abs(eager_loss):
                raise RuntimeError("compiled loss differs from eager loss")
            t = time_steps(step, 3, device)
            log(f"compiled: {t * 1e3:.1f} ms = {tok / t / 1e3:.0f} k tokens/s")
            if t < 0.97 * best or args.compile == "on":
                best, form = t, "compiled"
        except Exception as e:
            log("compile not used:", type(e).__name__, str(e).split("\n")[0][:200])
        if form != "compiled":
            runner.uncompile()
    log("training step:", form)
    return form


@torch.no_grad()
def valid_loss(runner, data, T, batches=4, B=32):
    gen = data.gen
    data.gen = torch.Generator(device=data.device)
    data.gen.manual_seed(99)
    with runner.eager():
        tot = sum(ce_loss(runner.model.hidden(b[:, :-1], runner.dtype), runner.model.model.embed_tokens.weight, b[:, 1:], runner.dtype).item()
                  for b in (data.windows("valid", B, T + 1, 0.5) for _ in range(batches)))
    data.gen = gen
    return tot / batches


def save_target(model, cfg, data, folder):
    from safetensors.torch import save_file
    os.makedirs(folder, exist_ok=True)
    sd = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    save_file(sd, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    json.dump(cfg.hf_dict(data.special), open(os.path.join(folder, "config.json"), "w"), indent=2)
    shutil.copy(os.path.join(data.folder, "tokenizer.json"), folder)
    Path(folder, "chat_template.jinja").write_text(CHAT_TEMPLATE)
    json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
               "unk_token": None, "add_bos_token": False, "clean_up_tokenization_spaces": False, "model_max_length": cfg.max_position_embeddings},
              open(os.path.join(folder, "tokenizer_config.json"), "w"), indent=2)
    json.dump({"do_sample": False, "eos_token_id": [data.special["<|im_end|>"], data.special["<|endoftext|>"]],
               "pad_token_id": data.special["<|endoftext|>"]}, open(os.path.join(folder, "generation_config.json"), "w"), indent=2)


def config_from_hf(folder):
    j = json.load(open(os.path.join(folder, "config.json")))
    keys = {f: j[f] for f in Config.__dataclass_fields__ if f in j}
    keys["rope_theta"] = j["rope_parameters"]["rope_theta"]
    keys["partial_rotary_factor"] = j["rope_parameters"]["partial_rotary_factor"]
    return Config(**keys)


def load_target(folder, device):
    from safetensors.torch import load_file
    cfg = config_from_hf(folder)
    m = TinyQwen(cfg)
    shards = sorted(Path(folder).glob("*.safetensors"))
    m.load_state_dict({k: v.float() for shard in shards for k, v in load_file(shard).items()})
    return m.to(device).eval().requires_grad_(False), cfg


def run_target(args, device, data):
    torch.manual_seed(args.seed)
    cfg = args.model_config(data.vocab)
    model = TinyQwen(cfg).to(device)
    log("target parameters:", count(model), json.dumps(cfg.layer_types().count("full_attention")), "attention layers of", cfg.num_hidden_layers)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    runner = Runner(model, dtype)
    B, T = args.batch, args.seq
    batch = data.windows("train", B, T + 1)
    form = choose_step(runner, batch, device, args)
    opt = Optim(list(model.named_parameters()), args.lr, args.wd, args.optim == "muon", args.adam_lr)
    work = os.path.join(args.work, "target")
    t0, t_end = time.time(), T_START + args.budget - args.reserve
    step, last_save, losses, nan = 0, time.time(), [], 0
    best_state = None
    while True:
        now = time.time()
        frac = (now - t0) / max(1e-6, t_end - t0) if not args.steps else step / args.steps
        if frac >= 1.0:
            break
        if frac > 1.0 - args.long_frac and T == args.seq and B > 1:     # the last part sees sequences of twice the length
            runner.uncompile()
            B, T = B // 2, T * 2
            log(f"switching to {B} x {T} at step {step}")
        batch = data.windows("train", B, T + 1)
        loss = runner.loss(batch)
        loss.backward()
        norm = opt.step(schedule(frac))
        step += 1
        if step % 20 == 0 or step <= 3 or (args.steps and args.steps <= 30):
            v = loss.item()             # also keeps the host from running far ahead of the device
            losses.append(v)
            if not math.isfinite(v):
                nan += 1
                log("loss is not finite at step", step)
                if best_state is not None and nan <= 3:
                    model.load_state_dict(best_state)
                    opt = Optim(list(model.named_parameters()), args.lr * 0.5 ** nan, args.wd, args.optim == "muon", args.adam_lr)
                    continue
                break
            if step % 200 == 0 or step <= 3 or device.type == "cpu":
                log(f"step {step} loss {v:.4f} norm {norm.item():.2f} lr x{schedule(frac):.3f} tokens {step * B * T / 1e6:.2f} M "
                    f"({step * B * T / (time.time() - t0) / 1e3:.0f} k/s)")
        if time.time() - last_save > 100:
            last_save = time.time()
            best_state = {k: v.detach().clone() for k, v in model.state_dict().items()}
            save_target(model, cfg, data, work)
            log(f"checkpoint at step {step}, valid loss {valid_loss(runner, data, T):.4f}")
            bundle(tree_files(args.work, "target"), "target")
    tokens = step * B * T
    log(f"trained {step} steps, {tokens / 1e6:.1f} M tokens")
    runner.uncompile()
    T = args.seq
    v32 = valid_loss(runner, data, T, 8)
    round_bf16(model)
    vbf = valid_loss(runner, data, T, 8)
    log(f"valid loss {v32:.4f}, with bf16 weights {vbf:.4f}")
    save_target(model, cfg, data, work)
    json.dump(dict(steps=step, tokens=tokens, valid_loss=vbf, valid_loss_fp32_weights=v32, seconds=time.time() - t0, parameters=count(model),
                   form=form, log=LOG), open(os.path.join(args.work, "target_log.json"), "w"), indent=1)
    bundle(tree_files(args.work, "target", "target_log.json"), "target")
    show_samples(model, data, dtype, device)
