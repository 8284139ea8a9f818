"""Who writes what of tensors that several ranks hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mars_dist.checkpoint.tensors import Chunk


def my_share(chunks: Iterable[Chunk], rank: int, world_size: int) -> Iterator[Chunk]:
    """Of tensors that every rank holds, the part that this rank writes: all parts together are each element once.

    The bytes of all chunks, one after the other, are cut into ``world_size`` intervals of the same length, at an
    element: a rank's file differs from the mean by less than one element (by less than one row for a block).

    Args:
        chunks: the same in the same order on every rank.
    """
    chunks = list(chunks)
    total = sum(chunk.nbytes for chunk in chunks)
    low, high = total * rank // world_size, total * (rank + 1) // world_size
    begin = 0
    for chunk in chunks:
        end = begin + chunk.nbytes
        if not chunk.numel:
            if rank == 0:
                yield chunk
            continue
        rows = _rows(chunk)
        unit = chunk.nbytes // rows
        first, last = (min(max(-((begin - edge) // unit), 0), rows) for edge in (low, high))
        if first < last:
            yield _cut(chunk, first, last, rows)
        begin = end


def _rows(chunk: Chunk) -> int:
    """Into how many parts a chunk can be cut: its elements, or of a block the length of its first dimension."""
    if chunk.region is None:
        return chunk.numel
    return chunk.region[0][1] - chunk.region[0][0] if chunk.region else 1


def _cut(chunk: Chunk, first: int, last: int, rows: int) -> Chunk:
    if first == 0 and last == rows:
        return chunk
    if chunk.region is None:
        return Chunk(chunk.name, chunk.shape, chunk.start + first, chunk.value.reshape(-1)[first:last])
    begin = chunk.region[0][0]
    region = ((begin + first, begin + last), *chunk.region[1:])
    return Chunk(chunk.name, chunk.shape, 0, chunk.value.reshape(rows, -1)[first:last], region)
