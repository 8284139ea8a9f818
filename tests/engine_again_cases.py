"""What runs on the ranks in test_engines_again.py: trainings under PyTorch's engines that once went wrong."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import engine_nets
from tests.engine_builders import BUILDERS, Built, line, square
from tests.engine_cases import BASE, EngineCase, backward, clean, full, local, optimizer_for

FSDP1 = EngineCase("fsdp1")
HEAD_WITHOUT_MARS = EngineCase("fsdp1", groups=((("head",), {"use_mars": False}),))


def built_with(case: EngineCase, bf16: bool = False, seed: int = 1234, frozen: bool = False) -> tuple[Built, Any]:
    """The engine around the net of ``case``, and its optimizer; ``frozen``: only the vectors outside norm train."""
    torch.manual_seed(seed)
    net = engine_nets.NETS[case.net]()
    if bf16:
        net.bfloat16()
    if frozen:
        for name, p in net.named_parameters():
            p.requires_grad_(p.ndim < 2 and not name.startswith("norm"))
    built = BUILDERS[case.engine](net, **case.options)
    return built, optimizer_of(case, built)


def optimizer_of(case: EngineCase, built: Built) -> Any:
    optimizer = optimizer_for(case, built.model)
    if case.engine == "fsdp1":
        optimizer.attach(built.wrapped)
    return optimizer


def train(built: Built, optimizer: Any, first: int, end: int) -> None:
    for step in range(first, end):
        optimizer.zero_grad()
        backward(built, step)
        optimizer.step()


def pieces(model: nn.Module) -> list[Tensor]:
    return [local(p).detach().clone() for p in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def attempt(built: Built, optimizer: Any) -> dict[str, Any]:
    """What a step says where it raises, and whether anything moved."""
    before, said, kind = pieces(built.wrapped), "", ""
    try:
        optimizer.step()
    except RuntimeError as error:
        said, kind = str(error), type(error).__name__
    return {"said": said, "kind": kind, "moved": not same(before, pieces(built.wrapped)), "facts": built.facts}


# ------------------------------------------------------------------------------------------- steps at the wrong moment


def step_after_no_sync(earlier: int) -> dict[str, Any]:
    """``earlier``: ordinary steps before it."""
    built, optimizer = built_with(FSDP1)
    train(built, optimizer, 0, earlier)
    optimizer.zero_grad()
    with built.wrapped.no_sync():  # type: ignore[operator]
        backward(built, earlier)
    return attempt(built, optimizer)


def step_within_summoned_parameters(earlier: int) -> dict[str, Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    built, optimizer = built_with(FSDP1)
    train(built, optimizer, 0, earlier)
    optimizer.zero_grad()
    backward(built, earlier)
    with FullyShardedDataParallel.summon_full_params(built.wrapped, with_grads=True):
        inside = attempt(built, optimizer)
    before = pieces(built.wrapped)
    optimizer.step()
    return {**inside, "moves_outside": not same(before, pieces(built.wrapped))}


# ------------------------------------------------------------------------------------------------ DTensors on two ranks


def trained_by_hand(
    named: dict[str, tuple[Tensor, Any]], gradients: list[dict[str, Tensor]], **settings: Any
) -> dict[str, Any]:
    """Whole tensors of value and gradient on their meshes, cut in rows, through real steps of MARS."""
    from torch.distributed.tensor import Shard, distribute_tensor

    import mars_dist

    def cut(tensor: Tensor, name: str) -> Any:
        return distribute_tensor(tensor, named[name][1], [Shard(0)], src_data_rank=None)

    params = {name: nn.Parameter(cut(value, name)) for name, (value, _) in named.items()}
    optimizer = mars_dist.MARS(list(params.items()), **{**BASE, **settings})
    moved = []
    for step in gradients:
        before = [local(p).detach().clone() for p in params.values()]
        for name, p in params.items():
            p.grad = cut(step[name], name)
        optimizer.step()
        moved.append([not torch.equal(b, local(p)) for b, p in zip(before, params.values(), strict=True)])
    inside = {name: named[name][1].get_coordinate() is not None for name in named}
    return {
        "start": {name: value.double() for name, (value, _) in named.items()},
        "gradients": [{name: g.double() for name, g in step.items()} for step in gradients],
        "end": {name: full(p) for name, p in params.items() if inside[name]},
        "held": {name: local(p).numel() for name, p in params.items()},
        "moved": moved,
        "counts": {name: float(optimizer.state[p]["step"]) for name, p in params.items() if optimizer.state.get(p)},
        "rule_counts": optimizer.rule_counts(),
        "engines": optimizer.engines(),
    }


def random_gradients(steps: int, names: tuple[str, ...], seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [{name: torch.randn(8, 4, generator=generator) for name in names} for _ in range(steps)]


def experts_beside_dense(bad_step: int | None) -> dict[str, Any]:
    """Dense over all ranks, another expert in each pair of them; one number of the first pair's expert is NaN."""
    pair = dist.get_rank() // 2
    dense, experts = (random_gradients(4, names, seed) for names, seed in ((("dense",), 7), (("expert",), 8 + pair)))
    gradients = [{**a, **b} for a, b in zip(dense, experts, strict=True)]
    if bad_step is not None and pair == 0:
        gradients[bad_step]["expert"][0, 0] = float("nan")
    named = {
        "dense": (torch.linspace(-1, 1, 32).view(8, 4), line()),
        "expert": (torch.linspace(-1, 1, 32).view(8, 4) + pair, square()["inner"]),
    }
    return trained_by_hand(named, gradients, skip_nonfinite=True)


def on_a_mesh_of_the_first_two(beside: bool) -> dict[str, Any]:
    """A tensor whose mesh the other ranks are not in; ``beside`` one that all ranks share."""
    from torch.distributed.device_mesh import DeviceMesh

    named = {"some": (torch.linspace(-1, 1, 32).view(8, 4), DeviceMesh("cpu", [0, 1]))}
    if beside:
        named["all"] = (torch.linspace(1, -1, 32).view(8, 4), line())
    return trained_by_hand(named, random_gradients(4, tuple(named), 11))


# ----------------------------------------------------------------------------------------- torch.distributed.checkpoint


def continued(case: EngineCase, bf16: bool = False, frozen: bool = False) -> dict[str, Any]:
    """Six steps at one go, and six with another optimizer from the fourth on; ``frozen``: unfrozen after two."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    ends, saved, rules, states = [], {}, [], {}
    for change in (False, True):
        built, optimizer = built_with(case, bf16, frozen=frozen)
        start = pieces(built.wrapped)
        train(built, optimizer, 0, 2)
        if frozen:
            built.wrapped.requires_grad_(True)
        train(built, optimizer, 2, 4)
        if change:
            saved = copy.deepcopy(get_optimizer_state_dict(built.wrapped, optimizer))
            of_first = [optimizer.state[p] for p in built.wrapped.parameters()]
            optimizer = optimizer_of(case, built)
            set_optimizer_state_dict(built.wrapped, optimizer, saved)
            of_second = [optimizer.state[p] for p in built.wrapped.parameters()]
            compared = [(a[key], b[key]) for a, b in zip(of_first, of_second, strict=True) for key in a]
            states = {"equal": same(*map(list, zip(*compared, strict=True))), "number": len(compared)}
        train(built, optimizer, 4, 6)
        ends.append(pieces(built.wrapped))
        rules.append((optimizer.rule_counts(), optimizer.engines()))
        stayed = [i for i, (a, b) in enumerate(zip(start, ends[-1], strict=True)) if a.numel() and torch.equal(a, b)]
    return {
        "equal": same(*ends),
        "stayed": stayed,
        "dtypes": {str(t.dtype) for t in ends[0]},
        "saved": sorted(map(clean, saved["state"])),
        "states": states,
        "rules": rules,
        "facts": built.facts,
    }


def moved_between(first: EngineCase, second: EngineCase) -> dict[str, Any]:
    """The full state of ``first`` set into ``second`` and, from there, into a new ``first``."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    whole = StateDictOptions(full_state_dict=True)
    built, optimizer = built_with(first)
    train(built, optimizer, 0, 3)
    # Copies: as in torch.optim the tensors in such a dict are those of the optimizer, which counts on.
    dicts = [copy.deepcopy(get_optimizer_state_dict(built.wrapped, optimizer, options=whole))]
    engines = [optimizer.engines()]
    for case in (second, first):
        built, optimizer = built_with(case)
        set_optimizer_state_dict(built.wrapped, optimizer, copy.deepcopy(dicts[-1]), options=whole)
        dicts.append(copy.deepcopy(get_optimizer_state_dict(built.wrapped, optimizer, options=whole)))
        train(built, optimizer, 3, 4)  # its own state again, by its own engine
        engines.append(optimizer.engines())
    flat = [
        {f"{clean(name)}.{key}": full(value) for name, state in d["state"].items() for key, value in state.items()}
        for d in dicts
    ]
    return {
        "states": flat,
        "engines": engines,
        "rule_counts": optimizer.rule_counts(),
        "counts": sorted({float(s["step"]) for s in optimizer.state.values()}),
    }


# --------------------------------------------------------------------------------------------------------- two models


def one_optimizer_over_two_models() -> dict[str, Any]:
    """Beside the same two trainings with an optimizer each."""
    import mars_dist

    apart = []
    for seed in (1, 2):
        built, optimizer = built_with(FSDP1, seed=seed)
        train(built, optimizer, 0, 4)
        apart += pieces(built.wrapped)
    two = [built_with(FSDP1, seed=seed)[0] for seed in (1, 2)]
    start = [p for built in two for p in pieces(built.wrapped)]
    named = [(f"{i}.{name}", p) for i, built in enumerate(two) for name, p in built.model.named_parameters()]
    optimizer = mars_dist.MARS(named, **BASE)
    for built in two:
        optimizer.attach(built.wrapped)
    for step in range(4):
        optimizer.zero_grad()
        for built in two:
            backward(built, step)
        optimizer.step()
    together = [p for built in two for p in pieces(built.wrapped)]
    return {
        "equal": same(apart, together),
        "moved": all(not torch.equal(a, b) for a, b in zip(start, together, strict=True) if a.numel()),
        "alone": mars_rules(two[0]),
        "rule_counts": optimizer.rule_counts(),
        "engines": optimizer.engines(),
        "facts": [built.facts for built in two],
    }


def mars_rules(built: Built) -> dict[str, int]:
    """The rules of an optimizer over one of the models alone."""
    optimizer = optimizer_of(FSDP1, built)
    train(built, optimizer, 4, 5)
    return optimizer.rule_counts()
