"""What runs on the ranks in the tests of PyTorch's engines: one short training under a real engine, fully recorded."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests import engine_nets, nets, orthogonalised
from tests.ddp_cases import messages
from tests.engine_builders import BUILDERS, Built

# A clip of 0.1: in these nets c is seldom longer than 1, and a clip that never acts would not be tested.
BASE: dict[str, Any] = {"lr": 1e-2, "lr_1d": 4e-3, "weight_decay": 0.05, "clip": 0.1}
EVERYONE = -1


@dataclass(frozen=True)
class EngineCase:
    """One training.

    Attributes:
        engine, options: a name in ``engine_builders.BUILDERS``, and its keywords.
        net: a name in ``engine_nets.NETS``.
        params: what goes to MARS beside ``BASE``.
        groups: further parameter groups as (prefixes of names, settings); all others are in the first.
        built: "after" wrapping, from the wrapped model; "before" it, from the net; "swapped": before it, and the
            engine's parameters are then put into the group's list, as Accelerate does.
        attach: whether ``optimizer.attach(model)`` is called.
        missing: (step, rank or EVERYONE, prefix of names) of gradients that are set to None.
        bad: (step, ranks, name) of a gradient in which one number of those ranks' pieces becomes NaN.
        before: what is called before the first step, a name in ``engine_more_cases.BEFORE``.
        reload: the step before which another optimizer takes over through ``state_dict``.
        by_torch: ``reload`` through the helpers of torch.distributed.checkpoint.
        move: the step before which ``model.to()`` is called.
        differ: settings of the last rank alone.
    """

    engine: str
    options: dict[str, Any] = field(default_factory=dict)
    net: str = "net"
    params: dict[str, Any] = field(default_factory=dict)
    groups: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = ()
    built: str = "after"
    attach: bool = True
    missing: tuple[tuple[int, int, str], ...] = ()
    bad: tuple[int, tuple[int, ...], str] | None = None
    before: str = ""
    reload: int | None = None
    by_torch: bool = False
    move: int | None = None
    differ: dict[str, Any] = field(default_factory=dict)
    steps: int = 10

    def __str__(self) -> str:
        words = [self.engine, *(f"{k}={v}" for k, v in self.options.items())]
        words += [self.net] * (self.net != "net") + [v if isinstance(v, str) else k for k, v in self.params.items()]
        words += ["groups"] * bool(self.groups) + [self.built] * (self.built != "after")
        words += ["unattached"] * (not self.attach) + [f"missing{m}" for m in self.missing]
        words += [f"bad{self.bad}"] * (self.bad is not None) + [self.before] * bool(self.before)
        words += [f"reload{self.reload}"] * (self.reload is not None) + ["differ"] * bool(self.differ)
        words += [f"move{self.move}"] * (self.move is not None)
        return "-".join(words).replace(" ", "").replace("mars-", "")


def clean(name: str) -> str:
    """The name of a parameter without what wrappers put into it."""
    for wrapper in (
        "_fsdp_wrapped_module.",
        "_checkpoint_wrapped_module.",
        "_orig_mod.",
        "module.",
    ):
        name = name.replace(wrapper, "")
    return name


class Collectives(TorchDispatchMode):
    """The names of the collectives that are started, however they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace in (
            "c10d",
            "_c10d_functional",
            "_dtensor",
        ) and not name.startswith(("wait", "_wrap")):
            self.names.append(name.rstrip("_"))
        return func(*args, **(kwargs or {}))


def optimizer_for(case: EngineCase, model: nn.Module) -> Any:
    import mars_dist

    named = list(model.named_parameters())
    settings = {
        **BASE,
        **case.params,
        **(case.differ if dist.get_rank() == dist.get_world_size() - 1 else {}),
    }
    if not case.groups:
        return mars_dist.MARS(named, **settings)
    return mars_dist.MARS(in_groups(case, named), **settings)


def in_groups(case: EngineCase, named: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    """The parameter groups of ``case``; ``named`` are names, as they are, with anything."""
    further: tuple[str, ...] = tuple(prefix for prefixes, _ in case.groups for prefix in prefixes)
    groups: list[dict[str, Any]] = [{"params": [(n, p) for n, p in named if not clean(n).startswith(further)]}]
    for prefixes, settings in case.groups:
        groups.append({"params": [(n, p) for n, p in named if clean(n).startswith(prefixes)], **settings})
    return groups


def setup(case: EngineCase) -> tuple[nn.Module, Built, Any, dict[str, Tensor]]:
    """The net, the engine around it, MARS, and the values that the parameters start from."""
    from tests.engine_more_cases import BEFORE

    net = engine_nets.build(case.net)
    start = {name: p.detach().double() for name, p in net.named_parameters()}
    early = optimizer_for(case, net) if case.built != "after" else None
    built = BUILDERS[case.engine](net, **case.options)
    optimizer = early if early is not None else optimizer_for(case, built.model)
    if case.built == "swapped":
        theirs = {clean(name): p for name, p in built.wrapped.named_parameters()}
        for group in optimizer.param_groups:
            group["params"] = [theirs[clean(name)] for name in group["param_names"]]
    if case.attach and case.engine in ("fsdp1", "ddp"):
        optimizer.attach(built.wrapped)
    if case.before:
        BEFORE[case.before](built, optimizer)
    return net, built, optimizer, start


def backward(built: Built, step: int) -> None:
    """This rank's part of the global batch of ``step``."""
    tokens, targets = nets.batch(step)
    mine = torch.arange(len(tokens)).view(built.shares, -1)[built.share]
    built.model(tokens[mine], targets[mine]).backward()


def run(case: EngineCase) -> dict[str, Any]:
    """Train; the gradients are gathered whole, by name, just before each step."""
    with messages() as texts, orthogonalised.counted() as counts:
        return {**train(case), "messages": texts, "orthogonalised": sum(counts)}


def train(case: EngineCase) -> dict[str, Any]:
    torch.compiler.reset()
    net, built, optimizer, start = setup(case)
    gradients, collectives, untouched = [], [], []
    for step in range(case.steps):
        if case.reload == step:
            optimizer = successor(case, built, optimizer)
        optimizer.zero_grad()
        if case.move == step:
            built.wrapped.to("cpu")
        backward(built, step)
        disturb(case, step, built.wrapped)
        public = None if needs_the_table(built) or case.missing else whole_gradients(built)
        before = snapshot(built.wrapped, optimizer)
        with Collectives() as calls:
            optimizer.step()
        collectives.append(calls.names)
        untouched.append(same(before, snapshot(built.wrapped, optimizer)))
        gradients.append(public if public is not None else gradients_by_table(optimizer, start))
    end = whole_parameters(built)
    if case.engine == "fsdp1" and not needs_the_table(built):
        end = {name: end[name] for name in start}
    return {
        "start": start,
        "end": end,
        "gradients": gradients,
        "collectives": collectives,
        "untouched": untouched,
        "rule_counts": optimizer.rule_counts(),
        "engines": optimizer.engines(),
        "facts": built.facts,
        "counts": sorted({float(s["step"]) for s in optimizer.state.values() if s}),
        "counts_by_name": counts_by_name(optimizer),
        "rounds": rounds_that_travel(optimizer),
        "held": {clean(s.name): s.numel for layout in optimizer._tables.seen() for s in layout.segments},
        "optimizer": type(optimizer).__name__,
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
    }


def rounds_that_travel(optimizer: Any) -> int:
    """In how many rounds of all plans pieces of matrices are sent."""
    return sum(exchange.travels for exchange in exchanges_of(optimizer))


def exchanges_of(optimizer: Any) -> list[Any]:
    """The rounds of all plans that ranks share."""
    return [exchange for exchanges, _ in optimizer._tables.plans.shared.values() for exchange in exchanges]


def counts_by_name(optimizer: Any) -> dict[str, float]:
    """How many steps the tensors have taken that this rank has a state of; a flat one under its first name."""
    params = [p for group in optimizer.param_groups for p in group["params"] if optimizer.state.get(p)]
    return {clean(optimizer._tables.layout(p).segments[0].name): float(optimizer.state[p]["step"]) for p in params}


def successor(case: EngineCase, built: Built, optimizer: Any) -> Any:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    saved: Any = get_optimizer_state_dict(built.wrapped, optimizer) if case.by_torch else optimizer.state_dict()
    saved = copy.deepcopy(saved)
    new = optimizer_for(case, built.model)
    if case.attach and case.engine in ("fsdp1", "ddp"):
        new.attach(built.wrapped)
    if case.by_torch:
        set_optimizer_state_dict(built.wrapped, new, saved)
    else:
        new.load_state_dict(saved)
    return new


def disturb(case: EngineCase, step: int, model: nn.Module) -> None:
    """Gradients that are missing or not finite, as the case wants them."""
    rank = dist.get_rank()
    for at, who, prefix in case.missing:
        for name, p in model.named_parameters():
            if at == step and who in (rank, EVERYONE) and clean(name).startswith(prefix):
                p.grad = None
    if case.bad is not None and case.bad[0] == step and rank in case.bad[1]:
        grads = [local(p.grad) for n, p in model.named_parameters() if clean(n) == case.bad[2] and p.grad is not None]
        assert grads and grads[0].numel(), "this rank holds nothing of that tensor: choose another"
        grads[0].view(-1)[0] = torch.nan


def local(t: Any) -> Tensor:
    return t.detach().to_local() if hasattr(t, "to_local") else t.detach()


def snapshot(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Copies of this rank's part of all values and states."""
    states = [t for p in model.parameters() for _, t in sorted(optimizer.state.get(p, {}).items())]
    return [local(t).clone() for t in (*model.parameters(), *states)]


def same(before: list[Tensor], after: list[Tensor]) -> bool:
    return len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# ----------------------------------------------------------------------------- whole tensors, by the engine's own calls


def needs_the_table(built: Built) -> bool:
    """A flat parameter of FSDP1: no public call gives its gradient by name."""
    return bool(built.facts.get("flat"))


@contextlib.contextmanager
def summoned(built: Built, with_grads: bool) -> Iterator[None]:
    if built.facts.get("type") != "FullyShardedDataParallel":
        yield
        return
    from torch.distributed.fsdp import FullyShardedDataParallel

    with FullyShardedDataParallel.summon_full_params(built.wrapped, writeback=False, with_grads=with_grads):
        yield


def full(t: Any) -> Tensor:
    whole = t.detach().full_tensor() if hasattr(t, "full_tensor") else t.detach()
    return whole.double().clone().cpu()


def whole_gradients(built: Built) -> dict[str, Tensor]:
    with summoned(built, with_grads=True):
        # FSDP1 shows the frozen tensors of a unit with gradients that are zero: MARS does not get those.
        named = [(clean(n), p) for n, p in built.wrapped.named_parameters() if p.requires_grad]
        return {name: full(p.grad) for name, p in named if p.grad is not None}


def whole_parameters(built: Built) -> dict[str, Tensor]:
    with summoned(built, with_grads=False):
        return {clean(n): full(p) for n, p in built.wrapped.named_parameters()}


def gradients_by_table(optimizer: Any, start: dict[str, Tensor]) -> dict[str, Tensor]:
    """By the optimizer's own table of pieces, which the comparison of the RESULT by name confirms.

    A piece whose gradient is missing counts as zero where another rank has one.
    """
    from mars_dist.sharding.dtensor import local_gradient

    mine: list[tuple[str, Any, Tensor]] = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            arrives = optimizer._tables.layout(p).gradient_placements if p.requires_grad else None
            if p.grad is None and arrives is None:
                continue
            piece = local_gradient(p, "", arrives).double().flatten()
            for s in optimizer._tables.layout(p).segments:
                where = s.region if s.region is not None else (s.start, s.stop)
                mine.append((clean(s.name), where, piece[s.offset : s.offset + s.numel]))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    whole: dict[str, Tensor] = {}
    for name, where, piece in (entry for one in everyone for entry in one):
        tensor = whole.setdefault(name, torch.zeros_like(start[name]))
        if piece.numel() and isinstance(where[0], tuple):
            block = tensor[tuple(slice(*interval) for interval in where)]
            block.copy_(piece.view(block.shape))
        elif piece.numel():
            tensor.view(-1)[where[0] : where[1]] = piece
    return whole
