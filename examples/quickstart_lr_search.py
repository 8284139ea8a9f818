"""The learning rates of the quickstart: its own training run, once for each learning rate and seed, in one launch.

    DS_ACCELERATOR=cpu deepspeed --num_gpus 2 --no_local_rank examples/quickstart_lr_search.py \
        --config ds_configs/quickstart_mars.json --lr 5e-3 1e-2 2e-2 --seed 1 --csv examples/results/quickstart_lr.csv

A row per run is appended to the file. `lr_1d` keeps the ratio to `lr` that the configuration has (`--set lr_1d=…` is
applied first).
"""

import argparse
import copy
import csv
import json
from pathlib import Path

import torch.distributed as dist
from gpt2_deepspeed import SEQUENCE, train

from mars_dist.pretrain.world import leave_processes

COLUMNS = ["optimizer", "lr", "lr_1d", "betas", "gamma", "seed", "steps", "tokens", "held_out_loss"]

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="DeepSpeed configuration (JSON)")
    parser.add_argument("--lr", type=float, nargs="+", required=True)
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    parser.add_argument("--set", nargs="*", default=[], help="other optimizer parameters: betas=[0.9,0.99] gamma=0.05")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--csv", type=Path, required=True, help="rows are appended here")
    parser.add_argument("--runs", type=Path, default=Path("runs/lr_search"), help="folder of the metrics")
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)

    base = json.loads(args.config.read_text())
    for word in args.set:
        key, value = word.split("=", 1)
        base["optimizer"]["params"][key] = json.loads(value)
    for seed in args.seed:
        for lr in args.lr:
            config = copy.deepcopy(base)
            name, params = config["optimizer"]["type"], config["optimizer"]["params"]
            if "lr_1d" in params:
                params["lr_1d"] *= lr / params["lr"]
            params["lr"] = lr
            out = args.runs / f"{'_'.join([name.lower(), f'lr{lr:g}', *args.set, f'seed{seed}'])}.jsonl"
            loss = train(config, out, args.steps, seed)
            if dist.get_rank() == 0:
                new = not args.csv.exists()
                with args.csv.open("a", newline="") as file:
                    writer = csv.writer(file, lineterminator="\n")
                    if new:
                        writer.writerow(COLUMNS)
                    shown = [f"{params[k]:g}" if k in params else "" for k in ("lr", "lr_1d")]
                    shown += [" ".join(map(str, params["betas"])), params.get("gamma", "")]
                    tokens = args.steps * config["train_batch_size"] * SEQUENCE
                    writer.writerow([name, *shown, seed, args.steps, tokens, f"{loss:.4f}"])
    leave_processes()
