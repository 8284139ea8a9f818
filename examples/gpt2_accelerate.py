"""Train a small GPT-2 with MARS in a plain Accelerate loop; the file of `accelerate launch` decides the engine.

    accelerate launch --config_file launch/accelerate/fsdp2_8.yaml examples/gpt2_accelerate.py --mars-type mars-m
On a machine without a GPU: accelerate launch --config_file launch/accelerate/cpu_2.yaml examples/gpt2_accelerate.py
"""

import argparse
import math
import os

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from mars_dist import MARS, param_groups  # importing mars_dist is all that Accelerate needs
from mars_dist.integrations.accelerate import fsdp2_plugin, mars_inside
from mars_dist.pretrain.data import encode, shakespeare
from mars_dist.pretrain.tokenizer import END_OF_TEXT_ID, PADDED_VOCABULARY, gpt2_tokenizer
from mars_dist.pretrain.world import leave_processes

WARMUP = 0.1  # of the updates


def build_model(args: argparse.Namespace) -> GPT2LMHeadModel:
    """GPT-2 with random weights, no download."""
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=PADDED_VOCABULARY,
            n_positions=args.sequence,
            n_layer=args.layers,
            n_embd=args.width,
            n_head=args.width // 32,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=END_OF_TEXT_ID,
            eos_token_id=END_OF_TEXT_ID,
            use_cache=False,
        )
    )
    model.loss_type = "ForCausalLM"  # the default, said explicitly: transformers warns when it has to guess
    return model


def schedule(update: int, updates: int) -> float:
    """Factor on every learning rate: linear warm-up, then a cosine down to a tenth."""
    warmup = max(1, round(WARMUP * updates))
    if update < warmup:
        return (update + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (update - warmup) / max(1, updates - warmup)))


def train(args: argparse.Namespace) -> None:
    fsdp2 = os.environ.get("ACCELERATE_USE_FSDP") == "true" and os.environ.get("FSDP_VERSION") == "2"
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true",
        gradient_accumulation_steps=args.accumulate,
        fsdp_plugin=fsdp2_plugin() if fsdp2 else None,  # the YAML's, but gradients are summed in float32
    )
    torch.manual_seed(args.seed)  # the same weights and the same order of the data on every process
    tokens = torch.from_numpy(encode(shakespeare(), gpt2_tokenizer()).astype("int64"))
    blocks = tokens[: len(tokens) // args.sequence * args.sequence].view(-1, args.sequence)
    loader = DataLoader(blocks, batch_size=args.batch, shuffle=True, drop_last=True)
    model = build_model(args)
    # Which tensor takes which rule: under matrix variants (mars-m, mars-shampoo) embeddings and head take AdamW.
    optimizer = MARS(param_groups(model, args.mars_type, lr=args.lr, weight_decay=0.01), mars_type=args.mars_type)
    # Not prepared: a prepared scheduler steps once per process at each call. It moves every group, 1-D tensors too.
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: schedule(update, args.steps))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    update = skipped = 0
    while update < args.steps:
        for ids in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:  # the last batch of an update: gradients are complete only now
                    accelerator.clip_grad_norm_(model.parameters(), args.clip)
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            update += 1
            if accelerator.optimizer_step_was_skipped:  # the GradScaler found an overflow: the schedule waits as well
                skipped += 1
            else:
                scheduler.step()
            if update % args.log_every == 0 or update == args.steps:
                mean = accelerator.reduce(loss.detach(), reduction="mean").item()
                lr = optimizer.param_groups[0]["lr"]
                accelerator.print(f"update {update:5d}/{args.steps}  loss {mean:.4f}  next lr {lr:.2e}")
            if update == args.steps:
                break

    mars = mars_inside(optimizer)
    accelerator.print(
        f"{accelerator.distributed_type.value} on {accelerator.num_processes} processes: "
        f"{type(model).__name__}, {type(mars).__name__}; pieces: {sorted(mars.engines())}; "
        f"rules: {mars.rule_counts()}; skipped updates: {skipped}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="updates of the weights")
    parser.add_argument("--accumulate", type=int, default=1, help="batches per update on each process")
    parser.add_argument("--batch", type=int, default=8, help="sequences per batch on each process")
    parser.add_argument("--clip", type=float, default=1.0, help="norm of the gradient; DeepSpeed takes its YAML's")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--mars-type", default="mars-adamw")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-every", type=int, default=20)
    train(parser.parse_args())
    leave_processes()  # what accelerator.end_training() does as well, but after the model is gone
