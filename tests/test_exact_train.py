"""``mars-dist train --exact``: the numbers of ``ExactMode``, going on bit for bit in every engine, what is shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mars_dist.cli import main
from mars_dist.exact import ExactMode
from mars_dist.pretrain import model as models
from mars_dist.pretrain import report
from mars_dist.pretrain.engine import schedule
from mars_dist.pretrain.train import open_sequences, split
from tests.ranks import RankPool
from tests.test_train import assert_same_end, assert_went_on, in_world, run, whole_and_parts, with_deepspeed
from tests.train_cases import losses, recipe, records, steps, watch

EXACT = {"optimizer__exact": "true"}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_that_crashed_goes_on_bit_for_bit(precision: str, tmp_path: Path) -> None:
    plan = whole_and_parts(recipe(training__precision=precision, **EXACT), tmp_path)
    assert_went_on([[run(*one) for one in plan]], tmp_path)
    assert [s["gradient_evaluations"] for s in steps(tmp_path / "parts")] == [2 * n for n in range(1, 11)]
    first, *_, last = records(tmp_path / "whole")
    assert first["run"]["optimizer"]["exact"] and last["summary"]["rules"] == {"MARS-AdamW": 6, "AdamW": 10}


def test_it_trains_as_exact_mode_in_a_loop_by_hand(tmp_path: Path) -> None:
    made_by = recipe(training__precision="fp32", **EXACT)
    assert run(made_by, tmp_path)[0] == 0
    torch.manual_seed(made_by.training.seed)
    model = models.build(made_by.model)
    optimizer = models.build_optimizer(model, made_by.optimizer)
    with watch():
        sequences, _ = open_sequences(made_by, "train")
    data = [part for step in range(11) for part in split(sequences.batch(step, 6, 0, 1), made_by)]
    found: list[float] = []

    def gradient(part: Any) -> None:
        loss = models.loss(model, part) / 2
        loss.backward()
        found.append(loss.item())

    def clip() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), made_by.training.clip or float("inf"))

    peaks = [group["lr"] for group in optimizer.param_groups]
    for step, batch in enumerate(ExactMode(optimizer, data, gradient, accumulation=2, before_step=clip)):
        if step == 10:
            break
        found.clear()
        for part in batch:
            gradient(part)
        assert sum(found) == pytest.approx(losses(tmp_path)[step + 1], abs=1e-6), step
        clip()
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * schedule(made_by, step)
        optimizer.step()
        optimizer.zero_grad()
    approximate = tmp_path / "approximate"
    assert run(recipe(training__precision="fp32"), approximate)[0] == 0
    assert losses(approximate)[1] == losses(tmp_path)[1] and losses(approximate)[10] != losses(tmp_path)[10]
    assert all("gradient_evaluations" not in s for s in steps(approximate))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ddp_and_deepspeed_go_on_bit_for_bit_with_the_numbers_of_one_process(pool: RankPool, tmp_path: Path) -> None:
    zero3 = tmp_path / "zero3.json"
    zero3.write_text(json.dumps({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}))
    settings: dict[str, Any] = {"training__micro_batch": 1, **EXACT}
    kinds = {
        "DDP": recipe(**settings),
        "DeepSpeed ZeRO-2": recipe(**settings, engine__name="deepspeed"),
        "DeepSpeed ZeRO-3": recipe(**settings, engine__name="deepspeed", engine__deepspeed=zero3),
    }
    assert run(recipe(**settings), tmp_path / "alone")[0] == 0
    folders = {kind: tmp_path / kind.replace(" ", "") for kind in kinds}
    plan = [one for kind, made_by in kinds.items() for one in whole_and_parts(made_by, folders[kind])]
    results = pool.run(in_world, 2, tmp_path / "rendezvous", with_deepspeed, plan, timeout=240.0)
    for i, (kind, folder) in enumerate(folders.items()):
        assert_went_on([result[3 * i : 3 * i + 3] for result in results], folder)
        first, *_, last = records(folder / "whole")
        assert first["run"]["engine"] == kind and last["summary"]["rules"] == {"MARS-AdamW": 6, "AdamW": 10}
        assert losses(folder / "whole") == pytest.approx(losses(tmp_path / "alone"), abs=2e-5)
        assert steps(folder / "whole")[-1]["gradient_evaluations"] == 20


def test_a_run_with_more_steps_goes_on_as_if_it_had_not_ended(tmp_path: Path) -> None:
    flat = {"schedule__min_lr": 0.005, "schedule__warmup_steps": 0, "optimizer__lr": 0.005, **EXACT}
    assert run(recipe(**flat), tmp_path / "whole")[0] == 0
    for more in (6, 10):
        assert run(recipe(training__steps=more, **flat), tmp_path / "parts")[0] == 0
    assert_same_end(tmp_path / "parts", tmp_path / "whole")


def test_a_checkpoint_of_the_other_mode_is_refused(tmp_path: Path) -> None:
    assert run(recipe(training__steps=3, **EXACT), tmp_path)[0] == 0
    said, _ = run(recipe(training__steps=5), tmp_path)
    assert "optimizer.exact is True there and None here" in str(said)


def test_the_switch_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny-mars-lion", "--exact", "--show"]) == 0
    assert "exact: true" in capsys.readouterr().out
    for name, reason in (("tiny-muon", "exact must be false for muon"), ("tiny-adamw", "optimizer.exact")):
        assert main(["train", name, "--exact", "--show"]) == 1
        assert reason in capsys.readouterr().err


def test_the_report_shows_the_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, more in (("exact", EXACT), ("approximate", {})):
        assert run(recipe(training__steps=3, **more), tmp_path / name)[0] == 0
    report.report([tmp_path / "exact", tmp_path / "approximate"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "gradients per step" in line]
    assert [word for word in line.split() if word.isdigit()] == ["2", "1"]
