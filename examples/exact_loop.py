"""Exact mode in a plain PyTorch loop: h is the gradient of the SAME batch at the point before, not the last gradient.

    python examples/exact_loop.py                                  one process
    torchrun --nproc-per-node 2 examples/exact_loop.py             DDP

It takes two gradients for each step. Beside an ordinary loop: the function `gradient`, and the two lines of the loop.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

from mars_dist import MARS
from mars_dist.exact import ExactMode
from mars_dist.pretrain.data import encode, shakespeare
from mars_dist.pretrain.tokenizer import END_OF_TEXT_ID, PADDED_VOCABULARY, gpt2_tokenizer
from mars_dist.pretrain.world import leave_processes


def build_model(args: argparse.Namespace) -> GPT2LMHeadModel:
    """GPT-2 with random weights and dropout, which draws the same masks in both passes of a batch."""
    ends = {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": END_OF_TEXT_ID}
    shape = {"n_layer": args.layers, "n_embd": args.width, "n_head": args.width // 32, "n_positions": args.sequence}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=PADDED_VOCABULARY, use_cache=False, **shape, **ends))
    model.loss_type = "ForCausalLM"
    return model


def train(args: argparse.Namespace) -> None:
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        dist.init_process_group()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    tokens = torch.from_numpy(encode(shakespeare(), gpt2_tokenizer()).astype("int64"))
    blocks = tokens[: len(tokens) // args.sequence * args.sequence].view(-1, args.sequence)
    needed = args.steps * args.accumulate * args.batch * ranks
    order = torch.randperm(len(blocks))[:needed].view(-1, ranks, args.batch)[:, rank]
    model = build_model(args).to(device)
    optimizer = MARS(model.named_parameters(), lr=args.lr, is_approx=False, mars_type=args.mars_type, weight_decay=0.01)
    net = DistributedDataParallel(model) if several else model
    losses: list[torch.Tensor] = []

    def gradient(ids: torch.Tensor) -> None:
        loss = net(input_ids=ids, labels=ids).loss
        (loss / args.accumulate).backward()
        losses.append(loss.detach())

    def clip() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)

    data = (blocks[rows].to(device) for rows in order)
    exact = ExactMode(optimizer, data, gradient, accumulation=args.accumulate, model=net, before_step=clip)
    for step, batch in enumerate(exact, 1):
        for ids in batch:
            gradient(ids)
        clip()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}/{args.steps}  loss {losses[-1].item():.4f}  gradients {exact.gradient_evaluations}")
    if rank == 0:
        print(f"{type(net).__name__} on {ranks} processes; pieces: {sorted(optimizer.engines())}; ", end="")
        print(f"rules: {optimizer.rule_counts()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--batch", type=int, default=8, help="sequences per micro-batch on each process")
    parser.add_argument("--clip", type=float, default=1.0, help="norm of the whole gradient")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--mars-type", default="mars-adamw")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    train(parser.parse_args())
    leave_processes()  # after model and optimizer are gone
