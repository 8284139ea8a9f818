"""The training loop: exact resume in every engine, other numbers of ranks, signals, losses that are NaN, files."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import signal
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mars_dist import cli
from mars_dist.checkpoint import CheckpointError, manifest
from mars_dist.pretrain import checkpoint, data
from mars_dist.pretrain import model as models
from mars_dist.pretrain.engine import BY_NAME, choose, deepspeed_config, state_form
from mars_dist.pretrain.metrics import Metrics
from mars_dist.pretrain.recipe import Recipe, load
from mars_dist.pretrain.train import open_sequences, train
from tests.processes import ROOT, run_python
from tests.ranks import RankPool
from tests.small import assert_identical
from tests.train_cases import (
    SMALL,
    Watched,
    in_turn,
    in_world,
    losses,
    recipe,
    records,
    run,
    run_apart,
    saved,
    steps,
    watch,
    with_deepspeed,
)

pytestmark = pytest.mark.timeout(300)
RANKS = 3
SETTINGS = [f"--set={key}={value}" for key, value in SMALL.items()]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    started = RankPool(RANKS)
    yield started
    started.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps in one go on one process: what every run that is interrupted is compared with."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("undisturbed")
    assert run(recipe(), out)[0] == 0
    return out


def end(out: Path, step: int = 10) -> Path:
    return out / f"checkpoints/step-{step:08d}"


def assert_same_end(out: Path, other: Path) -> None:
    """Losses, weights and optimizer states, bit for bit."""
    assert losses(out) == losses(other)
    assert list(losses(out)) == list(range(1, 11))
    assert_identical(saved(end(out)), saved(end(other)))


# --------------------------------------------------------------------------------------- 10 steps are 5 and 5 more


@pytest.mark.parametrize(
    ("name", "precision"), [("mars-adamw", "fp32"), ("adamw", "fp32"), ("muon", "fp32"), ("mars-adamw", "bf16")]
)
def test_a_run_that_crashed_goes_on_bit_for_bit(name: str, precision: str, tmp_path: Path) -> None:
    """Crashed two updates after its checkpoint, whose records were written: no step is there twice."""
    made_by = recipe(f"tiny-{name}", training__precision=precision)
    code, whole = run(made_by, tmp_path / "whole")
    assert code == 0
    code, first = run(made_by, tmp_path / "parts", {7: "crash"})
    assert code == "crash" and [s["step"] for s in steps(tmp_path / "parts")] == list(range(1, 8))
    code, second = run(made_by, tmp_path / "parts")
    assert code == 0 and list(second.trained) == [5, 6, 7, 8, 9]
    assert first.trained | second.trained == whole.trained
    assert_same_end(tmp_path / "parts", tmp_path / "whole")
    kinds = [next(iter(record)) for record in records(tmp_path / "parts")]
    assert kinds == ["run", *["step"] * 5, "run", *["step"] * 5, "summary"]


def whole_and_parts(made_by: Recipe, folder: Path) -> list[tuple[Any, ...]]:
    return [
        (made_by, folder / "whole"),
        (made_by, folder / "parts", {7: "crash"}),
        (made_by, folder / "parts"),
    ]


def assert_went_on(results: list[list[tuple[int | str, Watched]]], folder: Path) -> None:
    for (code, whole), (crashed, first), (code_of_rest, second) in results:
        assert (code, crashed, code_of_rest) == (0, "crash", 0)
        assert list(second.trained) == [5, 6, 7, 8, 9]
        assert first.trained | second.trained == whole.trained
    assert_same_end(folder / "parts", folder / "whole")


def test_ddp_goes_on_bit_for_bit(pool: RankPool, tmp_path: Path) -> None:
    plan = whole_and_parts(recipe(training__micro_batch=1), tmp_path)
    results = pool.run(in_world, 2, tmp_path / "rendezvous", in_turn, plan)
    assert_went_on(results[:2], tmp_path)
    assert records(tmp_path / "whole")[0]["run"]["engine"] == "DDP"


def test_deepspeed_goes_on_bit_for_bit(pool: RankPool, tmp_path: Path) -> None:
    """ZeRO-2 and ZeRO-3; then on another number of ranks, and in other engines."""
    settings = {"engine__name": "deepspeed", "training__micro_batch": 1, "validation__every": 5}
    zero3 = tmp_path / "zero3.json"
    zero3.write_text(json.dumps({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}))
    two, three = recipe(**settings), recipe(**settings, engine__deepspeed=zero3)
    plan = whole_and_parts(two, tmp_path / "2") + whole_and_parts(three, tmp_path / "3")
    # A run that begins under DDP and goes on under ZeRO-2 and ZeRO-3.
    chain = {"validation__every": 5, "checkpoint__every_steps": 2, "training__micro_batch": 1}
    engines = [{"name": "ddp"}, {"name": "deepspeed"}, {"name": "deepspeed", "deepspeed": zero3}, {"name": "deepspeed"}]
    kinds = [recipe(**chain, **{f"engine__{k}": v for k, v in engine.items()}) for engine in engines]
    plan += [(made_by, tmp_path / "chain", {3 + 2 * i: "crash"}) for i, made_by in enumerate(kinds[:3])]
    results = pool.run(in_world, 2, tmp_path / "rendezvous", with_deepspeed, plan, timeout=240.0)[:2]
    for stage, where in ((2, slice(0, 3)), (3, slice(3, 6))):
        folder = tmp_path / f"{stage}"
        assert_went_on([result[where] for result in results], folder)
        parts = end(folder / "whole").glob("mars-*.safetensors")
        sizes = [file.stat().st_size for file in parts]
        assert len(sizes) == 2 and max(sizes) <= 1.1 * sum(sizes) / 2, (stage, sizes)
        first, *_, last = records(folder / "whole")
        assert first["run"]["engine"] == f"DeepSpeed ZeRO-{stage}"
        assert first["run"]["parameters"] == 403448
        assert last["summary"]["rules"] == {"MARS-AdamW": 6, "AdamW": 10}
        assert all(s["grad_norm"] > 0 for s in steps(folder / "whole"))
    for result in results:
        assert [(code, min(seen.trained)) for code, seen in result[6:]] == [("crash", 0), ("crash", 2), ("crash", 4)]
    # The same numbers as without DeepSpeed, which sums in another order.
    alone = recipe(validation__every=5)
    assert run(alone, tmp_path / "alone")[0] == 0
    for stage in (2, 3):
        assert losses(tmp_path / f"{stage}/whole") == pytest.approx(losses(tmp_path / "alone"), abs=2e-5)
        theirs, ours = (
            [s["val_loss"] for s in steps(out) if "val_loss" in s]
            for out in (tmp_path / f"{stage}/whole", tmp_path / "alone")
        )
        assert theirs == pytest.approx(ours, abs=2e-5) and len(ours) == 2

    # Three ranks of ZeRO, then one process.
    pool.close()
    again = [(kinds[3], tmp_path / "chain", {9: "crash"})]
    results = pool.run(in_world, 3, tmp_path / "rendezvous3", with_deepspeed, again, timeout=240.0)
    assert [(code, min(seen.trained)) for ((code, seen),) in results] == [("crash", 6)] * 3
    code, seen = run(recipe(**chain), tmp_path / "chain")
    assert (code, min(seen.trained)) == (0, 8)
    about = [(r["run"]["engine"], r["run"]["world_size"]) for r in records(tmp_path / "chain") if "run" in r]
    zero2, zero3_ = "DeepSpeed ZeRO-2", "DeepSpeed ZeRO-3"
    assert about == [("DDP", 2), (zero2, 2), (zero3_, 2), (zero2, 3), ("one process", 1)]
    assert losses(tmp_path / "chain") == pytest.approx(losses(tmp_path / "alone"), abs=2e-5)
    steps_ = {name: value for name, value in saved(end(tmp_path / "chain")).items() if name.endswith("/step")}
    assert len(steps_) == 16 and {value.item() for value in steps_.values()} == {10.0}


@pytest.mark.slow
def test_other_optimizers_go_on_in_other_engines(pool: RankPool, tmp_path: Path) -> None:
    """One process, DDP, ZeRO-2, ZeRO-3, and back; against one process all the time."""
    zero3 = tmp_path / "zero3.json"
    zero3.write_text(json.dumps({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}))
    exact = {"optimizer__exact": "true"}
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        name: (f"tiny-{name}", {}) for name in ("adamw", "muon", "mars-lion", "mars-m", "mars-shampoo")
    }
    kinds |= {f"{name}-exact": (f"tiny-{name}", exact) for name in ("mars-adamw", "mars-m")}
    shared = {"checkpoint__every_steps": 2, "training__micro_batch": 1}
    plan = []
    for kind, (name, more) in kinds.items():
        assert run(recipe(name, **shared, **more), tmp_path / kind / "whole")[0] == 0
        assert run(recipe(name, **shared, **more), tmp_path / kind / "chain", {3: "crash"})[0] == "crash"
        for at, engine in (
            (5, {"name": "ddp"}),
            (7, {"name": "deepspeed"}),
            (9, {"name": "deepspeed", "deepspeed": zero3}),
        ):
            how = {f"engine__{key}": value for key, value in engine.items()}
            plan.append((recipe(name, **shared, **more, **how), tmp_path / kind / "chain", {at: "crash"}))
    results = pool.run(in_world, 2, tmp_path / "rendezvous", with_deepspeed, plan, timeout=280.0)[:2]
    for result in results:
        assert [(code, min(seen.trained)) for code, seen in result] == [("crash", n) for n in (2, 4, 6)] * len(kinds)
    for kind, (name, more) in kinds.items():
        code, seen = run(recipe(name, **shared, **more), tmp_path / kind / "chain")
        assert (code, min(seen.trained)) == (0, 8)
        whole, chain = (records(tmp_path / kind / out) for out in ("whole", "chain"))
        about = [r["run"]["engine"] for r in chain if "run" in r]
        assert about == ["one process", "DDP", "DeepSpeed ZeRO-2", "DeepSpeed ZeRO-3", "one process"]
        assert whole[-1]["summary"].get("rules") == chain[-1]["summary"].get("rules")
        assert losses(tmp_path / kind / "chain") == pytest.approx(losses(tmp_path / kind / "whole"), abs=2e-5), kind


def test_with_the_optimizer_on_disk_deepspeed_saves_by_itself() -> None:
    def form(name: str) -> str:
        return state_form(load("gpt2-xl", [f"engine.deepspeed={ROOT / 'ds_configs' / name}.json"]), "deepspeed")

    assert form("gpt2_xl_zero3_nvme") == "DeepSpeed's own, with the optimizer on the disks of 1 ranks"
    assert form("gpt2_xl_zero3_offload") == form("gpt2_xl_zero2") == BY_NAME == state_form(recipe(), "ddp")


def test_other_numbers_of_ranks_read_the_same_sequences(pool: RankPool, tmp_path: Path) -> None:
    """2 ranks, then 1, then 3, against one process; validation, too, with other micro batches."""
    settings = {"training__steps": 9, "checkpoint__every_steps": 3, "validation__every": 3}
    made_by = recipe(**settings, training__micro_batch=1)
    code, whole = run(recipe(**settings, training__micro_batch=3), tmp_path / "whole")
    assert code == 0
    read: dict[int, list[list[int]]] = {}
    for number, (size, crash) in enumerate([(2, {4: "crash"}), (1, {7: "crash"}), (3, None)]):
        rendezvous = tmp_path / f"rendezvous{number}"
        results = pool.run(in_world, size, rendezvous, run, made_by, tmp_path / "parts", crash)[:size]
        assert {code for code, _ in results} == {"crash" if crash else 0}
        for done in results[0][1].trained:
            read[done] = [row for _, seen in results for row in seen.trained[done]]
        evaluated = [row for _, seen in results for row in seen.evaluated]
        once = evaluated[: len(whole.evaluated) // 3] if size == 1 else evaluated
        assert sorted(once) == sorted(whole.evaluated[: len(whole.evaluated) // 3])
    assert read == whole.trained
    assert [r["run"]["world_size"] for r in records(tmp_path / "parts") if "run" in r] == [2, 1, 3]
    for key in ("loss", "val_loss", "grad_norm"):
        theirs, ours = ([s[key] for s in steps(tmp_path / out) if key in s] for out in ("parts", "whole"))
        assert theirs == pytest.approx(ours, abs=2e-6) and len(ours) == (3 if key == "val_loss" else 9)


# ----------------------------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_signal_saves_and_the_run_goes_on(name: str, tmp_path: Path, undisturbed: Path) -> None:
    handlers = [signal.getsignal(getattr(signal, n)) for n in ("SIGINT", "SIGTERM", "SIGUSR1")]
    code, first = run(recipe(), tmp_path, {6: name})
    assert code == 3
    assert list(first.trained) == list(range(7)), "the update that was under way is finished, and no other begun"
    assert checkpoint.latest(tmp_path / "checkpoints") == end(tmp_path, 7)
    assert "summary" not in records(tmp_path)[-1] and steps(tmp_path)[-1]["step"] == 7
    assert handlers == [signal.getsignal(getattr(signal, n)) for n in ("SIGINT", "SIGTERM", "SIGUSR1")]
    code, second = run(recipe(), tmp_path)
    assert code == 0 and list(second.trained) == [7, 8, 9]
    assert_same_end(tmp_path, undisturbed)


def test_a_signal_in_the_last_update_changes_nothing(tmp_path: Path, undisturbed: Path) -> None:
    assert run(recipe(), tmp_path, {9: "SIGTERM"})[0] == 0
    assert "summary" in records(tmp_path)[-1]
    assert_same_end(tmp_path, undisturbed)


def test_one_rank_stops_all(pool: RankPool, tmp_path: Path) -> None:
    """A signal on rank 1 alone; then a loss on rank 1 alone that is no number, after which nothing is saved."""
    made_by = recipe(training__micro_batch=1)
    plan = [(made_by, tmp_path, {3: "SIGTERM"}, 1), (made_by, tmp_path, {7: "nan"}, 1), (made_by, tmp_path)]
    for stopped, failed, finished in pool.run(in_world, 2, tmp_path / "rendezvous", in_turn, plan)[:2]:
        assert stopped[0] == 3 and list(stopped[1].trained) == [0, 1, 2, 3]
        assert list(failed[1].trained) == [4, 5, 6, 7]
        assert failed[0] == (
            f"NonFiniteLoss: the loss is nan at step 8 on rank 1; last good checkpoint: {end(tmp_path, 5)}. Lower the "
            "learning rate (--set optimizer.lr=...) or lengthen the warm-up (--set schedule.warmup_steps=...), and "
            "run again to go on from there."
        )
        assert finished[0] == 0 and list(finished[1].trained) == [5, 6, 7, 8, 9]
    assert list(losses(tmp_path)) == list(range(1, 11))


SECOND_SIGNAL = """
import os, signal, sys
from mars_dist import cli
from mars_dist.pretrain.engine import Plain
step = Plain.train_step
def train_step(self, done, micro_batches):
    if done == 3:
        os.kill(os.getpid(), signal.SIGINT)
        print("first", flush=True)
        os.kill(os.getpid(), signal.SIGINT)
        print("second", flush=True)
    return step(self, done, micro_batches)
Plain.train_step = train_step
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    command = ["train", "tiny", *SETTINGS, "--out", tmp_path / "run", "--quiet"]
    result = run_python("-c", SECOND_SIGNAL, *command, folder=tmp_path)
    assert result.returncode == -signal.SIGINT, result.stdout
    assert result.stdout.endswith("first\n")
    assert checkpoint.latest(tmp_path / "run/checkpoints") is None


def test_torchrun_with_one_process(tmp_path: Path, undisturbed: Path) -> None:
    command = ["train", "tiny", *SETTINGS, "--out", tmp_path / "run", "--json"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m", "mars_dist.cli"]
    result = run_python(*launcher, *command, folder=tmp_path)
    assert result.returncode == 0, result.stdout
    assert json.loads(result.stdout.splitlines()[-1])["summary"]["engine"] == "one process"
    assert losses(tmp_path / "run") == losses(undisturbed)


# ------------------------------------------------------------------------------------------------ losses, the command


def command(out: Path, *more: str) -> int:
    return cli.main(["train", "tiny", *SETTINGS, "--out", str(out), "--quiet", *more])


def test_a_loss_that_is_no_number_is_one_line_and_exit_code_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], undisturbed: Path
) -> None:
    with watch({6: "nan"}):
        assert command(tmp_path) == 4
    said = capsys.readouterr().err.splitlines()
    lines = [line for line in said if "error" in line]
    assert len(lines) == 1
    assert lines[0].startswith("mars-dist: error: the loss is nan at step 7 on rank 0; last good checkpoint: ")
    assert f"{end(tmp_path, 5)}. Lower" in lines[0]
    assert names(tmp_path) == ["latest", "step-00000005"]
    assert [s["step"] for s in steps(tmp_path)] == list(range(1, 7))
    assert command(tmp_path) == 0
    assert_same_end(tmp_path, undisturbed)


def test_before_the_first_checkpoint_there_is_none_to_name(tmp_path: Path) -> None:
    assert "the loss is nan at step 1 on rank 0; last good checkpoint: none. " in str(
        run(recipe(), tmp_path, {0: "nan"})[0]
    )
    assert checkpoint.complete(tmp_path / "checkpoints") == []


@pytest.mark.parametrize("clip", [1.0, None])
def test_a_gradient_that_is_no_number_is_caught_before_it_is_saved(
    clip: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of a step says nothing of the weights after it: a checkpoint at this very step would be poisoned."""

    class Spoiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
            return loss.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * torch.inf

    loss = models.loss
    monkeypatch.setattr(models, "loss", lambda model, rows: Spoiled.apply(loss(model, rows)))
    said = run(recipe(training__clip=clip, checkpoint__every_steps=1), tmp_path)[0]
    assert re.match(r"NonFiniteLoss: the norm of the gradient is (nan|inf) at step 1 on rank 0", str(said))
    assert checkpoint.complete(tmp_path / "checkpoints") == []


def test_a_validation_loss_that_is_no_number_stops_before_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = models.loss
    monkeypatch.setattr(models, "loss", lambda model, rows: loss(model, rows) * (1.0 if model.training else torch.nan))
    said = run(recipe(validation__every=2, checkpoint__every_steps=1), tmp_path)[0]
    assert "the validation loss is nan at step 2 on rank 0; last good" in str(said)
    assert checkpoint.complete(tmp_path / "checkpoints") == [end(tmp_path, 1)]


def test_another_learning_rate_is_used_after_a_resume(tmp_path: Path) -> None:
    """What the message about a loss that is no number advises."""
    assert run(recipe(), tmp_path, {6: "crash"})[0] == "crash"
    assert run(recipe(optimizer__lr=1e-4, optimizer__lr_1d=1e-4, schedule__min_lr=1e-4), tmp_path)[0] == 0
    assert [s["lr"] for s in steps(tmp_path)[5:]] == pytest.approx([1e-4] * 5)


# ------------------------------------------------------------------------------------------------------- checkpoints


def names(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def test_every_so_many_steps_and_the_last_ones_are_kept(tmp_path: Path) -> None:
    assert run(recipe(checkpoint__every_steps=3, checkpoint__keep_last=2), tmp_path)[0] == 0
    assert names(tmp_path) == ["latest", "step-00000009", "step-00000010"]
    assert (tmp_path / "checkpoints/latest").read_text() == "step-00000010"


def test_some_stay_for_ever(tmp_path: Path) -> None:
    assert run(recipe(checkpoint__every_steps=2, checkpoint__keep_last=1, checkpoint__keep_every=4), tmp_path)[0] == 0
    assert names(tmp_path) == ["latest", "step-00000004", "step-00000008", "step-00000010"]


def test_saving_while_training_goes_on(pool: RankPool, tmp_path: Path, undisturbed: Path) -> None:
    """On one process and two ranks; the same numbers, also after a crash, and no step that is not whole."""
    settings = {"checkpoint__every_steps": 2, "checkpoint__keep_last": 20, "checkpoint__asynchronous": "true"}
    assert run(recipe(**settings), tmp_path / "whole")[0] == 0
    assert_same_end(tmp_path / "whole", undisturbed)
    assert names(tmp_path / "whole") == ["latest", *(f"step-{n:08d}" for n in (2, 4, 6, 8, 10))]
    made_by = recipe(**settings, training__micro_batch=1)
    plan = [*whole_and_parts(made_by, tmp_path / "2"), (recipe(training__micro_batch=1), tmp_path / "2/plain")]
    for whole, crashed, rest, plain in pool.run(in_world, 2, tmp_path / "rendezvous", in_turn, plan)[:2]:
        assert (whole[0], crashed[0], rest[0], plain[0]) == (0, "crash", 0, 0)
        assert min(rest[1].trained) in (4, 6), "the sixth was under way"
    for out in ("parts", "whole"):
        assert_same_end(tmp_path / "2" / out, tmp_path / "2/plain")
        assert all(not manifest.faults(path) for path in checkpoint.complete(tmp_path / "2" / out / "checkpoints"))


def test_a_shard_that_is_missing_and_one_that_is_changed(pool: RankPool, tmp_path: Path) -> None:
    """Of the newest checkpoint of two ranks; the one before is taken on every rank, and none when that is damaged."""
    made_by = recipe(training__micro_batch=1, checkpoint__every_steps=3)
    plan = [(made_by, tmp_path / "whole"), (made_by, tmp_path / "parts", {7: "crash"})]
    pool.run(in_world, 2, tmp_path / "rendezvous", in_turn, plan)
    folder = tmp_path / "parts/checkpoints"
    assert names(tmp_path / "parts") == ["latest", "step-00000003", "step-00000006"]
    sizes = [file.stat().st_size for file in sorted((folder / "step-00000006").glob("*.safetensors"))]
    assert len(sizes) == 2 and max(sizes) < 1.1 * sum(sizes) / 2, sizes
    (folder / "step-00000006/mars-00001-of-00002.safetensors").unlink()
    results = pool.run(in_world, 2, tmp_path / "rendezvous2", in_turn, [(made_by, tmp_path / "parts")])[:2]
    assert [(code, min(seen.trained)) for ((code, seen),) in results] == [(0, 3), (0, 3)]
    assert_same_end(tmp_path / "parts", tmp_path / "whole")

    for checkpoint_ in checkpoint.complete(folder):
        file = checkpoint_ / "mars-00001-of-00002.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    more = recipe(training__micro_batch=1, training__steps=12)
    said = [
        result[0][0]
        for result in pool.run(in_world, 2, tmp_path / "rendezvous3", in_turn, [(more, tmp_path / "parts")])[:2]
    ]
    assert said[0] == said[1] and re.match(
        r"ValueError: no checkpoint in .* is whole: step-00000010 is damaged and passed over: .*00001-of-00002"
        r".safetensors has another content .*; step-00000009 is damaged",
        said[0],
    )


def test_every_so_many_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves by a minute whenever it is asked."""
    from mars_dist.pretrain import train as module

    ticks = iter(range(10**6))
    monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=lambda: 60.0 * next(ticks)))
    settings = {"checkpoint__every_steps": None, "checkpoint__keep_last": 20}
    assert run(recipe(**settings, checkpoint__every_minutes=9.5), tmp_path / "timed")[0] == 0
    assert run(recipe(**settings), tmp_path / "never")[0] == 0
    assert names(tmp_path / "never") == ["latest", "step-00000010"]
    found = names(tmp_path / "timed")
    gaps = {int(b[5:]) - int(a[5:]) for a, b in zip(found[1:-2], found[2:-1], strict=True)}
    assert len(found) > 3 and len(gaps) == 1, found


def test_half_written_checkpoints_are_never_taken_and_cleaned_away(tmp_path: Path, undisturbed: Path) -> None:
    assert run(recipe(), tmp_path, {6: "crash"})[0] == "crash"
    folder = tmp_path / "checkpoints"
    for name in (".step-00000008.tmp", ".step-00000005.tmp", "step-00000009"):  # the last has no manifest
        (folder / name).mkdir()
        (folder / name / "mars-00000-of-00001.safetensors").write_bytes(b"half")
    (folder / ".latest.tmp").write_text("step-00")
    (folder / "notes.txt").write_text("the user's")
    code, seen = run(recipe(), tmp_path)
    assert code == 0 and list(seen.trained) == [5, 6, 7, 8, 9]
    assert names(tmp_path) == ["latest", "notes.txt", "step-00000005", "step-00000009", "step-00000010"]
    assert_same_end(tmp_path, undisturbed)


def test_a_failure_while_saving_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mars_dist.checkpoint import tensors

    write = tensors.write

    def full(path: Path, *arguments: Any) -> Any:
        record = write(path, *arguments)
        if "00000010" in path.parent.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return record

    monkeypatch.setattr(tensors, "write", full)
    with pytest.raises(
        CheckpointError, match=f"No space left on device: free space.*newest checkpoint is {end(tmp_path, 5)}"
    ):
        train(recipe(), tmp_path, bar=False)
    assert names(tmp_path) == ["latest", "step-00000005"]
    assert (tmp_path / "checkpoints/latest").read_text() == "step-00000005"


OTHER_RUNS = {
    "model.width is 8 there and 16 here": {"model__width": 16},
    "model.bias is True there and False here": {"model__bias": "false"},
    "data.seed is 1 there and 2 here": {"data__seed": 2},
    "training.seed is 1 there and 2 here": {"training__seed": 2},
    "training.batch is 6 there and 12 here": {"training__batch": 12},
    "optimizer.name is 'mars-adamw' there and 'adamw' here": {"optimizer__name": "adamw"},
    "data.path is None there and 'data with the fingerprint ": {"data__path": "tokens"},
    "model.layers is 1 there and 2 here; data.seed is 1 there and 2 here": {"model__layers": 2, "data__seed": 2},
}


@pytest.mark.parametrize("said", OTHER_RUNS)
def test_a_checkpoint_of_another_run_is_refused(
    said: str, tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokens").mkdir()
    for split in ("train", "val"):
        torch.arange(1000, dtype=torch.int16).numpy().tofile(tmp_path / f"tokens/{split}.bin")
    before = (undisturbed / "metrics.jsonl").read_bytes(), (undisturbed / "recipe.yaml").read_bytes()
    message = str(run(recipe(**OTHER_RUNS[said]), undisturbed)[0])
    assert message.startswith(f"ValueError: {end(undisturbed)} belongs to another run: {said}")
    assert message.endswith(". Choose another --out, or --fresh to start over.") and "\n" not in message
    assert before == ((undisturbed / "metrics.jsonl").read_bytes(), (undisturbed / "recipe.yaml").read_bytes())


def test_other_tokens_under_the_same_path_are_refused(tmp_path: Path) -> None:
    made_by = recipe(data__path=tmp_path, training__steps=3)
    for first in (0, 1):
        for split in ("train", "val"):
            torch.arange(first, 1000, dtype=torch.int16).numpy().tofile(tmp_path / f"{split}.bin")
        code = run(made_by, tmp_path / "run")[0]
        assert code == 0 if first == 0 else "data.path is 'data with the fingerprint " in str(code)


def test_fresh_starts_over_and_what_was_there_does_not_come_back(tmp_path: Path) -> None:
    """Older checkpoints of more steps would be newer than those of the fresh run, and win at the next start."""
    assert run(recipe(logging__tensorboard="true"), tmp_path)[0] == 0
    events = list((tmp_path / "tensorboard").iterdir())
    other = recipe(model__width=16, checkpoint__every_steps=2, logging__tensorboard="true")
    with watch({3: "SIGTERM"}):
        assert train(other, tmp_path, resume=False, bar=False) == 3
    assert names(tmp_path) == ["latest", "step-00000002", "step-00000004"]
    assert [s["step"] for s in steps(tmp_path)] == [1, 2, 3, 4] and len(records(tmp_path)) == 5
    assert load(str(tmp_path / "recipe.yaml")).model.width == 16
    assert not set(events) & set((tmp_path / "tensorboard").iterdir())
    code, seen = run(other, tmp_path)
    assert code == 0 and list(seen.trained) == list(range(4, 10))
    assert run(other, tmp_path / "whole")[0] == 0
    assert_identical(saved(end(tmp_path)), saved(end(tmp_path / "whole")))


# ------------------------------------------------------------------------------------------------------------- files


def test_the_metrics_are_as_documented(undisturbed: Path) -> None:
    first, *middle, last = records(undisturbed)
    about = first["run"]
    made_by = recipe()
    assert about["name"] == "tiny-mars-adamw" and about["optimizer"]["name"] == "mars-adamw"
    assert (about["world_size"], about["engine"], about["device"]) == (1, "one process", "cpu")
    norms_and_biases = 3 * 2 * 8 + (3 * 8 + 8 + 4 * 8 + 8)
    assert about["parameters"] == (50304 + 16) * 8 + 12 * 8 * 8 + norms_and_biases
    assert [s["step"] for s in middle] == list(range(1, 11))
    assert [s["tokens"] for s in middle] == [n * 6 * 16 for n in range(1, 11)]
    assert all({"loss", "lr", "tokens_per_s", "seconds", "grad_norm"} <= s.keys() for s in middle)
    assert middle[2]["lr"] == made_by.optimizer.lr and middle[0]["lr"] == pytest.approx(made_by.optimizer.lr / 3)
    assert sorted(s["seconds"] for s in middle) == [s["seconds"] for s in middle]
    assert last["summary"]["steps"] == 10 and last["summary"]["rules"] == {"MARS-AdamW": 6, "AdamW": 10}
    assert load(str(undisturbed / "recipe.yaml")) == made_by


def test_a_finished_run_that_is_started_again_stays_as_it_is(tmp_path: Path) -> None:
    assert run(recipe(), tmp_path)[0] == 0
    before = (tmp_path / "metrics.jsonl").read_text()
    code, seen = run(recipe(), tmp_path)
    assert code == 0 and not seen.trained
    assert (tmp_path / "metrics.jsonl").read_text() == before
    # Killed between its last checkpoint and its summary; and prolonged.
    (tmp_path / "metrics.jsonl").write_text("".join(before.splitlines(keepends=True)[:-1]))
    assert run(recipe(), tmp_path)[0] == 0
    assert "summary" in records(tmp_path)[-1]
    code, seen = run(recipe(training__steps=12), tmp_path)
    assert code == 0 and list(seen.trained) == [10, 11]
    assert [next(iter(r)) for r in records(tmp_path)].count("summary") == 1
    assert list(losses(tmp_path)) == list(range(1, 13))


def test_half_of_a_line_at_the_end_is_dropped(tmp_path: Path) -> None:
    assert run(recipe(), tmp_path, {7: "crash"})[0] == "crash"
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "los')
    assert run(recipe(), tmp_path)[0] == 0
    assert list(losses(tmp_path)) == list(range(1, 11))


def test_the_time_of_all_parts_is_in_the_summary(tmp_path: Path) -> None:
    lines = [
        {"run": {}},
        {"step": 1, "seconds": 5.0},
        {"step": 2, "seconds": 7.0},
        {"run": {}},
        {"step": 3, "seconds": 2.0},
    ]
    lines += [{"step": 4, "seconds": 9.0}]  # lost: behind the checkpoint
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with Metrics(recipe(), tmp_path, 3, {"name": "x"}, active=True, bar=False) as metrics:
        metrics.summary({"name": "x"}, 11.0)
    assert records(tmp_path)[-1]["summary"]["seconds"] == 7.0 + 2.0 + 11.0


def test_only_every_so_many_steps_are_logged(tmp_path: Path) -> None:
    assert run(recipe(logging__every=4, validation__every=3), tmp_path)[0] == 0
    assert list(losses(tmp_path)) == [3, 4, 6, 8, 9, 10]
    assert [s["step"] for s in steps(tmp_path) if "val_loss" in s] == [3, 6, 9, 10]


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made_by = recipe(logging__tensorboard="true", validation__every=5)
    assert run(made_by, tmp_path, {7: "crash"})[0] == "crash"
    assert run(made_by, tmp_path)[0] == 0
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert {"loss", "lr", "grad_norm", "tokens_per_s", "val_loss"} == set(board.Tags()["scalars"])
    curve = {event.step: event.value for event in board.Scalars("loss")}
    assert curve == pytest.approx(losses(tmp_path)) and len(board.Scalars("loss")) == 10


def test_weights_and_biases_only_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []
    session = types.SimpleNamespace(
        log=lambda record, step: calls.append(("log", step)), finish=lambda: calls.append(("finish", None))
    )

    def init(**keywords: Any) -> Any:
        calls.append(("init", keywords["project"]))
        return session

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    assert run(recipe(training__steps=3), tmp_path / "without")[0] == 0
    assert not calls
    assert run(recipe(training__steps=3, logging__wandb="mine"), tmp_path / "with")[0] == 0
    assert calls == [("init", "mine"), *[("log", n) for n in (1, 2, 3)], ("finish", None)]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"pip install wandb.*--set logging.wandb=null"):
        train(recipe(training__steps=3, logging__wandb="mine"), tmp_path / "missing", bar=False)


# -------------------------------------------------------------------------------------------------------- validation


def test_the_validation_loss_is_that_of_the_held_out_sequences(tmp_path: Path) -> None:
    made_by = recipe(validation__every=4)
    code, seen = run(made_by, tmp_path)
    assert code == 0
    other = run(recipe(validation__every=10, data__seed=2), tmp_path / "other")[1]
    third = len(seen.evaluated) // 3  # at 4, 8 and 10
    assert other.evaluated == seen.evaluated[:third] and other.trained != seen.trained
    assert seen.evaluated[:third] == seen.evaluated[third : 2 * third] == seen.evaluated[2 * third :]
    text, _ = open_sequences(made_by, "val")
    rows = [row.tolist() for i in range(2) for row in text.batch(i, 6)]
    assert seen.evaluated[:third] == rows
    trained = {tuple(row) for part in seen.trained.values() for row in part}
    assert not trained & {tuple(row) for row in rows}

    model = models.build(made_by.model)
    values = saved(end(tmp_path))
    for name, p in model.named_parameters():
        p.data.copy_(values[f"{name}/param"])
    direct = [models.loss(model, torch.tensor([row])).item() for row in rows]
    assert steps(tmp_path)[-1]["val_loss"] == pytest.approx(sum(direct) / len(direct), abs=1e-5)


def test_a_short_held_out_text_is_read_once(tmp_path: Path) -> None:
    for split, length in (("train", 5000), ("val", 16 * 10 + 1)):
        torch.arange(length, dtype=torch.int16).numpy().tofile(tmp_path / f"{split}.bin")
    settings = {"training__steps": 3, "data__path": tmp_path, "validation__every": 3, "validation__batches": 50}
    code, seen = run(recipe(**settings), tmp_path / "run")
    assert code == 0
    assert len(seen.evaluated) == 12 and len({tuple(row) for row in seen.evaluated}) == 10  # the 2nd batch is full


def test_without_validation_no_held_out_text_is_needed(tmp_path: Path) -> None:
    torch.arange(5000, dtype=torch.int16).numpy().tofile(tmp_path / "train.bin")
    assert run(recipe(training__steps=3, data__path=tmp_path), tmp_path / "run")[0] == 0
    assert "val.bin: no such file" in str(run(recipe(data__path=tmp_path, validation__every=3), tmp_path / "2")[0])


# ---------------------------------------------------------------------------------------------- what a recipe starts


def test_the_short_text_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(recipe(training__steps=3), tmp_path / "short")[0] == 0
    assert not caplog.messages or "data.path" not in "".join(caplog.messages)
    monkeypatch.setattr(
        data, "split", lambda works, held_out: (["to be or not to be " * 9], ["that is the question " * 9])
    )
    assert run(recipe(training__steps=20), tmp_path / "long")[0] == 0
    said = [message for message in caplog.messages if "data.path is null" in message]
    assert len(said) == 1 and "times over" in said[0] and "--set data.path=FOLDER" in said[0]


def test_which_engine_is_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CROSS_RANK", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert choose(recipe()) == "ddp"
    assert choose(recipe(engine__deepspeed="x.json")) == "deepspeed"
    assert choose(recipe(engine__name="deepspeed")) == "deepspeed"
    monkeypatch.setenv("CROSS_RANK", "0"), monkeypatch.setenv("LOCAL_SIZE", "2")  # what its launcher sets
    assert choose(recipe()) == "deepspeed"
    assert choose(recipe(engine__name="ddp")) == "ddp"


def test_ranks_that_do_not_share_their_folder_are_refused(pool: RankPool, tmp_path: Path, undisturbed: Path) -> None:
    """They would train different steps together."""
    outs = [undisturbed, tmp_path / "empty"]
    for code, seen in pool.run(in_world, 2, tmp_path / "rendezvous", run_apart, recipe(training__steps=20), outs)[:2]:
        assert str(code).startswith("ValueError: ranks see different checkpoints, of steps [0, 10]: --out must be one")
        assert not seen.trained


def test_a_world_that_does_not_divide_is_refused(pool: RankPool, tmp_path: Path) -> None:
    made_by = recipe(training__batch=8, training__micro_batch=4)
    for code, _ in pool.run(in_world, 3, tmp_path / "rendezvous", run, made_by, tmp_path / "run"):
        assert str(code).startswith("RecipeError: a batch of 8 sequences does not divide into micro batches of 4 on 3")


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("gpt2_*.json")), ids=lambda path: path.stem)
def test_the_shipped_configurations_agree_with_the_recipes(path: Path) -> None:
    made_by = load(f"gpt2-{path.stem.split('_')[1]}", [f"engine.deepspeed={path}"])
    config = deepspeed_config(made_by)
    theirs = json.loads(path.read_text())
    assert config["zero_optimization"] == theirs["zero_optimization"]
    assert config["data_types"] == theirs["data_types"] and config["bf16"] == {"enabled": True}
    assert (config["train_batch_size"], config["gradient_clipping"]) == (480, 1.0)
    assert not config.keys() & {"optimizer", "scheduler", "fp16"}


@pytest.mark.parametrize(
    ("key", "theirs", "ours"),
    [
        ("train_batch_size", 240, 480),
        ("train_micro_batch_size_per_gpu", 15, 5),
        ("gradient_accumulation_steps", 12, 96),  # on one rank
        ("gradient_clipping", 0.5, 1.0),
        ("bf16.enabled", False, True),
        ("fp16.enabled", True, False),
        ("optimizer.type", "AdamW", "MARS"),
        ("optimizer.params.mars_type", "mars-lion", "mars-adamw"),
        ("optimizer.params.lr", 6e-4, 2e-3),
        ("optimizer.params.betas", [0.9, 0.95], [0.95, 0.99]),
        ("optimizer.params.weight_decay_1d", 0.5, 0.1),
        ("scheduler.params.total_num_steps", 1000, 100000),
        ("scheduler.params.warmup_num_steps", 100, 2000),
        ("scheduler.params.cos_min_ratio", 0.1, 0.005),
    ],
)
def test_a_configuration_that_contradicts_the_recipe_is_refused(
    key: str, theirs: Any, ours: Any, tmp_path: Path
) -> None:
    config = json.loads((ROOT / "ds_configs/gpt2_large_zero2.json").read_text())
    *sections, last = key.split(".")
    inner = config
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[last] = theirs
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=re.escape(f"{path}: {key} is {json.dumps(theirs)}, the recipe has ")
    ) as raised:
        deepspeed_config(load("gpt2-large", [f"engine.deepspeed={path}"]))
    assert f"the recipe has {json.dumps(ours)}: change one of them" in str(raised.value)
    inner[last] = "auto"
    path.write_text(json.dumps(config))
    deepspeed_config(load("gpt2-large", [f"engine.deepspeed={path}"]))


# ------------------------------------------------------------------------------------------------------------ memory


def open_files() -> list[str]:
    """What each descriptor points to. Not the one that lists them, nor TensorBoard's, which its thread opens anew for
    every block that it writes.
    """
    links = [Path("/proc/self/fd") / number for number in os.listdir("/proc/self/fd")]
    targets = sorted(os.readlink(link) for link in links if os.path.islink(link))
    assert sum("tfevents" in target for target in targets) <= 1
    return [target for target in targets if "tfevents" not in target]


def test_memory_and_open_files_are_flat_over_500_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 600 steps the last 500. The allocator keeps what it once had, so a leak is what goes on growing: a leak of
    one sequence of logits (1.6 MB) or of one set of gradients (0.8 MB) a step would be hundreds of MB.
    """
    from mars_dist.pretrain.engine import Plain

    step, resident, files = Plain.train_step, {}, {}

    def train_step(self: Plain, done: int, micro_batches: Any) -> Any:
        if done in (100, 350, 599):
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            resident[done], files[done] = pages * os.sysconf("SC_PAGE_SIZE") / 1e6, open_files()
        return step(self, done, micro_batches)

    monkeypatch.setattr(Plain, "train_step", train_step)
    for split in ("train", "val"):
        torch.arange(5000, dtype=torch.int16).numpy().tofile(tmp_path / f"{split}.bin")
    settings = {"training__steps": 600, "training__batch": 1, "training__micro_batch": 1, "model__sequence_length": 8}
    settings |= {"checkpoint__every_steps": 90, "validation__every": 50, "model__width": 4}
    assert run(recipe(**settings, data__path=tmp_path, logging__tensorboard="true"), tmp_path / "run")[0] == 0
    assert files[100] == files[350] == files[599]
    assert resident[599] - resident[100] < 25, resident
