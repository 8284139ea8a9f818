"""A pool of rank processes on this machine that a whole test module shares: start-up is the cost, not the cases.

Ranks talk over gloo with a file as rendezvous. A case that does not finish in time is a failure that shows the stack
of every rank; an exception on a rank is raised in the test with that rank's traceback.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any


class RankError(AssertionError):
    """A case failed on a rank."""


class RankPool:
    """``world_size`` processes with a process group (gloo; NCCL with a GPU each); ``run`` calls a function on all."""

    def __init__(self, world_size: int, device: str = "cpu") -> None:
        self.world_size = world_size
        self.device = device
        self.pipes: list[Any] = []
        self.processes: list[Any] = []

    def _start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mars-dist-ranks-"))
        context = multiprocessing.get_context("spawn")
        for rank in range(self.world_size):
            here, there = context.Pipe()
            args = (rank, self.world_size, str(self.folder), there, self.device)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """What ``function(*args)`` returns on each rank, by rank. ``function`` is defined at a module's top level."""
        if not self.processes:
            self._start()
        for pipe in self.pipes:
            pipe.send((function, args))
        results: list[Any] = []
        end = time.monotonic() + timeout
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(max(0.0, end - time.monotonic())):
                raise RankError(f"rank {rank} did not finish within {timeout:g} s\n{self._stacks()}")
            try:
                results.append(pipe.recv())
            except EOFError:
                self.processes[rank].join(5.0)
                code = self.processes[rank].exitcode
                self.close()
                raise RankError(f"rank {rank} died (exit code {code})") from None
        failed = [(rank, text) for rank, (ok, text) in enumerate(results) if not ok]
        if failed:
            raise RankError("\n".join(f"rank {rank}:\n{text}" for rank, text in failed))
        return [value for _, value in results]

    def _stacks(self) -> str:
        """Ask every rank for its stack, then end the processes: the next case starts new ones."""
        for process in self.processes:
            if process.is_alive() and process.pid:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1.0)
        files = [self.folder / f"stack{r}" for r in range(self.world_size)]  # not there yet while a rank starts
        stacks = [f"--- rank {r}\n{f.read_text() if f.exists() else 'starting'}" for r, f in enumerate(files)]
        self.close()
        return "\n".join(stacks)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        if self.processes:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.pipes, self.processes = [], []


def _serve(rank: int, world_size: int, folder: str, pipe: Any, device: str) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",  # never used: the rendezvous is a file
        DS_ACCELERATOR=device,
        MARS_DIST_KEEP_COLLECTIVES="1",
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
        HF_HOME=os.path.join(folder, "hf"),
        TORCH_EXTENSIONS_DIR=os.path.join(folder, "extensions"),
        TRITON_CACHE_DIR=os.path.join(folder, "triton"),
    )
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    stack = open(os.path.join(folder, f"stack{rank}"), "w")  # noqa: SIM115 - stays open for the handler
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    warnings.simplefilter("ignore", FutureWarning)  # DeepSpeed calls collectives by their old names
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    dist.init_process_group(backend, f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
