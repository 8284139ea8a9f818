"""Real checkpoint folders, written by the libraries themselves with MARS: what the tests of trust and of order read."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import nets

LR = {"lr": 1e-2, "lr_1d": 4e-3}


def trained(steps: int = 2) -> tuple[torch.nn.Module, Any]:
    """A small net and the MARS that has updated all of its tensors."""
    import mars_dist

    net = nets.build()
    mars = mars_dist.MARS(net.named_parameters(), **LR)
    for step in range(steps):
        net(*nets.batch(step)).backward()
        mars.step()
        mars.zero_grad()
    assert sum(mars.rule_counts().values()) == len(list(net.parameters()))
    return net, mars


def with_trainer(folder: Path) -> None:
    """``checkpoint-2`` and ``checkpoint-4`` of the Trainer on one process."""
    from transformers import Trainer, TrainingArguments

    from tests.trainer_cases import SEQUENCE, VOCABULARY, model

    rows = torch.randint(0, VOCABULARY, (16, SEQUENCE), generator=torch.Generator().manual_seed(5))
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = TrainingArguments(
        str(folder), optim="mars_adamw", max_steps=4, save_steps=2, per_device_train_batch_size=4, use_cpu=True,
        report_to=[], logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model(), args=arguments, train_dataset=data)
    trainer.train()
    assert type(trainer.optimizer.optimizer).__name__ == "MARS", type(trainer.optimizer)


def with_accelerate(folder: Path) -> None:
    """Two ``save_state`` of Accelerate on one process, with a scheduler and an object of the script's own."""
    from accelerate import Accelerator

    import mars_dist

    accelerator = Accelerator(cpu=True)
    net = nets.build()
    mars = mars_dist.MARS(net.named_parameters(), **LR)
    scheduler = torch.optim.lr_scheduler.StepLR(mars, 1)
    data = torch.utils.data.DataLoader(list(range(8)), batch_size=2)
    net, mars, data, scheduler = accelerator.prepare(net, mars, data, scheduler)
    for step in range(2):
        accelerator.backward(net(*nets.batch(step)))
        mars.step()
        scheduler.step()
        mars.zero_grad()
        accelerator.save_state(str(folder / f"checkpoint_{step + 1}"))
    assert sum(mars.optimizer.rule_counts().values()) == len(list(net.parameters()))


def with_dcp(folder: Path) -> None:
    """Two folders of torch's DCP: model and optimizer by name."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    net, mars = trained()
    for step in (1, 2):
        model, optimizer = get_state_dict(net, mars)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=str(folder / f"step_{step}"), no_dist=True)


def with_deepspeed(folder: str, stages: tuple[int, ...] = (1, 3), more: dict[str, Any] | None = None) -> dict[int, str]:
    """On every rank: ``zero<stage>/global_step1`` and ``global_step2`` for each stage; returns the engines' wrappers."""
    import deepspeed

    import mars_dist  # noqa: F401 - registers "MARS"

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for minutes
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    wrappers = {}
    for stage in stages:
        net = nets.build()
        config = {
            "train_micro_batch_size_per_gpu": 6,
            "steps_per_print": 10**9,
            "optimizer": {"type": "MARS", "params": LR},
            **(more or {}),
            "zero_optimization": {"stage": stage, **(more or {}).get("zero_optimization", {})},
        }
        engine, wrapper, *_ = deepspeed.initialize(model=net, config=config, model_parameters=list(net.parameters()))
        assert type(engine.basic_optimizer).__name__ == "MARS", type(engine.basic_optimizer)
        for step in (1, 2):
            tokens, targets = nets.batch(step)
            engine.backward(engine(tokens[dist.get_rank() :: 2], targets[dist.get_rank() :: 2]))
            engine.step()
            engine.save_checkpoint(os.path.join(folder, f"zero{stage}"), client_state={"mine": step})
        wrappers[stage] = type(wrapper).__name__
        engine.destroy()
    return wrappers
