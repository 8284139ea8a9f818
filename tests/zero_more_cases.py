"""What runs on the ranks in test_zero_more.py: nets with odd parameters, poisoned gradients, saving and loading.

Importing it adds its nets to ``nets.NETS``, so that ``zero_cases.run`` trains them as well.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import nets, zero_cases
from tests.zero_cases import LR, Messages, Recorder, ZeroCase

FROZEN = ("linear.bias", "narrow.weight")  # a vector and a matrix


def frozen() -> nn.Module:
    net = nets.Net()
    for name, p in net.named_parameters():
        p.requires_grad_(name not in FROZEN)
    return net


class Tied(nn.Module):
    """The head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(nets.VOCABULARY, 6)
        self.linear = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, nets.VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.linear(self.embedding(tokens))))
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


class WithEmpty(nets.Net):
    """A matrix and a vector without elements take part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.empty_matrix = nn.Parameter(torch.zeros(0, 5))
        self.empty_vector = nn.Parameter(torch.zeros(0))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        nothing = self.empty_matrix.float().sum() + self.empty_vector.float().sum()
        return super().forward(tokens, targets) + nothing


class SometimesShort(nets.Net):
    """Leaves two matrices out of every third batch; the data say which, so that all ranks agree."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", -1) + 1
        if self.calls % 3 != 1:
            return super().forward(tokens, targets)
        x = self.norm(torch.tanh(self.linear(self.embedding(tokens)))) + self.shift
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


class Unlike(nn.Module):
    """The same number of elements on every rank, but the matrix stands the other way up on all ranks but the first."""

    def __init__(self) -> None:
        super().__init__()
        shape = (4, 6) if dist.get_rank() == 0 else (6, 4)
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, 24).view(shape))
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        weight = self.weight if self.weight.shape[0] == 4 else self.weight.T
        return (weight[:, targets.flatten() % 6].T + self.shift).square().mean()


nets.NETS |= {"frozen": frozen, "tied": Tied, "empty": WithEmpty, "short": SometimesShort, "unlike": Unlike}  # type: ignore[dict-item]


# -------------------------------------------------------------------------------------------- engine and training


@dataclass(frozen=True)
class Poison:
    """One number of one gradient becomes ``value`` at update ``step`` on ``rank``.

    ``where``: "loss" adds ``value * shift`` to the rank's loss; "flat" writes into the first element of the gradient
    that reaches MARS on that rank, after DeepSpeed's own check (not at the first step: the layout must be known).
    ``calls``: in which calls of that update ("all", or the number of one).
    """

    step: int
    rank: int
    value: float = float("nan")
    where: str = "flat"
    calls: str | int = "all"


class Run:
    """One engine with MARS and its records."""

    def __init__(self, case: ZeroCase, poison: Poison | None = None, zero_init: bool = False) -> None:
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for minutes
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        import mars_dist

        self.case, self.poison = case, poison
        config = zero_cases.config(case)
        with deepspeed.zero.Init(config_dict_or_path=config, enabled=zero_init):
            self.net = nets.build(case.net)
        with deepspeed.zero.GatheredParameters(list(self.net.parameters()), enabled=zero_init):
            self.start = {n: p.detach().double().clone() for n, p in self.net.named_parameters()}
        if case.dtype == "bf16":
            self.start = {n: t.bfloat16().double() for n, t in self.start.items()}
        self.messages = Messages()
        logging.getLogger("mars_dist").addHandler(self.messages)
        arguments: dict[str, Any] = {"model_parameters": list(self.net.parameters())}
        if case.construct == "groups":  # the second of three has no parameters
            first, second = zero_cases.user_groups(self.net)
            arguments = {"model_parameters": [first, {"params": []}, second]}
        if case.construct == "instance":
            arguments = {"optimizer": mars_dist.MARS(self.net.named_parameters(), **{**LR, **case.params})}
        self.engine, wrapper, *_ = deepspeed.initialize(model=self.net, config=config, **arguments)
        self.mars = wrapper if isinstance(wrapper, mars_dist.MARS) else wrapper.optimizer
        assert type(self.mars) is mars_dist.MARS
        self.wrapper = type(wrapper).__name__
        self.calls = 0
        self.seen_lr: list[list[float]] = []
        self.before: list[Tensor] = []
        self.untouched: list[bool] = []
        self.mars.register_step_pre_hook(self._poison)
        self.recorder = Recorder(self.mars, self.net)
        self.mars.register_step_post_hook(self._compare)

    def _poison(self, *_: Any) -> None:
        self.seen_lr[-1].append(self.mars.param_groups[0]["lr"])
        flats = [p for group in self.mars.param_groups for p in group["params"] if p.grad is not None]
        poison = self.poison
        if poison is not None and (poison.where, poison.step) == ("flat", self.update):
            if poison.rank == dist.get_rank() and poison.calls in ("all", self.calls):
                for p in flats:  # the first element that is not padding
                    first = next(s for s in self.mars._tables.layout(p).segments if s.numel)
                    p.grad.view(-1)[first.offset] = poison.value
        self.calls += 1
        self.before = self._copies(flats)

    def _compare(self, *_: Any) -> None:
        flats = [p for group in self.mars.param_groups for p in group["params"] if p.grad is not None]
        self.untouched.append(same(self.before, self._copies(flats)))

    def _copies(self, flats: list[Tensor]) -> list[Tensor]:
        tensors = [t for p in flats for t in (p, *(self.mars.state[p][k] for k in sorted(self.mars.state[p])))]
        return [t.detach().clone() for t in tensors]

    def train(self, first: int, last: int) -> None:
        for self.update in range(first, last):
            self.calls = 0
            self.seen_lr.append([])
            tokens, targets = nets.batch(self.update)
            mine = torch.arange(len(tokens)).view(dist.get_world_size(), -1)[dist.get_rank()]
            loss = self.engine(tokens[mine], targets[mine])
            poison = self.poison
            if poison is not None and (poison.where, poison.step, poison.rank) == (
                "loss",
                self.update,
                dist.get_rank(),
            ):
                loss = loss + poison.value * self.net.shift.sum()
            self.engine.backward(loss)
            self.engine.step()
            self.recorder.end_of_update()

    def states(self) -> list[dict[str, Tensor]]:
        """Copies of this rank's states, in the order of the flats."""
        return [{k: v.clone() for k, v in state.items()} for state in self.mars.state.values()]

    def close(self) -> dict[str, Any]:
        result = {
            "start": self.start,
            "end": zero_cases.parameters(self.net, self.engine, self.case),
            "gradients": self.recorder.gathered(),
            "untouched": self.untouched,
            "skipped_by_deepspeed": self.engine.skipped_steps,
            "lr": self.seen_lr,
            "rule_counts": self.mars.rule_counts(),
            "engines": self.mars.engines(),
            "wrapper": self.wrapper,
            "steps": [float(state["step"]) for state in self.mars.state.values()],
            "finite": all(t.isfinite().all().item() for state in self.mars.state.values() for t in state.values()),
            "messages": self.messages.texts,
        }
        logging.getLogger("mars_dist").removeHandler(self.messages)
        self.engine.destroy()
        return result


def same(before: list[Tensor], after: list[Tensor]) -> bool:
    """Bit by bit: padding may hold NaN."""
    bits = [[t.flatten().view(torch.uint8) for t in tensors] for tensors in (before, after)]
    return len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(*bits, strict=True))


def train(case: ZeroCase, poison: Poison | None = None, zero_init: bool = False) -> dict[str, Any]:
    run = Run(case, poison, zero_init)
    run.train(0, case.steps)
    return run.close()


def train_on_used_memory(case: ZeroCase, poison: Poison | None = None) -> dict[str, Any]:
    """``train`` where every tensor that nobody initialises is full of NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3).isnan().all()
        run = Run(case, poison)
        run.train(0, case.steps)
        undefined = sum(p.isnan().sum().item() for p in run.mars.state)  # padding, which is nobody's value
        return {**run.close(), "undefined": undefined}
    finally:
        torch.use_deterministic_algorithms(False)


def train_with(case: ZeroCase, config: dict[str, Any], poison: Poison | None = None) -> dict[str, Any]:
    """``train`` with more keys in the configuration, which replace those that the case gives."""
    ordinary = zero_cases.config
    zero_cases.config = lambda case: {**ordinary(case), **config}
    try:
        return train(case, poison)
    finally:
        zero_cases.config = ordinary


def train_counts(case: ZeroCase) -> dict[str, Any]:
    """``train`` for nets whose master copies DeepSpeed has no public call for: the rules only."""
    run = Run(case)
    run.train(0, case.steps)
    counts = run.mars.rule_counts()
    logging.getLogger("mars_dist").removeHandler(run.messages)
    run.engine.destroy()
    return {"rule_counts": counts}


def save_and_continue(case: ZeroCase, other: ZeroCase, folder: str) -> dict[str, Any]:
    """Train half of ``case``, save, train the rest; then the rest again in an engine built as ``other`` says."""
    half = case.steps // 2
    run = Run(case)
    run.train(0, half)
    run.engine.save_checkpoint(folder, tag="half")
    saved = run.states()
    run.train(half, case.steps)
    uninterrupted = run.states(), run.close()

    run = Run(other)
    with torch.no_grad():
        run.engine.load_checkpoint(folder, tag="half")
    loaded = run.states()
    run.train(half, case.steps)
    settings = run.mars.settings.to_dict()
    continued = run.states(), run.close()
    return {
        "saved": saved,
        "loaded": loaded,
        "uninterrupted": uninterrupted,
        "continued": continued,
        "settings": settings,
    }


def on_copies(stage: int) -> None:
    """Somebody gives MARS copies of the parameters instead of the model's own."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    import mars_dist

    net = nets.build("net")
    copies = [p.detach().clone().requires_grad_() for p in net.parameters()]
    config = zero_cases.config(ZeroCase(stage, construct="instance"))
    engine, *_ = deepspeed.initialize(model=net, optimizer=mars_dist.MARS(copies, **LR), config=config)
    engine.backward(engine(*nets.batch(0)))
    engine.step()


def changed_behind_the_engine(stage: int) -> None:
    """Somebody writes into the model's weights after ``deepspeed.initialize``; its master copy does not know."""
    import deepspeed

    run = Run(ZeroCase(stage, construct="instance", steps=1))
    with deepspeed.zero.GatheredParameters([run.net.gain], modifier_rank=0, enabled=stage == 3), torch.no_grad():
        run.net.gain.fill_(0.75)
    run.train(0, 1)
