"""Documents to shards: token for token, interrupted anywhere, by any number of workers; and what is refused."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken

from mars_dist.pretrain import prepare as prepare_module
from mars_dist.pretrain import sources
from mars_dist.pretrain.encoding import Encoder
from mars_dist.pretrain.prepare import PrepareError, Progress, prepare
from mars_dist.pretrain.shards import DataError, open_split
from mars_dist.pretrain.sources import open_source
from mars_dist.pretrain.tokenizer import END_OF_TEXT, END_OF_TEXT_ID, gpt2_tokenizer
from tests.documents import ODD, different_texts, write_jsonl

FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def tokenizer() -> tiktoken.Encoding:
    return gpt2_tokenizer()


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return different_texts()


def written(folder: Path, split: str) -> list[list[int]]:
    """The documents of a split, each as its tokens without the end-of-text token, from the files alone."""
    index = json.loads((folder / "index.json").read_text())
    found = []
    for shard in index["splits"][split]["shards"]:
        tokens = np.fromfile(folder / shard["file"], dtype=index["dtype"])
        assert tokens[-1] == index["end_of_text"], "a shard ends with a document"
        assert len(tokens) == shard["tokens"]
        found += [
            part.tolist()[:-1] for part in np.split(tokens, np.flatnonzero(tokens == index["end_of_text"]) + 1)[:-1]
        ]
    assert len(found) == index["splits"][split]["documents"]
    return found


def all_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def check(folder: Path, texts: list[str], tokenizer: tiktoken.Encoding) -> None:
    """With nothing held out: the documents are the texts, in their order, token for token."""
    assert written(folder, "train") == [tokenizer.encode_ordinary(text) for text in texts]


# ---- encoding


def test_tokens_are_those_of_encode_ordinary(tokenizer: tiktoken.Encoding) -> None:
    draw, texts = random.Random(2), [*ODD, "half \ud83d a pair", "\udcff"]
    alphabet = "aZé日\U0001f600 \t\n\r\x1c\x85\u2009\u3000'012_!<|>" + "the  I'll"
    texts += ["".join(draw.choices(alphabet, k=draw.randrange(60))) for _ in range(2000)]
    part = Encoder(tokenizer, 0.0, np.dtype("<u2"))(texts)["train"]
    expected = [[*tokenizer.encode_ordinary(text), END_OF_TEXT_ID] for text in texts]
    assert part.tokens.tolist() == [token for ids in expected for token in ids]
    assert part.lengths.tolist() == [len(ids) for ids in expected]


def test_a_run_of_blanks_that_tiktoken_gives_up_on(
    tokenizer: tiktoken.Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = Encoder(tokenizer, 0.0, np.dtype("<u2"))
    long = "a" + "\n" * 1_000_000 + "b"
    with pytest.raises(ValueError, match="stack"):
        tokenizer.encode_to_numpy(long)
    assert tokenizer.decode(encode([long])["train"].tokens[:-1].tolist()) == long

    # The way around gives the same tokens where tiktoken does answer: here it is made to refuse the whole text.
    real, refused = type(tokenizer).encode_to_numpy, set()

    def refuse(self: tiktoken.Encoding, text: str, **options: Any) -> Any:
        if text in refused:
            raise ValueError("stack")
        return real(self, text, **options)

    monkeypatch.setattr(type(tokenizer), "encode_to_numpy", refuse)
    for blanks in (" " * 5000, "\n" * 5000, " \n" * 2500, "\u3000" + " " * 4999, "\t" * 4999 + " "):
        for before, after in (("a", "b"), ("", "b"), ("a", "'s b"), ("é", "9"), ("x", "\x1cy")):
            text = before + blanks + after
            refused.add(text)
            assert encode([text])["train"].tokens[:-1].tolist() == tokenizer.encode_ordinary(text)
    refused.add("abc")
    with pytest.raises(
        PrepareError, match=r"the document of 3 characters that begins 'abc' cannot be encoded \(stack\)"
    ):
        encode(["abc"])


# ---- prepare


def test_the_folder(tmp_path: Path, texts: list[str], tokenizer: tiktoken.Encoding) -> None:
    source = open_source(write_jsonl(tmp_path / "a.jsonl", texts))
    seen: list[Progress] = []
    out = tmp_path / "deep/out"
    index = prepare(source, out, workers=1, val_fraction=0.0, shard_tokens=5000, report=seen.append)
    check(out, texts, tokenizer)
    assert index == json.loads((out / "index.json").read_text())
    assert {k: index[k] for k in ("format", "tokenizer", "vocabulary", "end_of_text", "dtype")} == {
        "format": 1,
        "tokenizer": "gpt2",
        "vocabulary": 50257,
        "end_of_text": 50256,
        "dtype": "uint16",
    }
    assert index["tokenizer_sha256"] == prepare_module.tokenizer_sha256(tokenizer)
    assert index["source"]["kind"] == "files" and index["source"]["field"] == "text"
    shards = index["splits"]["train"]["shards"]
    assert len(shards) > 3 and index["splits"]["val"] == {"tokens": 0, "documents": 0, "shards": []}
    assert all(shard["tokens"] >= 5000 for shard in shards[:-1])
    assert {path.name for path in out.iterdir()} == {"index.json", *(shard["file"] for shard in shards)}
    assert seen[-1].documents == len(texts) and seen[-1].tokens == index["splits"]["train"]["tokens"]
    open_split(out).verify()


def test_the_split_depends_on_the_text_alone(tmp_path: Path, texts: list[str], tokenizer: tiktoken.Encoding) -> None:
    held_out = {}
    for name, order in (("forward", texts), ("backward", texts[::-1]), ("some", texts[::3])):
        source = open_source(write_jsonl(tmp_path / f"{name}.jsonl", order))
        prepare(source, tmp_path / name, workers=1, val_fraction=0.2, tokenizer=tokenizer)
        parts = {
            split: [tokenizer.decode(ids) for ids in written(tmp_path / name, split)] for split in ("train", "val")
        }
        assert sorted(parts["train"] + parts["val"]) == sorted(order)
        held_out[name] = set(parts["val"])
    assert held_out["forward"] == held_out["backward"]
    assert held_out["some"] == held_out["forward"] & set(texts[::3])
    assert 0.1 < len(held_out["forward"]) / len(texts) < 0.3
    encode = Encoder(tokenizer, 0.05, np.dtype("<u2"))
    assert {text for text in texts if encode._is_val(text)} < held_out["forward"], "a smaller fraction is a part of it"


def test_several_workers_write_the_same_bytes(
    tmp_path: Path, texts: list[str], tokenizer: tiktoken.Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "CHUNK", 3000)
    source = open_source(write_jsonl(tmp_path / "a.jsonl", texts))
    options: dict[str, Any] = {"val_fraction": 0.2, "shard_tokens": 7000, "tokenizer": tokenizer}
    for workers in (1, 3):
        prepare(source, tmp_path / str(workers), workers=workers, **options)
    assert all_files(tmp_path / "1") == all_files(tmp_path / "3")


def test_a_larger_vocabulary_is_written_as_uint32(tmp_path: Path) -> None:
    ranks = {bytes([i]): i for i in range(256)} | {b"ab": 70_000}
    big = tiktoken.Encoding(name="big", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 70_001})
    (tmp_path / "a.txt").write_text("ab c")
    index = prepare(open_source(tmp_path / "a.txt"), tmp_path / "out", workers=1, val_fraction=0.0, tokenizer=big)
    assert (index["dtype"], index["vocabulary"], index["end_of_text"]) == ("uint32", 70_002, 70_001)
    assert open_split(tmp_path / "out")[:].tolist() == [70_000, 32, 99, 70_001]


def run_until_killed(target: Callable[[], Any]) -> int | None:
    """In a process of its own, which may kill itself."""
    process = FORK.Process(target=target)
    process.start()
    process.join(60)
    return process.exitcode


def killing_at(count: int) -> Callable[..., None]:
    """A report that kills its process the `count`-th time it is called."""
    calls = iter(range(1, count + 1))

    def report(*_: Any) -> None:
        if next(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)

    return report


def test_killed_anywhere_it_goes_on_without_losing_or_doubling_a_document(
    tmp_path: Path, texts: list[str], tokenizer: tiktoken.Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL at the k-th write to the disk's log (fsync), for every k: between a rename and the next save, too."""
    monkeypatch.setattr(sources, "CHUNK", 4000)
    source = open_source(write_jsonl(tmp_path / "a.jsonl", texts[:50]))
    options: dict[str, Any] = {"val_fraction": 0.2, "shard_tokens": 1500, "tokenizer": tokenizer}
    options |= {"workers": 1, "save_seconds": 0.0}
    prepare(source, tmp_path / "whole", **options)
    whole = all_files(tmp_path / "whole")
    assert len(whole) > 4

    def killed_run(out: Path, k: int) -> None:
        kill, fsync = killing_at(k), os.fsync

        def fsync_or_die(descriptor: int) -> None:
            kill()
            fsync(descriptor)

        os.fsync = fsync_or_die  # type: ignore[assignment]  # in this process, which ends here
        prepare(source, out, **options)

    k, ended = 1, None
    while ended != 0 and k < 200:
        out = tmp_path / f"killed at {k}"
        ended = run_until_killed(lambda out=out, k=k: killed_run(out, k))  # type: ignore[misc]
        assert ended in (0, -signal.SIGKILL)
        if not (out / "index.json").exists():
            with pytest.raises(DataError, match="is not finished; run mars-dist prepare|no such file"):
                open_split(out)
        prepare(source, out, **options)
        assert all_files(out) == whole, f"killed at fsync {k}"
        k += 1
    assert ended == 0 and k > 20, "every place was tried, and so many there are"


def test_killed_again_and_again_with_workers_which_end_too(
    tmp_path: Path, texts: list[str], tokenizer: tiktoken.Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "CHUNK", 4000)
    source, out = open_source(write_jsonl(tmp_path / "a.jsonl", texts)), tmp_path / "out"
    options: dict[str, Any] = {"val_fraction": 0.2, "shard_tokens": 6000, "tokenizer": tokenizer, "save_seconds": 0.0}
    prepare(source, tmp_path / "whole", workers=1, **options)

    def killed_run() -> None:
        kill = killing_at(7)

        def report(progress: Progress) -> None:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
            (tmp_path / "workers").write_text(children)
            kill()

        prepare(source, out, workers=2, report=report, **options)

    kills = 0
    while run_until_killed(killed_run) != 0:
        kills += 1
        workers = [int(pid) for pid in (tmp_path / "workers").read_text().split()]
        assert len(workers) == 2
        deadline = time.monotonic() + 20
        while any(alive(pid) for pid in workers):
            assert time.monotonic() < deadline, "the workers of a killed process stay"
            time.sleep(0.05)
    assert kills >= 3
    assert all_files(out) == all_files(tmp_path / "whole")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_finished_folder_is_left_as_it_is(tmp_path: Path, texts: list[str], tokenizer: tiktoken.Encoding) -> None:
    path, out = write_jsonl(tmp_path / "a.jsonl", texts[:20]), tmp_path / "out"
    index = prepare(open_source(path), out, workers=1, val_fraction=0.3, tokenizer=tokenizer)
    times = {file: file.stat().st_mtime_ns for file in out.iterdir()}
    (tmp_path / "moved").mkdir()
    moved = path.rename(tmp_path / "moved/a.jsonl")
    assert prepare(open_source(moved), out, workers=1, val_fraction=0.3, tokenizer=tokenizer) == index
    assert {file: file.stat().st_mtime_ns for file in out.iterdir()} == times
    (out / "val-00000.bin").unlink()
    with pytest.raises(DataError, match="val-00000.bin is missing"):
        prepare(open_source(moved), out, workers=1, val_fraction=0.3, tokenizer=tokenizer)


@pytest.mark.parametrize("form", [None, "jsonl"])
@pytest.mark.parametrize("below", ["", "out", "deeper/out"])
def test_the_folder_of_the_shards_may_be_inside_the_source(
    below: str,
    form: str | None,
    tmp_path: Path,
    texts: list[str],
    tokenizer: tiktoken.Encoding,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`prepare my_texts --out my_texts/data`, killed and run again, twice: its own files are no documents."""
    folder = tmp_path / "source"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", texts[:20])
    write_jsonl(folder / "z.jsonl", texts[20:40])
    (folder / "deeper").mkdir()
    write_jsonl(folder / "deeper/index.json", texts[40:50])  # somebody else's file of that name
    out = folder / below
    options: dict[str, Any] = {"workers": 1, "val_fraction": 0.3, "tokenizer": tokenizer, "save_seconds": 0}
    options |= {"shard_tokens": 1000}
    monkeypatch.setattr(sources, "CHUNK", 2000)

    def killed_run() -> None:
        prepare(open_source(folder, form=form), out, report=killing_at(5), **options)

    assert run_until_killed(killed_run) == -signal.SIGKILL
    assert (out / "progress.json").exists() and list(out.glob("*.bin")) and list(out.glob("*.bin.tmp"))
    index = prepare(open_source(folder, form=form), out, **options)
    for _ in range(2):
        source = open_source(folder, form=form)
        assert source.left_out["written by mars-dist prepare"] >= 1
        assert prepare(source, out, **options) == index
    assert sum(split["documents"] for split in index["splits"].values()) == 50


def test_a_folder_with_other_data_is_refused(
    tmp_path: Path, texts: list[str], tokenizer: tiktoken.Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = write_jsonl(tmp_path / "a.jsonl", texts[:20]), tmp_path / "out"
    other = tiktoken.Encoding(
        name="bytes",
        pat_str=r"\S+|\s+",
        mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={END_OF_TEXT: 256},
    )
    options: dict[str, Any] = {"workers": 1, "val_fraction": 0.3, "tokenizer": tokenizer}
    monkeypatch.setattr(sources, "CHUNK", 100)
    for unfinished in (True, False):
        if unfinished:
            run_until_killed(lambda: prepare(open_source(path), out, save_seconds=0, report=killing_at(9), **options))
        else:
            prepare(open_source(path), out, **options)
        before = all_files(out)
        cases: list[tuple[dict[str, Any], str]] = [
            (
                {"val_fraction": 0.1},
                r"holds other data, differing in --val-fraction \(0.3 there, 0.1 now\); choose another --out",
            ),
            ({"shard_tokens": 7}, r"differing in --shard-tokens \(100000000 there, 7 now\)"),
            ({"tokenizer": other}, r"differing in .*tokenizer \(gpt2 there, bytes now\)"),
        ]
        for change, message in cases:
            with pytest.raises(PrepareError, match=message):
                prepare(open_source(path), out, **(options | change))
        another = write_jsonl(tmp_path / "b.jsonl", texts[:21])
        with pytest.raises(PrepareError, match=r"differing in source.bytes \(.* there, .* now\), source.sha256"):
            prepare(open_source(another), out, **options)
        with pytest.raises(PrepareError, match=r"differing in --errors \(strict there, replace now\);"):
            prepare(open_source(path, errors="replace"), out, **options)
        assert all_files(out) == before
    nanogpt = tmp_path / "nanogpt"
    nanogpt.mkdir()
    (nanogpt / "train.bin").write_bytes(b"12")
    with pytest.raises(PrepareError, match="nanogpt holds train.bin, which is not of a prepare"):
        prepare(open_source(path), nanogpt, **options)


def test_one_prepare_at_a_time(tmp_path: Path, tokenizer: tiktoken.Encoding) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["a"])

    def second(_: Progress) -> None:
        with pytest.raises(PrepareError, match="is being written by another mars-dist prepare"):
            prepare(open_source(path), tmp_path / "out", workers=1, tokenizer=tokenizer)

    prepare(open_source(path), tmp_path / "out", workers=1, val_fraction=0.0, tokenizer=tokenizer, report=second)


def test_no_documents_and_then_some(tmp_path: Path, tokenizer: tiktoken.Encoding) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n")
    with pytest.raises(PrepareError, match="no documents in .*a.jsonl"):
        prepare(open_source(path), tmp_path / "out", workers=1, tokenizer=tokenizer)
    write_jsonl(path, ["a"])
    prepare(open_source(path), tmp_path / "out", workers=1, val_fraction=0.0, tokenizer=tokenizer)
    check(tmp_path / "out", ["a"], tokenizer)


def test_wrong_arguments(tmp_path: Path) -> None:
    source = open_source("shipped")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"workers": 0}, "--workers is 0, must be at least 1"),
        ({"val_fraction": 1.0}, "--val-fraction is 1.0, must be at least 0 and below 1"),
        ({"val_fraction": float("nan")}, "--val-fraction is nan"),
        ({"shard_tokens": 0}, "--shard-tokens is 0"),
    ]
    for arguments, message in cases:
        with pytest.raises(PrepareError, match=message):
            prepare(source, tmp_path / "out", **arguments)
    (tmp_path / "file").write_text("")
    with pytest.raises(PrepareError, match="file cannot be written"):
        prepare(source, tmp_path / "file", workers=1)


def test_a_disk_that_takes_no_more_and_then_does(
    tmp_path: Path, texts: list[str], tokenizer: tiktoken.Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real error of the operating system: this process may write no file longer than 6 kB."""
    monkeypatch.setattr(sources, "CHUNK", 2000)
    source = open_source(write_jsonl(tmp_path / "a.jsonl", texts))
    options: dict[str, Any] = {"workers": 1, "val_fraction": 0.0, "tokenizer": tokenizer, "save_seconds": 0.0}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, hard))
    try:
        with pytest.raises(PrepareError, match=r"out cannot be written \(\[Errno 27\] File too large\)"):
            prepare(source, tmp_path / "out", **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    prepare(source, tmp_path / "out", **options)
    check(tmp_path / "out", texts, tokenizer)


def test_a_wrong_document_in_the_middle_stops_and_can_be_put_right(
    tmp_path: Path, tokenizer: tiktoken.Encoding
) -> None:
    """What a worker's document is refused for reaches the caller, and nothing hangs."""
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": f"document {i}"}) for i in range(50)]
    path.write_text("\n".join([*lines[:30], "{broken", *lines[30:]]))
    with pytest.raises(PrepareError, match="a.jsonl, line 31: not one JSON object"):
        prepare(open_source(path), tmp_path / "out", workers=2, val_fraction=0.0, tokenizer=tokenizer)
    path.write_text("\n".join(lines))
    prepare(open_source(path), tmp_path / "out", workers=2, val_fraction=0.0, tokenizer=tokenizer)
    check(tmp_path / "out", [f"document {i}" for i in range(50)], tokenizer)


def test_a_worker_that_is_killed_is_an_error_and_not_a_hang(
    tmp_path: Path, texts: list[str], tokenizer: tiktoken.Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "CHUNK", 2000)
    source = open_source(write_jsonl(tmp_path / "a.jsonl", texts))
    here = os.getpid()

    def die(self: Encoder, chunk: list[str]) -> Any:
        if chunk and os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return {}

    with monkeypatch.context() as patched:
        patched.setattr(Encoder, "__call__", die)
        with pytest.raises(PrepareError, match="a worker process was killed, .* fewer --workers"):
            prepare(source, tmp_path / "out", workers=2, val_fraction=0.0, tokenizer=tokenizer)
    prepare(source, tmp_path / "out", workers=2, val_fraction=0.0, tokenizer=tokenizer)
    check(tmp_path / "out", texts, tokenizer)
