"""Exact mode under DeepSpeed: h is the gradient of the SAME batch at the point before, not the last gradient.

    deepspeed --num_gpus 8 --no_local_rank examples/exact_deepspeed.py --stage 3

On a machine without a GPU: DS_ACCELERATOR=cpu deepspeed --num_gpus 2 --no_local_rank examples/exact_deepspeed.py

It takes two gradients for each step. The engine's counters, its schedule and its loss scale see one of them. Beside an
ordinary loop: the function `train_on`, which is the body of that loop, and the two lines of `for`.
"""

import argparse
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

import mars_dist  # noqa: F401 - importing it is all that "type": "MARS" needs
from mars_dist.exact import ExactMode
from mars_dist.integrations.deepspeed.launch import initialize, prepare_deepspeed, use_gpu
from mars_dist.pretrain.data import encode, shakespeare
from mars_dist.pretrain.tokenizer import END_OF_TEXT_ID, PADDED_VOCABULARY, gpt2_tokenizer
from mars_dist.pretrain.world import leave_processes


def config(args: argparse.Namespace) -> dict:
    params = {"lr": 1e-2, "is_approx": False, "mars_type": args.mars_type, "weight_decay": 0.01}
    offload = {"offload_optimizer": {"device": "cpu"}} if args.offload else {}
    return {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_accumulation_steps": args.accumulate,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "MARS", "params": params},
        "zero_optimization": {"stage": args.stage, **offload},
        "bf16": {"enabled": args.bf16},
        "steps_per_print": 1_000_000,
    }


def build_model(args: argparse.Namespace) -> GPT2LMHeadModel:
    """GPT-2 with random weights and dropout, which draws the same masks in both passes of a batch."""
    ends = {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": END_OF_TEXT_ID}
    shape = {"n_layer": args.layers, "n_embd": args.width, "n_head": args.width // 32, "n_positions": args.sequence}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=PADDED_VOCABULARY, use_cache=False, **shape, **ends))
    model.loss_type = "ForCausalLM"
    return model


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    prepare_deepspeed(Path(args.out))
    deepspeed.init_distributed("nccl" if use_gpu() else "gloo", verbose=False)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build_model(args)
    engine = initialize(model=model, model_parameters=list(model.parameters()), config=config(args))[0]
    tokens = torch.from_numpy(encode(shakespeare(), gpt2_tokenizer()).astype("int64"))
    blocks = tokens[: len(tokens) // args.sequence * args.sequence].view(-1, args.sequence)
    needed = args.steps * args.accumulate * args.batch * ranks
    order = torch.randperm(len(blocks))[:needed].view(-1, ranks, args.batch)[:, rank]
    losses: list[torch.Tensor] = []

    def train_on(ids: torch.Tensor) -> None:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()  # does nothing while the gradient of the next batch is taken
        losses.append(loss.detach())

    data = (blocks[rows].to(engine.device) for rows in order)
    exact = ExactMode(engine, data, train_on, accumulation=args.accumulate)
    for step, batch in enumerate(exact, 1):
        for ids in batch:
            train_on(ids)
        if rank == 0:
            print(f"step {step}/{args.steps}  loss {losses[-1].item():.4f}  gradients {exact.gradient_evaluations}")
    if rank == 0:
        mars = engine.basic_optimizer
        print(f"ZeRO-{engine.zero_optimization_stage()} on {ranks} processes, {engine.global_steps} steps; ", end="")
        print(f"pieces: {sorted(mars.engines())}; rules: {mars.rule_counts()}")
    engine.destroy()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--offload", action="store_true", help="optimizer states in the host's memory")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--batch", type=int, default=8, help="sequences per micro-batch on each process")
    parser.add_argument("--mars-type", default="mars-adamw")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default="runs/exact", help="folder of what DeepSpeed keeps beside a run")
    train(parser.parse_args())
    leave_processes()  # after the engine is gone
