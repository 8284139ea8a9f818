"""A process group whose ranks are threads of this process: torch.distributed as far as a step of MARS uses it.

Everything but the collectives is the real code, and any number of ranks starts at once.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from mars_dist import matrices
from mars_dist.sharding import assemble, norms


class Ranks:
    """``run`` calls a function on every rank. ``calls[rank]``: the name of each collective, and the elements that the
    rank has sent to others by it (None for sums)."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.me = threading.local()
        self.changed = threading.Condition()
        self.failed = False
        self.given: dict[int, dict[int, Any]] = {}  # by number of the collective and rank
        self.calls: list[list[tuple[str, int | None]]] = [[] for _ in range(world_size)]

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """``function(rank)`` on every rank at once; what it returned, by rank, or the exception that it raised."""
        results: list[Any] = [None] * self.world_size

        def rank(r: int) -> None:
            self.me.rank = r
            try:
                results[r] = function(r)
            except Exception as error:
                results[r] = error
                with self.changed:  # the others do not wait for this one
                    self.failed = True
                    self.changed.notify_all()

        threads = [threading.Thread(target=rank, args=(r,)) for r in range(self.world_size)]
        with self.in_place_of_torch():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return results

    @contextlib.contextmanager
    def in_place_of_torch(self) -> Iterator[None]:
        names = ("get_rank", "all_reduce", "all_to_all_single", "broadcast", "get_world_size", "get_backend_config")
        fake = types.SimpleNamespace(ReduceOp=dist.ReduceOp, **{name: getattr(self, name) for name in names})
        with contextlib.ExitStack() as stack:
            for module in (assemble, matrices, norms):
                stack.enter_context(mock.patch.object(module, "dist", fake))
            yield

    def everybodys(self, name: str, mine: Any, sent: int | None = None) -> list[Any]:
        """What every rank gives in this collective, by rank."""
        number = len(self.calls[self.me.rank])
        self.calls[self.me.rank].append((name, sent))
        with self.changed:
            self.given.pop(number - 1, None)
            given = self.given.setdefault(number, {})
            given[self.me.rank] = (name, mine)
            self.changed.notify_all()
            self.changed.wait_for(lambda: len(given) == self.world_size or self.failed, timeout=30.0)
        if len(given) < self.world_size:
            raise ConnectionError(f"not all ranks have come to {name}, collective {number}")
        assert {its for its, _ in given.values()} == {name}, "the ranks call different collectives"
        return [given[r][1] for r in range(self.world_size)]

    # ------------------------------------------------------------------------------------- as in torch.distributed

    def get_rank(self, group: Any) -> int:
        return int(self.me.rank)

    def get_world_size(self, group: Any) -> int:
        return self.world_size

    def get_backend_config(self, group: Any) -> str:
        return "cpu:threads"

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        gathered = torch.stack(self.everybodys("all_reduce", tensor.clone()))
        tensor.copy_(gathered.amax(0) if op == dist.ReduceOp.MAX else gathered.sum(0))

    def all_to_all_single(
        self, received: Tensor, packed: Tensor, coming: list[int], sizes: list[int], group: Any = None
    ) -> None:
        rank = self.me.rank
        assert sizes[rank] == coming[rank] == 0, "a rank sends nothing to itself"
        assert len(sizes) == len(coming) == self.world_size and sum(sizes) == packed.numel()
        pieces = self.everybodys("all_to_all", packed.clone().split(sizes), packed.numel())
        assert [len(its[rank]) for its in pieces] == coming, "the ranks do not agree on what is sent"
        torch.cat([its[rank] for its in pieces], out=received)

    def broadcast(self, tensor: Tensor, group: Any = None, group_src: int = 0, async_op: bool = False) -> Any:
        sent = tensor.numel() if group_src == self.me.rank else 0
        tensor.copy_(self.everybodys("broadcast", tensor.clone(), sent)[group_src])
        return types.SimpleNamespace(wait=lambda: None)
