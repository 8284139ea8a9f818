"""What runs on the ranks in the DDP tests: short recorded trainings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests import nets
from tests.zero_cases import Messages, Recorder

LR: dict[str, Any] = {"lr": 1e-2, "lr_1d": 4e-3}


@dataclass(frozen=True)
class DdpCase:
    """``params`` goes to MARS, ``ddp`` to DistributedDataParallel.

    ``unused``: in every third step the loss leaves out ``narrow`` and ``gain``. ``poison``: the step, the rank and the
    number that is multiplied into one term of the loss, which depends on ``shift`` alone.
    """

    params: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    set_to_none: bool = True
    unused: bool = False
    poison: tuple[int, int, float] | None = None
    steps: int = 10

    def __str__(self) -> str:
        words = [str(self.params.get("mars_type", "mars-adamw"))]
        words += [f"{k}={v}" for k, v in self.params.items() if k not in ("mars_type", "weight_decay", "ns_dtype")]
        words += [f"{k}={v}" for k, v in self.ddp.items() if v] + ["zeroed_in_place"] * (not self.set_to_none)
        words += ["unused"] * self.unused + [f"poison{self.poison}"] * (self.poison is not None)
        return "-".join(words).replace(" ", "")


class SometimesShort(nets.Net):
    """Leaves out two matrices when asked to: they have no gradient then, on any rank."""

    short = False

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if not self.short:
            return super().forward(tokens, targets)
        x = self.norm(torch.tanh(self.linear(self.embedding(tokens)))) + self.shift
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def run(case: DdpCase) -> dict[str, Any]:
    """Train ``case.steps`` steps; gradients are read from the model's parameters by name just before each step."""
    import mars_dist

    torch.manual_seed(1234)
    net = SometimesShort()
    start = {name: p.detach().double() for name, p in net.named_parameters()}
    ddp = DistributedDataParallel(net, **case.ddp)
    optimizer = mars_dist.MARS(net.named_parameters(), **{**LR, **case.params})
    recorder = Recorder(optimizer, net)
    gradients, untouched = [], []
    with messages() as texts:
        for step in range(case.steps):
            optimizer.zero_grad(set_to_none=case.set_to_none)
            net.short = case.unused and step % 3 == 1
            tokens, targets = nets.batch(step)
            mine = torch.arange(len(tokens)).view(dist.get_world_size(), -1)[dist.get_rank()]
            loss = ddp(tokens[mine], targets[mine])
            if case.poison is not None and case.poison[:2] == (step, dist.get_rank()):
                loss = loss + case.poison[2] * net.shift.sum()
            loss.backward()
            gradients.append({n: p.grad.detach().double() for n, p in net.named_parameters() if p.grad is not None})
            before = snapshot(net, optimizer)
            optimizer.step()
            untouched.append(same(before, snapshot(net, optimizer)))
    return {
        "start": start,
        "end": {name: p.detach().double() for name, p in net.named_parameters()},
        "gradients": gradients,
        "untouched": untouched,
        "collectives": recorder.collectives,
        "rule_counts": optimizer.rule_counts(),
        "engines": optimizer.engines(),
        "ddp": type(ddp).__name__,
        "messages": texts,
        "counts": {n: float(optimizer.state[p]["step"]) for n, p in net.named_parameters()},
    }


@contextlib.contextmanager
def messages() -> Iterator[list[str]]:
    """What mars_dist logs meanwhile, whatever level an earlier test has left."""
    import logging

    logger, handler = logging.getLogger("mars_dist"), Messages()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler.texts
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def snapshot(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of all values and states."""
    states = [t for p in net.parameters() for _, t in sorted(optimizer.state.get(p, {}).items())]
    return [t.detach().clone() for t in (*net.parameters(), *states)]


def same(before: list[Tensor], after: list[Tensor]) -> bool:
    return len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
