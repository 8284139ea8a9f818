"""kill -9 at any moment, full disks, damaged files: a run goes on from the last whole checkpoint as if undisturbed."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mars_dist.checkpoint import CheckpointError, Reader, manifest
from mars_dist.pretrain import checkpoint
from tests import crash_cases
from tests.crash_cases import EVERY, STEPS, losses, process, temporary_folders, wait_for
from tests.small import assert_identical

pytestmark = pytest.mark.timeout(300)
KILLS = 17
WAYS = {"plain": {}, "asynchronous": {"asynchronous": True}, "exact": {"exact": True}}


def contents(out: Path) -> dict[str, torch.Tensor]:
    """Of the last checkpoint, the random states too."""
    newest = checkpoint.latest(out / "checkpoints")
    assert newest is not None and checkpoint.step_of(newest) == STEPS
    readers = [Reader(newest), Reader(newest / checkpoint.RANDOM)]
    return {name: reader.whole(name).clone() for reader in readers for name in reader.names()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, float]]:
    """By way of training its folder, and how long it took."""
    found = {}
    for name, settings in WAYS.items():
        out = tmp_path_factory.mktemp("undisturbed") / name
        run = process(crash_cases.train, out, settings.get("asynchronous", False), settings.get("exact", False))
        wait_for(lambda out=out: (out / "losses.jsonl").exists())  # type: ignore[misc]
        began = time.monotonic()
        run.join(120)
        assert run.exitcode == 0 and list(losses(out)) == list(range(1, STEPS + 1))
        found[name] = out, time.monotonic() - began
    assert losses(found["plain"][0]) == losses(found["asynchronous"][0]) != losses(found["exact"][0])
    return found


def test_killed_at_any_moment_the_run_ends_as_if_undisturbed(
    undisturbed: dict[str, tuple[Path, float]], tmp_path: Path
) -> None:
    """A third of the kills at a random time, the others while a checkpoint is being written."""
    random_times, killed, in_a_save, resumed_at = random.Random(7), 0, 0, []
    for number in range(3 * KILLS):
        if killed >= KILLS and in_a_save >= 5:
            break
        name = list(WAYS)[number % 3]
        whole, seconds = undisturbed[name]
        arguments = WAYS[name].get("asynchronous", False), WAYS[name].get("exact", False)
        out = tmp_path / str(number)
        run = process(crash_cases.train, out, *arguments)
        wait_for(lambda out=out: (out / "losses.jsonl").exists())  # type: ignore[misc]
        if number // 3 % 3:
            step = EVERY * random_times.randint(1, STEPS // EVERY)
            target = out / f"checkpoints/.step-{step:08d}.tmp"
            wait_for(lambda target=target, run=run: target.exists() or not run.is_alive())  # type: ignore[misc]
            time.sleep(0.01 * random_times.random())
        else:
            time.sleep(seconds * random_times.random())
        run.kill()
        run.join()
        if run.exitcode == 0:  # it was faster
            continue
        assert run.exitcode == -signal.SIGKILL
        killed += 1
        before = checkpoint.latest(out / "checkpoints")
        newest = checkpoint.step_of(before) if before else 0
        in_a_save += any(int(path.name[6:14]) > newest for path in temporary_folders(out))  # others are being removed
        for finished in checkpoint.complete(out / "checkpoints"):
            assert not manifest.faults(finished), "complete means whole"
        resumed_at.append(newest)
        written = len((out / "losses.jsonl").read_text().splitlines())
        again = process(crash_cases.train, out, *arguments)
        again.join(120)
        assert again.exitcode == 0
        later = len((out / "losses.jsonl").read_text().splitlines()) - written
        assert later == STEPS - resumed_at[-1], "from the last complete one"
        assert losses(out) == losses(whole)
        assert_identical(contents(out), contents(whole))
        assert not list(temporary_folders(out))
    assert killed >= KILLS and in_a_save >= 5, (killed, in_a_save)
    assert len(set(resumed_at)) >= 3, resumed_at


# ------------------------------------------------------------------------------- a disk that is full or read-only


def some_steps(out: Path) -> dict[str, manifest.Record]:
    """A run of half of the steps; the files of its last checkpoint."""
    crash_cases.train(out, steps=STEPS // 2)
    newest = checkpoint.latest(out / "checkpoints")
    assert newest is not None
    return manifest.read(newest)["files"]


def assert_as_before(out: Path, files: dict[str, manifest.Record]) -> None:
    newest = checkpoint.latest(out / "checkpoints")
    assert newest is not None and checkpoint.step_of(newest) == STEPS // 2
    assert manifest.read(newest)["files"] == files and not manifest.faults(newest)
    assert (out / "checkpoints/latest").read_text() == newest.name


@pytest.mark.parametrize("size", [0, 5000, 1_000_000])
def test_a_full_disk_leaves_the_checkpoint_before(
    size: int, undisturbed: dict[str, tuple[Path, float]], tmp_path: Path
) -> None:
    out, note = tmp_path / "run", tmp_path / "note"
    files = some_steps(out)
    note.touch()
    (out / "losses.jsonl").rename(tmp_path / "first.jsonl")
    run = process(crash_cases.train_limited, out, max(size, 400), note)
    run.join(120)
    assert run.exitcode == 1
    said = note.read_text()
    assert said.startswith("CheckpointError: saving step-00000008 failed: ") and "ulimit -f" in said, said
    assert f"the newest checkpoint is {out / 'checkpoints/step-00000006'}" in said
    assert_as_before(out, files)
    assert not list(temporary_folders(out))
    crash_cases.train(out)
    assert_identical(contents(out), contents(undisturbed["plain"][0]))


def test_a_folder_that_may_not_be_written_leaves_the_checkpoint_before(
    undisturbed: dict[str, tuple[Path, float]], tmp_path: Path
) -> None:
    out, note = tmp_path / "run", tmp_path / "note"
    files = some_steps(out)
    note.touch()
    (out / "checkpoints").chmod(0o555)
    run = process(crash_cases.train_where_permissions_count, out, note)
    run.join(120)
    said = note.read_text()
    assert run.exitcode == 1 and "CheckpointError: saving step-00000008 failed: " in said, said
    assert "Permission denied" in said and "may not write there: change the owner" in said, said
    (out / "checkpoints").chmod(0o755)
    assert_as_before(out, files)
    crash_cases.train(out)
    assert_identical(contents(out), contents(undisturbed["plain"][0]))


# ------------------------------------------------------------------------------------------------------ damage


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.parametrize("damage", ["bit", "shard", "short", "manifest"])
def test_of_a_damaged_checkpoint_the_one_before_is_taken(
    damage: str, undisturbed: dict[str, tuple[Path, float]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "run"
    crash_cases.train(out, steps=STEPS // 2)
    before, newest = checkpoint.complete(out / "checkpoints")
    (file,) = newest.glob("mars-*.safetensors")
    if damage == "bit":
        flip(file, random.Random(1).randrange(8 * file.stat().st_size))
    elif damage == "shard":
        file.unlink()
    elif damage == "short":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        flip(newest / manifest.NAME, 8)
    expected = {
        "bit": f"step-00000006 is damaged and passed over: {file} has another content than was written (its SHA-256",
        "shard": f"step-00000006 is damaged and passed over: {file} is missing",
        "short": f"step-00000006 is damaged and passed over: {file} has ",
        "manifest": f"step-00000006 is damaged and passed over: {newest / manifest.NAME} is damaged",
    }[damage]
    assert checkpoint.newest_valid(out / "checkpoints") == before
    assert [message for message in caplog.messages if message.startswith(expected)], caplog.messages
    crash_cases.train(out)
    assert losses(out) == losses(undisturbed["plain"][0])
    assert_identical(contents(out), contents(undisturbed["plain"][0]))


def test_when_all_are_damaged_nothing_starts_over_by_itself(tmp_path: Path) -> None:
    out = tmp_path / "run"
    crash_cases.train(out, steps=STEPS // 2)
    for path in (out / "checkpoints").glob("step-*/*.safetensors"):
        flip(path, 99)
    with pytest.raises(
        ValueError, match="no checkpoint in .* is whole: step-00000006 is .*; step-00000004 is .*--fresh"
    ):
        checkpoint.newest_valid(out / "checkpoints")


def test_a_save_that_fails_in_the_background_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mars_dist.checkpoint import asynchronous

    write = asynchronous.tensors.write

    def broken(path: Path, *arguments: Any) -> Any:
        if "00000006" in str(path):
            raise OSError(5, "Input/output error")
        return write(path, *arguments)

    monkeypatch.setattr(asynchronous.tensors, "write", broken)
    with pytest.raises(CheckpointError, match=r"saving step-00000006 failed: .*Input/output error.*step-00000004"):
        crash_cases.train(tmp_path, asynchronous=True)
    assert [path.name for path in checkpoint.complete(tmp_path / "checkpoints")] == ["step-00000002", "step-00000004"]
