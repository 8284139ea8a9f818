"""What a loop may do around ``ExactMode``: evaluate, drain a batch, load a state: right, or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mars_dist import MARS
from mars_dist.exact import ExactMode
from tests.test_engines import furthest


class Left(nn.Module):
    """Dropout, and batch norm that may stay in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm, self.drop, self.head = (
            nn.Linear(5, 4),
            nn.BatchNorm1d(4),
            nn.Dropout(0.5),
            nn.Linear(4, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.norm(self.linear(x))))


def leaves_training(net: nn.Module, prepare: Callable[[nn.Module], Any], at_end: bool) -> None:
    """Six steps; ``prepare`` is called before each pass, and an evaluation follows, within the batch or after it."""
    optimizer = MARS(net.parameters(), lr=1e-2, lr_1d=1e-2, is_approx=False, gamma=0.3)
    data = [torch.randn(8, 5, generator=torch.Generator().manual_seed(i)) for i in range(6)]

    def gradient(x: Tensor) -> None:
        net(x).square().sum().backward()

    for batch in ExactMode(optimizer, data, gradient, seed=3, model=net):
        for x in batch:
            prepare(net)
            gradient(x)
            optimizer.step()
            optimizer.zero_grad()
            if not at_end:
                net.eval()
        if at_end:
            net.eval()


def frozen_norm(net: Any) -> None:
    net.train()
    net.norm.eval()


WRAPPED = {"bare": lambda net: net, "compiled": torch.compile, "wrapped": nn.DataParallel}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
@pytest.mark.parametrize("prepare", [nn.Module.train, frozen_norm])
def test_an_evaluation_leaves_no_trace_in_h(prepare: Callable[[Any], Any], wrap: Callable[[Any], Any]) -> None:
    """Layers that stay in evaluation mode do so in the look-ahead, whatever an evaluation has left."""
    net, never = Left(), Left()
    prepare(net)
    prepare(never)
    optimizer = MARS(never.parameters(), lr=1e-2, lr_1d=1e-2, is_approx=False, gamma=0.3)
    data = [torch.randn(8, 5, generator=torch.Generator().manual_seed(i)) for i in range(6)]

    def gradient(x: Tensor) -> None:
        never(x).square().sum().backward()

    for batch in ExactMode(optimizer, data, gradient, seed=3, model=never):
        for x in batch:
            gradient(x)
        optimizer.step()
        optimizer.zero_grad()
    wrapped = wrap(net)
    optimizer = MARS(net.parameters(), lr=1e-2, lr_1d=1e-2, is_approx=False, gamma=0.3)

    def through_the_inner(x: Tensor) -> None:
        net(x).square().sum().backward()

    for batch in ExactMode(optimizer, data, through_the_inner, seed=3, model=wrapped):
        prepare(net)
        through_the_inner(next(batch))  # the batch is not asked for its end
        optimizer.step()
        optimizer.zero_grad()
        net.eval()
    assert not net.training and furthest(dict(net.named_parameters()), dict(never.named_parameters())) == 0.0
    assert torch.equal(net.norm.running_mean, never.norm.running_mean)


def test_passes_in_another_mode_than_the_first_look_ahead_are_an_error() -> None:
    """As after ``from_pretrained``, which leaves a model in evaluation mode; ``train()`` in the body is too late."""
    with pytest.raises(RuntimeError, match=r"=False, and the passes of the loop have model\.training=True"):
        leaves_training(Left().eval(), nn.Module.train, at_end=True)
    with pytest.raises(RuntimeError, match=r"or differ in a layer of it"):
        leaves_training(Left(), frozen_norm, at_end=True)


def test_an_evaluation_within_the_batch() -> None:
    """Every micro-batch is handed out in evaluation mode, and comes back so: the mode of its pass cannot be known."""
    with pytest.raises(RuntimeError, match=r"=True, and the passes of the loop have model\.training=False"):
        leaves_training(Left(), nn.Module.train, at_end=False)


def test_a_batch_that_is_drained_before_its_passes_is_an_error_where_they_draw() -> None:
    for drop, error in [(0.5, True), (0.0, False)]:
        net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(drop), nn.Linear(4, 1))
        optimizer = MARS(net.parameters(), lr=1e-2, lr_1d=1e-2, is_approx=False)

        def gradient(x: Tensor, net: nn.Module = net) -> None:
            net(x).square().sum().backward()

        def train(optimizer: MARS = optimizer, gradient: Callable[[Tensor], None] = gradient) -> None:
            for batch in ExactMode(optimizer, torch.ones(6, 2, 3), gradient, accumulation=2):
                for x in list(batch):
                    gradient(x)
                optimizer.step()
                optimizer.zero_grad()

        if error:
            with pytest.raises(RuntimeError, match=r"had drawn none when the next.*list\(batch\)"):
                train()
        else:
            train()


def test_a_state_of_approximate_mode_is_named_where_exact_mode_is_asked_for() -> None:
    p, q = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    approximate, exact = MARS([p]), MARS([q], is_approx=False)
    p.grad = torch.ones_like(p)
    approximate.step()
    loop = iter(ExactMode(exact, range(3), lambda x: (q * x).sum().backward()))
    exact.load_state_dict(approximate.state_dict())
    with pytest.raises(RuntimeError, match=r"state that was loaded was saved in approximate mode \(is_approx=True\)"):
        next(loop)
    with pytest.raises(ValueError, match=r"state that was loaded was saved in approximate mode \(is_approx=True\)"):
        ExactMode(exact, [], lambda x: None)
    with pytest.raises(ValueError, match=r"construct MARS with is_approx=False"):
        ExactMode(MARS([p]), [], lambda x: None)


def test_accelerate_may_divide_by_the_accumulation_or_leave_it_to_the_loop() -> None:
    from accelerate import Accelerator

    ends = []
    for steps in (1, 2):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
        net = Left()
        model, optimizer = accelerator.prepare(net, MARS(net.parameters(), lr=1e-2, lr_1d=1e-2, is_approx=False))

        def gradient(x: Tensor, accelerator: Any = accelerator, model: Any = model, steps: int = steps) -> None:
            accelerator.backward(model(x).square().sum() / (2 / steps))

        data = torch.randn(6, 8, 5, generator=torch.Generator().manual_seed(1))
        for batch in ExactMode(optimizer, data, gradient, accumulation=2, accelerator=accelerator, seed=1):
            for x in batch:
                gradient(x)
            optimizer.step()
            optimizer.zero_grad()
        assert net.norm.num_batches_tracked == 6, "the model is the one that was prepared"
        ends.append(dict(net.named_parameters()))
        accelerator.free_memory()
    assert furthest(*ends) < 1e-6
