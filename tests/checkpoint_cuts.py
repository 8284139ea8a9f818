"""Tensors of all kinds, cut in all ways: what the tests of the checkpoints save and load."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import strategies as st
from torch import Tensor

from mars_dist.checkpoint import Chunk

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits, NaN and infinities among them."""
    size = torch.empty((), dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (math.prod(shape) * size,), generator=generator)
    return data.to(torch.uint8).view(dtype).reshape(shape)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Also of NaNs, and of the same shape and dtype."""
    bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*bits)


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)  # lone surrogates are no characters
shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
# The states of the variants have such names after a parameter's; here only that they are many of one shape counts.
STATES = ["param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "prev_grad", "next_prev_grad", "step"]


@st.composite
def models(draw: st.DrawFn) -> dict[str, Tensor]:
    """Some parameters, each with some states, in any mixture of dtypes."""
    found: dict[str, Tensor] = {}
    for name in draw(st.lists(names, min_size=1, max_size=4, unique=True)):
        shape = draw(shapes)
        for state in draw(st.lists(st.sampled_from(STATES), min_size=1, unique=True)):
            dtype = draw(st.sampled_from(DTYPES))
            of_state = () if state == "step" else shape
            found[f"{name}/{state}"] = random_tensor(of_state, dtype, draw(st.integers(0, 2**20)))
    return found


@st.composite
def cuts(draw: st.DrawFn, model: dict[str, Tensor], world_size: int, blocks: bool = True) -> list[list[Chunk]]:
    """For each rank what it holds: every tensor by intervals or by blocks, empty parts among them."""
    ranks: list[list[Chunk]] = [[] for _ in range(world_size)]
    for name, value in model.items():
        shape, flat = tuple(value.shape), value.reshape(-1)
        if blocks and shape and draw(st.booleans()):
            edges = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
            spans = [list(itertools.pairwise(e)) or [(0, 0)] for e in edges]
            for region in itertools.product(*spans):
                block = value[tuple(slice(b, e) for b, e in region)]
                ranks[draw(st.integers(0, world_size - 1))].append(Chunk(name, shape, 0, block, tuple(region)))
        else:
            inner = sorted(draw(st.lists(st.integers(0, len(flat)), min_size=world_size - 1, max_size=world_size - 1)))
            order = draw(st.permutations(range(world_size)))
            for rank, (begin, end) in zip(order, itertools.pairwise([0, *inner, len(flat)]), strict=True):
                ranks[rank].append(Chunk(name, shape, begin, flat[begin:end]))
    return ranks
