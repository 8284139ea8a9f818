"""Small nets and data for the engine tests: no attention (see the README of the tests), awkward sizes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOCABULARY = 13


class Net(nn.Module):
    """Embedding, linear, norm, untied head. Every size is chosen so that cuts fall inside tensors and rows.

    ``gain`` (1, 1) and ``shift`` (1,) have fewer elements than there are ranks; under 3 ranks the group of vectors
    leaves the last rank with padding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.linear = nn.Linear(6, 11)
        self.norm = nn.LayerNorm(11)
        self.narrow = nn.Linear(11, 1, bias=False)
        self.gain = nn.Parameter(torch.full((1, 1), 0.5))
        self.shift = nn.Parameter(torch.full((1,), 0.25))
        self.head = nn.Linear(11, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = self.norm(torch.tanh(self.linear(x)))
        x = x + torch.tanh(self.narrow(x)) @ self.gain + self.shift
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


MATRICES = 5
VECTORS = 4


class OnlyPadding(nn.Module):
    """Seven elements in one matrix: with 3 ranks and ZeRO-1/2 the last rank holds nothing but padding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, 7).view(1, 7))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = torch.nn.functional.one_hot(tokens, 7 + 6)[..., :7].to(self.weight.dtype) @ self.weight.T
        return ((x.squeeze(-1) - targets.to(x.dtype) / VOCABULARY).float() ** 2).mean()


NETS = {"net": Net, "only_padding": OnlyPadding}


def build(name: str = "net") -> nn.Module:
    torch.manual_seed(1234)
    return NETS[name]()


def batch(step: int, size: int = 12) -> tuple[Tensor, Tensor]:
    """The global batch of ``step``: (size, 4) tokens and targets. ``size`` divides by 1, 2 and 3 ranks and by 2."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, VOCABULARY, (size, 4), generator=generator)
    return tokens, (tokens * 5 + 3) % VOCABULARY
