"""Nets for the tests of PyTorch's engines, beside ``nets.Net``: no attention, awkward sizes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.nets import VOCABULARY, Net


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Layers(nn.Module):
    """For tensor parallelism: two linear layers that cut their inner dimension (12: divides by 2, 3 and 4), 13 rows in
    embedding and head, and a ``gain`` that no plan names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6)
        self.norm = nn.LayerNorm(6)
        self.gain = nn.Parameter(torch.full((6, 1), 0.5))
        self.head = nn.Linear(6, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens) * (1.0 + self.gain.squeeze(1))
        x = self.norm(self.down(torch.tanh(self.up(x))))
        return cross_entropy(self.head(x), targets)


class Tied(nn.Module):
    """The head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.linear = nn.Linear(6, 6)
        self.head = nn.Linear(6, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.head(torch.tanh(self.linear(self.embedding(tokens)))), targets)


class Lora(nn.Module):
    """Frozen base layers with low-rank adapters that train; the head's bias trains as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6).requires_grad_(False)
        self.linear = nn.Linear(6, 11).requires_grad_(False)
        self.down = nn.Linear(6, 2, bias=False)
        self.up = nn.Linear(2, 11, bias=False)
        self.head = nn.Linear(11, VOCABULARY)
        self.head.weight.requires_grad_(False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return cross_entropy(self.head(torch.tanh(self.linear(x) + self.up(self.down(x)))), targets)


class Kernels(nn.Module):
    """Experts in one tensor of rank 3, a convolution of rank 3 and one of rank 4."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.experts = nn.Parameter(torch.randn(3, 6, 5) * 0.5)
        self.line = nn.Conv1d(5, 7, 3, padding=1)
        self.plane = nn.Conv2d(1, 2, 3, padding=1)
        self.head = nn.Linear(7, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = torch.tanh(torch.einsum("bti,eio->beto", self.embedding(tokens), self.experts)).mean(1)
        x = self.plane(self.line(x.transpose(1, 2)).unsqueeze(1)).sum(1)
        return cross_entropy(self.head(torch.tanh(x.transpose(1, 2))), targets)


class Single(nn.Module):
    """One matrix of one element: all ranks but the first hold nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return (self.linear(tokens[..., None].float()).squeeze(-1) - targets.float()).square().mean() / VOCABULARY


NETS: dict[str, type[nn.Module]] = {
    "net": Net,
    "layers": Layers,
    "tied": Tied,
    "lora": Lora,
    "kernels": Kernels,
    "single": Single,
}
# Matrices, and all other tensors that train.
SIZES = {
    "net": (5, 4),
    "layers": (5, 4),
    "tied": (2, 1),
    "lora": (2, 1),
    "kernels": (2, 5),
    "single": (1, 0),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(1234)
    return NETS[name]()
