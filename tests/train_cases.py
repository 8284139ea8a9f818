"""Short runs of ``mars_dist.pretrain.train``, watched: what its tests run, here or on the ranks of a pool."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mars_dist.checkpoint.tensors import Reader
from mars_dist.pretrain import data, world
from mars_dist.pretrain import model as models
from mars_dist.pretrain.engine import Plain, ZeRO
from mars_dist.pretrain.recipe import Recipe, load
from mars_dist.pretrain.tokenizer import gpt2_tokenizer
from mars_dist.pretrain.train import train

POOL_RANK = int(os.environ.get("RANK", "0"))  # in a pool; a case may run on fewer ranks than the pool has
SMALL = {
    "model.layers": 1,
    "model.heads": 1,
    "model.width": 8,
    "model.sequence_length": 16,
    "training.steps": 10,
    "training.batch": 6,
    "training.micro_batch": 3,
    "schedule.warmup_steps": 2,
    "validation.every": 0,
    "validation.batches": 2,
    "checkpoint.every_steps": 5,
    "logging.tensorboard": "false",
}


def recipe(name: str = "tiny", **changes: Any) -> Recipe:
    """A recipe that takes milliseconds a step; ``changes``: ``training__steps=3`` is training.steps."""
    settings = SMALL | {key.replace("__", "."): value for key, value in changes.items()}
    return load(name, [f"{key}={'null' if value is None else value}" for key, value in settings.items()])


class Crash(Exception):
    """A process that ends without warning."""


@dataclass
class Watched:
    """What ``watch`` saw: by step the sequences of this rank, and the batches that were evaluated."""

    trained: dict[int, list[list[int]]] = field(default_factory=dict)
    evaluated: list[list[int]] = field(default_factory=list)


encode = data.encode


@functools.lru_cache
def encoded(documents: tuple[str, ...]) -> Any:
    """The shipped text is the same for all runs: half of the time of a short one."""
    return encode(documents, gpt2_tokenizer())


@contextlib.contextmanager
def watch(at: dict[int, str] | None = None, on_rank: int | None = None) -> Iterator[Watched]:
    """Record what is read, and do something before an update.

    Args:
        at: number of updates done -> "crash", "nan" (the loss of that update), or the name of a signal.
        on_rank: where it happens; None: everywhere.
    """
    seen, originals = Watched(), [(cls, cls.train_step, cls.evaluate) for cls in (Plain, ZeRO)]
    loss = models.loss

    def watched(step: Callable[..., Any], evaluate: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
        def train_step(self: Any, done: int, micro_batches: Any) -> Any:
            seen.trained[done] = [row.tolist() for part in micro_batches for row in part]
            rank = dist.get_rank() if dist.is_initialized() else 0
            what = (at or {}).get(done) if on_rank in (None, rank) else None
            if what == "crash":
                raise Crash
            if what == "nan":
                models.loss = lambda model, rows: loss(model, rows) * float("nan")
            elif what:
                os.kill(os.getpid(), getattr(signal, what))
            return step(self, done, micro_batches)

        def evaluate_(self: Any, rows: Tensor) -> Tensor:
            seen.evaluated += rows.tolist()
            return evaluate(self, rows)

        return train_step, evaluate_

    data.encode = lambda documents, tokenizer: encoded(tuple(documents))
    for cls, step, evaluate in originals:
        cls.train_step, cls.evaluate = watched(step, evaluate)
    try:
        yield seen
    finally:
        models.loss, data.encode = loss, encode
        for cls, step, evaluate in originals:
            cls.train_step, cls.evaluate = step, evaluate


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def steps(out: Path) -> list[dict[str, Any]]:
    return [record for record in records(out) if "step" in record]


def losses(out: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in steps(out)}


def tensors(content: Any, where: str = "") -> dict[str, Tensor]:
    """All tensors in nested dictionaries and lists, by their place."""
    if isinstance(content, Tensor):
        return {where: content.clone()}
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return {place: value for key, part in inner for place, value in tensors(part, f"{where}/{key}").items()}


def saved(checkpoint: Path) -> dict[str, Tensor]:
    """Values and optimizer states of a checkpoint, whole, however many ranks wrote them; and DeepSpeed's own files."""
    reader = Reader(checkpoint)
    found = {name: reader.whole(name).clone() for name in reader.names()}
    for file in sorted(checkpoint.rglob("*.pt")):
        found |= tensors(torch.load(file, weights_only=False), file.name)
    assert len(found) > 10, checkpoint
    return found


# ----------------------------------------------------------------------------------------- on the ranks of a pool


def in_world(size: int, rendezvous: Path, function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` on the first ``size`` ranks, which are a world of their own; None on the others."""
    if dist.is_initialized():
        gc.collect()  # a model that is gone may hold the group; freed by it, the group could wait for ever
        dist.destroy_process_group()
    if size <= POOL_RANK:
        return None
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ[name] = str(size)
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=POOL_RANK, world_size=size)
    return function(*args)


def run(
    recipe: Recipe, out: Path, at: dict[int, str] | None = None, on_rank: int | None = None
) -> tuple[int | str, Watched]:
    """Train: the exit code, "crash", or what the error says; and what this rank read."""
    with watch(at, on_rank) as seen:
        try:
            return train(recipe, out, bar=False), seen
        except Crash:
            return "crash", seen
        except (ValueError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}", seen


def run_apart(recipe: Recipe, outs: list[Path]) -> tuple[int | str, Watched]:
    """Each rank in a folder of its own, as on machines that share none."""
    return run(recipe, outs[dist.get_rank()])


def in_turn(runs: list[tuple[Any, ...]]) -> list[tuple[int | str, Watched]]:
    """One after the other in the same world: one start of the engine's libraries for all of them."""
    return [run(*arguments) for arguments in runs]


def with_deepspeed(runs: list[tuple[Any, ...]]) -> list[tuple[int | str, Watched]]:
    """The same under DeepSpeed, which keeps the process group that it met first."""
    world.prepare_deepspeed(Path(os.environ["TORCH_EXTENSIONS_DIR"]))
    import deepspeed

    deepspeed.comm.comm.cdb = None
    return in_turn(runs)
