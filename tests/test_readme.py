"""What the first page says works as it is written there."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import ROOT, free_port, run_python
from torch import nn

import mars_dist
from mars_dist import MARS

README = (ROOT / "README.md").read_text()
RULES = {"MARS-AdamW": 2, "AdamW": 2}  # of ``Net``


def blocks(language: str = "") -> list[str]:
    """The code blocks of the page."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [text for name, text in fences if name == language]


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def test_the_two_commands_are_what_ci_runs() -> None:
    commands = [line for block in blocks() for line in block.splitlines() if line.startswith("bash ")]
    assert commands == ["bash launch/quickstart.sh", "bash launch/test.sh"]
    ci = [line.split("</dev/null")[0].strip() for line in (ROOT / ".ci/run").read_text().splitlines()]
    assert [line for line in ci if line.startswith("bash ")] == commands
    assert "--all" in (ROOT / "launch/test.sh").read_text()


def test_the_configuration_builds_mars() -> None:
    (text,) = blocks("json")
    config = json.loads(text)
    assert config["zero_optimization"]["stage"] == 2 and "zero_allow_untested_optimizer" not in config
    params = config["optimizer"]["params"]
    # How DeepSpeed comes from the name to the optimizer.
    build: Any = getattr(torch.optim, config["optimizer"]["type"])
    model = Net()
    optimizer = build(model.parameters(), **params)
    assert isinstance(optimizer, MARS)
    for group in optimizer.param_groups:
        assert group["lr"] == params["lr"] and group["gamma"] == params["gamma"]
        assert list(group["betas"]) == params["betas"] and group["weight_decay"] == params["weight_decay"]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert optimizer.rule_counts() == RULES


def test_the_two_lines_for_accelerate_run() -> None:
    from accelerate import Accelerator

    (snippet,) = [text for text in blocks("python") if "accelerator.prepare" in text]
    model = Net()
    names: dict[str, Any] = {"MARS": MARS, "model": model, "accelerator": Accelerator(cpu=True), "loader": [0]}
    exec(compile(snippet, "README.md", "exec"), names)
    names["accelerator"].backward(names["model"](torch.ones(1, 3)).square().sum())
    names["optimizer"].step()
    assert type(names["optimizer"].optimizer) is MARS and names["optimizer"].optimizer.rule_counts() == RULES


def test_the_arguments_for_the_trainer_build_mars(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    (snippet,) = [text for text in blocks("python") if "TrainingArguments" in text]
    names: dict[str, Any] = {"TrainingArguments": TrainingArguments}
    exec(compile(snippet.replace('"out"', repr(str(tmp_path))), "README.md", "exec"), names)
    optimizer = Trainer(Net(), names["args"]).create_optimizer()
    assert type(optimizer) is MARS
    assert {(g["gamma"], g["betas"], g["lr"] * g["lr_1d_ratio"]) for g in optimizer.param_groups} == {
        (0.05, (0.95, 0.99), 1e-3)
    }


def test_the_loop_of_your_own_runs() -> None:
    (snippet,) = [text for text in blocks("python") if "from mars_dist import MARS" in text]
    model = Net()
    before = [p.detach().clone() for p in model.parameters()]
    names: dict[str, Any] = {"model": model, "loss": model(torch.ones(1, 3)).square().sum()}
    exec(compile(snippet, "README.md", "exec"), names)
    assert names["optimizer"].rule_counts() == RULES
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_the_loop_of_exact_mode_runs_and_gains_at_most_six_lines() -> None:
    (snippet,) = [text for text in blocks("python") if "ExactMode" in text]
    plain = ["for micro_batch in loader:", "gradient(micro_batch)", "optimizer.step()", "optimizer.zero_grad()"]
    lines = [line.split("  #")[0].strip() for line in snippet.splitlines()]
    gained = [line for line in lines if line not in plain]
    assert set(plain) - set(lines) == {plain[0]} and len(gained) <= 6 - 2  # `def gradient`, and the import
    model = Net()
    optimizer = MARS(model.parameters(), is_approx=False, lr_1d=3e-3)
    seen: list[float] = []

    def gradient(micro_batch: torch.Tensor) -> None:
        seen.append(micro_batch[0, 0].item())
        model(micro_batch).square().sum().backward()

    loader = [torch.full((1, 3), 1.0 + i) for i in range(3)]
    names: dict[str, Any] = {"mars_dist": mars_dist, "optimizer": optimizer, "loader": loader, "gradient": gradient}
    exec(compile(snippet, "README.md", "exec"), names)
    assert seen == [2.0, 1.0, 3.0, 2.0, 3.0] and optimizer.rule_counts() == RULES


def test_links_and_files_exist() -> None:
    targets = [t.split("#")[0] for t in re.findall(r"\]\(([^)]+)\)", README) if not t.startswith("http")]
    assert targets
    named = re.findall(r"`((?:launch|examples|tests|ds_configs|mars_dist)/[\w./]+)`", README)
    assert [t for t in [*targets, *named] if not (ROOT / t).exists()] == []


@pytest.mark.slow
def test_the_search_of_the_learning_rates_runs(tmp_path: Path) -> None:
    """``examples/quickstart_lr_search.py``: two learning rates, and ``--set`` as its results' README has it."""
    table = tmp_path / "lr.csv"
    launcher: list[str | Path] = [
        "-m",
        "deepspeed.launcher.runner",
        "--no_local_rank",
        "--num_gpus",
        "2",
        "--master_port",
        free_port(),
    ]
    script: list[str | Path] = [
        ROOT / "examples/quickstart_lr_search.py",
        "--config",
        ROOT / "ds_configs/quickstart_mars.json",
    ]
    arguments: list[str | Path] = [
        "--lr",
        "5e-3",
        "1e-2",
        "--set",
        "lr_1d=2.5e-3",
        "--steps",
        "2",
        "--csv",
        table,
        "--runs",
        tmp_path,
    ]
    result = run_python(*launcher, *script, *arguments, folder=tmp_path, seconds=240)
    assert result.returncode == 0, result.stdout
    rows = list(csv.DictReader(table.open()))
    assert [(row["optimizer"], row["lr"], row["lr_1d"]) for row in rows] == [
        ("MARS", "0.005", "0.0025"),
        ("MARS", "0.01", "0.005"),
    ]
    assert all(row["steps"] == "2" and 5 < float(row["held_out_loss"]) < 12 for row in rows)
