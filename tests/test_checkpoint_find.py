"""Which checkpoint is complete and unchanged: real folders of every kind, damaged in every file of them."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mars_dist import cli
from mars_dist.checkpoint import find, kinds, manifest
from mars_dist.checkpoint.together import CheckpointError
from mars_dist.versions import installed
from tests import checkpoint_folders as folders
from tests.checkpoint_folders import KINDS

pytestmark = pytest.mark.timeout(300)


def copy_of(kind: str, to: Path, sealed: bool) -> tuple[Path, Path, Path]:
    """The folder, its newest checkpoint and the one before; all of them sealed, or none."""
    folder = Path(shutil.copytree(folders.made()[kind], to / kind))
    for path in folder.rglob(manifest.NAME):
        path.unlink()
    new, old = kinds.checkpoints_in(folder)[:2]
    if sealed:
        find.seal(new)
        find.seal(old)
    return folder, new, old


def files_of(checkpoint: Path) -> list[Path]:
    return [checkpoint / name for name in manifest.files_in(checkpoint)]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def cut_off_one_byte(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def flip_in_a_tensor(path: Path) -> None:
    """Where no zip file has padding: in the longest of its members."""
    if not zipfile.is_zipfile(path):
        return flip(path)
    with zipfile.ZipFile(path) as archive:
        member = max(archive.infolist(), key=lambda info: info.file_size)
    content = bytearray(path.read_bytes())
    lengths = content[member.header_offset + 26 : member.header_offset + 30]
    start = member.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    content[start + member.file_size // 2] ^= 4
    path.write_bytes(content)


THEIRS = [kind for kind in KINDS if kind != "mars-dist-train"]  # without a manifest ours are half written

DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": truncate,
    "one byte less": cut_off_one_byte,
    "emptied": empty,
    "flipped": flip,
    "deleted": Path.unlink,
}


def taken(folder: Path) -> tuple[Path | None, str]:
    said: list[str] = []
    return find.latest_valid(folder, say=said.append), "\n".join(said)


# ------------------------------------------------------------------------------------------------------ whole folders


@pytest.mark.parametrize("sealed", [False, True], ids=["as it is", "sealed"])
@pytest.mark.parametrize("kind", THEIRS)
def test_whole_checkpoints_are_valid(kind: str, sealed: bool, tmp_path: Path) -> None:
    folder, new, old = copy_of(kind, tmp_path, sealed)
    report = find.verify(folder)
    assert not report.faults and [one.folder for one in report.several] == [new, old]
    for one in report.several:
        assert one.valid and one.kind == KINDS[kind] and one.sealed == sealed, str(one)
        assert ("manifest" in one.compared) == sealed
    assert taken(folder) == (new, "")
    assert kinds.step_of(new) > kinds.step_of(old)  # type: ignore[operator]


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"dcp", "universal", "mars-dist-train"}))
def test_what_is_saved_with_mars_is_sealed(kind: str) -> None:
    report = find.verify(folders.made()[kind])
    ranks = 1 if kind in ("accelerate", "trainer") else 2
    for one in report.several:
        assert one.sealed and one.valid, str(one)
        facts = manifest.read(one.folder)
        assert facts["world_size"] == ranks and facts["saved_by"] == KINDS[kind]
        assert facts["versions"]["torch"] == installed("torch")


@pytest.mark.parametrize("kind", KINDS)
def test_no_file_holds_a_secret_of_the_environment(kind: str) -> None:
    """Configurations, arguments and states as the libraries write them, and our manifests; members of zip files too."""
    files = [path for path in folders.made()[kind].rglob("*") if path.is_file()]
    assert len(files) > 3
    for path in files:
        contents = [path.read_bytes()]
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                contents += [archive.read(name) for name in archive.namelist()]
        for name, secret in folders.SECRETS.items():
            needle = "vX4-ocean-otter" if "://" in secret else secret
            assert not any(needle.encode() in content for content in contents), f"{name} is in {path}"


def test_sealing_is_turned_off_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARS_DIST_SEAL", "0")
    folders.with_accelerate(tmp_path)
    assert not list(tmp_path.rglob(manifest.NAME)) and find.verify(tmp_path).several[0].valid


# ---------------------------------------------------------------------------------------------------- damaged folders


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["two", "every"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_damage_to_any_file_of_a_sealed_one_is_found(kind: str, every: bool, tmp_path: Path) -> None:
    """Two of the damages in turn to each file; every one of them to each in the slow tests."""
    folder, new, old = copy_of(kind, tmp_path, sealed=True)
    for i, file in enumerate(files_of(new)):
        original = file.read_bytes()
        for how in list(DAMAGES) if every else [list(DAMAGES)[j % len(DAMAGES)] for j in (i, i + 2)]:
            DAMAGES[how](file)
            if i == 0 or every:
                chosen, said = taken(folder)
                assert chosen == old and str(new) in said and str(file) in said, (how, file, said)
            assert any(str(file) in fault for fault in find.verify(new).faults), (how, file)
            file.write_bytes(original)
    assert taken(folder) == (new, "")


# What no other file speaks of: whether it is there, and what is in it, only a seal shows.
UNSPOKEN = {
    "config.json",
    "generation_config.json",
    "training_args.bin",
    "scheduler.bin",
    "optimizer_state.pt",
}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["two", "every"])
@pytest.mark.parametrize("kind", THEIRS)
def test_damage_is_found_in_the_structure_alone(kind: str, every: bool, tmp_path: Path) -> None:
    folder, new, old = copy_of(kind, tmp_path, sealed=False)
    damages = DAMAGES | {"flipped": flip_in_a_tensor}
    found = []
    for i, file in enumerate(files_of(new)):
        original = file.read_bytes()
        for how in list(damages) if every else [list(damages)[j % len(damages)] for j in (i, i + 2)]:
            if not _shows(how, kind, file):
                continue
            damages[how](file)
            if len(found) < 2 or every:
                chosen, said = taken(folder)
                assert chosen == old and str(new) in said, (how, file, said)
            assert find.verify(new).faults, (how, file)
            found.append(how)
            file.write_bytes(original)
    assert len(found) >= 2 and taken(folder) == (new, "")


def _shows(how: str, kind: str, file: Path) -> bool:
    """Whether a damage contradicts what the checkpoint says of itself: where it does not, only a seal shows it."""
    if file.suffix == ".py" or (file.name == "latest" and how == "deleted" and kind.startswith("accelerate")):
        return False
    if how == "deleted" and file.name == "scheduler.pt" and kind == "trainer-zero1":
        return False  # the scheduler may be DeepSpeed's own
    if how == "deleted":
        return file.name not in UNSPOKEN
    if how == "flipped":  # without a checksum of their own
        return file.suffix not in (".json", ".safetensors", ".pkl") and file.name != ".metadata" or _is_zip(file)
    if how == "one byte less":
        return file.suffix != ".json"  # a line's end
    return True


def _is_zip(file: Path) -> bool:
    return zipfile.is_zipfile(file) and file.suffix != ".distcp"


@pytest.mark.parametrize("kind", KINDS)
def test_a_newer_folder_that_is_empty_or_foreign_is_passed_over(kind: str, tmp_path: Path) -> None:
    folder, new, _ = copy_of(kind, tmp_path, sealed=kind not in THEIRS)
    name = new.name.replace(str(kinds.step_of(new)), "90000000")
    (folder / name).mkdir()
    chosen, said = taken(folder)
    assert chosen == new and f"{folder / name} is passed over: {folder / name} is empty" in said
    (folder / name / "notes.txt").write_text("hello")
    chosen, said = taken(folder)
    assert chosen == new and "holds nothing of a checkpoint that is known" in said


def test_the_number_counts_and_not_the_letters_or_the_time(tmp_path: Path) -> None:
    names = ["checkpoint-9", "checkpoint-10", "checkpoint-100", "checkpoint-20"]
    for name in names:
        shutil.copytree(folders.made()["trainer"] / "checkpoint-4", tmp_path / name)
        state = tmp_path / name / "trainer_state.json"
        state.write_text(json.dumps(json.loads(state.read_text()) | {"global_step": int(name.split("-")[1])}))
        find.seal(tmp_path / name)
    os.utime(tmp_path / "checkpoint-9")
    assert [path.name for path in kinds.checkpoints_in(tmp_path)] == [f"checkpoint-{n}" for n in (100, 20, 10, 9)]
    assert taken(tmp_path)[0] == tmp_path / "checkpoint-100"
    for name, step in {"step-00000020": 20, "global_step7": 7, "checkpoint_3": 3, "epoch_2": 2, "iter_0000500": 500,
                       "global_step4_universal": 4, "7": 7}.items():  # fmt: skip
        assert kinds.step_of(Path(name)) == step
    assert kinds.step_of(Path("best")) is None and kinds.step_of(Path("step-3.tmp")) is None


def test_a_checkpoint_of_another_step_than_its_name(tmp_path: Path) -> None:
    folder, new, old = copy_of("trainer", tmp_path, sealed=False)
    new.rename(folder / "checkpoint-400")
    chosen, said = taken(folder)
    assert chosen == old and "is of step 4" in said


def test_names_without_a_number_come_last(tmp_path: Path) -> None:
    folder, new, old = copy_of("zero1", tmp_path, sealed=False)
    shutil.copytree(old, folder / "best")
    (folder / "logs").mkdir()
    assert [path.name for path in kinds.checkpoints_in(folder)] == [new.name, old.name, "best"]
    shutil.rmtree(new)
    shutil.rmtree(old)
    (folder / "latest").write_text("best")
    assert taken(folder) == (folder / "best", "")


def test_a_missing_file_of_a_rank_is_named(tmp_path: Path) -> None:
    for kind, name in {
        "zero1": "zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "zero3": "zero_pp_rank_1_mp_rank_00_model_states.pt",
        "accelerate-zero3": "random_states_1.pkl",
        "accelerate-fsdp2": "random_states_1.pkl",
        "trainer-zero1": "rng_state_1.pth",
    }.items():
        _, new, _ = copy_of(kind, tmp_path, sealed=False)
        (new / name).unlink()
        faults = find.verify(new).faults
        assert any(f"{name} is missing" in fault for fault in faults), faults


def test_shards_that_an_index_names(tmp_path: Path) -> None:
    _, new, _ = copy_of("trainer", tmp_path, sealed=False)
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (new / "model.safetensors").rename(new / names["a"])
    (new / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert f"{new / names['b']} is missing, and model.safetensors.index.json names it" in find.verify(new).faults
    shutil.copy(new / names["a"], new / names["b"])
    assert find.verify(new).valid


def test_only_the_model_was_to_be_saved(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    _, new, _ = copy_of("trainer", tmp_path, sealed=False)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (new / name).unlink()
    assert "no states of an optimizer" in str(find.verify(new))
    torch.save(TrainingArguments(str(tmp_path), save_only_model=True, use_cpu=True), new / "training_args.bin")
    assert find.verify(new).valid


def test_what_was_added_to_a_sealed_folder(tmp_path: Path) -> None:
    folder, new, old = copy_of("zero1", tmp_path, sealed=True)
    (new / "README.md").write_text("a note")
    assert find.verify(new).valid
    torch.save({}, new / "mp_rank_01_model_states.pt")
    chosen, said = taken(folder)
    assert chosen == old and "mp_rank_01_model_states.pt was added after the folder was sealed" in said


def test_pointers_that_lead_out_of_the_folder(tmp_path: Path) -> None:
    folder, new, _ = copy_of("zero1", tmp_path, sealed=True)
    outside = shutil.copytree(new, tmp_path / "outside" / "global_step99")
    (folder / "linked").symlink_to(outside)
    for tag in ("../outside/global_step99", str(outside), "linked", "", "..", "a\0b"):
        (folder / "latest").write_text(tag)
        chosen, said = taken(folder)
        assert chosen == new and "Tags cannot leave the folder" in said, (tag, said)
        assert not find.verify(folder).valid
    (folder / "latest").write_text("global_step77")
    assert "global_step77', which is not there" in taken(folder)[1]
    for tag in ("global_step2", "a/b", "with space"):
        assert kinds.tag_folder(folder, tag) == folder / tag
    _, trained, _ = copy_of("trainer-zero1", tmp_path, sealed=False)
    (trained / "latest").write_text("../checkpoint-5/global_step5")
    assert "Tags cannot leave the folder" in str(find.verify(trained))


def test_a_folder_of_which_nothing_is_valid(tmp_path: Path) -> None:
    for name in ("checkpoint-1", "checkpoint-2"):
        (tmp_path / name).mkdir()
    chosen, said = taken(tmp_path)
    assert chosen is None and said.count("is passed over") == 2
    assert taken(tmp_path / "checkpoint-1")[0] is None
    with pytest.raises(FileNotFoundError, match="no folder"):
        find.latest_valid(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="no folder"):
        find.verify(tmp_path / "nothing")


def test_a_link_to_elsewhere_is_a_fault(tmp_path: Path) -> None:
    folder, new, old = copy_of("zero1", tmp_path, sealed=False)
    file = new / "mp_rank_00_model_states.pt"
    shutil.move(file, tmp_path / "elsewhere.pt")
    file.symlink_to(tmp_path / "elsewhere.pt")
    chosen, said = taken(folder)
    assert chosen == old and "outside of the folder" in said


def test_links_in_a_circle(tmp_path: Path) -> None:
    folder, new, old = copy_of("zero1", tmp_path, sealed=False)
    (new / "one").symlink_to("two")
    (new / "two").symlink_to("one")
    (folder / "latest").unlink()
    (folder / "latest_universal").symlink_to("latest")
    (folder / "latest").write_text("circle")
    (folder / "circle").symlink_to("circle")
    chosen, said = taken(folder)
    assert chosen == old and "one cannot be read (RuntimeError: Symlink loop" in said
    assert "the tag 'circle' leads nowhere" in said


@pytest.mark.parametrize(
    "content",
    ["[" * 200_000, '{"format": 1, "files": {"a": {"size": 1e400, "sha256": ""}}}', "[]", "1" * 5000],
)
def test_a_manifest_of_nonsense_is_damaged(content: str, tmp_path: Path) -> None:
    _, new, old = copy_of("zero1", tmp_path, sealed=True)
    (new / manifest.NAME).write_text(content)
    assert taken(new.parent)[0] == old
    assert any(f"{manifest.NAME} is damaged" in fault for fault in manifest.faults(new))


def test_a_name_that_no_disk_takes(tmp_path: Path) -> None:
    _, new, old = copy_of("zero1", tmp_path, sealed=True)
    (new / manifest.NAME).write_text(json.dumps({"format": 1, "files": {"n" * 5000: {"size": 1, "sha256": ""}}}))
    chosen, said = taken(new.parent)
    assert chosen == old and "cannot be read ([Errno 36] File name too long" in said


def test_huge_numbers_of_ranks_do_not_keep_us_busy(tmp_path: Path) -> None:
    tag = tmp_path / "global_step1"
    tag.mkdir()
    content = {"dp_world_size": 10**6, "mp_world_size": 10**6, "ds_config": {"zero_optimization": {"stage": 3}}}
    torch.save(content, tag / "mp_rank_00_model_states.pt")
    assert "more files are missing" in find.verify(tag).faults[-1]


# ---------------------------------------------------------------------------------------------- any bytes; the ranks


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each kind that is flipped and put right again."""
    return {kind: copy_of(kind, tmp_path_factory.mktemp(kind), sealed=kind not in THEIRS)[1] for kind in KINDS}


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_flipped_byte_makes_verify_fail(data: st.DataObject, small: dict[str, Path]) -> None:
    checkpoint = small[data.draw(st.sampled_from(sorted(small)))]
    file = data.draw(st.sampled_from(files_of(checkpoint)))
    original = file.read_bytes()
    content = bytearray(original)
    places = st.integers(0, max(len(content) - 1, 0))
    near = (
        st.integers(0, min(400, len(content) - 1)) | st.integers(max(0, len(content) - 400), len(content) - 1) | places
    )
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(near)] = data.draw(st.integers(0, 255))
    try:
        file.write_bytes(content)
        report = find.verify(checkpoint)
        assert all(isinstance(text, str) for text in [*report.faults, *report.foreign])
        json.dumps(report.as_json())
    finally:
        file.write_bytes(original)
    assert find.verify(checkpoint).valid


def seal_on_ranks(folder: str, missing: str | None) -> str:
    import torch.distributed as dist

    where = Path(folder) if missing is None or dist.get_rank() == 0 else Path(missing)
    try:
        return str(find.seal(where, {"mine": 1}))
    except CheckpointError as error:
        return f"CheckpointError: {error}"


def test_ranks_seal_together(tmp_path: Path) -> None:
    _, new, old = copy_of("zero3", tmp_path, sealed=False)
    assert folders.pool().run(seal_on_ranks, str(new), None) == [str(len(files_of(new)))] * 2
    found = manifest.read(new)
    assert found["world_size"] == 2 and found["mine"] == 1 and "deepspeed" in found["versions"]
    assert find.verify(new).valid and find.verify(new).sealed
    errors = folders.pool().run(seal_on_ranks, str(old), str(tmp_path / "nothing"))
    assert all("failed on 1 of 2 ranks: rank 1" in text and "nothing to seal" in text for text in errors), errors
    assert not (old / manifest.NAME).exists()


# ------------------------------------------------------------------------------------------------------- the command


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, new, old = copy_of("zero1", tmp_path, sealed=False)

    def run(*words: str) -> tuple[int, str, str]:
        code = cli.main(["checkpoint", *words])
        out, err = capsys.readouterr()
        return code, out, err

    code, out, _ = run("verify", str(new))
    assert code == 0 and f"{new}: valid (DeepSpeed; not sealed; structure)" in out
    code, out, _ = run("seal", str(new))
    assert code == 0 and f"sealed {new} (DeepSpeed, 3 files)" in out
    before = (new / manifest.NAME).read_bytes()
    code, _, err = run("seal", str(new))
    assert code == 1 and "is sealed already" in err and (new / manifest.NAME).read_bytes() == before
    code, _, err = run("seal", str(folder))
    assert code == 1 and f"holds 2 checkpoints: seal {new}" in err and not (folder / manifest.NAME).exists()
    code, out, _ = run("verify", str(folder))
    assert code == 0 and "valid (DeepSpeed; sealed; contents compared with the manifest)" in out
    assert f"newest valid checkpoint: {new}" in out
    flip(new / "mp_rank_00_model_states.pt")
    code, out, _ = run("verify", str(new))
    assert code == 1 and "NOT VALID" in out and "its SHA-256 differs" in out
    code, out, _ = run("verify", "--json", str(folder))
    report = json.loads(out)
    assert code == 0 and report["latest_valid"] == str(old) and not report["several"][0]["valid"]
    code, out, err = run("latest", str(folder))
    assert code == 0 and out == f"{old}\n" and f"{new} is passed over" in err
    code, _, err = run("seal", str(new))
    assert code == 1 and "is not sealed, because it is not valid" in err
    shutil.rmtree(old)
    assert run("verify", str(folder))[0] == 1 and run("latest", str(folder))[0] == 1
    code, _, err = run("verify", str(tmp_path / "nothing"))
    assert code == 1 and "does not exist" in err
    with pytest.raises(SystemExit):
        cli.main(["checkpoint", "verify", "--help"])
    assert "exit codes" in capsys.readouterr().out


def test_verify_of_a_run_looks_into_its_checkpoints(tmp_path: Path) -> None:
    run = tmp_path / "run"
    folder, new, old = copy_of("mars-dist-train", run, sealed=True)
    folder.rename(run / "checkpoints")
    assert [one.folder.name for one in find.verify(run).several] == [new.name, old.name]
    assert taken(run)[0] == run / "checkpoints" / new.name
    (run / "checkpoints" / new.name / manifest.NAME).unlink()  # which is written last
    chosen, said = taken(run)
    assert chosen == run / "checkpoints" / old.name and "half written" in said
