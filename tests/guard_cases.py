"""What runs on the ranks in test_guard.py: engines in which something takes the update away from MARS."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from tests import hard_cases, nets, zero_cases
from tests.zero_cases import Messages, ZeroCase
from tests.zero_more_cases import Run


def nothing(run: Run) -> None:
    """An ordinary engine."""


def everything(run: Run) -> None:
    """The wrapper steps an AdamW of its own, as SuperOffload does."""
    other = torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    for group in run.mars.param_groups:
        group |= other.defaults | group
    other.param_groups = run.mars.param_groups
    run.engine.optimizer.optimizer = other


def one_group(run: Run) -> None:
    """The second of two calls of an update goes to another optimizer."""
    step, calls = run.mars.step, []

    def every_other(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return step(*args, **kwargs) if len(calls) % 2 else None

    run.mars.step = every_other


def twice(run: Run) -> None:
    """A plug-in steps the optimizer once more after the engine did."""
    step = run.mars.step

    def again(*args: Any, **kwargs: Any) -> Any:
        step(*args, **kwargs)
        return step(*args, **kwargs)

    run.mars.step = again


def later(run: Run) -> None:
    """A feature that switches itself on after some warm-up steps, as ZenFlow does."""
    run.train(0, 3)
    everything(run)


def train(case: ZeroCase, take_over: Callable[[Run], None]) -> tuple[int, int]:
    run = Run(case)
    take_over(run)
    run.train(3, 5)
    return run.mars.tensor_updates, run.engine.global_steps


def json_and_client(stage: int, kind: str) -> list[str]:
    """A file that names MARS beside an optimizer of the script; what MARS has logged."""
    import deepspeed

    import mars_dist

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    net, messages = nets.build(), Messages()
    logging.getLogger("mars_dist").addHandler(messages)
    optimizer = {
        "object": lambda: torch.optim.AdamW(net.parameters()),
        "callable": lambda: lambda params: torch.optim.AdamW(params),
        "mars": lambda: mars_dist.MARS(net.parameters(), lr=1e-3, lr_1d=1e-3),
    }[kind]()
    config = zero_cases.config(ZeroCase(stage))
    try:
        engine, *_ = deepspeed.initialize(
            model=net, optimizer=optimizer, model_parameters=net.parameters(), config=config
        )
        engine.destroy()
    finally:
        logging.getLogger("mars_dist").removeHandler(messages)
    return messages.texts


def half(run: Run) -> None:
    """Without ZeRO: every second tensor loses its gradient on the way, as if another optimizer had taken it."""
    step = run.mars.step

    def some(*args: Any, **kwargs: Any) -> Any:
        for group in run.mars.param_groups:
            for p in group["params"][::2]:
                p.grad = None
        return step(*args, **kwargs)

    run.mars.step = some


def valid_flow(kind: str) -> tuple[int, dict[str, int]]:
    """Something unusual at stage 0 that is right: MARS's updates in all, and the rules."""
    net = nets.build("empty" if kind == "empty" else "net")
    if kind == "unfreeze":
        net.head.weight.requires_grad_(False)
    engine, mars = hard_cases.engine_for(net, 0)
    hard_cases.train(engine, 0, 1)
    if kind == "unfreeze":
        net.head.weight.requires_grad_(True)
    if kind == "add":
        net.more = torch.nn.Parameter(torch.ones(2, 2))
        mars.add_param_group({"params": [net.more]})
        net.more.grad = torch.ones(2, 2)
    if kind == "discard":
        tokens, targets = nets.batch(1)
        engine.backward(engine(tokens, targets))
        for p in net.parameters():
            p.grad = None
    if kind not in ("no backward", "discard"):
        tokens, targets = nets.batch(1)
        engine.backward(engine(tokens, targets))
    engine.step()
    engine.destroy()
    return mars.tensor_updates, mars.rule_counts()


def frozen_when_built_again(stage: int, dtype: str) -> dict[str, int]:
    """A layer frozen between two engines on the same model still carries what the first engine wrote on it."""
    net = nets.build()
    engine, _ = hard_cases.engine_for(net, stage, dtype)
    hard_cases.train(engine, 0, 1)
    engine.destroy()
    net.linear.weight.requires_grad_(False)
    engine, mars = hard_cases.engine_for(net, stage, dtype)
    hard_cases.train(engine, 1, 2)
    engine.destroy()
    return mars.rule_counts()


def autocast_that_stays_on() -> None:
    """An engine in float16 autocast, and after it one that does not ask for it."""
    from deepspeed.runtime import torch_autocast

    engine, _ = hard_cases.engine_for(nets.build(), 0, torch_autocast={"enabled": True, "dtype": "float16"})
    engine.destroy()
    try:
        hard_cases.engine_for(nets.build(), 2)
    finally:
        torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
        torch_autocast.TORCH_AUTOCAST_DTYPE = None


def start(case: ZeroCase) -> list[str]:
    """What MARS has logged when the engine has started."""
    run = Run(case)
    run.close()
    return run.messages.texts
