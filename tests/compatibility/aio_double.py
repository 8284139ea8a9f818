"""A test double of DeepSpeed's ``async_io`` op, so that its NVMe swappers run where the op cannot be compiled.

Everything above the op is DeepSpeed's own code, and the files are really written and read. The double is stricter than
a fast disk: nothing is done before ``wait()``. A write stores what the buffer holds THEN, and a buffer that is being
read is full of NaN until then, so that whoever touches a tensor too early gets a wrong number and not a lucky one. A
read that direct I/O cannot do raises, where the op leaves the buffer as it was and reports success.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor

SWAPPERS = "deepspeed.runtime.swap_tensor."
WITH_THE_OP = ("partitioned_optimizer_swapper", "pipelined_optimizer_swapper", "partitioned_param_swapper")
ALIGNMENT = 512
WITH_THE_LIMIT = ("optimizer_utils", "partitioned_param_swapper")


class Handle:
    """What the swappers use of ``aio_handle``; counts what went through it."""

    locked: dict[int, Tensor] = {}  # the page-locked tensors of this process, by address
    counts = {"reads": 0, "writes": 0, "bytes": 0}  # of all handles of this process

    def __init__(
        self, block_size: int, queue_depth: int, single_submit: bool, overlap_events: bool, intra_op_parallelism: int
    ) -> None:
        self.intra_op_parallelism = intra_op_parallelism
        self.pending: list[Callable[[], Any]] = []

    def async_pread(self, buffer: Tensor, path: str, file_offset: int = 0) -> int:
        size = self._checked(buffer)
        base = max((b for b in self.locked if b <= buffer.data_ptr()), default=0)
        if self.is_pinned(buffer) and ((buffer.data_ptr() - base) % ALIGNMENT or size % ALIGNMENT):
            raise ValueError(
                f"the op reads wrong numbers, without a word, into memory not aligned to {ALIGNMENT} bytes"
            )
        with open(path, "rb") as f:
            f.seek(file_offset)
            content = f.read(size)
        if len(content) != size:
            raise EOFError(f"{path}: {size} bytes asked for from {file_offset}, {len(content)} there")
        buffer = buffer.detach()  # the caller may give its tensor other memory before wait()
        buffer.fill_(float("nan"))
        source = torch.from_numpy(numpy.frombuffer(content, numpy.uint8).copy())
        self.pending.append(lambda: buffer.view(torch.uint8).copy_(source))
        self._count("reads", size)
        return 0

    def async_pwrite(self, buffer: Tensor, path: str, file_offset: int = 0) -> int:
        size = self._checked(buffer)
        buffer = buffer.detach()

        def write() -> None:
            with open(path, "r+b") as f:
                f.seek(file_offset)
                f.write(buffer.view(torch.uint8).numpy().tobytes())

        open(path, "ab").close()
        self.pending.append(write)
        self._count("writes", size)
        return 0

    def wait(self) -> int:
        assert self.pending, "wait() without a pending operation"
        done = len(self.pending)
        for operation in self.pending:
            operation()
        self.pending = []
        return done

    def new_cpu_locked_tensor(self, numel: int, example: Tensor) -> Tensor:
        tensor = torch.full((int(numel),), float("nan"), dtype=example.dtype)  # the op does not initialise it either
        self.locked[tensor.data_ptr()] = tensor
        return tensor

    def free_cpu_locked_tensor(self, tensor: Tensor) -> bool:
        return self.locked.pop(tensor.data_ptr(), None) is not None

    def is_pinned(self, tensor: Tensor) -> bool:
        begin = tensor.data_ptr()
        return any(base <= begin and begin + tensor.nbytes <= base + t.nbytes for base, t in self.locked.items())

    def _checked(self, buffer: Tensor) -> int:
        assert buffer.is_contiguous() and buffer.device.type == "cpu"
        assert buffer.nbytes % self.intra_op_parallelism == 0, "the op refuses this number of bytes"
        return buffer.nbytes

    def _count(self, kind: str, size: int) -> None:
        self.counts[kind] += 1
        self.counts["bytes"] += size


class Builder:
    """What the swappers call ``AsyncIOBuilder``."""

    def load(self, verbose: bool = False) -> Any:
        return SimpleNamespace(aio_handle=Handle)


@contextmanager
def installed(smallest: int) -> Iterator[dict[str, int]]:
    """The double in the place of the op; tensors of ``smallest`` bytes and more are swapped (DeepSpeed: 1 MiB).

    Yields: the counts of what was really read and written.
    """
    Handle.counts.update(dict.fromkeys(Handle.counts, 0))
    replaced: list[tuple[str, str, Any]] = [(name, "AsyncIOBuilder", Builder) for name in WITH_THE_OP]
    replaced += [(name, "MIN_AIO_BYTES", smallest) for name in WITH_THE_LIMIT]
    before = []
    for name, attribute, value in replaced:
        module = importlib.import_module(SWAPPERS + name)
        before.append((module, attribute, getattr(module, attribute)))
        setattr(module, attribute, value)
    try:
        yield Handle.counts
    finally:
        for module, attribute, value in before:
            setattr(module, attribute, value)
