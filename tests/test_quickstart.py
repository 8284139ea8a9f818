"""The quickstart and the DeepSpeed example in small, through the `deepspeed` launcher; what the scripts refuse."""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from mars_dist.integrations.deepspeed.launch import launcher_arguments
from tests.processes import ROOT, assert_left_properly, noting_exits, run


@pytest.mark.parametrize("name", ["mars", pytest.param("adamw", marks=pytest.mark.slow)])
def test_training_through_the_launcher(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    config = ROOT / f"ds_configs/quickstart_{name}.json"
    out = tmp_path / "run.jsonl"
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--no_local_rank", *launcher_arguments(batch=16)]
    script = ["examples/gpt2_deepspeed.py", "--config", config, "--out", out, "--steps", "4", "--eval-every", "2"]
    result = run(*launcher, *script, env=noting_exits(tmp_path))
    assert result.returncode == 0, result.stdout
    assert_left_properly(tmp_path, ranks=2)

    *steps, summary = [json.loads(line) for line in out.read_text().splitlines()]
    assert [s["step"] for s in steps] == [1, 2, 3, 4]
    assert [s["tokens"] for s in steps] == [1024, 2048, 3072, 4096]
    assert steps[0]["loss"] == pytest.approx(math.log(50304), abs=0.3)  # random weights know nothing
    assert steps[-1]["held_out_loss"] < steps[1]["held_out_loss"] < steps[0]["loss"]
    assert all(s["lr"] > 0 and s["tokens_per_s"] > 0 for s in steps)

    # The engine under test was the one that trained: ZeRO-2 over two ranks.
    facts: dict[str, Any] = {"engine": "DeepSpeedZeroOptimizer", "zero_stage": 2, "ranks": 2, "device": "cpu"}
    assert {key: summary[key] for key in facts} == facts
    # 4 matrices in each of 4 layers and two embeddings; the head is tied. 10.4 k of 3.4 M elements are in the others.
    matrices, others = 18, 34
    rules = {"mars": {"MARS-AdamW": matrices, "AdamW": others}, "adamw": {"AdamW": matrices + others}}
    assert summary["rules"] == rules[name]
    bytes_per_parameter = sum(summary["state_bytes_per_rank"]) / summary["parameters"]
    assert bytes_per_parameter == pytest.approx({"mars": 12, "adamw": 8}[name], rel=2e-3)
    assert len(set(summary["state_bytes_per_rank"])) == 1
    assert 'type": "MARS"' in config.read_text() or name == "adamw"


@pytest.mark.slow  # the first command of the README is the same in full
def test_the_quickstart_learns_from_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own command in small: 60 steps of `mars-dist train tiny` on two ranks under the launcher.

    6.355 is the best loss without context (`data.unigram_loss` of the shipped text): the curve must fall below it.
    """
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    out = tmp_path / "mars"
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--no_local_rank", *launcher_arguments(batch=16)]
    command = ["--module", "mars_dist.cli", "train", "tiny-mars-adamw", "--out", out, "--quiet"]
    for setting in ("training.steps=60", "schedule.warmup_steps=6", "validation.every=30"):
        command += ["--set", setting]
    result = run(*launcher, *command, env=noting_exits(tmp_path))
    assert result.returncode == 0, result.stdout
    assert_left_properly(tmp_path, ranks=2)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}
    assert losses.keys() == {30, 60} and losses[60] < 6.355 < losses[30]
    summary = lines[-1]["summary"]
    assert (summary["engine"], summary["world_size"], summary["device"]) == ("DeepSpeed ZeRO-2", 2, "cpu")
    assert summary["rules"] == {"MARS-AdamW": 18, "AdamW": 34}


def test_the_script_runs_that_command() -> None:
    script = (ROOT / "launch/quickstart.sh").read_text()
    assert '--module mars_dist.cli train "tiny-$optimizer"' in script and "for optimizer in mars-adamw adamw" in script
    assert 'mars-dist report "$run/mars-adamw" "$run/adamw"' in script


def fake(folder: Path, name: str, script: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("script", ["launch/quickstart.sh", "launch/test.sh"])
def test_scripts_refuse_with_one_line(script: str, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    old = fake(tmp_path / "bin", "python3.8", 'test "$1" = -V && echo Python 3.8.1; exit 1')
    result = run("bash", script, env=dict(PYTHON=str(old), MARS_DIST_VENV=str(venv)))
    assert result.returncode == 1
    assert "needs Python 3.11 or newer, found: " in result.stdout and "(Python 3.8.1)" in result.stdout
    assert not venv.exists()

    fake(tmp_path / "df", "df", "echo head; echo disk 10 5 5 50% /")
    path = f"{tmp_path / 'df'}:{os.environ['PATH']}"
    result = run("bash", script, env=dict(PYTHON=sys.executable, MARS_DIST_VENV=str(venv), PATH=path))
    assert result.returncode == 1
    assert f"5 MB free at {venv}, about" in result.stdout

    (venv / "letters").mkdir(parents=True)  # somebody's folder: it must not be emptied
    result = run("bash", script, env=dict(PYTHON=sys.executable, MARS_DIST_VENV=str(venv)))
    assert result.returncode == 1
    assert f"{venv} exists and is no virtual environment" in result.stdout
    assert (venv / "letters").exists()
