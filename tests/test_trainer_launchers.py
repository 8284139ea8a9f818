"""``--optim mars_adamw`` for a script that nobody edited, and ``examples/gpt2_trainer.py``, under every launcher."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

import mars_dist  # noqa: F401  the only line that MARS needs
from tests.processes import ROOT, assert_left_properly, free_port, noting_exits, run_python

Words = tuple[str | Path, ...]
EXAMPLE = ROOT / "examples" / "gpt2_trainer.py"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node", "2")
DEEPSPEED = ("-m", "deepspeed.launcher.runner", "--num_gpus", "2")
ACCELERATE = ("-m", "accelerate.commands.launch", "--config_file", ROOT / "launch" / "accelerate" / "cpu_2.yaml")
OFFLINE = {"HF_HUB_OFFLINE": "1"}
ON_CPU = {"ACCELERATE_USE_CPU": "true", **OFFLINE}  # for `accelerate launch`; it would turn DeepSpeed off

# What a user of transformers has: no word of MARS in it.
UNEDITED = """
import pickle
from pathlib import Path
import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
before = pickle.loads(Path("arguments.pickle").read_bytes())
assert type(before.optim) is type(args.optim), "a real member of the enum in this process too"
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=64, n_positions=8, n_layer=1, n_embd=32, n_head=2, bos_token_id=0, eos_token_id=0)
)
tokens = torch.randint(0, 64, (32, 8), generator=torch.Generator().manual_seed(1))
trainer = Trainer(model=model, args=args, train_dataset=[{"input_ids": t, "labels": t} for t in tokens])
trainer.train()
optimizer = trainer.optimizer.optimizer
group = optimizer.param_groups[0]
if trainer.is_world_process_zero():
    print("PICKLED", before.optim.value, before.optim_args)
    print("INSIDE", type(optimizer).__module__, type(optimizer).__name__, optimizer.settings.mars_type)
    print("VALUES", group["betas"], group["gamma"], round(group["lr_1d_ratio"], 9), group["amsgrad"])
    print("RAN", optimizer.rule_counts(), type(trainer.model_wrapped).__name__, args.world_size)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""
COMMON: tuple[str, ...] = ("--use_cpu", "--report_to", "none", "--disable_tqdm", "true")
COMMON += ("--save_strategy", "no", "--per_device_train_batch_size", "4")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """An unedited script; beside it arguments that were pickled by another process, with ``optim="mars_lion"``."""
    from transformers import TrainingArguments

    args = TrainingArguments(output_dir="o", use_cpu=True, report_to=[], optim="mars_lion", optim_args="gamma=0")
    (tmp_path / "arguments.pickle").write_bytes(pickle.dumps(args))
    (tmp_path / "script.py").write_text(UNEDITED)
    return tmp_path / "script.py"


def check_unedited(launcher: Words, script: Path, model: str, processes: int) -> None:
    given = (
        "--learning_rate",
        "1e-2",
        "--optim",
        "mars_shampoo",
        "--optim_args",
        "gamma=0.05,lr_1d=1e-3,beta1=0.9,amsgrad=False",
    )
    run = run_python(
        *launcher, script, "--output_dir", "o", "--max_steps", "2", *given, *COMMON, folder=script.parent, env=ON_CPU
    )
    assert run.returncode == 0, run.stdout
    for line in (
        "PICKLED mars_lion gamma=0",
        "INSIDE mars_dist.optimizer MARS mars-shampoo",
        "VALUES (0.9, 0.99) 0.05 0.1 False",
        f"RAN {{'AdamW': 10, 'MARS-Shampoo': 6}} {model} {processes}",
    ):
        assert run.stdout.count(line) == 1, run.stdout
    assert run.stdout.count("Trainer's optimizer is mars-shampoo: lr 0.01") == 1, run.stdout


@pytest.mark.timeout(240)
def test_an_unedited_script_under_python(script: Path) -> None:
    check_unedited(("-m", "mars_dist"), script, "GPT2LMHeadModel", 1)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_unedited_script_under_accelerate_launch(script: Path) -> None:
    launcher = (*ACCELERATE, "--main_process_port", free_port(), "-m", "mars_dist")
    check_unedited(launcher, script, "DistributedDataParallel", 2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_unedited_script_under_torchrun(script: Path) -> None:
    launcher = (*TORCHRUN, "--master_port", free_port(), "-m", "mars_dist")
    check_unedited(launcher, script, "DistributedDataParallel", 2)


def test_a_name_that_does_not_exist_is_refused_by_the_parser() -> None:
    """The choices of ``--optim`` are the members of the enum at the time the parser is built."""
    from transformers import HfArgumentParser, TrainingArguments

    optim = next(a for a in HfArgumentParser(TrainingArguments)._actions if a.dest == "optim")
    assert {"mars_adamw", "mars_lion", "mars_shampoo", "mars_m", "sgd"} <= set(optim.choices)
    with pytest.raises(SystemExit):
        HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(["--output_dir", "o", "--optim", "mars_adam"])


# --------------------------------------------------------------------------------------------------- the example

SMALL = ("--works", "4", "--held_out_sequences", "8", "--sequence_length", "16", *COMMON)
MARS = ("--learning_rate", "1e-2", "--optim", "mars_adamw", "--optim_args", "gamma=0.05,lr_1d=5e-3")


def check_example(
    launcher: tuple[str | Path, ...],
    folder: Path,
    model: str,
    processes: int,
    steps: int = 2,
    more: tuple[str, ...] = MARS,
) -> str:
    given = ("--output_dir", "o", "--max_steps", str(steps), *more, *SMALL)
    env = (OFFLINE if "--deepspeed" in more else ON_CPU) | noting_exits(folder)
    run = run_python(*launcher, EXAMPLE, *given, folder=folder, env=env, seconds=200)
    assert run.returncode == 0, run.stdout
    if processes > 1:
        assert_left_properly(folder, processes)
    line = f"{model} on {processes} processes, {{'AdamW': 18, 'MARS-AdamW': 10}}"
    assert run.stdout.count(line) == 1 and f"after {steps} steps" in run.stdout, run.stdout
    return run.stdout


@pytest.mark.timeout(240)
def test_the_example_under_python_learns(tmp_path: Path) -> None:
    """Random weights give each of the 50,304 tokens a loss of about 10.8."""
    printed = check_example((), tmp_path, "GPT2LMHeadModel", 1, steps=12)
    loss = float(printed.split("held-out loss ")[1].split()[0])
    assert 5.0 < loss < 10.0, printed
    assert "Trainer's optimizer is mars-adamw: lr 0.01 (learning_rate), lr_1d 0.005 (optim_args)" in printed


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_example_under_torchrun(tmp_path: Path) -> None:
    check_example((*TORCHRUN, "--master_port", free_port()), tmp_path, "DistributedDataParallel", 2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_example_under_accelerate_launch(tmp_path: Path) -> None:
    check_example((*ACCELERATE, "--main_process_port", free_port()), tmp_path, "DistributedDataParallel", 2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_example_under_deepspeed(tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    more = (*MARS, "--deepspeed", "ds.json")
    printed = check_example((*DEEPSPEED, "--master_port", free_port()), tmp_path, "DeepSpeedEngine", 2, more=more)
    assert "MARS-AdamW on 10 matrices, AdamW on 18 other tensors (ZeRO-3)" in printed


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_example_under_deepspeed_with_the_block_of_the_shipped_configuration(tmp_path: Path) -> None:
    more = ("--deepspeed", str(ROOT / "ds_configs" / "trainer_auto.json"), "--learning_rate", "0.003")
    printed = check_example((*DEEPSPEED, "--master_port", free_port()), tmp_path, "DeepSpeedEngine", 2, more=more)
    assert "is the MARS block of the DeepSpeed configuration: mars_type mars-adamw, lr 0.003" in printed
    assert "MARS-AdamW on 10 matrices, AdamW on 18 other tensors (ZeRO-1/2)" in printed
