"""One face for the engines that a run may have: one process and DDP (``Plain``), or DeepSpeed (``ZeRO``).

An engine holds the model and the optimizer. It knows nothing of data, metrics or folders, and no step number.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mars_dist.checkpoint.named import chunks_of, load_chunks, settings_of
from mars_dist.checkpoint.names import remember
from mars_dist.checkpoint.tensors import Chunk, Reader
from mars_dist.integrations import exact_loop
from mars_dist.integrations.deepspeed import nvme
from mars_dist.integrations.deepspeed.launch import initialize
from mars_dist.one_state import GAMMA
from mars_dist.optimizer import MARS
from mars_dist.pretrain import model as models
from mars_dist.pretrain.recipe import accumulation

if TYPE_CHECKING:
    from mars_dist.pretrain.recipe import Recipe

BY_NAME = "by parameter name"


def choose(recipe: Recipe) -> str:
    """The engine's name: what the recipe says, else what started this process: the deepspeed launcher, or anything."""
    if recipe.engine.name != "auto":
        return recipe.engine.name
    launched_by_deepspeed = "CROSS_RANK" in os.environ and "LOCAL_SIZE" in os.environ
    return "deepspeed" if recipe.engine.deepspeed or launched_by_deepspeed else "ddp"


def state_form(recipe: Recipe, engine_name: str) -> str:
    """How the state is saved: what is by parameter name goes on in every engine and on any number of ranks."""
    if engine_name != "deepspeed" or not nvme.is_on(deepspeed_config(recipe)):
        return BY_NAME
    size = dist.get_world_size() if dist.is_initialized() else 1
    return f"DeepSpeed's own, with the optimizer on the disks of {size} ranks"


def schedule(recipe: Recipe, done: int) -> float:
    """Factor on every learning rate in the update that follows ``done`` updates, as in nanoGPT.

    .. code-block:: text

        done < warmup    (done + 1) / (warmup + 1)
        else             r + (1 - r) * (1 + cos(pi * (done - warmup) / (steps - warmup))) / 2,    r = min_lr / lr
    """
    steps, warmup = recipe.training.steps, recipe.schedule.warmup_steps
    if done < warmup:
        return (done + 1) / (warmup + 1)
    lowest = recipe.schedule.min_lr / recipe.optimizer.lr
    part = min(1.0, (done - warmup) / (steps - warmup))
    return lowest + (1.0 - lowest) * 0.5 * (1.0 + math.cos(math.pi * part))


class Engine(ABC):
    """What both have in common: the hyper-parameters are the recipe's, also after a checkpoint was loaded."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.recipe, self.device = recipe, device

    @property
    def lr(self) -> float:
        """Of the last update."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def is_exact(self) -> bool:
        return bool(getattr(self.recipe.optimizer, "exact", False))

    def look_ahead(self, micro_batches: Sequence[Tensor]) -> None:
        """Exact mode: take the gradient of the NEXT update's batch at the present point, as ``train_step`` takes its.

        There is no dropout in these models: the two passes of a batch need no common masks.
        """
        passes = self._passes()
        passes.zero_grad()
        with passes.aside():
            for i, sequences in enumerate(micro_batches):
                with passes.micro_batch(i + 1 == len(micro_batches)):
                    self._backward(sequences, len(micro_batches))
            passes.keep()
        passes.zero_grad()
        passes.close()

    def chunks(self) -> list[Chunk]:
        """This rank's part of all values and states, by parameter name: it is loaded in any engine, on any ranks."""
        return list(chunks_of(self.optimizer, self.model))

    def settings_to_save(self) -> dict[str, Any]:
        """What belongs to the states and is no tensor; JSON values."""
        return settings_of(self.optimizer, self.model)

    def load(self, folder: Path, reader: Reader, settings: dict[str, Any]) -> None:
        """What was saved; an error is the same on all ranks."""
        load_chunks(self.optimizer, self.model, reader, self.with_own_numbers(settings))

    def with_own_numbers(self, saved: dict[str, Any]) -> dict[str, Any]:
        """The recipe's hyper-parameters hold; of those that were saved only what says which form the states have."""
        of = {name: group["values"] for group in saved["groups"] for name in group["names"]}
        groups = []
        for group in self.settings_to_save()["groups"]:
            theirs: dict[str, Any] = next((of[name] for name in group["names"] if name in of), {})
            form = {key: theirs[key] for key in ("one_state", GAMMA) if key in theirs}
            groups.append({"names": group["names"], "values": group["values"] | form})
        names = {name for group in groups for name in group["names"]}
        return {**saved, "groups": groups + [g for g in saved["groups"] if not names & set(g["names"])]}

    def save_by_itself(self, folder: Path) -> None:
        """Files that the engine's library writes; none where ``chunks`` has all."""
        return

    @abstractmethod
    def _passes(self) -> exact_loop.Engine: ...

    @abstractmethod
    def _backward(self, sequences: Tensor, micro_batches: int) -> Tensor:
        """Forward and backward of one of ``micro_batches``; returns its part of the mean loss."""

    def keep_settings(self) -> None:
        """Remember what the optimizer was made with: ``apply_settings`` comes back to it."""
        self.settings = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]

    def apply_settings(self, done: int) -> None:
        """Hyper-parameters of the update that follows ``done`` updates: the recipe's, times the schedule."""
        factor = schedule(self.recipe, done)
        for group, settings in zip(self.optimizer.param_groups, self.settings, strict=True):
            group |= settings | {"lr": settings["lr"] * factor}


class Plain(Engine):
    """One process, or DDP when there are more; bf16 by autocast with float32 weights."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        super().__init__(recipe, device)
        self.model = models.build(recipe.model).to(device)
        self.ddp: nn.parallel.DistributedDataParallel | None = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            ids = [device.index] if device.type == "cuda" else None
            self.ddp = nn.parallel.DistributedDataParallel(self.model, device_ids=ids)
        self.optimizer = models.build_optimizer(self.model, recipe.optimizer)
        if self.ddp is not None and isinstance(self.optimizer, MARS):
            self.optimizer.attach(self.ddp)  # each rank orthogonalises its share of the matrices
        self.keep_settings()
        self.name = "DDP" if self.ddp else "one process"

    def train_step(self, done: int, micro_batches: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The update that follows ``done`` updates.

        Returns: mean loss of this rank's micro batches before it, and the norm of the whole gradient; on the device.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for i, sequences in enumerate(micro_batches):
            exchange = self.ddp is None or i + 1 == len(micro_batches)
            with contextlib.nullcontext() if exchange or self.ddp is None else self.ddp.no_sync():
                total += self._backward(sequences, len(micro_batches))
        norm = self._clip()
        self.apply_settings(done)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, norm

    def _backward(self, sequences: Tensor, micro_batches: int) -> Tensor:
        loss = self._loss(self.ddp or self.model, sequences) / micro_batches
        loss.backward()
        return loss.detach().double()

    def _clip(self) -> Tensor:
        return nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.training.clip or math.inf)

    def _passes(self) -> exact_loop.Engine:
        return exact_loop.Loop(self.optimizer, self.ddp, self._clip, None)

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

    def close(self) -> None: ...


class ZeRO(Engine):
    """DeepSpeed. The file ``engine.deepspeed`` says how to shard; batch, precision, clipping, schedule and optimizer
    are the recipe's, and a file that says something else about them is refused.
    """

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        super().__init__(recipe, device)
        config = deepspeed_config(recipe)
        self.model = models.build(recipe.model)
        self.optimizer = models.build_optimizer(self.model, recipe.optimizer)
        self.on_disk = nvme.is_on(config)
        if not isinstance(self.optimizer, MARS):
            remember(self.optimizer)  # which parameters are in DeepSpeed's flat tensors
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)  # it talks on standard output
        warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # it calls collectives by old names
        self.engine = initialize(model=self.model, optimizer=self.optimizer, config=config)[0]
        self.keep_settings()
        self.name = f"DeepSpeed ZeRO-{self.engine.zero_optimization_stage()}"

    def train_step(self, done: int, micro_batches: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        total = torch.zeros((), dtype=torch.float64, device=self.engine.device)
        self.apply_settings(done)
        for sequences in micro_batches:
            total += self._backward(sequences, len(micro_batches))
            self.engine.step()
        norm = self.engine.get_global_grad_norm()
        return total, torch.as_tensor(norm or 0.0, device=total.device)  # None: ZeRO was told not to compute it

    def _backward(self, sequences: Tensor, micro_batches: int) -> Tensor:
        loss = models.loss(self.engine, sequences.to(self.engine.device, non_blocking=True))
        self.engine.backward(loss)
        return loss.detach().double() / micro_batches

    def _passes(self) -> exact_loop.Engine:
        from mars_dist.integrations.deepspeed.look_ahead import DeepSpeed

        return DeepSpeed(self.engine)

    @torch.no_grad()
    def evaluate(self, sequences: Tensor) -> Tensor:
        self.engine.eval()
        loss = models.loss(self.engine, sequences.to(self.engine.device))
        self.engine.train()
        return loss

    def chunks(self) -> list[Chunk]:
        return [] if self.on_disk else list(chunks_of(self.engine, self.model))

    def settings_to_save(self) -> dict[str, Any]:
        return {} if self.on_disk else settings_of(self.engine, self.model)

    def save_by_itself(self, folder: Path) -> None:
        if self.on_disk:
            self.engine.save_checkpoint(str(folder), tag="deepspeed")

    def load(self, folder: Path, reader: Reader, settings: dict[str, Any]) -> None:
        if not self.on_disk:
            load_chunks(self.engine, self.model, reader, self.with_own_numbers(settings))
        elif self.engine.load_checkpoint(str(folder), tag="deepspeed")[0] is None:
            raise FileNotFoundError(f"nothing of DeepSpeed in {folder}")

    def close(self) -> None:
        self.engine.destroy()


def deepspeed_config(recipe: Recipe) -> dict[str, Any]:
    """What goes to ``deepspeed.initialize``: the recipe's numbers, and the sharding of the recipe's file (or ZeRO-2).

    Raises:
        ValueError: when the file and the recipe contradict each other; the message has both.
    """
    from mars_dist.integrations.deepspeed.check import read

    path = recipe.engine.deepspeed
    if path and not Path(path).is_file():
        raise ValueError(f"engine.deepspeed = {path!r}: there is no such file")
    config: dict[str, Any] = dict(read(Path(path))) if path else {"zero_optimization": {"stage": 2}}
    said, training, optimizer = flat(config), recipe.training, recipe.optimizer
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    mine = {
        "train_batch_size": training.batch,
        "train_micro_batch_size_per_gpu": training.micro_batch,
        "gradient_accumulation_steps": accumulation(training.batch, training.micro_batch, world_size),
        "gradient_clipping": training.clip or 0.0,
    }
    ours = mine | {
        "bf16.enabled": training.precision == "bf16",
        "fp16.enabled": False,
        "optimizer.type": "AdamW" if optimizer.name == "adamw" else "MARS",
        "optimizer.params.mars_type": getattr(optimizer, "mars_type", "auto"),
        **{f"optimizer.params.{key}": value for key, value in optimizer.model_dump(mode="json").items()},
        "scheduler.params.total_num_steps": training.steps,
        "scheduler.params.warmup_num_steps": recipe.schedule.warmup_steps,
        "scheduler.params.cos_min_ratio": recipe.schedule.min_lr / optimizer.lr,
    }
    for key in said.keys() & ours.keys():
        if not _agree(said[key], ours[key]):
            raise ValueError(
                f"{path}: {key} is {json.dumps(said[key])}, the recipe has {json.dumps(ours[key])}: change one of "
                "them (--set changes the recipe), or take it out of the file, and the recipe's is used"
            )
    sharding = {key: value for key, value in config.items() if key not in ("optimizer", "scheduler", "fp16")}
    bf16 = dict(config.get("bf16", {})) | {"enabled": training.precision == "bf16"}
    quiet = {"steps_per_print": 10**9} | sharding
    return quiet | mine | {"bf16": bf16, "zero_force_ds_cpu_optimizer": False}


def flat(config: Any, above: str = "") -> dict[str, Any]:
    """``{"bf16": {"enabled": true}}`` as ``{"bf16.enabled": true}``."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        out |= flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
    return out


def _agree(theirs: Any, ours: Any) -> bool:
    if isinstance(theirs, str) or isinstance(ours, str):
        return "auto" in (theirs, ours) or str(theirs).lower() == str(ours).lower()
    if isinstance(theirs, float) and isinstance(ours, float):
        return math.isclose(theirs, ours, rel_tol=1e-9)
    return bool(theirs == ours)
