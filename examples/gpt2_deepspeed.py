"""Train a small GPT-2 with DeepSpeed. MARS or AdamW: the optimizer block of the config decides, the code is the same.

    deepspeed --num_gpus 2 --no_local_rank examples/gpt2_deepspeed.py --config ds_configs/quickstart_mars.json \
        --out runs/mars.jsonl

On a machine without a GPU put `DS_ACCELERATOR=cpu` in front.
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mars_dist  # noqa: F401  the only line that MARS needs: DeepSpeed now knows "type": "MARS"
from mars_dist.integrations.deepspeed.launch import prepare_deepspeed, use_gpu
from mars_dist.pretrain.data import Blocks, encode, shakespeare, split, unigram_loss
from mars_dist.pretrain.tokenizer import END_OF_TEXT_ID, PADDED_VOCABULARY, RANKS_FILE, gpt2_tokenizer
from mars_dist.pretrain.world import leave_processes

SEQUENCE = 64
MODEL = dict(n_layer=4, n_head=2, n_embd=64)
HELD_OUT_WORKS = 3  # the last works of the shipped text are never trained on
HELD_OUT_BATCHES = 4
WARMUP = 0.1  # of the steps


def build_model() -> torch.nn.Module:
    """transformers' GPT-2 from a configuration: random weights, no download."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=PADDED_VOCABULARY,
        n_positions=SEQUENCE,
        **MODEL,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # the default, said explicitly: transformers warns when it has to guess
    return model


def schedule(steps: int, step: int) -> float:
    """Factor on every learning rate: linear warm-up, then a cosine down to a tenth."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def mean_over_ranks(value: torch.Tensor) -> float:
    value = value.detach().float().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def held_out_loss(engine: Any, blocks: Blocks, batch: int) -> float:
    engine.eval()
    losses = []
    with torch.no_grad():
        for i in range(HELD_OUT_BATCHES):
            ids = torch.from_numpy(blocks.batch(i, batch, dist.get_rank(), dist.get_world_size())).to(engine.device)
            losses.append(engine(input_ids=ids, labels=ids).loss)
    engine.train()
    return mean_over_ranks(torch.stack(losses).mean())


def optimizer_facts(engine: Any) -> dict[str, Any]:
    """What the optimizer really holds: bytes of its states on each rank, and how many tensors follow which rule."""
    optimizer = engine.basic_optimizer
    tensors = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    per_rank: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(per_rank, sum(t.numel() * t.element_size() for t in tensors))
    if hasattr(optimizer, "rule_counts"):
        rules = optimizer.rule_counts()
    else:
        rules = {type(optimizer).__name__: len(list(engine.module.parameters()))}
    return {"state_bytes_per_rank": per_rank, "rules": rules}


def train(config: dict[str, Any], out: Path, steps: int, seed: int = 1, eval_every: int = 50) -> float:
    """One run; metrics go to `out` as JSON lines, the last one a summary. Returns the last held-out loss."""
    prepare_deepspeed(out.parent)
    import deepspeed

    if not dist.is_initialized():
        deepspeed.init_distributed("nccl" if use_gpu() else "gloo", verbose=False)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batch = config["train_batch_size"]

    tokenizer = gpt2_tokenizer()
    train_works, held_out_works = split(shakespeare(), HELD_OUT_WORKS)
    train_tokens, held_out_tokens = encode(train_works, tokenizer), encode(held_out_works, tokenizer)
    blocks = Blocks(train_tokens, SEQUENCE, seed)
    held_out = Blocks(held_out_tokens, SEQUENCE, seed=0)

    torch.manual_seed(seed)
    model = build_model()
    parameters = sum(p.numel() for p in model.parameters())
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=config | {"bf16": {"enabled": use_gpu() and torch.cuda.is_bf16_supported()}},
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: schedule(steps, s)),
    )

    name = config["optimizer"]["type"]
    log = out.open("w") if rank == 0 else None
    if rank == 0:
        lr, zero = config["optimizer"]["params"]["lr"], engine.zero_optimization_stage()
        print(f"\n{name}, lr {lr:g}: {parameters / 1e6:.1f} M parameters, {steps} steps of {batch} x {SEQUENCE} tokens")
        print(f"ZeRO-{zero} on {world_size} ranks ({engine.device.type}); tokenizer: {RANKS_FILE}", flush=True)

    rates, start, loss_out = [], time.perf_counter(), math.nan
    for step in range(steps):
        step_start = time.perf_counter()
        lr = engine.get_lr()[0]
        ids = torch.from_numpy(blocks.batch(step, batch, rank, world_size)).to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        record: dict[str, Any] = {"step": step + 1, "tokens": (step + 1) * batch * SEQUENCE}
        record["loss"] = mean_over_ranks(loss)
        rates.append(batch * SEQUENCE / (time.perf_counter() - step_start))
        record |= {"lr": lr, "tokens_per_s": round(rates[-1], 1)}
        if (step + 1) % eval_every == 0 or step + 1 == steps:
            record["held_out_loss"] = loss_out = held_out_loss(engine, held_out, batch)
            if rank == 0:
                print(
                    f"{name} step {step + 1:4d}/{steps}  loss {record['loss']:.3f}  held-out {loss_out:.3f}  "
                    f"lr {lr:.1e}  {statistics.median(rates):,.0f} tokens/s",
                    flush=True,
                )
        record["seconds"] = round(time.perf_counter() - start, 2)
        if log:
            print(json.dumps(record), file=log, flush=True)

    summary = {
        "summary": name,
        "optimizer": config["optimizer"],
        "zero_stage": engine.zero_optimization_stage(),
        "engine": type(engine.optimizer).__name__,
        "device": engine.device.type,
        "ranks": world_size,
        "parameters": parameters,
        "tokens_per_s": round(statistics.median(rates), 1),
        "unigram_loss": unigram_loss(train_tokens, held_out_tokens),
        **optimizer_facts(engine),
    }
    if log:
        print(json.dumps(summary), file=log)
        log.close()
    engine.destroy()
    return loss_out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="DeepSpeed configuration (JSON)")
    parser.add_argument("--out", type=Path, required=True, help="file of the metrics, JSON lines")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seed", type=int, default=1, help="of the initial weights and of the data order")
    parser.add_argument("--eval-every", type=int, default=50, help="steps between two held-out losses")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    train(json.loads(args.config.read_text()), args.out, args.steps, args.seed, args.eval_every)
    leave_processes()
