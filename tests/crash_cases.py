"""A run without the libraries of the application: the same code saves, and starting it again takes milliseconds.

``process(arguments)`` starts one in a process of its own, which can be killed as the system would kill it.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import resource
import sys
import time
import types
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mars_dist import MARS
from mars_dist.checkpoint.named import chunks_of, load_chunks, settings_of
from mars_dist.checkpoint.tensors import Chunk, Reader
from mars_dist.pretrain import checkpoint

STEPS, EVERY, WIDTH = 12, 2, 256
FACTS = {"model.width": WIDTH}


class Tiny:
    """What ``Checkpoints`` asks of an engine: a net whose save takes some hundredths of a second."""

    def __init__(self, exact: bool) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(16, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4))
        self.optimizer = MARS(self.model.parameters(), lr=1e-2, lr_1d=1e-2, is_approx=not exact)

    def batch(self, step: int) -> torch.Tensor:
        return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))

    def backward(self, x: torch.Tensor) -> torch.Tensor:
        noise = 0.1 * torch.randn(x.shape)  # of the process's own random numbers, which go on where they were
        loss = nn.functional.cross_entropy(self.model(x + noise), (x.sum(1) > 0).long())
        loss.backward()
        return loss.detach()

    def chunks(self) -> list[Chunk]:
        return list(chunks_of(self.optimizer, self.model))

    def settings_to_save(self) -> dict[str, Any]:
        return settings_of(self.optimizer, self.model)

    def save_by_itself(self, folder: Path) -> None: ...

    def load(self, folder: Path, reader: Reader, settings: dict[str, Any]) -> None:
        load_chunks(self.optimizer, self.model, reader, settings)


def train(out: Path, asynchronous: bool = False, exact: bool = False, steps: int = STEPS) -> None:
    """Go on from the newest checkpoint that is whole; a line for each step in losses.jsonl."""
    how = types.SimpleNamespace(keep_last=2, keep_every=None, asynchronous=asynchronous)
    folder = out / "checkpoints"
    out.mkdir(exist_ok=True)
    checkpoint.tidy(folder, everything=False)
    saved = checkpoint.newest_valid(folder)
    engine, step = Tiny(exact), 0
    if saved is not None:
        checkpoint.restore(saved, engine)  # type: ignore[arg-type]
        step = checkpoint.step_of(saved)
    with (
        checkpoint.Checkpoints(folder, how, FACTS) as keeper,  # type: ignore[arg-type]
        (out / "losses.jsonl").open("a") as lines,
    ):
        while step < steps:
            if exact:
                engine.backward(engine.batch(step + 1))
                with engine.optimizer.looking_ahead():
                    engine.optimizer.step()
                engine.optimizer.zero_grad()
            loss = engine.backward(engine.batch(step))
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            step += 1
            print(json.dumps([step, loss.item()]), file=lines, flush=True)
            if keeper.is_written:
                keeper.finish()
            if step % EVERY == 0:
                keeper.save(step, engine)  # type: ignore[arg-type]
        keeper.finish()


def losses(out: Path) -> dict[int, float]:
    """The last that was said of each step; half of a line is what a process that was killed may leave."""
    lines = (out / "losses.jsonl").read_text().split("\n")[:-1]
    return {step: loss for step, loss in map(json.loads, (line for line in lines if line.startswith("[")))}


# --------------------------------------------------------------------------------------- in a process of its own


def process(function: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Started, from a server that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.crash_cases"])
    started = context.Process(target=function, args=arguments, daemon=True)
    started.start()
    return started


def temporary_folders(out: Path) -> Iterator[Path]:
    try:
        yield from (out / "checkpoints").glob(".step-*.tmp")
    except FileNotFoundError:
        return


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.0002)


def train_limited(out: Path, bytes_of_a_file: int, note: Path) -> None:
    """As on a disk that is full after so many bytes of a file."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_of_a_file, resource.RLIM_INFINITY))
    train_and_note(out, note)


def train_where_permissions_count(out: Path, note: Path) -> None:
    """They do not stop root, until it has given up the two capabilities of Linux that say so."""
    if os.getuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        version_3_of_this_process = (ctypes.c_uint32 * 2)(0x20080522, 0)
        sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; the next 32 bits of each
        assert libc.capget(version_3_of_this_process, sets) == 0
        for i in (0, 1):
            sets[i] &= ~(1 << 1 | 1 << 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        assert libc.capset(version_3_of_this_process, sets) == 0
    train_and_note(out, note)


def train_and_note(out: Path, note: Path) -> None:
    """What it raised goes to the pipe ``note``, which is open."""
    try:
        train(out)
    except Exception as error:
        with note.open("a") as file:
            print(f"{type(error).__name__}: {error}", file=file)
        sys.exit(1)
