"""Rows of what starts the processes and builds the engines: DeepSpeed, Accelerate, the Trainer.

``kind`` names the cases of the test file that show a row; test_engines.py holds that they run the row's variants.
"""

from __future__ import annotations

from typing import Any

from tests.engines.row import Row

ACCELERATE = "Accelerate: `accelerator.prepare(model, optimizer)`"
TRAINER = "Hugging Face Trainer: `optim=`"
POOL = "process group"
LAUNCH = "process group, `accelerate launch` (mars-adamw)"
LAUNCHERS = "process group, `torchrun`, `accelerate launch` (mars-adamw)"
BY_DEEPSPEED = "process group, `deepspeed` (mars-adamw)"


def prepared(kind: str, feature: str, **more: Any) -> Row:
    return Row(
        ACCELERATE, feature, LAUNCH, kind=kind, shown_by="tests/test_accelerate.py::test_replay_and_end_to_end", **more
    )


def trained(kind: str, feature: str, launcher: str, test: str = "test_training_on_several_ranks", **more: Any) -> Row:
    return Row(TRAINER, feature, launcher, kind=kind, shown_by=f"tests/test_trainer_training.py::{test}", **more)


LAUNCHED: list[Row] = [
    Row(
        "DeepSpeed",
        'ZeRO-0/1/2/3 by `"type": "MARS"`',
        "process group; `python`, `torchrun`, `deepspeed` (ZeRO-2, mars-adamw)",
        shown_by="tests/test_zero.py::test_replay",
        ranks=(2, 3),
        note="[every key](../ds_configs/README.md#what-works-with-mars)",
    ),
    Row(
        "DeepSpeed",
        "exact mode: ZeRO-0/1/2/3, BF16_Optimizer, CPU offload",
        POOL,
        shown_by="tests/test_exact_engines.py::test_replay",
        ranks=(2,),
        note="by `mars_dist.exact.ExactMode`",
    ),
    Row(
        ACCELERATE,
        "exact mode: DDP, FSDP1, FSDP2, DeepSpeed ZeRO-2/3",
        POOL,
        shown_by="tests/test_exact_engines.py::test_replay",
        ranks=(2,),
        note="by `mars_dist.exact.ExactMode`",
    ),
    prepared("ddp", "DDP", note="matrix variants share out the matrices"),
    prepared("fsdp1", "FSDP1", note="the flat parameters where the model is prepared before MARS is built"),
    prepared("fsdp2", "FSDP2"),
    prepared("hsdp", "HSDP 2 x 2", ranks=(4,)),
    prepared("zero2", "DeepSpeed ZeRO-2, with and without offload"),
    prepared("zero3", "DeepSpeed ZeRO-3, with and without offload", note='also `"type": "MARS"` with `DummyOptim`'),
    trained(
        "alone",
        "one process",
        "`python`",
        "test_training_on_one_process",
        ranks=(1,),
        note="LoRA run with mars-lion, checkpointing with mars-adamw",
    ),
    trained("ddp", "DDP", LAUNCHERS, note="matrix variants share out the matrices"),
    trained("fsdp2", "FSDP2", POOL),
    Row(
        TRAINER,
        "exact mode: DDP, FSDP2, DeepSpeed ZeRO-2/3",
        POOL,
        shown_by="tests/test_exact_trainer.py::test_on_two_ranks",
        variants=("mars-adamw",),
        ranks=(2,),
        note="by `mars_dist.integrations.exact_trainer.ExactTrainer`; compared with one process",
    ),
    trained(
        "",
        "FSDP1, original parameters",
        POOL,
        "test_fsdp1_with_original_parameters",
        variants=("mars-adamw",),
        ranks=(2,),
        note="class, rules and groups checked; by numbers through Accelerate",
    ),
    trained(
        "",
        "FSDP1, flat parameters",
        POOL,
        "test_fsdp1_with_flat_parameters_is_refused",
        answer="refused",
        message="under FSDP1 needs the original parameters",
        variants=("mars-adamw",),
        ranks=(2,),
    ),
    trained("zero2", "DeepSpeed ZeRO-2, with and without offload and optimizer block", BY_DEEPSPEED),
    trained(
        "zero3",
        "DeepSpeed ZeRO-3, with and without offload and optimizer block",
        BY_DEEPSPEED,
        note="offload run on 2 ranks",
    ),
]
