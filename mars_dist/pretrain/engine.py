"""One face for the engines that a run may have: one process and DDP (``Plain``), or DeepSpeed (``ZeRO``).

An engine holds the model, the optimizer and the learning-rate schedule. It knows nothing of data, metrics or folders.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mars_dist.integrations.deepspeed.launch import initialize
from mars_dist.pretrain import model as models

if TYPE_CHECKING:
    from mars_dist.pretrain.recipe import Recipe

STATE_FILE = "state.pt"


def choose(recipe: Recipe) -> str:
    """The engine's name: what the recipe says, else what started this process: the deepspeed launcher, or anything."""
    if recipe.engine.name != "auto":
        return recipe.engine.name
    launched_by_deepspeed = "CROSS_RANK" in os.environ and "LOCAL_SIZE" in os.environ
    return "deepspeed" if recipe.engine.deepspeed or launched_by_deepspeed else "ddp"


def schedule(recipe: Recipe, step: int) -> float:
    """Factor on every learning rate in the update after ``step`` updates: linear warm-up, then cosine to min_lr."""
    steps, warmup = recipe.training.steps, recipe.schedule.warmup_steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    lowest = recipe.schedule.min_lr / recipe.optimizer.lr
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return lowest + (1.0 - lowest) * 0.5 * (1.0 + math.cos(math.pi * done))


class Plain:
    """One process, or DDP when there are more; bf16 by autocast with float32 weights."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.recipe, self.device = recipe, device
        self.model = models.build(recipe.model).to(device)
        self.wrapped: nn.Module = self.model
        if dist.is_initialized() and dist.get_world_size() > 1:
            ids = [device.index] if device.type == "cuda" else None
            self.wrapped = nn.parallel.DistributedDataParallel(self.model, device_ids=ids)
        self.optimizer = models.build_optimizer(self.model, recipe.optimizer)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: schedule(recipe, step))

    @property
    def name(self) -> str:
        return "DDP" if self.wrapped is not self.model else "one process"

    @property
    def lr(self) -> float:
        return float(self.scheduler.get_last_lr()[0])

    def train_step(self, micro_batches: Sequence[Tensor]) -> Tensor:
        """One update on this rank's micro batches; their mean loss before it (on the device)."""
        total = torch.zeros((), device=self.device)
        for i, sequences in enumerate(micro_batches):
            last = i + 1 == len(micro_batches)
            waits = not last and isinstance(self.wrapped, nn.parallel.DistributedDataParallel)
            with self.wrapped.no_sync() if waits else contextlib.nullcontext():  # type: ignore[operator]
                loss = self._loss(self.wrapped, sequences) / len(micro_batches)
                loss.backward()
            total += loss.detach()
        if self.recipe.training.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.training.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return total

    @torch.no_grad()
    def evaluate(self, sequences: Tensor) -> Tensor:
        self.model.eval()
        loss = self._loss(self.model, sequences)
        self.model.train()
        return loss

    def _loss(self, model: nn.Module, sequences: Tensor) -> Tensor:
        half = {"bf16": torch.bfloat16, "fp32": None}[self.recipe.training.precision]
        with torch.autocast(self.device.type, dtype=half, enabled=half is not None):
            return models.loss(model, sequences.to(self.device, non_blocking=True))

    def save(self, folder: Path) -> None:
        """Rank 0 writes; all ranks hold the same."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
            torch.save({name: part.state_dict() for name, part in parts.items()}, folder / STATE_FILE)

    def load(self, folder: Path) -> None:
        state = torch.load(folder / STATE_FILE, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])

    def close(self) -> None: ...


class ZeRO:
    """DeepSpeed. The file ``engine.deepspeed`` says how to shard; batch, precision, clipping and optimizer are the
    recipe's, and a file that says something else about them is refused.
    """

    name = "DeepSpeed"

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.recipe, self.device = recipe, device
        self.model = models.build(recipe.model)
        self.optimizer = models.build_optimizer(self.model, recipe.optimizer)
        self.engine, _, _, self.scheduler = initialize(
            model=self.model,
            optimizer=self.optimizer,
            config=deepspeed_config(recipe),
            lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: schedule(recipe, step)),
        )
        self.name = f"DeepSpeed ZeRO-{self.engine.zero_optimization_stage()}"

    @property
    def lr(self) -> float:
        return float(self.engine.get_lr()[0])

    def train_step(self, micro_batches: Sequence[Tensor]) -> Tensor:
        total = torch.zeros((), device=self.engine.device)
        for sequences in micro_batches:
            loss = models.loss(self.engine, sequences.to(self.engine.device, non_blocking=True))
            self.engine.backward(loss)
            self.engine.step()
            total += loss.detach() / len(micro_batches)
        return total

    @torch.no_grad()
    def evaluate(self, sequences: Tensor) -> Tensor:
        self.engine.eval()
        loss = models.loss(self.engine, sequences.to(self.engine.device))
        self.engine.train()
        return loss

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder), tag="deepspeed")

    def load(self, folder: Path) -> None:
        loaded, _ = self.engine.load_checkpoint(str(folder), tag="deepspeed")
        if loaded is None:
            raise RuntimeError(f"{folder} holds no checkpoint of DeepSpeed: it was written by another engine")

    def close(self) -> None:
        self.engine.destroy()


def deepspeed_config(recipe: Recipe) -> dict[str, Any]:
    """What goes to ``deepspeed.initialize``: the recipe's numbers, and the sharding of the recipe's file (or ZeRO-2).

    Raises:
        ValueError: when the file and the recipe contradict each other; the message has both.
    """
    from mars_dist.integrations.deepspeed.check import read

    path = recipe.engine.deepspeed
    config: dict[str, Any] = dict(read(Path(path))) if path else {"zero_optimization": {"stage": 2}}
    params = (config.pop("optimizer", None) or {}).get("params", {})
    config.pop("scheduler", None)
    mine = {
        "train_batch_size": recipe.training.batch,
        "train_micro_batch_size_per_gpu": recipe.training.micro_batch,
        "gradient_clipping": recipe.training.clip or 0.0,
    }
    half = {"enabled": recipe.training.precision == "bf16"}
    said = {
        **{key: (config.get(key, "auto"), value) for key, value in mine.items()},
        "bf16.enabled": (config.get("bf16", {}).get("enabled", "auto"), half["enabled"]),
        "fp16.enabled": (config.get("fp16", {}).get("enabled", "auto"), False),
        **{
            f"optimizer.params.{name}": (value, getattr(recipe.optimizer, name))
            for name, value in params.items()
            if hasattr(recipe.optimizer, name)
        },
    }
    for key, (theirs, ours) in said.items():
        same = list(theirs) == list(ours) if isinstance(ours, list | tuple) else theirs == ours
        if theirs != "auto" and not same:
            raise ValueError(
                f"{path}: {key} is {json.dumps(theirs)}, the recipe has {json.dumps(ours)}: change one of them "
                "(--set changes the recipe)"
            )
    config.pop("fp16", None)
    return config | mine | {"bf16": config.get("bf16", {}) | half, "zero_force_ds_cpu_optimizer": False}
