"""The quickstart in small: its training script through the `deepspeed` launcher, its report, its refusals."""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from mars_dist.integrations.deepspeed.launch import launcher_arguments
from tests.processes import ROOT, run


@pytest.mark.parametrize("name", ["mars", pytest.param("adamw", marks=pytest.mark.slow)])
def test_training_through_the_launcher(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    config = ROOT / f"ds_configs/quickstart_{name}.json"
    out = tmp_path / "run.jsonl"
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--no_local_rank", *launcher_arguments(batch=16)]
    script = ["examples/gpt2_deepspeed.py", "--config", config, "--out", out, "--steps", "4", "--eval-every", "2"]
    result = run(*launcher, *script)
    assert result.returncode == 0, result.stdout

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


def write_metrics(path: Path, name: str, losses: list[float], **summary: Any) -> Path:
    records: list[dict[str, Any]] = [
        {"step": i + 1, "loss": loss + 0.01, "held_out_loss": loss, "seconds": i} for i, loss in enumerate(losses)
    ]
    records.append(
        {
            "summary": name,
            "optimizer": {"type": name, "params": {"lr": 0.01}},
            "zero_stage": 2,
            "ranks": 2,
            "device": "cpu",
            "parameters": 1000,
            "tokens_per_s": 4321.0,
            "unigram_loss": 6.3,
            "state_bytes_per_rank": [4000, 4000],
            "rules": {"AdamW": 52},
        }
        | summary
    )
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_report(tmp_path: Path) -> None:
    mars = write_metrics(
        tmp_path / "mars.jsonl",
        "MARS",
        [9.0, 7.0, 6.0],
        state_bytes_per_rank=[6000, 6000],
        rules={"MARS-AdamW": 18, "AdamW": 34},
    )
    adamw = write_metrics(tmp_path / "adamw.jsonl", "AdamW", [9.5, 8.0, 7.5])
    png = tmp_path / "curves.png"
    result = run(sys.executable, "examples/quickstart_report.py", mars, adamw, "--png", png)
    assert result.returncode == 0, result.stdout
    rows = {line[: line.find("  ")]: line.split()[-2:] for line in result.stdout.splitlines() if "  " in line}
    assert rows["held-out loss at step 3"] == ["6.000", "7.500"]
    assert rows["optimizer bytes per parameter"] == ["12.00", "8.00"]
    assert "MARS-AdamW 18, AdamW 34" in result.stdout and "AdamW 52" in result.stdout
    assert "After 3 steps MARS is 1.500 below AdamW; it had reached AdamW's final 7.500 by step 2." in result.stdout
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 10_000


def test_report_of_an_unfinished_run(tmp_path: Path) -> None:
    finished = write_metrics(tmp_path / "finished.jsonl", "MARS", [9.0])
    stopped = tmp_path / "stopped.jsonl"
    stopped.write_text('{"step": 1, "loss": 9.0}\n')
    result = run(sys.executable, "examples/quickstart_report.py", finished, stopped, "--png", tmp_path / "x.png")
    assert result.returncode == 1
    assert f"{stopped}: no summary at its end: the run did not finish; run the training again" in result.stdout
    assert "Traceback" not in result.stdout


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
