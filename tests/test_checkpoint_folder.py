"""A checkpoint is complete or not there: whatever fails, on whichever rank, at whichever call to the system."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import checkpoint_cases as cases
import pytest
import torch
from failing_calls import Failing, Killed
from ranks import RankPool

from mars_dist.checkpoint import (
    CheckpointError,
    Chunk,
    Reader,
    Saver,
    bench,
    complete,
    folder,
    latest,
    latest_valid,
    manifest,
    part,
    save,
    step_of,
    tensors,
    tidy,
    verify,
)
from mars_dist.pretrain.checkpoint import newest_valid


def of(value: float, numel: int = 3) -> list[Chunk]:
    return [Chunk("w", (numel,), 0, torch.full((numel,), value))]


def saved(run: Path, step: int, value: float, keep_last: int = 5, **more: Any) -> Path:
    return save(run, step, {"about": value}, part(of(value)), keep_last, **more)


def value_in(checkpoint: Path | None) -> float:
    assert checkpoint is not None and manifest.faults(checkpoint) == []
    value = Reader(checkpoint).whole("w")
    assert len(set(value.tolist())) == 1
    return value[0].item()


def names(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


# ---- what is saved


def test_a_checkpoint_says_what_it_is(tmp_path: Path) -> None:
    run = tmp_path / "deep/run"
    path = saved(run, 20, 1.5)
    assert (path, step_of(path), latest(run), complete(run)) == (run / "step-00000020", 20, path, [path])
    assert names(run) == ["latest", path.name] and (run / "latest").read_text() == path.name
    content = manifest.read(path)
    assert (content["step"], content["world_size"], content["about"]) == (20, 1, 1.5)
    assert content["versions"].keys() == {"mars_dist", "torch"} and value_in(path) == 1.5


def test_files_of_others_are_recorded_and_hashed_ones_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, record = [], manifest.record
    monkeypatch.setattr(manifest, "record", lambda path: read.append(path.name) or record(path))

    def write(temporary: Path) -> dict[str, manifest.Record]:
        (temporary / "engine").mkdir()
        (temporary / "engine/state.pt").write_bytes(b"12345")
        return dict(part(of(1.0))(temporary) or {})

    path = save(tmp_path, 1, {}, write, 1)
    assert read == ["state.pt"]
    assert set(manifest.read(path)["files"]) == {"engine/state.pt", tensors.file_name(0, 1)}
    assert manifest.faults(path) == []


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [(1, None, [12]), (3, None, [8, 10, 12]), (1, 4, [4, 8, 12]), (2, 3, [6, 10, 12]), (1, 5, [10, 12])],
)
def test_rotation(tmp_path: Path, keep_last: int, keep_every: int | None, kept: list[int]) -> None:
    for step in range(2, 13, 2):
        saved(tmp_path, step, step, keep_last, keep_every=keep_every)
    assert [step_of(path) for path in complete(tmp_path)] == kept
    assert len(names(tmp_path)) == len(kept) + 1, "and the pointer"


def test_a_run_that_went_back_behind_damaged_ones_keeps_what_is_whole(tmp_path: Path) -> None:
    """Steps 20 and 30 have a flipped byte, which sizes do not show: they must not count as the two that are kept."""
    for step in (10, 20, 30):
        saved(tmp_path, step, step, 3)
    for step in (20, 30):
        (file,) = (tmp_path / f"step-{step:08d}").glob("*.safetensors")
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    assert newest_valid(tmp_path) == tmp_path / "step-00000010"
    new = saved(tmp_path, 15, 15.0, 2)
    assert newest_valid(tmp_path) == new and value_in(new) == 15.0
    assert [step_of(path) for path in complete(tmp_path)] == [10, 15, 20, 30]
    saved(tmp_path, 20, 20.0, 2)
    assert [step_of(path) for path in complete(tmp_path)] == [15, 20, 30]
    assert value_in(newest_valid(tmp_path)) == 20.0


def test_a_relative_folder_is_the_one_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    saver = Saver(Path("run"), keep_last=1)
    saver.save(1, {}, of(1.0))
    monkeypatch.chdir(tmp_path / "there")
    assert saver.wait() == tmp_path / "here" / "run" / "step-00000001"
    saver.save(2, {}, of(2.0))
    assert saver.wait() == tmp_path / "here" / "run" / "step-00000002"
    assert names(tmp_path / "there") == []


def test_what_cannot_be_asked_for(tmp_path: Path) -> None:
    for more in ({"keep_last": 0}, {"keep_every": 0}, {"keep_last": -1}, {"keep_last": 1.5}, {"keep_every": "2"}):
        with pytest.raises(ValueError, match="both count from 1"):
            saved(tmp_path, 1, 1.0, **more)  # type: ignore[arg-type]
    for step in (-1, 2.0, "3", True, None):
        with pytest.raises(ValueError, match="the number of a step is needed, 0 or more"):
            saved(tmp_path, step, 1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\['files', 'step'\], which the manifest says by itself"):
        save(tmp_path, 1, {"step": 2, "files": {}}, part([]), 1)
    with pytest.raises(CheckpointError, match="not JSON serializable"):
        save(tmp_path, 1, {"tensor": torch.ones(1)}, part([]), 1)
    assert names(tmp_path) == []


def test_everything_is_on_disk_before_it_gets_its_name(tmp_path: Path) -> None:
    def write(temporary: Path) -> dict[str, manifest.Record]:
        (temporary / "engine").mkdir()
        (temporary / "engine/state.pt").write_bytes(b"12345")
        return dict(part(of(1.0))(temporary) or {})

    with Failing(tmp_path, 10**9, Killed(), False) as watching:
        save(tmp_path / "run", 1, {}, write, 1)
    order = list(zip(watching.calls, watching.paths, strict=True))
    renamed = order.index(("rename", "run/.step-00000001.tmp"))
    pointed = order.index(("replace", "run/.latest.tmp"))
    before = {path for call, path in order[:renamed] if call == "fsync"}
    names = ["", "/engine", "/engine/state.pt", f"/{tensors.file_name(0, 1)}", f"/.{manifest.NAME}.tmp"]
    assert before == {".", *(f"run/.step-00000001.tmp{name}" for name in names)}
    manifest_named = order.index(("replace", f"run/.step-00000001.tmp/.{manifest.NAME}.tmp"))
    assert {path for call, path in order[:manifest_named] if call == "fsync"} >= before - {"run/.step-00000001.tmp"}
    assert order[manifest_named + 1 : renamed][-1] == ("fsync", "run/.step-00000001.tmp")
    assert {("fsync", "run"), ("fsync", "run/.latest.tmp")} <= set(order[renamed:pointed])
    assert ("fsync", "run") in order[pointed:]


# ---- which one is chosen, what is removed


def empty(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


@pytest.mark.parametrize(
    "damage",
    [
        empty,
        lambda checkpoint: (checkpoint / manifest.NAME).unlink(),
        lambda checkpoint: (checkpoint / manifest.NAME).write_text("{"),
        lambda checkpoint: (checkpoint / tensors.file_name(0, 1)).unlink(),
        lambda checkpoint: (checkpoint / tensors.file_name(0, 1)).write_bytes(b"short"),
        lambda checkpoint: checkpoint.rename(checkpoint.with_name(".step-00000002.tmp")),
        lambda checkpoint: checkpoint.rename(checkpoint.with_name("step-2")),
    ],
)
def test_what_is_not_complete_is_never_the_latest(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    first, second = saved(tmp_path, 1, 1.0), saved(tmp_path, 2, 2.0)
    damage(second)
    assert latest(tmp_path) == first
    assert saved(tmp_path, 3, 3.0) == latest(tmp_path)


@pytest.mark.parametrize("files", [{"files": [["a", 1]]}, {"inventory": "a.json"}, {}], ids=str)
def test_a_newer_format_is_named_whatever_is_in_it(tmp_path: Path, files: dict[str, Any]) -> None:
    first, second = saved(tmp_path, 1, 1.0), saved(tmp_path, 2, 2.0)
    (second / manifest.NAME).write_text(json.dumps({"format": 2, **files}))
    expected = r"mars_dist_manifest.json has format 2, and this version of mars_dist reads 1: update mars_dist"
    with pytest.raises(ValueError, match=expected):
        manifest.read(second)
    said: list[str] = []
    assert latest(tmp_path) == latest_valid(tmp_path, say=said.append) == first
    assert len(said) == 1 and str(second) in said[0] and "has format 2" in said[0]
    assert not verify(second).valid and "has format 2" in str(verify(second))


def test_every_public_name_is_there() -> None:
    from mars_dist import checkpoint

    assert set(checkpoint.__all__) == set(checkpoint._LATER) and len(checkpoint.__all__) == len(checkpoint._LATER)
    assert all(getattr(checkpoint, name).__module__.startswith("mars_dist.checkpoint.") for name in checkpoint.__all__)
    assert all(getattr(checkpoint, name).__doc__ for name in checkpoint.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        checkpoint.nothing  # noqa: B018


def test_nothing_is_complete_where_nothing_is(tmp_path: Path) -> None:
    assert complete(tmp_path / "nowhere") == [] and latest(tmp_path) is None
    tidy(tmp_path / "nowhere", everything=True)


def test_tidy_removes_what_is_ours(tmp_path: Path) -> None:
    path = saved(tmp_path, 1, 1.0)
    for name in (".step-00000002.tmp", ".latest.tmp", "step-00000009", "notes", ".step-2.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    tidy(tmp_path, everything=False)
    assert names(tmp_path) == [".step-2.tmp", "latest", "notes", path.name, "step-00000009"]
    tidy(tmp_path, everything=True)
    assert names(tmp_path) == [".step-2.tmp", "notes", "step-00000009"], "a folder without a manifest is not ours"


# ---- failures


ERRORS = {
    "full": OSError(errno.ENOSPC, "No space left on device"),
    "read-only": OSError(errno.EROFS, "Read-only file system"),
    "killed": Killed(),
}


@pytest.mark.parametrize("for_ever", [False, True], ids=["once", "for ever"])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("case", ["next step", "same step", "same step, two renames"])
def test_a_failure_at_any_call_leaves_the_old_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, error: str, for_ever: bool
) -> None:
    if case == "same step, two renames":
        monkeypatch.setattr(folder, "change_places", lambda a, b: False)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # it is counted, and made to fail
    before = tmp_path / "before"
    saved(before, 1, 1.0, keep_last=1)
    step = 2 if case == "next step" else 1
    seen: set[str] = set()
    for at in range(1000):
        run = tmp_path / f"run{at}"
        shutil.copytree(before, run)
        with Failing(run, at, ERRORS[error], for_ever) as failing:
            try:
                saved(run, step, 2.0, keep_last=1)
            except (CheckpointError, Killed) as raised:
                failure: BaseException | None = raised
            else:
                failure = None
        seen |= set(failing.calls)
        between_two_renames = f".step-{step:08d}.aside" in names(run) and not (run / f"step-{step:08d}").exists()
        assert not between_two_renames or (case == "same step, two renames" and (for_ever or error == "killed"))
        if between_two_renames:
            tidy(run, everything=False)
        value = value_in(latest(run))
        assert value == 2.0 or (failure is not None and value == 1.0)
        assert value_in(run / (run / "latest").read_text()) in (1.0, 2.0), "the pointer is right as well"
        if isinstance(failure, CheckpointError):
            assert f"saving step-{step:08d} failed: " in str(failure)
            assert between_two_renames or "Now the newest checkpoint is" in str(failure)
            assert {"full": "free space on that disk", "read-only": "mounted read-only"}[error] in str(failure)
        tidy(run, everything=False)
        assert value_in(latest(run)) == value
        assert value_in(saved(run, 3, 3.0, keep_last=1)) == 3.0 and names(run) == ["latest", "step-00000003"]
        if not failing.hit:
            break
        shutil.rmtree(run)
    assert failure is None and at > 20
    at_once = {"rename"} if case == "same step" else set()
    assert seen == {"open", "write", "fsync", "rename", "replace", "mkdir", "rmdir", "unlink", "io.open"} - at_once


def test_a_real_limit(tmp_path: Path) -> None:
    old = saved(tmp_path, 1, 1.0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=f"File too large.*ulimit -f.*the newest checkpoint is {old}"):
            save(tmp_path, 2, {}, part(of(2.0, 100_000)), 5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(tmp_path) == ["latest", old.name] and value_in(latest(tmp_path)) == 1.0


def test_too_little_space_is_said_before_anything_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "not/there/yet"
    asked = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or type("Usage", (), {"free": 99_999}))
    with Failing(tmp_path, 10**9, Killed(), False) as watching, pytest.raises(CheckpointError) as error:
        save(run, 1, {}, part([]), 1, size=100_000)
    assert "100,000 bytes are needed and 99,999 are free" in str(error.value) and "there is no check" in str(
        error.value
    )
    assert not watching.calls and names(tmp_path) == [] and asked == [tmp_path]
    save(run, 1, {}, part([]), 1, size=99_999)


def test_an_old_one_that_cannot_be_removed_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 1, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(folder, "_rotate", lambda *_: (_ for _ in ()).throw(PermissionError("old")))
        assert value_in(saved(tmp_path, 2, 2.0, keep_last=1)) == 2.0
    assert "an older checkpoint could not be removed: old" in caplog.text


# ---- asynchronous


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writing waits for it."""
    event, write = threading.Event(), tensors.write

    def waits(*args: Any) -> manifest.Record:
        assert event.wait(60)
        return write(*args)

    monkeypatch.setattr(tensors, "write", waits)
    yield event
    event.set()


def test_what_is_saved_is_what_was_there_at_the_call(tmp_path: Path, gate: threading.Event) -> None:
    chunks = of(1.0)
    with Saver(tmp_path, keep_last=2) as saver:
        assert saver.written and saver.under_way is None and saver.wait() is None
        saver.save(1, {"a": 1}, chunks, also=lambda f: (f / "rng.json").write_text("[]") and None)
        chunks[0].value.fill_(2.0)
        assert not saver.written and saver.under_way == 1 and latest(tmp_path) is None
        gate.set()
        path = saver.wait()
        assert saver.written and saver.under_way is None
    assert path == latest(tmp_path) and value_in(path) == 1.0
    assert set(manifest.read(path)["files"]) == {"rng.json", tensors.file_name(0, 1)}


def test_two_saves_in_a_row_use_the_same_memory(tmp_path: Path) -> None:
    saver = Saver(tmp_path, keep_last=5)
    memory = set()
    for step, value in enumerate((1.0, 2.0, 3.0), 1):
        saver.save(step, {}, of(value))
        memory.add(saver._staging.memory.data_ptr())
        assert len(complete(tmp_path)) == step - 1, "each is complete when the next one begins"
    saver.close()
    assert [value_in(path) for path in complete(tmp_path)] == [1.0, 2.0, 3.0] and len(memory) == 1


@pytest.mark.parametrize("finish", ["wait", "close", "save"])
def test_a_failure_of_the_thread_is_raised_at_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finish: str
) -> None:
    old = saved(tmp_path, 1, 1.0)
    saver = Saver(tmp_path, keep_last=5)
    with monkeypatch.context() as patch:
        patch.setattr(tensors, "write", lambda path, *_: path.touch() or [].pop())
        saver.save(2, {}, of(2.0))
        arguments = (3, {}, of(3.0)) if finish == "save" else ()
        with pytest.raises(CheckpointError, match=f"step-00000002 failed: IndexError.*the newest checkpoint is {old}"):
            getattr(saver, finish)(*arguments)
    assert names(tmp_path) == ["latest", old.name] and saver.under_way is None
    saver.save(4, {}, of(4.0))
    assert value_in(saver.wait()) == 4.0


def test_what_fails_before_the_thread_starts(tmp_path: Path) -> None:
    saver = Saver(tmp_path, keep_last=1)
    with pytest.raises(CheckpointError, match="ZeroDivisionError"):
        saver.save(1, {}, of(1.0), also=lambda f: 1 / 0)  # type: ignore[arg-type, return-value]
    assert saver.wait() is None and names(tmp_path) == []


def test_an_error_in_the_training_is_not_covered_by_a_save(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Saver(tmp_path, keep_last=1) as saver:
        saver.save(1, {}, of(1.0))
        _ = 1 / 0
    assert saver.written and complete(tmp_path) == []
    tidy(tmp_path, everything=False)
    assert names(tmp_path) == []


def test_tensors_of_all_kinds_are_copied(tmp_path: Path) -> None:
    values = {
        "0-dim": torch.tensor(2.0),
        "bool": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 3),
        "strided": torch.randn(6, 4).t(),
        "half": torch.randn(5).bfloat16(),
        "gradient": torch.randn(2, 2, requires_grad=True),
    }
    with Saver(tmp_path, keep_last=1) as saver:
        saver.save(1, {}, [Chunk(name, tuple(value.shape), 0, value) for name, value in values.items()])
    reader = Reader(tmp_path / "step-00000001")
    assert all(torch.equal(reader.whole(name), value) for name, value in values.items())


# ---- several ranks


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    ranks = RankPool(2)
    yield ranks
    ranks.close()


def test_two_ranks_save_and_fail_together(pool: RankPool, tmp_path: Path) -> None:
    (path, first), (other, second) = pool.run(cases.saved, str(tmp_path))
    files = ["large", "rng/0.json", "rng/1.json", "small", *(tensors.file_name(rank, 2) for rank in range(2))]
    assert path == other and first["files"] == second["files"] == sorted(files) and first["world_size"] == 2
    assert (first["read"], second["read"]) == (["large"], ["0.json", "1.json", "small"]), "shared out by size"

    here, there = pool.run(cases.failed, str(tmp_path))
    assert here == there, "the same text on both ranks"
    expected = {
        "rank 0 has a full disk": "1 of 2 ranks: rank 0: CheckpointError: [Errno 28] No space left on device",
        "rank 1 has a full disk": "1 of 2 ranks: rank 1: CheckpointError: [Errno 28] No space left on device",
        "too large together": "2,000 bytes are needed and 1,500 are free",
        "not one folder": "is not the folder of rank 0: give one that all ranks see",
        "fsync": "rank 1: CheckpointError: [Errno 5] Input/output error",
        "one file twice": "ranks 0 and 1 have both written x",
        "something else": "failed on 2 of 2 ranks: rank 0: IndexError",
    }
    assert here.keys() == expected.keys()
    for name, text in expected.items():
        assert text in here[name] and f"Now the newest checkpoint is {path}" in here[name]
    assert all("free space on that disk" in here[name] for name in list(expected)[:3])


def test_two_ranks_save_asynchronously(pool: RankPool, tmp_path: Path) -> None:
    here, there = pool.run(cases.asynchronous, str(tmp_path))
    assert here == there
    assert "saving step-00000002 failed on 1 of 2 ranks: rank 1: CheckpointError: [Errno 28]" in here[0]
    assert here[1:] == ["step-00000001", "step-00000004", "step-00000004"]


# ---- the benchmark


def test_the_benchmark_prints_its_ratios(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bench.main(["--mb", "1", "--rounds", "1", "--json", "--folder", str(tmp_path)])
    result = json.loads(capsys.readouterr().out)
    assert result["of_raw"].keys() == {"raw", "durable", "asynchronous"} and result["of_raw"]["raw"] == 1
    assert 0 < result["blocked_share"] < 1
    bench.main(["--mb", "1", "--rounds", "1", "--folder", str(tmp_path)])
    assert "of its total" in capsys.readouterr().out and names(tmp_path) == []
