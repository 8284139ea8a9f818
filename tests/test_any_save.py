"""States of every variant in every precision: saved by any cut over simulated ranks, loaded by any other, the same.

The states are made by steps of the optimizer and taken by name; two times they are cut and read, and come back into
another optimizer. That each engine cuts as its layout says: ``test_named_states.py``.
"""

from __future__ import annotations

import copy
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from mars_dist import MARS
from mars_dist.checkpoint import Chunk, Reader, chunks_of, load_chunks, settings_of
from mars_dist.checkpoint.tensors import file_name, write
from mars_dist.config import VARIANTS
from tests.checkpoint_cuts import cuts, same_bits

SHAPES = st.lists(st.lists(st.integers(1, 6), max_size=3).map(tuple), min_size=1, max_size=4)
# Of the parameters, and of their gradients: prev_grad is kept in the gradient's, the moments in float32 or better.
DTYPES = {
    torch.float32: [torch.float32, torch.bfloat16],
    torch.float64: [torch.float64],
    torch.bfloat16: [torch.bfloat16, torch.float32],
}


@pytest.fixture(autouse=True)
def _not_to_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Net(nn.Module):
    def __init__(
        self, shapes: list[tuple[int, ...]], dtype: torch.dtype, of_gradients: torch.dtype, value: float
    ) -> None:
        super().__init__()
        self.all = nn.ParameterList([nn.Parameter(torch.full(shape, value, dtype=dtype)) for shape in shapes])
        for p in self.parameters():
            p.grad_dtype = of_gradients


def trained(net: Net, optimizer: MARS, steps: int, seed: int, exact: bool) -> None:
    generator = torch.Generator().manual_seed(seed)

    def gradients() -> None:
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.grad_dtype)

    def look_ahead() -> None:
        gradients()
        with optimizer.looking_ahead():
            optimizer.step()

    for _ in range(steps):
        if exact:
            look_ahead()
        gradients()
        optimizer.step()
    if exact:
        look_ahead()


def contents(net: Net, optimizer: MARS) -> dict[str, torch.Tensor]:
    chunks = list(chunks_of(optimizer, net))
    assert all(chunk.start == 0 and chunk.region is None for chunk in chunks)
    return {chunk.name: chunk.value.detach().clone().reshape(chunk.shape) for chunk in chunks}


def written(folder: Path, ranks: list[list[Chunk]]) -> Reader:
    folder.mkdir()
    for rank, chunks in enumerate(ranks):
        write(folder / file_name(rank, len(ranks)), chunks)
    return Reader(folder)


def read_by(reader: Reader, ranks: list[list[Chunk]]) -> list[list[Chunk]]:
    """The same places, with what the files have there."""

    def read(chunk: Chunk) -> Chunk:
        if chunk.region is not None:
            value = reader.block(chunk.name, chunk.region)
        else:
            value = reader.read(chunk.name, chunk.start, chunk.start + chunk.numel)
        return Chunk(chunk.name, chunk.shape, chunk.start, value, chunk.region)

    return [[read(chunk) for chunk in chunks] for chunks in ranks]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_saved_by_any_cut_and_loaded_by_any_other(data: st.DataObject) -> None:
    shapes = data.draw(SHAPES)
    dtype = data.draw(st.sampled_from(list(DTYPES)))
    of_gradients = data.draw(st.sampled_from(DTYPES[dtype]))
    exact, clip = data.draw(st.booleans()), data.draw(st.sampled_from((1.0, None)))
    how: dict[str, Any] = {
        "mars_type": data.draw(st.sampled_from(VARIANTS)),
        "optimize_1d": data.draw(st.booleans()),
        "amsgrad": data.draw(st.booleans()),
        "is_approx": not exact,
        "clip": clip,
    }
    net = Net(shapes, dtype, of_gradients, 0.5)
    optimizer = MARS(net.named_parameters(), lr=1e-2, **how)
    trained(net, optimizer, data.draw(st.integers(1, 2)), data.draw(st.integers(0, 99)), exact)
    whole = contents(net, optimizer)
    a, b = (data.draw(cuts(whole, data.draw(st.integers(1, 5)))) for _ in range(2))
    blank = {name: torch.zeros_like(value) for name, value in whole.items()}
    places = [[Chunk(c.name, c.shape, c.start, torch.empty_like(c.value), c.region) for c in chunks] for chunks in b]
    with tempfile.TemporaryDirectory() as folder:
        first = written(Path(folder) / "a", a)
        second = written(Path(folder) / "b", read_by(first, places))
        other = Net(shapes, dtype, of_gradients, -0.25)
        into = MARS(other.named_parameters(), lr=0.5, **how)
        load_chunks(into, other, second, copy.deepcopy(settings_of(optimizer, net)))
        loaded = contents(other, into)
    assert loaded.keys() == whole.keys()
    different = [name for name, value in whole.items() if not same_bits(value, loaded[name])]
    assert not different, different
    assert into.param_groups[0]["lr"] == 1e-2
    assert any(not torch.equal(whole[name], blank[name]) for name in whole), "this would prove nothing"
    if exact:
        assert any(name.endswith("/next_prev_grad") for name in whole) == any(n.endswith("/prev_grad") for n in whole)
