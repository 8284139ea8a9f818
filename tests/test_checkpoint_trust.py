"""Pickles are held against the table before a library opens them: every real folder passes, every payload does not.

Each planted payload is shown to be one: afterwards the file is loaded without a check, and the program does run.
"""

from __future__ import annotations

import importlib
import os
import pickle
import shutil
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from mars_dist import cli
from mars_dist.checkpoint import pickles, trust
from mars_dist.checkpoint.allowed import ALLOWED, Global
from mars_dist.checkpoint.trust import UntrustedCheckpoint
from tests import checkpoint_folders as folders
from tests import checkpoint_trust_cases as cases
from tests.checkpoint_trust_cases import PLANTED, Payload

pytestmark = pytest.mark.timeout(300)
THEIRS = [kind for kind in folders.KINDS if kind != "mars-dist-train"]
REMEDY = "--trust-checkpoint, or MARS_DIST_TRUST_CHECKPOINT=1"


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "it-ran"


def copy_of(kind: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders.made()[kind], tmp_path / kind))


def newest(folder: Path) -> Path:
    return max((path for path in folder.iterdir() if path.is_dir()), key=lambda path: path.name.replace("10", "9_"))


# ---------------------------------------------------------------------------------------------------- real folders


@pytest.mark.parametrize("kind", THEIRS)
def test_what_the_libraries_write_passes(kind: str) -> None:
    folder = folders.made()[kind]
    assert any(path.suffix in (".pt", ".pth", ".bin", ".distcp") for path in folder.rglob("*"))
    trust.check(folder)


def test_what_is_ours_is_json_and_plain_tensors() -> None:
    files = [path for path in folders.made()["mars-dist-train"].rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors", ""}
    assert {path.name for path in files if not path.suffix} == {"latest"}


def test_every_kind_of_file_is_among_the_real_ones() -> None:
    names = {path.name for folder in folders.made().values() for path in folder.rglob("*")}
    assert {
        "training_args.bin",
        "scheduler.bin",
        "optimizer.bin",
        "random_states_0.pkl",
        "random_states_1.pkl",
    } <= names
    assert {"rng_state.pth", "rng_state_1.pth", "scheduler.pt", "optimizer.pt", ".metadata", "__1_0.distcp"} <= names
    assert {"mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt", "fp32.pt"} <= names
    assert {"zero_pp_rank_1_mp_rank_00_model_states.pt", "optimizer_state.pt"} <= names


@pytest.mark.parametrize("kind", THEIRS)
def test_a_payload_in_each_file_of_each_kind_is_refused(kind: str, tmp_path: Path, marker: Path) -> None:
    folder = newest(copy_of(kind, tmp_path))
    files = cases.pickled_files(folder)
    assert files
    for file in files:
        original = file.read_bytes()
        for how, plant in PLANTED.items():
            plant(file, marker)
            with pytest.raises(UntrustedCheckpoint) as caught:
                trust.check(folder if how == "hidden" else file)
            text = str(caught.value)
            assert str(file) in text and "posix.system" in text and REMEDY in text, (how, text)
            assert not marker.exists(), (how, file)
            trust.check(file, trusted=True)
        runs(file, marker)  # the last one planted
        file.write_bytes(original)
    trust.check(folder)


@pytest.mark.parametrize("how", PLANTED)
def test_the_planted_payloads_do_run_where_nobody_checks(how: str, tmp_path: Path, marker: Path) -> None:
    for kind, name in {
        "zero1": "mp_rank_00_model_states.pt",
        "trainer": "training_args.bin",
        "dcp": ".metadata",
    }.items():
        file = newest(copy_of(kind, tmp_path)) / name
        PLANTED[how](file, marker)
        runs(file, marker)


def runs(file: Path, marker: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.load(file, weights_only=False) if _of_torch(file) else pickle.loads(file.read_bytes())
        finally:
            assert marker.exists(), file
            marker.unlink()


def _of_torch(file: Path) -> bool:
    return (
        file.name != ".metadata"
        or zipfile.is_zipfile(file)
        or b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19" in file.read_bytes()[:20]
    )


def test_a_payload_in_a_piece_that_only_metadata_leads_to(tmp_path: Path, marker: Path) -> None:
    """Behind the bytes of all other pieces, in a file of any name."""
    folder = newest(copy_of("dcp", tmp_path))
    planted = tmp_path / "planted.pt"
    torch.save([Payload(marker)], planted)
    for name in ("__0_0.distcp", "weights.safetensors"):
        target = folder / name
        before = target.read_bytes() if target.exists() else b""
        target.write_bytes(before + planted.read_bytes())
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        index = next(i for i in metadata.storage_data if "param_groups" in i.fqn)
        info = metadata.storage_data[index]
        info.relative_path, info.offset, info.length = name, len(before), planted.stat().st_size
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(UntrustedCheckpoint, match=rf"\.metadata leads to a piece of {name} .*posix\.system"):
            trust.check(folder)
        assert not marker.exists()
    import torch.distributed.checkpoint as dcp

    state = {"optimizer": {"param_groups": {index.fqn.removeprefix("optimizer.param_groups."): None}}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    assert marker.exists(), "dcp.load does run it"


@pytest.mark.parametrize(("name", "value"), [("relative_path", "../elsewhere"), ("transform_descriptors", ["zstd"])])
def test_metadata_that_leads_elsewhere(name: str, value: Any, tmp_path: Path) -> None:
    folder = newest(copy_of("dcp", tmp_path))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    setattr(next(iter(metadata.storage_data.values())), name, value)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UntrustedCheckpoint, match="outside of the folder" if name == "relative_path" else "compressed"):
        trust.check(folder)


@pytest.mark.parametrize("way", ["slots", "another class", "twice", "changed later", "the end of a zip file"])
def test_metadata_that_hides_where_a_piece_lies(way: str, tmp_path: Path, marker: Path) -> None:
    """What is read here and what the unpickler makes must be one table of pieces: else one of them is not looked at."""
    folder = newest(copy_of("dcp", tmp_path))
    planted = tmp_path / "planted.pt"
    torch.save([Payload(marker)], planted)
    target = folder / "__0_0.distcp"
    start = target.stat().st_size
    target.write_bytes(target.read_bytes() + planted.read_bytes())
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    index = next(i for i in metadata.storage_data if "param_groups" in i.fqn)
    place = {"relative_path": target.name, "offset": start, "length": planted.stat().st_size}
    (folder / ".metadata").write_bytes(cases.HIDDEN_PLACES[way](metadata, index, place))
    with pytest.raises(UntrustedCheckpoint, match=r"\.metadata "):
        trust.check(folder)
    (finding,) = trust.findings(folder)
    assert not finding.damaged, "found for what it does, not because it could not be read"
    assert not marker.exists()
    import torch.distributed.checkpoint as dcp

    state = {"optimizer": {"param_groups": {index.fqn.removeprefix("optimizer.param_groups."): None}}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    assert marker.exists(), "dcp.load does run it"


# -------------------------------------------------------------------------------------------------- single pickles

EVIL = {
    "eval": b"cbuiltins\neval\n(V1\ntR.",
    "exec": b"cbuiltins\nexec\n(V1\ntR.",
    "a name of Python 2": b"c__builtin__\neval\n(V1\ntR.",
    "getattr": b"cbuiltins\ngetattr\n.",
    "import": b"cbuiltins\n__import__\n(Vos\ntR.",
    "open": b"cbuiltins\nopen\n.",
    "map": b"cbuiltins\nmap\n.",
    "partial": b"cfunctools\npartial\n.",
    "attrgetter": b"coperator\nattrgetter\n(Vsystem\ntR.",
    "methodcaller": b"coperator\nmethodcaller\n(Vsystem\ntR.",
    "a pickle in a storage": b"ctorch.storage\n_load_from_bytes\n(C\x01.tR.",
    "numpy.load": b"cnumpy\nload\n.",
    "pickle.loads": b"c_pickle\nloads\n(C\x01.tR.",
    "torch.load": b"ctorch\nload\n.",
    "a name with dots": b"\x80\x04\x8c\x05torch\x8c\x17serialization.os.system\x93.",
    "a name with dots by GLOBAL": b"\x80\x04ctorch\nserialization.os.system\n.",
    "INST": b"(Vtouch /nowhere\niposix\nsystem\n.",
    "OBJ": b"(cposix\nsystem\nVtouch /nowhere\no.",
    "an extension": b"\x82\x01.",
    "an extension of two bytes": b"\x83\x01\x01.",
    "an extension of four bytes": b"\x84\x01\x01\x01\x01.",
    "a name that is no text": b"\x80\x04)\x8c\x06system\x93.",
    "a name that a call makes": b"\x80\x04ccollections\nOrderedDict\n)R\x8c\x06system\x93.",
    "attributes of a class": b"ccollections\nOrderedDict\n}Vmove_to_end\nK\x01sb.",
    "an item of a class": b"ccollections\nOrderedDict\nK\x01K\x02s.",
    "an element for a class": b"ccollections\nOrderedDict\nK\x01a.",
    "a call of a value": b"ctorch\nTensor\n(tR.",
    "a call of what a call made": b"ccollections\nOrderedDict\n(tR(tR.",
    "the constructor of arguments": b"ctransformers.training_args\nTrainingArguments\n(V/nowhere\ntR.",
    "any function under a tensor": (
        b"ctorch._tensor\n_rebuild_from_type_v2\n(ccollections\nOrderedDict\nctorch\nTensor\n)}tR."
    ),
    "an array of objects": b"cnumpy\ndtype\n(VO8\nK\x00K\x01tR.",
    "a type with flags": b"cnumpy\ndtype\n(Vf8\nK\x00K\x01tR(K\x03V<\nNNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x3ftb.",
    "attributes that are set twice": b"\x80\x02ccollections\nOrderedDict\n)R}Va\nK\x01sb}Vb\nK\x01sb.",
    "a tensor by what is very deep": (
        b"ctorch._tensor\n_rebuild_from_type_v2\n()" + b"\x85" * 300_000 + b"ctorch\nTensor\n)}tR."
    ),
    "any codec": b"c_codecs\nencode\n(Vabc\nVzip\ntR.",
    "another memory": b"(Vmodule\nNtQ.",
    "memory by a name": b"Pabc\n.",
    "out of band": b"\x80\x05\x97.",
}


@pytest.mark.parametrize("name", EVIL)
def test_ways_around_the_table(name: str, tmp_path: Path) -> None:
    path = tmp_path / "scheduler.bin"
    path.write_bytes(EVIL[name])
    with pytest.raises(UntrustedCheckpoint) as caught:
        trust.check(tmp_path)
    finding = trust.findings(tmp_path)[0]
    assert not finding.damaged, "found for what it does, not because it could not be read"
    assert str(path) in str(caught.value)


GOOD = {
    "a pickle in bytes is data": pickle.dumps({"inner": pickle.dumps(Payload(Path("x")))}),
    "names in texts": pickle.dumps(["os.system", "posix", "system"]),
    "plain values": pickle.dumps({"a": [1, 2.5, None, True, (1, 2), {3}, b"x", bytearray(b"y"), 1 << 99]}),
    "protocol 0": pickle.dumps({"a": [1, 2.5, None, (1,)]}, protocol=0),
    "a dead mark": b"(K\x011K\x01.",
}


@pytest.mark.parametrize("name", GOOD)
def test_harmless_pickles_pass(name: str, tmp_path: Path) -> None:
    (tmp_path / "x.pkl").write_bytes(GOOD[name])
    trust.check(tmp_path)


def test_the_scaler_of_float16_passes(tmp_path: Path) -> None:
    """DeepSpeed has no float16 on CPUs: the object alone."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    torch.save({"scaler": DynamicLossScaler(init_scale=4, scale_window=2, min_scale=1.0, delayed_shift=1,
                                            consecutive_hysteresis=False)}, tmp_path / "x.pt")  # fmt: skip
    trust.check(tmp_path)


def test_values_are_read_as_python_would_read_them(tmp_path: Path) -> None:
    value = {"a": [1, -2, 2.5, None, True, "x", b"y", (1, (2,)), {}, []], 3: "d", (1, "k"): 1 << 70}
    for protocol in range(6):
        (tmp_path / "x.pkl").write_bytes(pickle.dumps(value, protocol=protocol))
        found = trust.values(tmp_path / "x.pkl")[0]
        if protocol > 2:  # before it, bytes are a call
            assert found == value
        assert found["a"][:6] == value["a"][:6] and found[3] == "d"


def test_a_second_pickle_behind_the_first(tmp_path: Path, marker: Path) -> None:
    path = tmp_path / "random_states_0.pkl"
    path.write_bytes(pickle.dumps([1]) + pickle.dumps(Payload(marker)))
    with pytest.raises(UntrustedCheckpoint, match=r"posix\.system"):
        trust.check(tmp_path)
    path.write_bytes(pickle.dumps([1]) + b"\x00 what is this")
    with pytest.raises(UntrustedCheckpoint, match="bytes behind its pickle"):
        trust.check(tmp_path)
    torch.save([1], tmp_path / "x.pt")
    cases.rewrite_zip(tmp_path / "x.pt", lambda name, data: data + pickle.dumps(2) if name.endswith(".pkl") else data)
    with pytest.raises(UntrustedCheckpoint, match="another pickle behind the first"):
        trust.check(tmp_path / "x.pt")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_zip_files_that_two_readers_see_differently(tmp_path: Path, marker: Path) -> None:
    path, other = tmp_path / "x.pt", tmp_path / "other.pt"
    torch.save([1], path)
    good = path.read_bytes()
    with zipfile.ZipFile(path, "a") as archive:  # a second member of the same name
        archive.writestr("x/data.pkl", pickle.dumps(Payload(marker)))
    with pytest.raises(UntrustedCheckpoint, match="more than once|posix"):
        trust.check(path)
    with zipfile.ZipFile(other, "w") as archive:  # a second folder with a pickle
        archive.writestr("other/data.pkl", pickle.dumps([1], protocol=2))
        archive.writestr("other/version", "3")
        archive.writestr("other/code/data.pkl", pickle.dumps(Payload(marker)))
    with pytest.raises(UntrustedCheckpoint, match=r"posix\.system"):
        trust.check(other)
    torch.save([Payload(marker)], other)
    path.write_bytes(pickle.dumps([1]) + other.read_bytes())  # a zip file behind a pickle
    with pytest.raises(UntrustedCheckpoint):
        trust.check(path)
    path.write_bytes(good + other.read_bytes())  # one behind another: readers begin at the end
    with pytest.raises(UntrustedCheckpoint):
        trust.check(path)
    path.write_bytes(other.read_bytes() + good)
    with pytest.raises(UntrustedCheckpoint):
        trust.check(path)
    assert not marker.exists()


def test_old_and_foreign_formats_are_refused(tmp_path: Path, marker: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(cases.tar_of(marker))
    with pytest.raises(UntrustedCheckpoint, match="tar file"):
        trust.check(path)
    path.unlink()
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("data.pkl", "constants.pkl"):
            archive.writestr(f"x/{name}", pickle.dumps([1], protocol=2))
        archive.writestr("x/version", "3")
    with pytest.raises(UntrustedCheckpoint, match="TorchScript"):
        trust.check(path)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["model.weights", "optimizer", "x.dat", "tokenizer.json"])
def test_a_pickle_under_another_name_is_found(name: str, tmp_path: Path, marker: Path) -> None:
    torch.save([Payload(marker)], tmp_path / name)
    with pytest.raises(UntrustedCheckpoint, match=name):
        trust.check(tmp_path)
    (tmp_path / name).write_bytes(pickle.dumps(Payload(marker)))
    with pytest.raises(UntrustedCheckpoint, match=name):
        trust.check(tmp_path)


def test_texts_and_tensors_are_no_pickles(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("cposix\nsystem\n(Vtouch x\ntR.")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "latest").write_text("global_step2")
    trust.check(tmp_path)


@pytest.mark.parametrize("length", [640, 896, 1152, 1408, 65536 + 896])
def test_safetensors_that_begin_like_a_pickle(length: int, tmp_path: Path, marker: Path) -> None:
    """The first bytes are the length of the header: 0x80 and the number of a pickle's protocol."""
    from safetensors.torch import load_file, save_file

    path = tmp_path / "model.safetensors"
    for size in range(length):
        save_file({"x": torch.arange(3.0)}, path, {"of": "x" * max(0, length - 128 + size)})
        if int.from_bytes(path.read_bytes()[:8], "little") == length:
            break
    content = path.read_bytes()
    assert content[0] == 0x80 and 2 <= content[1] <= 5 and load_file(path)["x"].sum() == 3.0
    trust.check(tmp_path)
    assert trust.findings(tmp_path) == []
    for planted in (pickle.dumps(Payload(marker)), content[:2] + cases.run_by_opcodes(marker) + content[8:]):
        path.write_bytes(planted)
        with pytest.raises(UntrustedCheckpoint, match=r"model\.safetensors .*posix\.system"):
            trust.check(tmp_path)
    path.write_bytes(content[:300])
    with pytest.raises(UntrustedCheckpoint, match="no whole pickle"):
        trust.check(tmp_path)


# ------------------------------------------------------------------------------------------------ links, the table


def test_links_that_leave_the_folder(tmp_path: Path, marker: Path) -> None:
    folder, outside = tmp_path / "checkpoint-1", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    torch.save([1], outside / "x.pt")
    torch.save([1], folder / "x.pt")
    (folder / "inside.pt").symlink_to("x.pt")
    trust.check(folder)
    for target in (outside / "x.pt", outside, tmp_path / "nothing"):
        link = folder / "linked.pt"
        link.symlink_to(target)
        with pytest.raises(UntrustedCheckpoint, match=f"linked.pt is a link to {target}, outside"):
            trust.check(folder)
        link.unlink()


def test_what_is_no_file_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.pt")
    with pytest.raises(UntrustedCheckpoint, match="no regular file"):
        trust.check(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        trust.check(tmp_path / "nothing")


@pytest.mark.parametrize("name", ALLOWED, ids=str)
def test_every_name_of_the_table_is_there(name: Global) -> None:
    """In the installed release: a wrong name would hide a wrong reason."""
    module = name.module.replace("numpy.core", "numpy._core")
    assert hasattr(importlib.import_module(module), name.name)


def test_a_table_of_exact_names() -> None:
    dangerous = {"builtins", "os", "posix", "nt", "subprocess", "sys", "importlib", "functools", "operator", "types"}
    assert {name.name for name in ALLOWED if name.module in dangerous} == {"set", "bytearray", "complex"}
    assert not any("*" in str(name) or "load" in name.name.lower() for name in ALLOWED)


@pytest.mark.parametrize("version", ["2.5.1", "2.6.0", "2.9.1+cpu"])
def test_a_torch_that_is_not_safe_is_refused(version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.save([1], tmp_path / "x.pt")
    trust.check(tmp_path)
    monkeypatch.setattr(torch, "__version__", version)
    reason = "CVE-2025-32434" if version == "2.5.1" else "GHSA-63cw-57p8-fm3p"
    with pytest.raises(UntrustedCheckpoint, match=rf"torch {version.split('+')[0]}.*{reason}.*torch>=2\.10"):
        trust.check(tmp_path)
    for good in ("2.10.0", "2.13.0+cpu", "3.0.0a0+git1"):
        trust.require_safe_torch(good)


def test_damaged_pickles_are_named(tmp_path: Path) -> None:
    for content in (
        b"",
        b"\x80",
        b"\x80\x02}",
        b"K\x01K",
        b"\xff\xfe",
        b"PK\x03\x04 no zip",
        b"\x80\x04B\xff\xff\xff\x7fab.",
    ):
        (tmp_path / "x.pt").write_bytes(content)
        (finding,) = trust.findings(tmp_path)
        assert finding.damaged and "x.pt" in str(finding), content


def test_a_deep_pickle_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.pkl").write_bytes(b")" + b"\x85" * 20_000 + b".")
    (tmp_path / "y.pkl").write_bytes(b"}" + b")" + b"\x85" * 20_000 + b"K\x01s.")
    trust.check(tmp_path)


def test_a_compressed_pickle_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    """torch.save compresses nothing; a few megabytes may become all the memory that there is."""
    with zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"B" + (1 << 24).to_bytes(4, "little") + bytes(1 << 24) + b".")
        archive.writestr("archive/version", "3")
    assert (tmp_path / "x.pt").stat().st_size < 1 << 15
    with pytest.raises(UntrustedCheckpoint, match=r"holds archive/data\.pkl compressed, which torch\.save does not do"):
        trust.check(tmp_path)


def test_numbers_without_end_are_refused(tmp_path: Path) -> None:
    folder = newest(copy_of("dcp", tmp_path))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).offset = 10**5000
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UntrustedCheckpoint, match=r"\.metadata cannot be read \(ValueError"):
        trust.check(folder)


def test_a_window_does_not_read_beyond_itself(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(range(100)))
    with (tmp_path / "x").open("rb") as file:
        window = pickles.Window(file, 10, 20)
        assert window.read(5) == bytes(range(10, 15))
        assert window.seek(-2, 2) == 8 and window.read() == bytes([18, 19]) and window.read(1 << 60) == b""


# ------------------------------------------------------------------------------------------------------- the hooks


def test_deepspeed_refuses_on_every_rank_before_it_opens_a_file(tmp_path: Path, marker: Path) -> None:
    pool = folders.pool()
    for stage, name in (
        (1, "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        (3, "zero_pp_rank_0_mp_rank_00_model_states.pt"),
    ):
        folder = copy_of(f"zero{stage}", tmp_path)
        assert pool.run(cases.load_with_deepspeed, str(folder), stage, "global_step1") == ["loaded"] * 2
        cases.hide(folder / "global_step2" / name, marker)
        found = pool.run(cases.load_with_deepspeed, str(folder), stage, None)
        assert found[0] == found[1]
        assert found[0].startswith("CheckpointError: ") and name in found[0] and "posix.system" in found[0]
        assert not marker.exists()
        assert pool.run(cases.load_with_deepspeed, str(folder), stage, None, True) == ["loaded"] * 2
        assert marker.exists(), "DeepSpeed does run it"
        marker.unlink()


def test_tags_cannot_leave_the_folder(tmp_path: Path) -> None:
    pool = folders.pool()
    folder = copy_of("zero1", tmp_path)
    (folder / "linked").symlink_to(folders.made()["zero3"] / "global_step2")
    for tag in ("../zero1/global_step2", str(folders.made()["zero1"] / "global_step2"), "linked"):
        found = pool.run(cases.load_with_deepspeed, str(folder), 1, tag)
        assert found[0] == found[1] and "Tags cannot leave the folder" in found[0], found
        (folder / "latest").write_text(tag)
        found = pool.run(cases.load_with_deepspeed, str(folder), 1, None)
        assert found[0] == found[1] and "Tags cannot leave the folder" in found[0], found
    for tag in ("../outside", str(tmp_path / "outside")):
        found = pool.run(cases.save_with_deepspeed, str(folder), tag)
        assert found[0] == found[1] and "Tags cannot leave the folder" in found[0], found
        assert not (tmp_path / "outside").exists()
    assert pool.run(cases.save_with_deepspeed, str(folder), "a tag/with (odd) name") == ["saved"] * 2
    assert (folder / "a tag/with (odd) name/mars_dist_manifest.json").is_file()
    assert pool.run(cases.load_with_deepspeed, str(folder), 1, "a tag/with (odd) name") == ["loaded"] * 2


def test_accelerate_refuses_before_it_opens_a_file(tmp_path: Path, marker: Path) -> None:
    from accelerate import Accelerator

    import mars_dist
    from tests import nets

    folder = copy_of("accelerate", tmp_path) / "checkpoint_2"
    accelerator = Accelerator(cpu=True)
    net = nets.build()
    scheduler = None
    net, mars = accelerator.prepare(net, mars_dist.MARS(net.named_parameters(), lr=1e-2))
    cases.hide(folder / "random_states_0.pkl", marker)
    before = {name: p.clone() for name, p in net.named_parameters()}
    with pytest.raises(UntrustedCheckpoint, match=r"random_states_0\.pkl .*posix\.system"):
        accelerator.load_state(str(folder))
    assert not marker.exists() and scheduler is None
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters()), "nothing was loaded"


def test_the_trainer_checks_what_it_resumes_from_and_takes_the_newest_valid(tmp_path: Path, marker: Path) -> None:
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    from tests.trainer_cases import dataset, model

    folder = copy_of("trainer", tmp_path)

    def trainer() -> Any:
        arguments = TrainingArguments(
            str(folder), optim="mars_adamw", max_steps=5, save_strategy="no", per_device_train_batch_size=4,
            use_cpu=True, report_to=[], logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        return Trainer(model=model(), args=arguments, train_dataset=dataset(16))

    cases.hide(folder / "checkpoint-4" / "optimizer.pt", marker)
    with pytest.raises(UntrustedCheckpoint, match=r"checkpoint-4/optimizer\.pt"):
        trainer().train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    assert not marker.exists()
    (folder / "checkpoint-20").mkdir()
    assert get_last_checkpoint(str(folder)).endswith("checkpoint-20"), "transformers takes the empty one"
    resumed = trainer()
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 5 and type(resumed.optimizer.optimizer).__name__ == "MARS"
    steps = {float(state["step"]) for state in resumed.optimizer.optimizer.state.values()}
    assert steps == {5.0}, "from checkpoint-2: three more"
    shutil.rmtree(folder / "checkpoint-2")
    with pytest.raises(ValueError, match="holds no valid checkpoint"):
        trainer().train(resume_from_checkpoint=True)


def test_export_checks_a_checkpoint_of_deepspeed(tmp_path: Path, marker: Path) -> None:
    from mars_dist.integrations.deepspeed.launch import whole_weights

    folder = copy_of("zero1", tmp_path)
    assert whole_weights(folder, "global_step2")["linear.weight"].shape == (11, 6)
    cases.hide(folder / "global_step2" / "mp_rank_00_model_states.pt", marker)
    with pytest.raises(UntrustedCheckpoint, match="mp_rank_00_model_states"):
        whole_weights(folder, "global_step2")
    assert not marker.exists()
    with pytest.raises(ValueError, match="Tags cannot leave the folder"):
        whole_weights(folder, "../zero1/global_step2")
    whole_weights(folder, "global_step2", trusted=True)
    assert marker.exists()


def test_the_command_names_foreign_pickles(
    tmp_path: Path, marker: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = newest(copy_of("universal", tmp_path))
    assert cli.main(["checkpoint", "verify", str(folder)]) == 0
    capsys.readouterr()
    cases.hide(folder / "zero" / "gain" / "fp32.pt", marker)
    assert cli.main(["checkpoint", "verify", str(folder)]) == 1
    assert "gain/fp32.pt (archive/data.pkl in it) uses posix.system" in capsys.readouterr().out.replace(
        "fp32/", "archive/"
    )
    assert cli.main(["checkpoint", "verify", str(folder), "--trust-checkpoint"]) == 0
    monkeypatch.setenv("MARS_DIST_TRUST_CHECKPOINT", "1")
    assert cli.main(["checkpoint", "verify", str(folder)]) == 0
    assert not marker.exists()
