"""Tensors in pieces: saved by any cut, read by any other, bit for bit; files that are not what they were, refused."""

from __future__ import annotations

import json
import math
import os
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cuts import DTYPES, cuts, models, random_tensor, same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mars_dist.bench import gpt2_shapes
from mars_dist.checkpoint import Chunk, Reader, manifest, my_share
from mars_dist.checkpoint.tensors import TABLE, file_name, write

FIXTURE = [HealthCheck.function_scoped_fixture]  # the one below is the same for every example


@pytest.fixture(autouse=True)
def _not_to_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What survives a power cut is not tested here, and waiting for the disk is most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def whole(name: str, value: torch.Tensor) -> Chunk:
    return Chunk(name, tuple(value.shape), 0, value)


def write_all(folder: Path, ranks: list[list[Chunk]]) -> Reader:
    for rank, chunks in enumerate(ranks):
        path = folder / file_name(rank, len(ranks))
        assert write(path, chunks) == manifest.record(path), "the record is that of the file"
    return Reader(folder)


@settings(max_examples=60, deadline=None, suppress_health_check=FIXTURE)
@given(st.data())
def test_any_cut_is_read_by_any_other_bit_for_bit(data: st.DataObject) -> None:
    model = data.draw(models())
    saved = data.draw(cuts(model, data.draw(st.integers(1, 5))))
    loaded = data.draw(cuts(model, data.draw(st.integers(1, 5))))
    with tempfile.TemporaryDirectory() as folder:
        reader = write_all(Path(folder), saved)
        assert reader.names() == sorted(model)
        for name, value in model.items():
            assert (reader.shape(name), reader.dtype(name)) == (tuple(value.shape), value.dtype)
            assert same_bits(reader.whole(name), value)
        for chunk in (chunk for chunks in loaded for chunk in chunks):
            if chunk.region is None:
                read = reader.read(chunk.name, chunk.start, chunk.start + chunk.numel)
            else:
                read = reader.block(chunk.name, chunk.region)
            assert same_bits(read, chunk.value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_read_by_the_library_as_well(tmp_path: Path, dtype: torch.dtype) -> None:
    value = random_tensor((3, 5), dtype, 1)
    write(
        tmp_path / "a.safetensors", [whole("odd", random_tensor((3,), torch.uint8, 2)), whole("w", value)], {"a": "b"}
    )
    found = load_file(tmp_path / "a.safetensors")
    assert same_bits(found["w@0:15"], value) and len(found) == 2
    content = (tmp_path / "a.safetensors").read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    begin = end + json.loads(content[8:end])["w@0:15"]["data_offsets"][0]
    assert begin % value.element_size() == 0, "for those that map the file into memory"
    assert Reader(tmp_path).metadata == {"a.safetensors": {"a": "b"}}


def test_a_file_is_on_disk_when_write_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    record = write(tmp_path / "a.safetensors", [whole("w", torch.ones(5_000_000))])
    assert sizes == [record.size] and record.size > 20_000_000


def test_a_failure_in_the_middle_is_raised_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count, system_write = [], os.write

    def fails(descriptor: int, data: memoryview) -> int:
        count.append(len(data))
        if len(count) == 3:
            raise OSError(28, "No space left on device")
        return system_write(descriptor, data[: len(data) // 2 + 1])  # the system may take less than it is given

    monkeypatch.setattr(os, "write", fails)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "a.safetensors", [whole("w", torch.ones(5_000_000))])
    count[:] = [0] * 10
    record = write(tmp_path / "b.safetensors", [whole("w", torch.ones(1000))])
    monkeypatch.undo()
    assert record == manifest.record(tmp_path / "b.safetensors")
    with pytest.raises(FileExistsError):
        write(tmp_path / "b.safetensors", [])


def test_what_is_not_contiguous_or_requires_a_gradient(tmp_path: Path) -> None:
    value = torch.randn(6, 4)
    write(tmp_path / "a.safetensors", [whole("t", value.t()), whole("p", torch.nn.Parameter(value[::2]))])
    reader = Reader(tmp_path)
    assert torch.equal(reader.whole("t"), value.t()) and torch.equal(reader.whole("p"), value[::2])


def test_names_of_any_characters(tmp_path: Path) -> None:
    names = ["", "@", "a@0:1", "a@0", "__metadata__", TABLE, "\0", 'q"\\', "größe 重み", "../../x", "x" * 5000]
    write(tmp_path / "a.safetensors", [whole(name, torch.tensor(float(n))) for n, name in enumerate(names)])
    reader = Reader(tmp_path)
    assert [reader.whole(name).item() for name in names] == list(range(len(names)))


def test_an_empty_file_of_a_rank_that_holds_nothing(tmp_path: Path) -> None:
    assert write_all(tmp_path, [[], [whole("w", torch.ones(2))]]).names() == ["w"]


def test_what_is_read_is_not_the_file(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", [whole("w", torch.ones(4))])
    Reader(tmp_path).read("w").zero_()
    assert torch.equal(Reader(tmp_path).read("w"), torch.ones(4))


def test_several_ranks_may_hold_the_same_elements(tmp_path: Path) -> None:
    value = torch.arange(10.0)
    parts = [Chunk("w", (10,), begin, value[begin:end]) for begin, end in ((0, 6), (2, 5), (3, 10), (0, 10))]
    reader = write_all(tmp_path, [[part] for part in parts])
    assert torch.equal(reader.read("w", 1, 9), value[1:9])


# ---- what does not fit together


W = torch.arange(12.0)
HALVES = [[Chunk("w", (12,), 0, W[:6])], [Chunk("w", (12,), 6, W[6:])]]


def test_elements_that_nobody_holds_are_named(tmp_path: Path) -> None:
    reader = write_all(tmp_path, [[Chunk("w", (12,), 0, W[:4])], [Chunk("w", (12,), 7, W[7:9])]])
    assert torch.equal(reader.read("w", 7, 9), W[7:9])
    for wanted, hole in (((0, 12), "[4, 7)"), ((5, 6), "[5, 6)"), ((8, 12), "[9, 12)"), ((10, 11), "[10, 11)")):
        with pytest.raises(ValueError, match="no file holds elements") as error:
            reader.read("w", *wanted)
        assert f"elements {hole} of 'w'" in str(error.value) and "mars-00000-of-00002" in str(error.value)


def test_blocks_that_leave_a_hole_are_named(tmp_path: Path) -> None:
    value = torch.randn(4, 4)
    left = Chunk("w", (4, 4), 0, value[:, :2], ((0, 4), (0, 2)))
    again = Chunk("w", (4, 4), 0, value[:, 1:3], ((0, 4), (1, 3)))
    with pytest.raises(ValueError, match="16 elements, and all files together hold 8"):
        write_all(tmp_path, [[left]]).whole("w")
    (tmp_path / file_name(0, 1)).unlink()
    with pytest.raises(ValueError, match=r"no file holds elements \[3, 4\) of 'w'"):
        write_all(tmp_path, [[left], [again]]).read("w", 0, 1)


def test_the_missing_file_of_a_rank_is_named(tmp_path: Path) -> None:
    write_all(tmp_path, [*HALVES, [whole("only here", W)]])
    (tmp_path / file_name(2, 3)).unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks {file_name(2, 3)}"):
        Reader(tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no .safetensors file"):
        Reader(tmp_path / "nothing")


@pytest.mark.parametrize(
    "other", [Chunk("w", (13,), 6, W[6:]), Chunk("w", (12,), 6, W[6:].double()), Chunk("w", (3, 4), 6, W[6:])]
)
def test_files_of_two_checkpoints_are_told(tmp_path: Path, other: Chunk) -> None:
    with pytest.raises(ValueError, match="not of one checkpoint") as error:
        write_all(tmp_path, [HALVES[0], [other]])
    assert "'w'" in str(error.value) and all(file_name(rank, 2) in str(error.value) for rank in (0, 1))


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([Chunk("w", (12,), 7, W[6:])], r"elements \[7, 13\) are not within the shape \(12,\)"),
        ([Chunk("w", (12,), -1, W[6:])], "are not within the shape"),
        ([Chunk("w", (3, 4), 0, W[:4], ((0, 2), (0, 2), (0, 1)))], "is not within the shape"),
        ([Chunk("w", (3, 4), 0, W[:4], ((2, 4), (0, 2)))], "is not within the shape"),
        ([Chunk("w", (3, 4), 0, W[:5], ((0, 2), (0, 2)))], "5 elements do not fill the region"),
        ([whole("w", W), whole("w", W)], "there are two of it"),
        ([HALVES[0][0], Chunk("w", (13,), 6, W[6:])], "another chunk of it has shape"),
        ([whole("w", W.to(torch.complex64))], "its dtype torch.complex64"),
    ],
)
def test_chunks_that_cannot_be_are_refused_before_a_file_is_made(
    tmp_path: Path, chunks: list[Chunk], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        write(tmp_path / "a.safetensors", chunks)
    assert "'w'" in str(error.value) and not list(tmp_path.iterdir())


def test_questions_without_an_answer(tmp_path: Path) -> None:
    reader = write_all(tmp_path, HALVES)
    with pytest.raises(ValueError, match="holds no tensor 'v'"):
        reader.read("v")
    for start, stop in ((-1, 2), (3, 2), (0, 13)):
        with pytest.raises(ValueError, match="'w' has 12 elements"):
            reader.read("w", start, stop)
    with pytest.raises(ValueError, match="'w': the region .* is not within the shape"):
        reader.block("w", ((0, 13),))


# ---- files that are not what they were


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write(path, [whole("w", W), whole("s", torch.tensor(1.0))])
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="a.safetensors is damaged"):
            Reader(tmp_path)


@settings(max_examples=150, deadline=None, suppress_health_check=FIXTURE)
@given(st.data())
def test_a_changed_byte_of_the_header_never_reads_other_elements(data: st.DataObject) -> None:
    """It is refused, or what is read is a tensor of the size that was asked for: no crash, nothing huge."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.safetensors"
        write(path, [Chunk("w", (12,), 0, W[:6]), Chunk("b", (2, 2), 0, W[:2], ((0, 2), (1, 2)))])
        content = bytearray(path.read_bytes())
        header = 8 + struct.unpack("<Q", content[:8])[0]
        content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(content)
        try:
            reader = Reader(Path(folder))
        except ValueError as error:
            assert folder in str(error)
            return
        for name in reader.names():
            try:
                assert reader.read(name).numel() <= 8, "no more than the file holds"
            except ValueError as error:
                assert folder in str(error)


def test_a_header_that_claims_to_be_huge(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for claimed in (2**63, 2**40, 99_999_999):
        path.write_bytes(struct.pack("<Q", claimed) + b"{}")
        with pytest.raises(ValueError, match="a.safetensors is damaged"):
            Reader(tmp_path)


def forge(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrite the table of chunks of a file; the tensors stay."""
    content = path.read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:end])
    table = json.loads(header["__metadata__"][TABLE])
    table = change(table) or table
    header["__metadata__"][TABLE] = table if isinstance(table, str) else json.dumps(table)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[end:])


def entry(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda table: table["chunks"]["w@0:6"].update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (entry(shape=[10**30]), None),  # only where it is read: nothing of that size is asked for
        (entry(shape=[5]), "not within the shape"),
        (entry(start=7), "not within the shape"),
        (entry(start=-1), "is no chunk"),
        (entry(start=1.0), "is no chunk"),
        (entry(start=True), "is no chunk"),
        (entry(name=3), "is no chunk"),
        (entry(shape="12"), "is no chunk"),
        (entry(shape=None), "TypeError"),
        (entry(region=[[0, 7]]), "do not fill the region"),
        (entry(region=[[0]]), "ValueError"),
        (entry(region=3), "TypeError"),
        (lambda table: table["chunks"].pop("w@0:6") and None, "only in one of"),
        (lambda table: table["chunks"].update(x=table["chunks"]["w@0:6"]), "only in one of"),
        (lambda table: table["chunks"]["w@0:6"].pop("shape") and None, "KeyError"),
        (lambda table: {"format": 1, "chunks": [1]}, "table of chunks"),
        (lambda table: {"format": 1}, "table of chunks"),
        (lambda table: [table], "table of chunks"),
        (lambda table: "[" * 100_000, "table of chunks"),
        (lambda table: "no JSON", "table of chunks"),
        (lambda table: {**table, "format": 2}, "format 2, and .* update mars_dist"),
        (lambda table: {"format": 2, "pieces": []}, "format 2, and .* update mars_dist"),
    ],
)
def test_a_forged_table_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str | None
) -> None:
    write(tmp_path / "a.safetensors", [Chunk("w", (12,), 0, W[:6])])
    forge(tmp_path / "a.safetensors", change)
    if message is None:
        with pytest.raises(ValueError, match=r"no file holds elements \[6, 1000"):
            Reader(tmp_path).read("w")
        return
    with pytest.raises(ValueError, match=message) as error:
        Reader(tmp_path)
    assert str(tmp_path / "a.safetensors") in str(error.value)


def test_somebody_elses_file_is_refused(tmp_path: Path) -> None:
    save_file({"w": W}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="model.safetensors was not written by mars_dist"):
        Reader(tmp_path)


# ---- who writes what


@settings(max_examples=50, deadline=None, suppress_health_check=FIXTURE)
@given(st.data())
def test_shares_are_every_element_once_and_of_equal_size(data: st.DataObject) -> None:
    model = data.draw(models())
    (chunks,) = data.draw(cuts(model, 1))
    world_size = data.draw(st.integers(1, 9))
    shares = [list(my_share(chunks, rank, world_size)) for rank in range(world_size)]
    assert sum(chunk.numel for share in shares for chunk in share) == sum(value.numel() for value in model.values())
    with tempfile.TemporaryDirectory() as folder:
        reader = write_all(Path(folder), shares)
        assert all(same_bits(reader.whole(name), value) for name, value in model.items())
    if all(chunk.region is None for chunk in chunks):
        sizes = [sum(chunk.nbytes for chunk in share) for share in shares]
        assert max(sizes) - sum(sizes) / world_size < 8, "less than one element"


@pytest.mark.parametrize("world_size", [2, 3, 8, 32])
def test_no_rank_writes_much_more_than_the_mean(tmp_path: Path, world_size: int) -> None:
    """GPT-2's shapes with the states of MARS; the files of a tiny one are written, the bytes of the others counted."""

    def chunks(size: str, device: str = "meta") -> list[Chunk]:
        states = ("param", "exp_avg", "prev_grad")
        shapes = [(f"{n}/{state}", shape) for n, shape in enumerate(gpt2_shapes(size)) for state in states]
        steps = [whole(f"{n}/step", torch.tensor(1.0)) for n in range(len(shapes) // len(states))]
        return [whole(name, torch.zeros(shape, device=device)) for name, shape in shapes] + steps

    for size in ("small", "large", "xl"):
        bytes_of = [sum(one.nbytes for one in my_share(chunks(size), r, world_size)) for r in range(world_size)]
        assert max(bytes_of) <= 1.0001 * sum(bytes_of) / world_size
        of_fsdp2 = [0] * world_size  # which cuts by rows, and a rank writes what it holds
        for shape in gpt2_shapes(size):
            for rank, rows in enumerate(torch.empty(shape[0], device="meta").chunk(world_size)):
                of_fsdp2[rank] += len(rows) * math.prod(shape[1:])
        assert max(of_fsdp2) <= 1.1 * sum(of_fsdp2) / world_size, (size, max(of_fsdp2) * world_size / sum(of_fsdp2))
    files = [tmp_path / file_name(rank, world_size) for rank in range(world_size)]
    sizes = [write(path, my_share(chunks("tiny", "cpu"), rank, world_size)).size for rank, path in enumerate(files)]
    assert max(sizes) <= 1.1 * sum(sizes) / world_size, "headers included"
