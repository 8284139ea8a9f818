"""The training loop, from top to bottom: processes, data, engine, resume, steps, end."""

from __future__ import annotations

import math
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import mars_dist
from mars_dist.integrations.deepspeed.launch import prepare_deepspeed, use_gpu
from mars_dist.pretrain import checkpoint, data
from mars_dist.pretrain import model as models
from mars_dist.pretrain.engine import Plain, ZeRO, choose
from mars_dist.pretrain.metrics import Metrics
from mars_dist.pretrain.recipe import Recipe, accumulation
from mars_dist.pretrain.shards import open_split
from mars_dist.pretrain.tokenizer import gpt2_tokenizer

DONE, INTERRUPTED = 0, 3
HELD_OUT_WORKS = 3  # of the shipped text, never trained on
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class NonFiniteLoss(RuntimeError):
    """The loss is NaN or infinite: training on would poison every later checkpoint."""

    exit_code = 4


def train(recipe: Recipe, out: Path, resume: bool = True, bar: bool = True) -> int:
    """Train ``recipe`` in the folder ``out``, from its last checkpoint if there is one.

    Returns: 0 when all steps are done, 3 when a signal ended the run after a checkpoint was saved.

    Raises:
        NonFiniteLoss: with step, rank and last checkpoint.
        ValueError: for a recipe that does not fit the data, the number of ranks or the checkpoint in ``out``.
    """
    engine_name = choose(recipe)
    device = start_processes(out, engine_name)
    rank, world_size = place()
    micro_batches = accumulation(recipe.training.batch, recipe.training.micro_batch, world_size)

    sequences, digest = open_sequences(recipe, "train")
    held_out, _ = open_sequences(recipe, "val")

    torch.manual_seed(recipe.training.seed)
    engine = (ZeRO if engine_name == "deepspeed" else Plain)(recipe, device)
    facts = {
        "recipe": recipe.name,
        "model": recipe.model.model_dump(exclude={"gradient_checkpointing", "compile"}),
        "optimizer": recipe.optimizer.name,
        "batch": recipe.training.batch,
        "seeds": [recipe.training.seed, recipe.data.seed],
        "data": digest,
        "engine": engine_name,
        **({"world_size": world_size} if engine_name == "deepspeed" else {}),  # DeepSpeed cannot change it
    }
    folder = out / "checkpoints"
    step = continue_from(checkpoint.latest(folder) if resume else None, engine, facts)

    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        (out / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    about = about_run(recipe, engine, world_size, digest)
    metrics = Metrics(recipe, out, step, about, active=rank == 0, bar=bar)
    metrics.say(describe(recipe, about, step, out))

    per_step = recipe.training.batch * recipe.model.sequence_length
    flops, peak = models.flops_per_token(engine.model, recipe.model), models.peak_flops(device)
    began = last_saved = time.perf_counter()
    with signals_noted() as noted:
        while step < recipe.training.steps:
            step_began = time.perf_counter()
            lr = engine.lr
            mine = sequences.batch(step, recipe.training.batch, rank, world_size)
            loss = engine.train_step(split(mine, micro_batches))
            step += 1

            due = recipe.checkpoint.every_minutes
            minutes_over = due is not None and time.perf_counter() - last_saved > 60 * due
            # The one exchange of a step: the loss, whether a signal came, whether it is time to save.
            told = over_ranks([loss.item(), float(bool(noted)), float(minutes_over)], device)
            bad = [r for r, (value, _, _) in enumerate(told) if not math.isfinite(value)]
            if bad:
                metrics.finish(None)
                kept = checkpoint.latest(folder)
                raise NonFiniteLoss(
                    f"the loss is {told[bad[0]][0]} at step {step} on rank {bad[0]}; last good checkpoint: "
                    f"{kept or 'none'}. Lower the learning rate (--set optimizer.lr=...) or lengthen the warm-up, and "
                    "run again to go on from there."
                )

            seconds = time.perf_counter() - step_began
            record: dict[str, Any] = {
                "step": step,
                "tokens": step * per_step,
                "loss": sum(value for value, _, _ in told) / world_size,
                "lr": lr,
                "tokens_per_s": round(per_step / seconds, 1),
            }
            if peak is not None:
                record["mfu"] = round(flops * per_step / seconds / (peak * world_size), 4)
            last = step == recipe.training.steps
            if recipe.validation.every and (last or step % recipe.validation.every == 0):
                record["val_loss"] = validate(engine, held_out, recipe, rank, world_size, device)
            record["seconds"] = round(time.perf_counter() - began, 3)
            if last or "val_loss" in record or step % recipe.logging.every == 0:
                metrics.write(record)

            stop = any(stopped for _, stopped, _ in told)
            every = recipe.checkpoint.every_steps
            if last or stop or bool(told[0][2]) or (every and step % every == 0):
                checkpoint.save(folder, step, facts, engine.save, recipe.checkpoint.keep_last)
                last_saved = time.perf_counter()
            if stop and not last:
                metrics.say(f"stopped by a signal at step {step}; saved: run the same command again to go on")
                metrics.finish(None)
                engine.close()
                return INTERRUPTED
    metrics.finish({**about, "steps": step, "seconds": round(time.perf_counter() - began, 2), **rules_of(engine)})
    engine.close()
    return DONE


def start_processes(out: Path, engine_name: str) -> torch.device:
    """Join the processes of whatever launcher started this one; return this process's device."""
    if engine_name == "deepspeed":
        prepare_deepspeed(out)
    gpu, local_rank = use_gpu(), int(os.environ.get("LOCAL_RANK", "0"))
    if "WORLD_SIZE" not in os.environ and engine_name == "deepspeed":  # plain `python`: a world of one
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
            os.environ |= alone | {"MASTER_PORT": str(s.getsockname()[1])}
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        if not gpu:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("nccl" if gpu else "gloo")
    if not gpu:
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def open_sequences(recipe: Recipe, split_name: str) -> tuple[data.Blocks, str]:
    """The sequences of "train" or "val", one token longer than the model reads, and what the data are known by."""
    length, seed = recipe.model.sequence_length, recipe.data.seed if split_name == "train" else 0
    if recipe.data.path is None:
        train_works, val_works = data.split(data.shakespeare(), HELD_OUT_WORKS)
        tokens: Any = data.encode(train_works if split_name == "train" else val_works, gpt2_tokenizer())
        digest = data.TEXT_SHA256
    else:
        tokens = open_split(recipe.data.path, split_name)
        digest = tokens.fingerprint()
    return data.Blocks(tokens, length, seed, recipe.model.vocabulary, overlap=1), digest


def place() -> tuple[int, int]:
    """Rank and world size."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def continue_from(saved: Path | None, engine: Plain | ZeRO, facts: dict[str, Any]) -> int:
    """Load ``saved`` and return its step; 0 without one.

    Raises:
        ValueError: when it is another run's; the message has the first fact that differs.
    """
    if saved is None:
        return 0
    theirs = checkpoint.facts_of(saved)
    for key, value in facts.items():
        if theirs.get(key) != value:
            raise ValueError(
                f"{saved} belongs to another run: {key} is {theirs.get(key)!r} there and {value!r} here. Choose "
                "another --out, or --fresh to start over."
            )
    engine.load(saved)
    checkpoint.restore_rng(saved)
    return int(theirs["step"])


def split(sequences: np.ndarray[Any, Any], parts: int) -> Sequence[Tensor]:
    return torch.from_numpy(sequences).chunk(parts)


def over_ranks(values: list[float], device: torch.device) -> list[list[float]]:
    """The values of every rank, by rank."""
    if not dist.is_initialized():
        return [values]
    mine = torch.tensor(values, dtype=torch.float64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return torch.stack(everyone).tolist()


def validate(
    engine: Plain | ZeRO, held_out: data.Blocks, recipe: Recipe, rank: int, world_size: int, device: torch.device
) -> float:
    """Mean loss over the same held-out sequences every time, whatever the number of ranks."""
    losses = []
    parts = accumulation(recipe.training.batch, recipe.training.micro_batch, world_size)
    for i in range(recipe.validation.batches):
        mine = held_out.batch(i, recipe.training.batch, rank, world_size)
        losses += [engine.evaluate(sequences) for sequences in split(mine, parts)]
    told = over_ranks([torch.stack(losses).mean().item()], device)
    return sum(value for (value,) in told) / world_size


@contextmanager
def signals_noted() -> Iterator[list[int]]:
    """A list that receives every SIGINT, SIGTERM and SIGUSR1 while the block runs; a second SIGINT ends it at once."""
    noted: list[int] = []

    def note(number: int, frame: Any) -> None:
        if number == signal.SIGINT and signal.SIGINT in noted:
            raise KeyboardInterrupt
        noted.append(number)

    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def about_run(recipe: Recipe, engine: Plain | ZeRO, world_size: int, digest: str) -> dict[str, Any]:
    trained = sum(getattr(p, "ds_numel", p.numel()) for p in engine.model.parameters())
    return {
        "name": recipe.name,
        "optimizer": recipe.optimizer.model_dump(exclude_none=True),
        "parameters": trained,
        "batch": recipe.training.batch,
        "sequence_length": recipe.model.sequence_length,
        "engine": engine.name,
        "world_size": world_size,
        "device": engine.device.type,
        "data": digest,
        "versions": {"mars_dist": mars_dist.__version__, "torch": torch.__version__},
    }


def describe(recipe: Recipe, about: dict[str, Any], step: int, out: Path) -> str:
    return (
        f"{about['name']}: {about['parameters'] / 1e6:.1f} M parameters, {recipe.optimizer.name} at lr "
        f"{recipe.optimizer.lr:g}, {recipe.training.steps} steps of {about['batch']} x {about['sequence_length']} "
        "tokens\n"
        f"{about['engine']} on {about['world_size']} x {about['device']}"
        + (f", going on from step {step}" if step else "")
        + f"; writing {out}"
    )


def rules_of(engine: Plain | ZeRO) -> dict[str, Any]:
    """How many tensors MARS updated by which rule; nothing for another optimizer."""
    optimizer = engine.optimizer
    return {"rules": optimizer.rule_counts()} if isinstance(optimizer, mars_dist.MARS) else {}
