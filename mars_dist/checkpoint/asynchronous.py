"""Saving while training goes on: the tensors are copied, a thread writes them, and the copy is all one waits for."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from mars_dist.checkpoint import tensors
from mars_dist.checkpoint.folder import Saving, Write
from mars_dist.checkpoint.manifest import Record
from mars_dist.checkpoint.tensors import Chunk
from mars_dist.checkpoint.together import together

ALIGNMENT = 64  # bytes


class Saver:
    """Saves checkpoints one after the other; every rank calls every method, in the same order.

    A thread only writes this rank's file. What the ranks have to agree on, and the renaming that makes the checkpoint
    visible, happen on the calling thread in ``wait``, which the next ``save`` and ``close`` call: a collective in the
    background would meet those of the training in another order on every rank. So that a checkpoint does not stay
    hidden until the next one, put ``written`` into an exchange that the training has anyway, and call ``wait`` once it
    is true on all ranks: then it takes no time to speak of.

    Args:
        folder, keep_last, keep_every, process_group: as for ``folder.save``.
    """

    def __init__(
        self,
        folder: Path,
        keep_last: int,
        keep_every: int | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.folder, self.keep_last, self.keep_every, self.group = (
            Path(folder).absolute(),
            keep_last,
            keep_every,
            process_group,
        )
        self._staging = Staging()
        self._under_way: tuple[Saving, _Writing] | None = None

    def save(
        self,
        step: int,
        facts: Mapping[str, Any],
        chunks: Iterable[Chunk],
        metadata: Mapping[str, str] | None = None,
        also: Write | None = None,
    ) -> None:
        """Begin to save; afterwards the tensors may change. A save that is under way is finished first.

        Args:
            chunks: what this rank writes. They are copied into CPU memory that is kept for the next save.
            also: writes small files as in ``folder.save``, before this returns.

        Raises:
            CheckpointError: on every rank, when this save could not begin, or the one before has failed.
        """
        self.wait()
        with together(f"saving step {step}", self.group):
            chunks = list(chunks)
        saving = Saving(self.folder, step, facts, self.keep_last, self.keep_every, self.group)
        saving.begin(sum(chunk.nbytes for chunk in chunks))
        name = tensors.file_name(saving.rank, saving.world_size)
        with saving.attempt():
            records = dict((also and also(saving.temporary)) or {})
            staged = self._staging.copy(chunks)
        self._under_way = saving, _Writing(saving.temporary, name, staged, metadata, records)

    @property
    def under_way(self) -> int | None:
        """The step of the checkpoint that is not visible yet; the same on all ranks."""
        return self._under_way[0].step if self._under_way else None

    @property
    def written(self) -> bool:
        """Whether this rank's part is on disk (or has failed), and ``wait`` would not wait for it."""
        return self._under_way is None or not self._under_way[1].thread.is_alive()

    def wait(self) -> Path | None:
        """Finish what is under way, if anything.

        Returns: the checkpoint's folder.

        Raises:
            CheckpointError: on every rank, when one could not write.
        """
        if self._under_way is None:
            return None
        (saving, writing), self._under_way = self._under_way, None
        with saving.attempt():
            records = writing.result()
        return saving.commit(records)

    def close(self) -> None:
        """``wait``, and give the memory back."""
        try:
            self.wait()
        finally:
            self._staging = Staging()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """After an error nothing is exchanged, for nobody knows whether the other ranks are here."""
        if error is None:
            self.close()
        elif self._under_way is not None:
            self._under_way[1].thread.join()
            self._under_way = None


class _Writing:
    """A thread that writes one file. It does not keep a process alive: what it writes would never become visible."""

    def __init__(
        self,
        folder: Path,
        name: str,
        chunks: list[Chunk],
        metadata: Mapping[str, str] | None,
        records: dict[str, Record],
    ) -> None:
        self.error: BaseException | None = None

        def run() -> None:
            try:
                records[name] = tensors.write(folder / name, chunks, metadata)
            except BaseException as error:  # raised by result(), on the calling thread
                self.error = error

        self.records = records
        self.thread = threading.Thread(target=run, name="mars-dist-save", daemon=True)
        self.thread.start()

    def result(self) -> dict[str, Record]:
        self.thread.join()
        if self.error is not None:
            raise self.error
        return self.records


class Staging:
    """CPU memory for the copies of one save, kept from save to save; page-locked if tensors of a GPU are copied."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, chunks: list[Chunk]) -> list[Chunk]:
        """The same chunks with values of their own, valid until the next call."""
        offsets, size = [], 0
        for chunk in chunks:
            offsets.append(size)
            size += -(-chunk.nbytes // ALIGNMENT) * ALIGNMENT
        devices = {chunk.value.device for chunk in chunks if chunk.value.device.type != "cpu"}
        if len(self.memory) < size:
            self.memory = torch.empty(0, dtype=torch.uint8)  # let go of the old before the new is there
            self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=any(d.type == "cuda" for d in devices))
        staged = []
        for chunk, offset in zip(chunks, offsets, strict=True):
            value = chunk.value.detach()
            place = self.memory[offset : offset + chunk.nbytes].view(value.dtype).view(value.shape)
            place.copy_(value, non_blocking=True)
            staged.append(Chunk(chunk.name, chunk.shape, chunk.start, place, chunk.region))
        for device in devices:
            torch.accelerator.synchronize(device)
        return staged
