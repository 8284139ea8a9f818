"""Reading prepared tokens: across files, beyond 4 GB, in bounded memory, for any world size; and what is refused."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mars_dist.pretrain.data import Blocks
from mars_dist.pretrain.prepare import prepare
from mars_dist.pretrain.shards import OPEN_FILES, DataError, Shards, open_split
from mars_dist.pretrain.sources import open_source
from mars_dist.pretrain.tokenizer import PADDED_VOCABULARY


def many(folder: Path, sizes: list[int], dtype: str = "uint16") -> Shards:
    """The tokens 0, 1, 2, … over files of these sizes."""
    start, files = 0, []
    for number, size in enumerate(sizes):
        path = folder / f"train-{number:05d}.bin"
        np.arange(start, start + size).astype(dtype).tofile(path)
        files.append((path, size))
        start += size
    return Shards(files, dtype, None, "", {})


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped text in several shards; a test that changes it takes a copy."""
    folder = tmp_path_factory.mktemp("prepared")
    prepare(open_source("shipped"), folder, workers=1, val_fraction=0.1, shard_tokens=200_000)
    return folder


@pytest.fixture
def copy(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "copy"))


# ---- one flat sequence


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_every_slice_is_that_of_the_whole(dtype: str, tmp_path: Path) -> None:
    tokens, whole = many(tmp_path, [5, 1, 7, 2], dtype), np.arange(15, dtype=dtype)
    assert len(tokens) == 15 and tokens.dtype == whole.dtype
    bounds: list[int | None] = [None, *range(-17, 18)]
    for start in bounds:
        for stop in bounds:
            found = tokens[start:stop]
            assert found.dtype == whole.dtype and np.array_equal(found, whole[start:stop])
    assert [tokens[i] for i in range(-15, 15)] == [whole[i] for i in range(-15, 15)]
    for i in (15, -16):
        with pytest.raises(IndexError):
            tokens[i]
    with pytest.raises(DataError, match="read in order, the step of the slice is 2"):
        tokens[::2]
    assert tokens.locate(12) == f"{tmp_path}/train-00002.bin, token 6"
    tokens[0:3][:] = 9  # a copy: the file is left alone
    assert tokens[0:3].tolist() == [0, 1, 2]


def test_what_prepare_wrote(prepared: Path) -> None:
    index = json.loads((prepared / "index.json").read_text())
    for split in ("train", "val"):
        tokens = open_split(prepared, split)
        files = [np.fromfile(prepared / shard["file"], dtype="<u2") for shard in index["splits"][split]["shards"]]
        assert np.array_equal(tokens[:], np.concatenate(files))
        assert len(tokens) == index["splits"][split]["tokens"]
        assert tokens.vocabulary == 50257
        tokens.verify()
    assert len(index["splits"]["train"]["shards"]) > 2


def test_nanogpts_files_are_read(tmp_path: Path) -> None:
    ids = np.random.default_rng(1).integers(0, 50257, 1000).astype(np.uint16)
    ids[:900].tofile(tmp_path / "train.bin")  # as its prepare.py does
    ids[900:].tofile(tmp_path / "val.bin")
    assert np.array_equal(open_split(tmp_path)[:], ids[:900])
    assert np.array_equal(open_split(tmp_path, "val")[:], ids[900:])
    assert np.array_equal(open_split(str(tmp_path / "val.bin"))[:], ids[900:])
    assert open_split(tmp_path).vocabulary is None
    assert len(open_split(tmp_path, dtype="uint32")) == 450


def test_more_shards_than_are_held_open(tmp_path: Path) -> None:
    tokens = many(tmp_path, [3] * (OPEN_FILES + 30))

    def opened() -> int:
        return sum(str(tmp_path) in os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd"))

    for _ in range(2):
        assert np.array_equal(tokens[:], np.arange(3 * (OPEN_FILES + 30), dtype=np.uint16))
    assert opened() == OPEN_FILES
    tokens.close()
    assert opened() == 0
    assert tokens[4:6].tolist() == [4, 5], "it opens them again"
    del tokens
    assert opened() == 0


def test_other_processes_read_it_too(tmp_path: Path) -> None:
    tokens = many(tmp_path, [5, 10])
    assert tokens[3:8].tolist() == [3, 4, 5, 6, 7]
    assert pickle.loads(pickle.dumps(tokens))[3:8].tolist() == [3, 4, 5, 6, 7]
    with multiprocessing.get_context("fork").Pool(2) as pool:  # as a DataLoader's workers: open files are shared
        starts = list(range(12)) * 20
        assert pool.map(Reader(tokens), starts) == [[i, i + 1, i + 2] for i in starts]


class Reader:
    def __init__(self, tokens: Shards) -> None:
        self.tokens = tokens

    def __call__(self, start: int) -> list[int]:
        return list(map(int, self.tokens[start : start + 3]))


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_offsets_beyond_4_gb(dtype: str, tmp_path: Path) -> None:
    """A file of 9 GB that is all hole but for a few tokens on both sides of 2, 4 and 8 GiB."""
    size, path = np.dtype(dtype).itemsize, tmp_path / "train.bin"
    total = 9 * 2**30 // size
    marks = {2**31 // size - 1: 11, 2**32 // size - 1: 12, 2**32 // size: 13, 2**33 // size + 5: 14, total - 1: 15}
    with path.open("wb") as file:
        file.truncate(9 * 2**30)
        for place, token in marks.items():
            file.seek(place * size)
            file.write(np.array([token], dtype=dtype).tobytes())
    tokens = open_split(tmp_path, dtype=dtype)
    assert len(tokens) == total
    for place, token in marks.items():
        assert tokens[place] == token
        assert tokens[place - 3 : place + 3].tolist().count(token) == 1
    assert tokens[2**32 // size - 2 : 2**32 // size + 2].tolist() == [0, 12, 13, 0]

    # And by the loader: the blocks that hold them, wherever the order of the epoch has put them.
    blocks = Blocks(tokens, length=4096, seed=1)
    order = blocks._shuffled(0)
    for place, token in marks.items():
        i = int(np.flatnonzero(order == place // 4096)[0])
        assert blocks.batch(i, 1)[0, place % 4096] == token


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_does_not_grow_with_what_was_read(tmp_path: Path) -> None:
    count = 48 * 2**20
    path = tmp_path / "train.bin"
    path.write_bytes(b"\1\0" * (count // 2) * 2)
    del path
    blocks = Blocks(open_split(tmp_path), length=1024, seed=1)
    assert len(blocks.tokens) == count
    blocks.batch(0, 8)
    before = resident()
    for step in range(blocks.count // 64):
        blocks.batch(step, 64)
    assert resident() - before < 8 * 2**20, "96 MiB were read"

    mapped = np.memmap(tmp_path / "train.bin", dtype=np.uint16)  # that the measure would have seen it
    before = resident()
    assert int(mapped.max()) == 1
    assert resident() - before > 64 * 2**20


# ---- which rank reads what, on files


def test_any_world_size_reads_the_same_sequences_and_goes_on_at_any_step(prepared: Path) -> None:
    tokens = open_split(prepared)
    blocks = Blocks(tokens, 1024, seed=3, vocabulary=PADDED_VOCABULARY)
    in_memory = Blocks(tokens[:], 1024, seed=3)
    steps = [0, 1, blocks.count // 12 - 1, blocks.count // 12, 500]  # also across two epochs
    for step in steps:
        whole = blocks.batch(step, 12)
        assert np.array_equal(whole, in_memory.batch(step, 12))
        for world_size in (1, 2, 3, 6):
            fresh = [Blocks(open_split(prepared), 1024, seed=3) for _ in range(world_size)]
            parts = [fresh[rank].batch(step, 12, rank, world_size) for rank in range(world_size)]
            assert np.array_equal(np.concatenate(parts), whole)


def test_an_overlap_adds_tokens_of_the_next_block_and_changes_no_order(tmp_path: Path) -> None:
    tokens = many(tmp_path, [7, 50, 44])  # 101 tokens: ten blocks of ten, and the one token that the last one needs
    plain, overlapping = Blocks(tokens, 10, seed=1), Blocks(tokens, 10, seed=1, overlap=1)
    batch = overlapping.batch(0, 10)
    assert batch.shape == (10, 11)
    assert np.array_equal(batch[:, :10], plain.batch(0, 10))
    assert sorted(batch[:, 1:].ravel().tolist()) == list(range(1, 101)), "all are predicted, once"
    assert Blocks(many(tmp_path, [100]), 10, seed=1, overlap=1).count == 9
    with pytest.raises(DataError, match="has 10 tokens, fewer than one sequence of 11"):
        Blocks(many(tmp_path, [10]), 10, seed=1, overlap=1)


def test_the_order_is_numpys_permutation() -> None:
    """So that runs of earlier versions go on with the sequences that they have not seen."""
    blocks = Blocks(np.arange(10_007, dtype=np.uint16), 1, seed=5)
    for epoch in (0, 3):
        expected = np.random.default_rng((5, epoch)).permutation(10_007).tolist()
        assert [blocks.index(epoch * 10_007 + i) for i in range(10_007)] == expected
    assert blocks._order.nbytes == 4 * 10_007


# ---- what is refused


def test_nothing_there_or_not_finished(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train.bin: no such file, and no index.json: prepare the data first"):
        open_split(tmp_path)
    with pytest.raises(DataError, match=r"none: no such file"):
        open_split(tmp_path / "none")
    (tmp_path / "progress.json").write_text("{}")
    with pytest.raises(DataError, match="is not finished; run mars-dist prepare with the same arguments again"):
        open_split(tmp_path)


def test_files_without_an_index_that_cannot_be_right(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(b"123")
    with pytest.raises(DataError, match="train.bin has 3 bytes, not a whole number of uint16 tokens"):
        open_split(tmp_path)
    (tmp_path / "train.bin").write_bytes(b"")
    with pytest.raises(DataError, match="train.bin is empty; prepare again into another --out, with more text"):
        open_split(tmp_path)
    remedy = "; prepare again into another --out with a larger --val-fraction (0.5 for a handful of documents; "
    remedy += "--separator splits a txt file into documents), or train with --set validation.every=0"
    remedy = re.escape(remedy)
    with pytest.raises(DataError, match=f"val.bin: no such file{remedy}"):
        open_split(tmp_path, "val")
    (tmp_path / "val.bin").write_bytes(b"")
    with pytest.raises(DataError, match=f"val.bin is empty{remedy}"):
        open_split(tmp_path, "val")
    with pytest.raises(DataError, match="dtype 'int8' is not one of uint16, uint32"):
        open_split(tmp_path, dtype="int8")


def test_fewer_tokens_than_one_block(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has 15 tokens, fewer than one sequence of 16"):
        Blocks(many(tmp_path, [5, 10]), 16, seed=1)
    with pytest.raises(DataError, match=r"train-00000.bin has 5 tokens, fewer than one sequence of 16: give more text"):
        Blocks(open_split(tmp_path / "train-00000.bin"), 16, seed=1)
    (tmp_path / "a.txt").write_text("a")
    prepare(open_source(tmp_path / "a.txt"), tmp_path / "out", workers=1, val_fraction=0.0)
    with pytest.raises(DataError, match=r"/out, 'train', has 2 tokens, fewer than one sequence of 16"):
        Blocks(open_split(tmp_path / "out"), 16, seed=1)


def test_a_token_outside_the_vocabulary_is_named_when_it_is_read(tmp_path: Path) -> None:
    tokens = many(tmp_path, [300, 300])
    assert Blocks(tokens, 10, seed=1, vocabulary=600).batch(0, 60).max() == 599
    with pytest.raises(DataError, match=r"train-00001.bin, token 299 is 599, outside the vocabulary of 599: the data"):
        Blocks(tokens, 10, seed=1, vocabulary=599).batch(0, 60)
    with pytest.raises(DataError, match=r"token 7 of the text is 7, outside the vocabulary of 7"):
        Blocks(np.arange(8, dtype=np.uint16), 8, seed=1, vocabulary=7).batch(0, 1)
    (tmp_path / "val.bin").write_bytes(np.array([50_000, 65_535], dtype="<u2").tobytes())
    with pytest.raises(DataError, match="is 65535, outside the vocabulary of 50304"):
        Blocks(open_split(tmp_path, "val"), 2, seed=1, vocabulary=50304).batch(0, 1)


@pytest.mark.parametrize("count", [2, 1000, 40_000, 200_001])
@pytest.mark.parametrize("vocabulary", [50_257, 128_256, 262_144])
def test_uint32_tokens_without_an_index_are_not_read_as_uint16(count: int, vocabulary: int, tmp_path: Path) -> None:
    ids = np.random.default_rng(1).integers(10, vocabulary, count)
    ids.astype("<u4").tofile(tmp_path / "train.bin")
    message = "train.bin looks like uint32 tokens; prepare the data with `mars-dist prepare`"
    for path in (tmp_path, tmp_path / "train.bin"):
        with pytest.raises(DataError, match=message):
            open_split(path)
    assert np.array_equal(open_split(tmp_path, dtype="uint32")[:], ids)
    assert len(open_split(tmp_path, dtype="uint16")) == 2 * count, "whoever says so knows"


@pytest.mark.parametrize("vocabulary", [2, 4, 65, 50_257])
def test_uint16_tokens_of_any_vocabulary_are_read(vocabulary: int, tmp_path: Path) -> None:
    ids = np.random.default_rng(1).integers(0, vocabulary, 1000).astype("<u2")
    ids.tofile(tmp_path / "train.bin")
    assert np.array_equal(open_split(tmp_path)[:], ids)


def test_shards_that_are_not_what_the_index_says(copy: Path) -> None:
    with (copy / "train-00001.bin").open("ab") as file:
        file.write(b"12")
    with pytest.raises(DataError, match=r"train-00001.bin has .* bytes, by the index .*; prepare the data again"):
        open_split(copy)
    assert len(open_split(copy, "val"))
    (copy / "train-00001.bin").unlink()
    with pytest.raises(DataError, match="train-00001.bin is missing"):
        open_split(copy)
    with pytest.raises(DataError, match="has no split 'test'; there are train, val"):
        open_split(copy, "test")
    with pytest.raises(DataError, match="index.json says uint16, asked for is uint32"):
        open_split(copy, "val", dtype="uint32")


def test_a_changed_byte_is_found_by_verify(copy: Path) -> None:
    path = copy / "train-00001.bin"
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="train-00001.bin is not what was prepared"):
        open_split(copy).verify()


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    tokens = many(tmp_path, [5, 10])
    assert tokens[5:15].sum() == 95
    os.truncate(tmp_path / "train-00001.bin", 4)
    assert tokens[5:7].tolist() == [5, 6]
    with pytest.raises(DataError, match="train-00001.bin has become shorter since it was opened"):
        tokens[5:15]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "index.json has format 2, known is 1: prepared by another version"),
        ({"dtype": "float32"}, "index.json: dtype 'float32' is not one of uint16, uint32"),
        ({"vocabulary": "many"}, "index.json cannot be used .*; prepare the data again"),
        ({"splits": {"train": {"tokens": 5}}}, "index.json cannot be used .KeyError: 'shards'"),
        ({"splits": None}, "index.json cannot be used"),
        (None, "index.json cannot be used .JSONDecodeError"),
    ],
)
def test_an_index_that_is_none(change: dict[str, Any] | None, message: str, copy: Path) -> None:
    index = json.loads((copy / "index.json").read_text())
    (copy / "index.json").write_text("{" if change is None else json.dumps(index | change))
    with pytest.raises(DataError, match=message) as raised:
        open_split(copy)
    assert "\n" not in str(raised.value)


def test_a_split_without_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    prepare(open_source(tmp_path / "a.txt"), tmp_path / "out", workers=1, val_fraction=0.0)
    assert len(open_split(tmp_path / "out")) == 2
    with pytest.raises(
        DataError, match="no document went to 'val'; prepare again into another --out with a larger --val-fraction"
    ):
        open_split(tmp_path / "out", "val")


def test_the_fingerprint_changes_with_the_tokens_alone(prepared: Path, copy: Path, tmp_path: Path) -> None:
    assert open_split(prepared).fingerprint() == open_split(copy).fingerprint()
    assert open_split(prepared).fingerprint() != open_split(prepared, "val").fingerprint()
    index = json.loads((copy / "index.json").read_text())
    index["source"]["path"] = "elsewhere"
    (copy / "index.json").write_text(json.dumps(index))
    assert open_split(prepared).fingerprint() == open_split(copy).fingerprint()
    prepare(open_source("shipped"), tmp_path / "other", workers=1, val_fraction=0.2, shard_tokens=200_000)
    assert open_split(prepared).fingerprint() != open_split(tmp_path / "other").fingerprint()
    for content in (b"1234", b"1235"):
        (tmp_path / "train.bin").write_bytes(content)
        assert len({open_split(tmp_path).fingerprint() for _ in range(2)}) == 1
        (tmp_path / f"{content.decode()}.txt").write_text(open_split(tmp_path).fingerprint())
    assert (tmp_path / "1234.txt").read_text() != (tmp_path / "1235.txt").read_text()
