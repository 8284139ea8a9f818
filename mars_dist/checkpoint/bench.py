"""``python -m mars_dist.checkpoint.bench``: what saving costs, as ratios within one run.

The candidates take turns, so that a disk that slows down slows all of them; medians of the rounds are shown:

- raw: write and fsync of the same bytes, nothing else;
- durable: ``save`` with hashes, manifest, fsync, rename and pointer, as a ratio to raw;
- asynchronous: from the call of ``Saver.save`` until the checkpoint is visible, as a ratio to raw, and which part of
  that the caller was blocked (the copy, and the end). Meanwhile the caller sleeps. Its staging memory exists already,
  as from the second save of a run on; the first one is shown apart.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from mars_dist.checkpoint import tensors
from mars_dist.checkpoint.asynchronous import Saver
from mars_dist.checkpoint.folder import part, save
from mars_dist.checkpoint.tensors import Chunk

MB = 1 << 20
PIECE = 32 * MB // 4  # elements of one tensor


def state(megabytes: int) -> list[Chunk]:
    """Tensors of 32 MB (the last one may be smaller) of random values."""
    chunks: list[Chunk] = []
    left = megabytes * MB // 4
    while left:
        value = torch.randn(min(PIECE, left))
        chunks.append(Chunk(f"tensor{len(chunks)}", tuple(value.shape), 0, value))
        left -= len(value)
    return chunks


def raw(path: Path, chunks: list[Chunk]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    for chunk in chunks:
        data = memoryview(np.asarray(chunk.value).data).cast("B")
        while data:
            data = data[os.write(descriptor, data[: tensors.BLOCK]) :]
    os.fsync(descriptor)
    os.close(descriptor)


def measure(folder: Path, chunks: list[Chunk], rounds: int) -> dict[str, list[float]]:
    """Seconds of each round by candidate; the first round of all is warm-up, of which only "first" is kept."""
    seconds: dict[str, list[float]] = {}
    saver = Saver(folder / "asynchronous", keep_last=1)

    def once() -> Iterator[tuple[str, float]]:
        begin = time.perf_counter()
        raw(folder / "raw", chunks)
        yield "raw", time.perf_counter() - begin
        begin = time.perf_counter()
        save(folder / "durable", 1, {}, part(chunks), keep_last=1)
        yield "durable", time.perf_counter() - begin
        begin = time.perf_counter()
        saver.save(1, {}, chunks)
        copied = time.perf_counter()
        while not saver.written:
            time.sleep(0.002)
        written = time.perf_counter()
        saver.wait()
        end = time.perf_counter()
        yield "asynchronous", end - begin
        yield "blocked", (copied - begin) + (end - written)

    for turn in range(rounds + 1):
        for name, value in once():
            if turn:
                seconds.setdefault(name, []).append(value)
            elif name == "blocked":
                seconds["blocked, first"] = [value]
        (folder / "raw").unlink()
        for name in ("durable", "asynchronous"):  # removing an old one is not saving
            shutil.rmtree(folder / name)
        os.sync()
    return seconds


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m mars_dist.checkpoint.bench", description=__doc__.split("\n")[0])
    parser.add_argument("--mb", type=int, default=512, help="size of the checkpoint (default: 512)")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds after one that warms up (default: 5)")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured (default: the temporary folder)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="mars-dist-bench-", dir=args.folder) as folder:
        seconds = measure(Path(folder), state(args.mb), args.rounds)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = {name: medians[name] / medians["raw"] for name in ("raw", "durable", "asynchronous")}
    blocked = medians["blocked"] / medians["asynchronous"]
    if args.json:
        result = {"mb": args.mb, "rounds": args.rounds, "seconds": medians, "of_raw": ratios, "blocked_share": blocked}
        print(json.dumps(result))
        return
    print(f"{args.mb} MB, medians of {args.rounds} rounds (least and most)")
    print(f"{'':28} {'seconds':>8} {'':>15} {'of raw':>7}")
    for name, ratio in ratios.items():
        least, most = min(seconds[name]), max(seconds[name])
        print(f"{name:28} {medians[name]:8.3f} {f'{least:.3f} - {most:.3f}':>15} {ratio:7.2f}")
    print(f"{'blocked by asynchronous':28} {medians['blocked']:8.3f}  {blocked:.2f} of its total")
    print(f"{'blocked by the first one':28} {medians['blocked, first']:8.3f}  its memory is allocated as well")


if __name__ == "__main__":
    main()
