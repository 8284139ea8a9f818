"""The folder of a run: one training at a time, nobody else's files, nothing of the user's lost."""

from __future__ import annotations

import fcntl
import sys
from pathlib import Path

import pytest

from mars_dist import cli
from mars_dist.pretrain import recipe as recipes

SETTINGS = ["model.layers=1", "model.heads=1", "model.width=8", "model.sequence_length=16", "validation.every=0"]
SETTINGS += ["training.steps=2", "training.batch=2", "training.micro_batch=2", "schedule.warmup_steps=1"]
SETTINGS += ["checkpoint.every_steps=1", "logging.tensorboard=false"]


def train(out: Path, *more: str) -> int:
    words = ["train", "tiny", "--out", str(out), "--quiet"]
    return cli.main([*words, *(word for setting in SETTINGS for word in ("--set", setting)), *more])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of two steps."""
    assert train(tmp_path / "run") == 0
    return tmp_path / "run"


def steps(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir() if path.name.startswith("step-"))


def test_two_trainings_do_not_share_a_folder(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / "metrics.jsonl").read_text()
    with (run / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert train(run, "--fresh") == 1
    assert f"another mars-dist train writes into {run}" in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_text() == before and len(steps(run)) == 2
    assert train(run) == 0, "the lock is free again"


@pytest.mark.parametrize("name", ["metrics.jsonl", "recipe.yaml"])
@pytest.mark.parametrize("fresh", [[], ["--fresh"]])
def test_somebody_elses_files_are_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, fresh: list[str]
) -> None:
    (tmp_path / name).write_text("mine\n")
    assert train(tmp_path, *fresh) == 1
    assert f"{tmp_path} holds {name}, which is not of mars-dist train" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name] and (tmp_path / name).read_text() == "mine\n"


def test_folders_that_only_look_like_checkpoints_survive_a_fresh_start(run: Path) -> None:
    mine = run / "checkpoints/step-00000009"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    assert train(run, "--fresh") == 0
    assert (mine / "notes.txt").read_text() == "mine"


def test_a_fresh_start_that_cannot_start_removes_nothing(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # not installed
    recipe, kept = (run / "recipe.yaml").read_text(), steps(run)
    assert train(run, "--fresh", "--set", "logging.wandb=project") == 1
    assert "wandb" in capsys.readouterr().err
    assert steps(run) == kept and (run / "recipe.yaml").read_text() == recipe


def test_a_finished_run_keeps_the_recipe_that_it_had(run: Path) -> None:
    recipe = (run / "recipe.yaml").read_text()
    assert train(run, "--set", "optimizer.lr=0.1") == 0
    assert (run / "recipe.yaml").read_text() == recipe


def test_a_run_that_goes_on_with_other_settings_keeps_both_recipes(run: Path) -> None:
    before = (run / "recipe.yaml").read_text()
    assert train(run, "--set", "training.steps=3", "--set", "optimizer.lr=0.002") == 0
    assert (run / "recipe-before-step-2.yaml").read_text() == before
    now = recipes.load(run / "recipe.yaml")
    assert (now.training.steps, now.optimizer.lr) == (3, 0.002)


def test_a_curve_whose_checkpoints_are_gone_is_kept(run: Path) -> None:
    curve = (run / "metrics.jsonl").read_text()
    for path in [path for path in (run / "checkpoints").rglob("step-*/*") if path.is_file()]:
        path.unlink()
    assert train(run) == 0
    assert (run / "earlier-metrics.jsonl").read_text() == curve


def test_damage_is_told_in_one_line(
    run: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Of the newest: the one before is taken. Of all: an error."""
    (file,) = (run / "checkpoints/step-00000002").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-8] + b"changed!")
    assert train(run, "--set", "training.steps=3") == 0
    said = f"step-00000002 is damaged and passed over: {file} has another content"
    assert [message for message in caplog.messages if said in message] and "\n" not in "".join(caplog.messages)
    assert steps(run) == ["step-00000002", "step-00000003"]
    for step in steps(run):
        (run / "checkpoints" / step / "mars_dist_manifest.json").write_text("[1]")
    assert train(run, "--set", "training.steps=4") == 1
    error = capsys.readouterr().err
    assert "no checkpoint in " in error and "--fresh to start over" in error and "Traceback" not in error


def test_a_damaged_line_of_the_curve_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([lines[0], "5", *lines[1:]]) + "\n")
    assert train(run, "--set", "training.steps=3") == 1
    assert "metrics.jsonl, line 2 is damaged: '5'" in capsys.readouterr().err


def test_exporting_what_is_damaged(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (file,) = (run / "checkpoints/step-00000002").glob("*.safetensors")
    file.write_bytes(b"g" * file.stat().st_size)
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 1
    assert f"step-00000002 is damaged: {file} has another content" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert cli.main(["export", str(run), str(tmp_path / "file")]) == 1
    assert "exists and is not empty" in capsys.readouterr().err


def test_a_missing_package_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert train(tmp_path / "run") == 1
    assert "pip install 'mars-dist[deepspeed,train]'" in capsys.readouterr().err
