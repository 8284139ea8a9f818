"""From one engine into another: whole tensors by parameter name, and what reads them.

.. code-block:: python

    states = full_states(engine, engine.module)             # DeepSpeed ZeRO-3 on 8 ranks; whole on rank 0
    torch.save(states, path)                                # tensors and plain values only
    ...
    states = torch.load(path, weights_only=True) if rank == 0 else {}
    load_full_states(optimizer, model, states)              # FSDP2 on 3 ranks
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mars_dist.checkpoint.named import chunks_of, load_chunks, settings_of
from mars_dist.checkpoint.tensors import Chunk
from mars_dist.checkpoint.together import together
from mars_dist.sharding.norms import communication_device

FORMAT = 1
Tensors = Mapping[str, Mapping[str, Tensor]]


@torch.no_grad()
def full_states(optimizer: Any, model: nn.Module, rank0_only: bool = True) -> dict[str, Any]:
    """All values and states whole, on the CPU: ``["tensors"]["wte.weight"]["exp_avg"]``, and ``["settings"]``.

    Collective. One tensor at a time is brought together; only rank 0 keeps them (all do with ``rank0_only=False``).

    Args:
        optimizer, model: as for ``chunks_of``.

    Returns: on the other ranks an empty dict; what ``load_full_states`` takes.
    """
    mine = list(chunks_of(optimizer, model))
    settings = settings_of(optimizer, model)
    rank, size = _place()
    tables: list[Any] = [[(c.name, tuple(c.shape), c.start, c.numel, c.region, c.value.dtype) for c in mine]]
    if size > 1:
        own, tables = tables[0], [None] * size
        dist.all_gather_object(tables, own)
    pieces: dict[str, list[tuple[int, int]]] = {}
    for holder, entries in enumerate(tables):
        for i, entry in enumerate(entries):
            pieces.setdefault(entry[0], []).append((holder, i))
    tensors: dict[str, dict[str, Tensor]] = {}
    for name in sorted(pieces):
        _, shape, _, _, _, dtype = tables[pieces[name][0][0]][pieces[name][0][1]]
        whole = torch.empty(shape, dtype=dtype) if rank == 0 or not rank0_only else torch.empty(0)
        filled = 0
        for holder, i in pieces[name]:
            _, _, start, numel, region, its_dtype = tables[holder][i]
            value = _to_rank_0(mine[i] if holder == rank else None, holder, numel, its_dtype)
            filled += numel
            if value is not None:
                _fill(whole, value, start, region)
        if filled != math.prod(shape):
            raise RuntimeError(f"{name}: all ranks together hold {filled} of {math.prod(shape)} elements")
        if not rank0_only and size > 1:
            whole = _from_rank_0(whole)
        parameter, _, key = name.rpartition("/")
        if rank == 0 or not rank0_only:
            tensors.setdefault(parameter, {})[key] = whole
    return {"format": FORMAT, "tensors": tensors, "settings": settings} if tensors else {}


def load_full_states(
    optimizer: Any, model: nn.Module, states: Mapping[str, Any] | None, *, values: bool = True
) -> None:
    """Load what ``full_states`` (or ``from_authors``) gave, in any engine, on any number of ranks.

    Args:
        optimizer, model, values: as for ``load_chunks``, which says what is checked.
        states: on every rank, or on rank 0 with None (or {}) on the others: then one tensor at a time is sent.

    Raises:
        As ``load_chunks``; CheckpointError (ValueError on one rank) for a newer format. Nothing was changed.
    """
    states = {} if states is None else states
    with together("loading the states by parameter name (nothing was changed)"):
        if not isinstance(states, Mapping):
            raise ValueError(f"the states are a {type(states).__name__}, and what full_states gives is a dict")
        if states and states.get("format") != FORMAT:
            raise ValueError(
                f"the states have format {states.get('format')!r}, and this mars_dist knows {FORMAT}: what full_states "
                "or from_authors gives is needed, or a newer mars_dist"
            )
        if not states and _place()[0] == 0:
            raise ValueError("there are no states on rank 0")
        _refuse_no_tensors(states.get("tensors", {}))
    reader: Whole = Whole(states.get("tensors", {}))
    settings = states.get("settings")
    if _place()[1] > 1:
        has: list[Any] = [None] * _place()[1]
        dist.all_gather_object(has, bool(states))
        if not all(has):
            shared = [settings]
            dist.broadcast_object_list(shared, src=0)
            settings, reader = shared[0], FromRank0(states.get("tensors", {}))
    load_chunks(optimizer, model, reader, settings, values=values)


def _refuse_no_tensors(tensors: Any) -> None:
    """Before ranks exchange anything: where one of them failed later, the others would wait for it."""
    if not isinstance(tensors, Mapping) or not all(isinstance(its, Mapping) for its in tensors.values()):
        raise ValueError('the "tensors" of the states are no dict of dicts, by parameter name and key')
    for name, its in tensors.items():
        for key, value in its.items():
            if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
                what = f"{value.layout} on {value.device}" if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"{name}/{key} is no dense tensor with values ({what})")


class Whole:
    """Whole tensors by parameter name and key, as ``load_chunks`` reads them."""

    is_collective = False

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = {f"{name}/{key}": value for name, its in tensors.items() for key, value in its.items()}

    def names(self) -> list[str]:
        return sorted(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self._tensors[name].detach().reshape(-1)[start:stop]


class FromRank0(Whole):
    """The same where rank 0 alone has them. Every rank must read the same names in the same order."""

    is_collective = True

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(tensors)
        shared = [{name: (tuple(value.shape), value.dtype) for name, value in self._tensors.items()}]
        dist.broadcast_object_list(shared, src=0)
        self._facts = shared[0]

    def names(self) -> list[str]:
        return sorted(self._facts)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._facts[name][0]

    def dtype(self, name: str) -> torch.dtype:
        return self._facts[name][1]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        shape, dtype = self._facts[name]
        whole = self._tensors[name].detach() if dist.get_rank() == 0 else torch.empty(shape, dtype=dtype)
        return _from_rank_0(whole.cpu()).reshape(-1)[start:stop].clone()


def _fill(whole: Tensor, value: Tensor, start: int, region: Any) -> None:
    if region is None:
        whole.reshape(-1)[start : start + value.numel()] = value
    else:
        block = whole[tuple(slice(begin, end) for begin, end in region)]
        block.copy_(value.view(block.shape))


def _place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _device(tensor: Tensor) -> torch.device:
    world = dist.group.WORLD
    assert world is not None
    return communication_device(tensor, world)


def _to_rank_0(chunk: Chunk | None, holder: int, numel: int, dtype: torch.dtype) -> Tensor | None:
    """The elements of ``chunk``, which rank ``holder`` has, flat and on the CPU, on rank 0."""
    rank = _place()[0]
    if rank == holder == 0:
        assert chunk is not None
        return chunk.value.detach().reshape(-1).cpu()
    if rank == holder:
        assert chunk is not None
        value = chunk.value.detach().reshape(-1).contiguous()
        dist.send(value.view(torch.uint8).to(_device(value)), dst=0)
    elif rank == 0:
        value = torch.empty(numel, dtype=dtype)
        moved = value.view(torch.uint8).to(_device(value))
        dist.recv(moved, src=holder)
        return moved.cpu().view(dtype)
    return None


def _from_rank_0(whole: Tensor) -> Tensor:
    moved = whole.reshape(-1).contiguous().view(torch.uint8).to(_device(whole))
    dist.broadcast(moved, src=0)
    return moved.cpu().view(whole.dtype).view(whole.shape)
