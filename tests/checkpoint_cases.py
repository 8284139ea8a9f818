"""What ranks do together when they save; run by a pool (ranks.py) for test_checkpoint_folder.py."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from mars_dist.checkpoint import CheckpointError, Chunk, Reader, Saver, latest, manifest, my_share, part, save, tensors


def chunks(value: float) -> list[Chunk]:
    """What every rank holds."""
    shapes = {"a": (7, 5), "b": (3,), "step": ()}
    return [Chunk(name, shape, 0, torch.full(shape, value)) for name, shape in shapes.items()]


def mine(value: float) -> list[Chunk]:
    return list(my_share(chunks(value), dist.get_rank(), dist.get_world_size()))


def error_of(function: object, *args: object, **kwargs: object) -> str:
    try:
        function(*args, **kwargs)  # type: ignore[operator]
    except CheckpointError as error:
        return str(error)
    return "no error"


def saved(root: str) -> tuple[str, dict[str, object]]:
    """Each rank its share, and files that nobody has a record of: one of each rank, two of rank 0."""
    rank, folder = dist.get_rank(), Path(root)
    read: list[str] = []
    record = manifest.record

    def write(temporary: Path) -> dict[str, manifest.Record]:
        (temporary / "rng").mkdir(exist_ok=True)
        (temporary / f"rng/{rank}.json").write_text(f"{rank}")
        if rank == 0:
            (temporary / "large").write_bytes(b"x" * 1000)
            (temporary / "small").write_bytes(b"x")
        return dict(part(mine(1.0))(temporary) or {})

    def counted(path: Path) -> manifest.Record:
        read.append(path.name)
        return record(path)

    with mock.patch.object(manifest, "record", counted):
        path = save(folder, 1, {"variant": "mars-adamw"}, write, keep_last=2, size=100)
    content = manifest.read(path)
    assert manifest.faults(path) == [] and latest(folder) == path
    assert all(torch.equal(Reader(path).whole(chunk.name), chunk.value) for chunk in chunks(1.0))
    return str(path), {"read": sorted(read), "files": sorted(content["files"]), "world_size": content["world_size"]}


def failed(root: str) -> dict[str, str]:
    """The text of each failure on this rank."""
    rank, folder = dist.get_rank(), Path(root)
    before = latest(folder)
    texts = {}

    def full(who: int) -> object:
        def write(temporary: Path) -> None:
            (temporary / f"half-{rank}").write_text("half")
            if rank == who:
                raise OSError(28, "No space left on device", str(temporary / f"half-{rank}"))

        return write

    for who in (0, 1):
        texts[f"rank {who} has a full disk"] = error_of(save, folder, 2, {}, full(who), 2)
    with mock.patch("shutil.disk_usage", lambda path: mock.Mock(free=1500)):
        texts["too large together"] = error_of(save, folder, 2, {}, part(mine(2.0)), 2, size=1000)
    texts["not one folder"] = error_of(save, folder if rank == 0 else folder / "mine", 2, {}, part([]), 2)
    fsync = os.fsync

    def fails(descriptor: int) -> None:
        if rank == 1:
            raise OSError(5, "Input/output error")
        fsync(descriptor)

    with mock.patch.object(os, "fsync", fails):
        texts["fsync"] = error_of(save, folder, 2, {}, part(mine(2.0)), 2)
    both = {"x": manifest.Record(4, "")}
    texts["one file twice"] = error_of(save, folder, 2, {}, lambda f: (f / "x").write_text("four") and both, 2)
    texts["something else"] = error_of(save, folder, 2, {}, lambda f: [][rank], 2)
    dist.barrier()
    assert latest(folder) == before and manifest.faults(before) == []
    assert sorted(path.name for path in folder.iterdir()) == ["latest", before.name]
    return texts


def asynchronous(root: str) -> list[str]:
    """One save that works, one that fails on rank 1 only, and one after it."""
    rank, folder = dist.get_rank(), Path(root)
    write = tensors.write
    said = []

    def fails(path: Path, *args: object) -> manifest.Record:
        if rank == 1:
            raise OSError(28, "No space left on device")
        return write(path, *args)  # type: ignore[arg-type]

    with Saver(folder, keep_last=5) as saver:
        saver.save(1, {}, mine(1.0))
        with mock.patch.object(tensors, "write", fails):
            saver.save(2, {}, mine(2.0))
            said.append(error_of(saver.save, 3, {}, mine(3.0)))
        said.append(latest(folder).name)  # type: ignore[union-attr]
        saver.save(4, {}, mine(4.0))
    last = latest(folder)
    assert last is not None and torch.equal(Reader(last).whole("a"), torch.full((7, 5), 4.0))
    return [*said, last.name, (folder / "latest").read_text()]
