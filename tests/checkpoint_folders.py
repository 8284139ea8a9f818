"""Real checkpoint folders, written by the libraries themselves with MARS: what the tests of trust and of order read.

Made once for each process of pytest; every test works on copies.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests import nets
from tests.ranks import RankPool

LR = {"lr": 1e-2, "lr_1d": 4e-3}


# In the environment of all that is saved here: no file may hold one.
SECRETS = {
    "HF_TOKEN": "hf_mB7cZq1TnW5xJr8kLdVp",
    "AWS_SECRET_ACCESS_KEY": "uK3hTzXwQpLmN/C9DSECRET/aYvBsGfJeR2",
    "DATABASE_URL": "postgresql://reader:vX4-ocean-otter@db.internal:5432/runs",
}


def plant(secrets: dict[str, str]) -> None:
    os.environ.update(secrets)


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
    """On every rank: ``zero<stage>/global_step1`` and ``global_step2`` of each stage; returns what wraps MARS."""
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


def with_accelerate_on_ranks(folder: str, engine: str) -> tuple[str, str]:
    """On every rank: two ``save_state`` under DeepSpeed or FSDP2; returns the types of what ran."""
    import mars_dist
    from tests import cpu_fsdp
    from tests.accelerate_cases import Case, accelerator_of

    try:
        accelerator = accelerator_of(Case(engine))
        net = nets.build()
        net, mars = accelerator.prepare(net, mars_dist.MARS(net.named_parameters(), **LR))
        for step in (1, 2):
            accelerator.backward(net(*nets.batch(step)))
            mars.step()
            mars.zero_grad()
            accelerator.save_state(os.path.join(folder, f"checkpoint_{step}"))
        return type(net).__name__, str(accelerator.distributed_type.value)
    finally:
        cpu_fsdp.reset()


def with_trainer_on_ranks(folder: str) -> str:
    """On every rank: ``checkpoint-5`` and ``checkpoint-10`` of the Trainer under ZeRO-1."""
    from tests import trainer_cases

    trainer_cases.prepare()
    found = trainer_cases.train(trainer_cases.TrainerCase(zero=1), folder)
    assert found["class"].__name__ == "MARS"
    return str(found["model"])


def as_universal(source: str, out: str) -> None:
    """DeepSpeed's own conversion of a tag, on rank 0."""
    import argparse

    from deepspeed.checkpoint import ds_to_universal

    if dist.get_rank() == 0:
        ds_to_universal.main(
            argparse.Namespace(
                input_folder=source, output_folder=out, num_extract_workers=1, num_merge_workers=1,
                keep_temp_folder=False, strict=True, inject_missing_state=False,
            )
        )  # fmt: skip
    dist.barrier()


@functools.cache
def pool() -> RankPool:
    """Two ranks, for the folders and for the tests of what stands around DeepSpeed."""
    started = RankPool(2)
    atexit.register(started.close)
    return started


@functools.cache
def made() -> dict[str, Path]:
    """By kind: a folder with two checkpoints of it, the second one newer."""
    with mock.patch.dict(os.environ, SECRETS):
        pool().run(plant, SECRETS)
        return _made()


def _made() -> dict[str, Path]:
    from mars_dist.pretrain.train import train
    from tests.train_cases import recipe

    root = Path(tempfile.mkdtemp(prefix="mars-dist-folders-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    ranks = pool()
    wrappers = ranks.run(with_deepspeed, str(root), (0, 1, 3))
    assert wrappers == [{0: "MARS", 1: "DeepSpeedZeroOptimizer", 3: "DeepSpeedZeroOptimizer_Stage3"}] * 2
    for step in (1, 2):
        tag = f"global_step{step}"
        ranks.run(as_universal, str(root / "zero3" / tag), str(root / "universal" / f"{tag}_universal"))
    assert ranks.run(with_accelerate_on_ranks, str(root / "accelerate-zero3"), "zero3")[0][1] == "DEEPSPEED"
    assert ranks.run(with_accelerate_on_ranks, str(root / "accelerate-fsdp2"), "fsdp2")[0] == ("FSDPNet", "FSDP")
    assert ranks.run(with_trainer_on_ranks, str(root / "trainer-zero1"))[0] == "DeepSpeedEngine"
    with_dcp(root / "dcp")
    with_accelerate(root / "accelerate")
    with_trainer(root / "trainer")
    assert (
        train(recipe(training__steps=2, checkpoint__every_steps=1, schedule__warmup_steps=0), root / "mars-dist") == 0
    )
    shutil.move(root / "mars-dist" / "checkpoints", root / "mars-dist-train")
    return {path.name: path for path in root.iterdir() if path.name != "mars-dist"}


KINDS = {
    "zero0": "DeepSpeed",
    "zero1": "DeepSpeed",
    "zero3": "DeepSpeed",
    "universal": "DeepSpeed universal",
    "accelerate": "Accelerate",
    "accelerate-zero3": "Accelerate",
    "accelerate-fsdp2": "Accelerate",
    "trainer": "Trainer",
    "trainer-zero1": "Trainer",
    "dcp": "torch DCP",
    "mars-dist-train": "mars-dist train",
}
