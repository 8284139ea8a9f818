"""The processes of a run: what all must have alike, compared before anything large is built, and who of them has ended.

A library that loses a peer says "Connection closed by peer", or nothing until its timeout. Who is gone is asked of the
operating system, for the ranks on this machine; ranks on other machines answer a roll call.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

SOON = 5.0  # seconds: a process that was killed has ended by then; the others have noticed an error by twice that
GRACE = 20.0  # seconds that a library has to notice by itself that a rank is gone
ABOUT_OTHERS = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed? ?out", re.IGNORECASE)


class Disagreement(ValueError):
    """The ranks were not started alike: the same text on every rank."""


class RankLost(RuntimeError):
    """A rank has ended, or does not answer: the others cannot go on without it."""


# ------------------------------------------------------------------------------------------------------------- alike


@dataclass(frozen=True)
class Peer:
    """One rank's process. ``system``: the running system and the process numbers that hold there; "" if unknown."""

    rank: int
    host: str
    system: str
    pid: int
    started: str

    @classmethod
    def myself(cls, rank: int) -> Peer:
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            system = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        except OSError:
            system = ""
        return cls(rank, socket.gethostname(), system, os.getpid(), _started(os.getpid())[1])

    def has_ended(self) -> bool:
        """Of a process on this machine; False for what cannot be known."""
        state, started = _started(self.pid)
        return state == "gone" or state in "ZX" or started != self.started

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


def _started(pid: int) -> tuple[str, str]:
    """State, and when it began: a number is given to another process some time after the first has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (FileNotFoundError, ProcessLookupError):
        return "gone", ""


def compare(facts: Mapping[str, Any], fault: Exception | None = None) -> list[Peer]:
    """Exchange ``facts`` over all ranks and refuse to go on unless they are the same everywhere.

    Args:
        facts: JSON values by the names that a user knows them by.
        fault: what this rank found that it cannot start with. When one rank has a fault, none starts.

    Returns: the processes, by rank.

    Raises:
        Disagreement: with all that differs, and which ranks have what.
        Exception: ``fault`` itself where every rank has the same.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if fault is not None:
            raise fault
        return []
    mine = {"facts": dict(facts), "fault": _said(fault), "peer": Peer.myself(dist.get_rank())}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    faults: list[str] = [of["fault"] for of in everyone]
    if fault is not None and len(set(faults)) == 1:
        raise fault
    if any(faults):
        said = "; ".join(f"{text} ({_ranks(where)})" for text, where in _groups(faults).items() if text)
        raise Disagreement(f"no rank starts, because not all can: {said}") from fault
    if differing := differences([of["facts"] for of in everyone]):
        raise Disagreement(
            f"the ranks of this run disagree: {'; '.join(differing)}. Start the same command with the same files and "
            "the same packages on all of them"
        )
    return [of["peer"] for of in everyone]


def differences(by_rank: list[dict[str, Any]]) -> list[str]:
    """``training.seed is 1 on rank 0 and 2 on ranks 1-3`` for each fact that is not the same on all ranks."""
    keys = dict.fromkeys(key for facts in by_rank for key in facts)
    found = []
    for key in keys:
        values = _groups([repr(facts.get(key)) for facts in by_rank])
        if len(values) > 1:
            found.append(f"{key} is " + " and ".join(f"{value} on {_ranks(where)}" for value, where in values.items()))
    return found


def _groups(values: list[str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return groups


def _ranks(ranks: list[int]) -> str:
    """``rank 3``, ``ranks 0, 2-5``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def _said(error: Exception | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {' '.join(str(error).split())}"


# -------------------------------------------------------------------------------------------------------------- gone


class Watch:
    """Looks every second whether a rank on this machine has ended, until ``stop`` or an error in its ``with`` block.

    Then this process gets ``GRACE`` seconds to notice by itself (gloo does at once; NCCL waits for its timeout, and a
    signal is only noted while a collective waits). After that it is ended, with the rank's name.
    """

    def __init__(self, peers: list[Peer]) -> None:
        mine = Peer.myself(dist.get_rank() if peers else 0)
        self.others = [peer for peer in peers if peer.rank != mine.rank]
        self.here = [peer for peer in self.others if peer.system and peer.system == mine.system]
        self._stopped = threading.Event()
        if self.here:
            threading.Thread(target=self._look, name="watch over ranks", daemon=True).start()

    def stop(self) -> None:
        """The others may end now."""
        self._stopped.set()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """After an error this process waits for nobody, and may take its time to close its files."""
        if kind is not None:
            self.stop()

    def ended(self) -> list[Peer]:
        return [peer for peer in self.here if peer.has_ended()]

    def explain(self, error: Exception) -> RankLost | None:
        """Which rank an error of a collective is about; None for an error that is about something else."""
        if not self.others or not _is_about_others(error):
            return None
        end = time.monotonic() + SOON
        while not (lost := self.ended()) and time.monotonic() < end:
            time.sleep(0.1)
        reason = " ".join(str(error).split())[:200]
        if lost:
            return RankLost(f"{_has_ended(lost)} ({type(error).__name__}: {reason})")
        silent = self._roll_call()
        who = f"{', '.join(map(str, silent))} did not answer" if silent else "every rank still runs"
        return RankLost(
            f"the ranks have lost each other: {who}. A rank that hangs, or is slower than engine.timeout_minutes, "
            f"looks like this ({type(error).__name__}: {reason})"
        )

    def _roll_call(self) -> list[Peer]:
        """Who does not say within some seconds that it met an error, too."""
        try:
            store = dist.distributed_c10d._get_default_store()
            store.set(f"mars_dist/met_an_error/{dist.get_rank()}", "1")
            silent, end = self.others, time.monotonic() + 2 * SOON
            while silent and time.monotonic() < end:
                silent = [peer for peer in silent if not store.check([f"mars_dist/met_an_error/{peer.rank}"])]
                time.sleep(0.1)
        except RuntimeError:  # the store is gone, and with it who held it: rank 0, or the launcher
            return [peer for peer in self.others if peer.rank == 0]
        return silent

    def _look(self) -> None:
        since = None
        while not self._stopped.wait(1.0):
            lost = self.ended()
            since = (since or time.monotonic()) if lost else None
            if since is not None and time.monotonic() - since > GRACE:
                print(f"mars-dist: error: {_has_ended(lost)} (this rank still waited)", file=sys.stderr, flush=True)
                os._exit(1)


def _has_ended(lost: list[Peer]) -> str:
    return (
        f"{', '.join(map(str, lost))} {'has' if len(lost) == 1 else 'have'} ended: what it printed, or the launcher, "
        "says why. Run the same command again: the run goes on from its last checkpoint"
    )


def _is_about_others(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and ABOUT_OTHERS.search(f"{type(error).__name__} {error}")
        ):
            return True
        error = error.__cause__ or error.__context__
    return False
