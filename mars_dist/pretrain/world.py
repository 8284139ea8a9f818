"""The processes of a run: joining those of the launcher, what they tell each other, the signals that end them."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist

from mars_dist.integrations.deepspeed.launch import destroy_groups, prepare_deepspeed, use_gpu

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True)
class World:
    """This process among all of the run."""

    rank: int
    size: int
    device: torch.device
    joined_here: bool

    def gather(self, values: list[float]) -> list[list[float]]:
        """The values of every rank, by rank."""
        if not dist.is_initialized():
            return [values]
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyone, mine)
        return torch.stack(everyone).tolist()

    def leave(self, when_all_are_here: Callable[[], None]) -> None:
        """Wait for the others, so that no launcher ends one that is still closing its files, and part from them."""
        if dist.is_initialized():
            dist.barrier()
        when_all_are_here()
        if self.joined_here:
            leave_processes()


def leave_processes() -> None:
    """Part from the other processes so that this one can end: call it last, when no model or optimizer is in use.

    A thread of a gloo group may be the last to hold a tensor of a collective that is over, and then needs Python's
    lock to free it. If it asks while the interpreter ends, it aborts the process ("terminate called without an active
    exception"); if it asks while something that holds the lock, such as a DDP model, frees the group, both wait for
    ever. So what else holds the groups (engines in cycles, DeepSpeed's copy, default arguments) goes first, the groups
    last, from here, where PyTorch waits for their threads without the lock.
    """
    if not dist.is_initialized():
        return
    dist.barrier()
    gc.collect()  # engines are cycles, and hold groups
    groups = list(dist.distributed_c10d._world.pg_map)
    destroy_groups()
    # `def barrier(group=GroupMember.WORLD)`, in a module imported after the world was made, keeps the world.
    for function in [o for o in gc.get_objects() if type(o) is FunctionType and o.__defaults__]:
        values = function.__defaults__ or ()
        if any(value is group for value in values for group in groups):
            function.__defaults__ = tuple(None if any(v is g for g in groups) else v for v in values)
    gc.collect()
    groups.clear()  # the last holder: it is back when the threads have ended
    # Caches of PyTorch and Accelerate keep the groups of some engines (FSDP2's mesh, ZeRO-3): time for their threads to
    # let go of the last tensors.
    time.sleep(0.2)


def join(out: Path, engine_name: str, minutes: float) -> World:
    """Join the processes of whatever launcher started this one; without one, this process is the world.

    Args:
        minutes: after which a rank gives up waiting for the others, here and in every collective.
    """
    if engine_name == "deepspeed":
        os.environ.setdefault("DEEPSPEED_TIMEOUT", str(max(1, round(minutes))))  # read when it is imported
        prepare_deepspeed(out)
        if "WORLD_SIZE" not in os.environ:  # DeepSpeed wants a process group even for one
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                port = str(s.getsockname()[1])
            os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    device = torch.device("cpu")
    if use_gpu():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    joins = "WORLD_SIZE" in os.environ and not dist.is_initialized()
    if joins:
        here = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE"))
        if device.type == "cpu" and here == os.environ["WORLD_SIZE"]:  # gloo need not resolve this machine's name
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        limit = timedelta(minutes=minutes)
        dist.init_process_group("gloo" if device.type == "cpu" else "nccl", timeout=limit, **_store(here, limit))
    if not dist.is_initialized():
        return World(0, 1, device, joined_here=False)
    return World(dist.get_rank(), dist.get_world_size(), device, joined_here=joins)


def _store(here: str | None, limit: timedelta) -> dict[str, Any]:
    """A place of its own for each restart by torchrun on one machine, whose store outlives the processes.

    Where torchrun was given a port rather than --standalone, the new processes would find the addresses of the dead
    ones in it. On several machines the count of restarts may differ: there --rdzv-backend=c10d makes a new store.
    """
    restart, size = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ["WORLD_SIZE"]
    if restart == "0" or here != size or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    held = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=limit)
    store = dist.PrefixStore(f"restart {restart}", held)
    return {"store": store, "rank": int(os.environ["RANK"]), "world_size": int(size)}


def limit_waiting(minutes: float) -> None:
    """Give every process group that exists by now this timeout: engines make theirs with the library's."""
    if dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):
            dist.distributed_c10d._set_pg_timeout(timedelta(minutes=minutes), group)


@contextmanager
def signals_noted() -> Iterator[list[int]]:
    """A list that receives every SIGINT, SIGTERM and SIGUSR1 while the block runs; a second SIGINT ends it at once."""
    noted: list[int] = []

    def note(number: int, frame: Any) -> None:
        noted.append(number)
        if os.environ.get("RANK", "0") == "0":
            print(f"{signal.Signals(number).name}: saving after this step, then leaving", file=sys.stderr, flush=True)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends it even while it waits in a library for another rank

    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
