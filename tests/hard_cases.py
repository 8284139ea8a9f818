"""Trainings that once went wrong under ZeRO, each with the number or the message that is right."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests import nets
from tests.zero_cases import LR


def engine_for(net: nn.Module, stage: int, dtype: str = "fp32", groups: Any = None, **extra: Any) -> tuple[Any, Any]:
    """A DeepSpeed engine with MARS by name, and the MARS optimizer inside."""
    import deepspeed

    import mars_dist

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 12 // dist.get_world_size(),
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "MARS", "params": {**LR, **extra.pop("params", {})}},
        "steps_per_print": 10**9,
        **extra,
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    parameters = list(net.parameters()) if groups is None else groups
    engine, wrapper, *_ = deepspeed.initialize(model=net, model_parameters=parameters, config=config)
    return engine, wrapper if isinstance(wrapper, mars_dist.MARS) else wrapper.optimizer


def train(engine: Any, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        tokens, targets = nets.batch(step)
        rows = torch.arange(12).view(dist.get_world_size(), -1)[dist.get_rank()]
        engine.backward(engine(tokens[rows], targets[rows]))
        engine.step()


def values(net: nn.Module, stage: int) -> dict[str, torch.Tensor]:
    import deepspeed

    out = {}
    for name, p in net.named_parameters():
        with deepspeed.zero.GatheredParameters([p], enabled=stage == 3):
            out[name] = p.detach().double().clone()
    return out


def only_trainable(stage: int, dtype: str, kind: str) -> tuple[dict[str, int], set[str]]:
    """BitFit (vectors only) or LoRA-like (matrices only) by name: rule counts and what moved."""
    net = nets.build()
    for p in net.parameters():
        p.requires_grad_((p.ndim == 2) == (kind == "matrices"))
    low = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    start = {name: p.detach().to(low).double() for name, p in net.named_parameters()}
    engine, optimizer = engine_for(net, stage, dtype)
    train(engine, 0, 3)
    end = values(net, stage)
    engine.destroy()
    return optimizer.rule_counts(), {n for n in end if not torch.equal(end[n], start[n])}


def thawed(stage: int) -> tuple[dict[str, int], float]:
    """A tensor frozen after initialize, before the first step, and thawed after it: how far it moves."""
    net = nets.build()
    engine, optimizer = engine_for(net, stage)
    net.head.weight.requires_grad_(False)
    train(engine, 0, 1)
    net.head.weight.requires_grad_(True)
    before = values(net, stage)["head.weight"]
    train(engine, 1, 3)
    moved = (values(net, stage)["head.weight"] - before).abs().max().item()
    engine.destroy()
    return optimizer.rule_counts(), moved


def copied(stage: int) -> str:
    """The message when a deepcopy of MARS under ZeRO is stepped."""
    net = nets.build()
    engine, optimizer = engine_for(net, stage)
    train(engine, 0, 1)
    twin = copy.deepcopy(optimizer)
    flats = [p for group in twin.param_groups for p in group["params"]] or list(twin.state)
    twin.param_groups[0]["params"] = flats
    for p in flats:
        p.grad = torch.zeros_like(p)
    try:
        twin.step()
    except RuntimeError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


class LowRank(nn.Module):
    """x (W + A B) with B = 0: the gradient of A is exactly zero in the first step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.w = nn.Parameter(torch.randn(nets.VOCABULARY, nets.VOCABULARY) * 0.1)
        self.a = nn.Parameter(torch.randn(nets.VOCABULARY, 2))
        self.b = nn.Parameter(torch.zeros(2, nets.VOCABULARY))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = nn.functional.one_hot(tokens, nets.VOCABULARY).to(self.w.dtype)
        return nn.functional.cross_entropy((x @ (self.w + self.a @ self.b)).flatten(0, 1), targets.flatten())


def warm_up_from_zero(stage: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Zero gradients at lr 0 in a group of their own are a step like any other."""
    net = LowRank()
    groups = [{"params": [net.a]}, {"params": [net.b, net.w]}]
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"}}
    engine, optimizer = engine_for(net, stage, groups=groups, scheduler=schedule)
    train(engine, 0, 4)
    counters = sorted(float(state["step"]) for state in optimizer.state.values())
    end = values(net, stage)
    engine.destroy()
    return counters, end


def exact_mode(stage: int, dtype: str) -> tuple[int, str]:
    """How many steps an ordinary loop takes in exact mode, and what is said then."""
    engine, _ = engine_for(nets.build(), stage, dtype, params={"is_approx": False})
    for step in range(4):
        try:
            train(engine, step, step + 1)
        except RuntimeError as error:
            engine.destroy()
            return step, str(error)
    raise AssertionError("nothing was said")


def one_after_the_other(first: tuple[int, str], second: tuple[int, str]) -> dict[str, int]:
    """A second engine on the same model: attributes of the first one are still on the parameters."""
    net = nets.build()
    engine, _ = engine_for(net, *first)
    train(engine, 0, 1)
    engine.destroy()
    engine, optimizer = engine_for(net, *second)
    train(engine, 1, 2)
    counts = optimizer.rule_counts()
    engine.destroy()
    return counts


def ranks_that_differ(setting: dict[str, Any]) -> None:
    """Rank 0 constructs MARS with other settings than the rest."""
    engine, _ = engine_for(nets.build(), 2, params=setting if dist.get_rank() == 0 else {})
    train(engine, 0, 1)
