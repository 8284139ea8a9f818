"""What runs on the ranks in the tests of states by parameter name: a training that is taken up by another engine.

The groups of the engine that loads are in another order, and its numbers are wrong on purpose: what is loaded holds.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import engine_cases, engine_nets, nets, zero_cases
from tests.ddp_cases import messages
from tests.engine_builders import BUILDERS, Built
from tests.zero_cases import ZeroCase

States = dict[str, Any]
SETTINGS: dict[str, Any] = {"lr": 1e-2, "lr_1d": 4e-3, "weight_decay": 0.05, "clip": 0.1}
WRONG: dict[str, Any] = {"lr": 0.5, "weight_decay": 0.7, "betas": (0.5, 0.6), "clip": 7.0}
SECOND = {"weight_decay": 0.0, "lr": 5e-3, "gamma": 0.05}
SECOND_OF_ADAMW = {"weight_decay": 0.0, "lr": 5e-3, "betas": (0.8, 0.9)}
BEGIN, END = 4, 9
# Name: a builder of PyTorch's engines with its options, or a ZeRO case.
ENGINES: dict[str, Any] = {
    "plain": ("", {}),
    "ddp": ("ddp", {}),
    "fsdp2": ("fsdp2", {}),
    "fsdp1": ("fsdp1", {"original": True, "nested": True}),
    "fsdp1-flat": ("fsdp1", {"original": False}),
    "hsdp": ("fsdp2", {"mesh": "square"}),
    "tensor": ("tensor_parallel", {}),
    "tensor-fsdp2": ("tensor_parallel", {"data": True}),
    "zero0": ZeroCase(0),
    "zero1": ZeroCase(1, zero={"round_robin_gradients": True}),
    "zero2": ZeroCase(2),
    "zero3": ZeroCase(3, zero={"sub_group_size": 60, "stage3_param_persistence_threshold": 12}),
    "zero2-offload": ZeroCase(2, offload=True),
    "zero3-offload": ZeroCase(3, offload=True),
    "zero0-bf16": ZeroCase(0, "bf16"),
    "zero2-bf16": ZeroCase(2, "bf16"),
    "zero3-bf16": ZeroCase(3, "bf16"),
    "bf16-optimizer": ZeroCase(1, "bf16", extra={"data_types": {"grad_accum_dtype": "fp32"}}),
}


@dataclass(frozen=True)
class Case:
    """One engine and optimizer.

    Attributes:
        engine: a name in ``ENGINES``; "plain" is one process.
        params: what goes to MARS beside ``SETTINGS``.
        net: a name in ``engine_nets``.
        groups: two parameter groups; a flat parameter of FSDP1 can be in one only.
    """

    engine: str
    params: dict[str, Any] = field(default_factory=dict)
    net: str = "net"
    groups: bool = True

    @property
    def is_exact(self) -> bool:
        return not self.params.get("is_approx", True)


@dataclass
class Training:
    optimizer: Any  # what the user holds
    model: Any
    mars: Any
    step: Callable[[int], None]
    ahead: Callable[[int], None]
    weights: Callable[[], dict[str, Tensor]]
    facts: dict[str, Any]
    close: Callable[[], None] = lambda: None


def groups_of(net: nn.Module, second: dict[str, Any], reverse: bool) -> list[dict[str, Any]]:
    """Two groups that mix matrices and vectors, with settings of their own."""
    pairs: list[list[Any]] = [[], []]
    for name, p in net.named_parameters():
        pairs[engine_cases.clean(name).startswith(zero_cases.SECOND_GROUP)].append((name, p))
    groups: list[dict[str, Any]] = [{"params": pairs[0]}, {"params": pairs[1], **second}]
    return groups[::-1] if reverse else groups


def mars_for(net: nn.Module, case: Case, fresh: bool) -> Any:
    import mars_dist

    settings = {**SETTINGS, **case.params, **(WRONG if fresh else {})}
    if not case.groups:
        return mars_dist.MARS(net.named_parameters(), **settings)
    return mars_dist.MARS(groups_of(net, {} if fresh else SECOND, fresh), **settings)


def build(case: Case, fresh: bool) -> Training:
    """``fresh``: with other weights and other numbers, to be loaded into."""
    net = engine_nets.build(case.net)
    if fresh:
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(1.7).add_(0.01)
    kind = ENGINES[case.engine]
    return deepspeed(case, kind, net, fresh) if isinstance(kind, ZeroCase) else native(case, *kind, net, fresh)


def native(case: Case, builder: str, options: dict[str, Any], net: nn.Module, fresh: bool) -> Training:
    built = BUILDERS[builder](net, **options) if builder else Built(net, net, 0, 1, {"type": type(net).__name__})
    mars = mars_for(built.wrapped, case, fresh)
    mars.attach(built.wrapped)

    def step(number: int) -> None:
        mars.zero_grad()
        engine_cases.backward(built, number)
        mars.step()

    def ahead(number: int) -> None:
        mars.zero_grad()
        engine_cases.backward(built, number)
        with mars.looking_ahead():
            mars.step()
        mars.zero_grad()

    weights = lambda: engine_cases.whole_parameters(built)  # noqa: E731
    return Training(mars, built.wrapped, mars, step, ahead, weights, dict(built.facts))


def deepspeed(case: Case, zero: ZeroCase, net: nn.Module, fresh: bool) -> Training:
    import deepspeed as ds

    from mars_dist.integrations.deepspeed.look_ahead import DeepSpeed

    ds.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for minutes
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    config = zero_cases.config(zero)
    config.pop("optimizer")
    config["zero_force_ds_cpu_optimizer"] = False
    engine, wrapper, *_ = ds.initialize(model=net, config=config, optimizer=mars_for(net, case, fresh))
    mine = torch.arange(12).view(dist.get_world_size(), -1)[dist.get_rank()]

    def backward(number: int) -> None:
        tokens, targets = nets.batch(number)
        engine.backward(engine(tokens[mine], targets[mine]))

    def step(number: int) -> None:
        backward(number)
        engine.step()

    def ahead(number: int) -> None:
        passes = DeepSpeed(engine)
        passes.zero_grad()
        with passes.aside():
            with passes.micro_batch(True):
                backward(number)
            passes.keep()
        passes.zero_grad()
        passes.close()

    def weights() -> dict[str, Tensor]:
        return zero_cases.parameters(net, engine, zero)

    facts = {"type": type(wrapper).__name__, "stage": engine.zero_optimization_stage()}
    return Training(engine, engine, engine.basic_optimizer, step, ahead, weights, facts, engine.destroy)


def facts(training: Training) -> dict[str, Any]:
    training.facts.pop("sizes", None)
    mars = training.mars
    active = {"engines": mars.engines(), "rule_counts": mars.rule_counts(), "optimizer": type(mars).__name__}
    return {**training.facts, **active}


def go(training: Training, case: Case, numbers: range, begun: bool = False) -> None:
    """The steps ``numbers``; in exact mode ``begun``: the gradient of the batch after the first was taken already."""
    for number in numbers:
        if case.is_exact and number + 1 < END and not (begun and number == numbers.start):
            training.ahead(number + 1)
        training.step(number)


def take(case: Case) -> dict[str, Any]:
    """Train, take the states, and train on: the states on rank 0, and the end.

    In exact mode the states are taken between a look-ahead and its step: ``next_prev_grad`` is there.
    """
    from mars_dist.checkpoint import full_states

    training = build(case, fresh=False)
    go(training, case, range(BEGIN))
    if case.is_exact:
        training.ahead(BEGIN + 1)
    states = full_states(training.optimizer, training.model)
    go(training, case, range(BEGIN, END), begun=True)
    out = {"states": states, "end": training.weights(), **facts(training)}
    training.close()
    return out


def go_on(case: Case, states: States, on_all: bool = False) -> dict[str, Any]:
    """Load into a fresh engine, and train on. ``on_all``: every rank has the states, and not rank 0 alone."""
    from mars_dist.checkpoint import full_states, load_full_states

    training = build(case, fresh=True)
    mine = states if on_all or not dist.is_initialized() or dist.get_rank() == 0 else {}
    with messages() as texts:
        load_full_states(training.optimizer, training.model, mine)
    again = full_states(training.optimizer, training.model)  # before the first step
    weights = training.weights()
    go(training, case, range(BEGIN, END), begun=True)
    out = {"again": again, "weights": weights, "end": training.weights(), "messages": texts, **facts(training)}
    training.close()
    return out


def save_files(case: Case, folder: str) -> dict[str, Any]:
    """Each rank writes what it holds into a file of its own."""
    from mars_dist.checkpoint import chunks_of, settings_of
    from mars_dist.checkpoint.tensors import file_name, write

    training = build(case, fresh=False)
    go(training, case, range(BEGIN))
    chunks = list(chunks_of(training.optimizer, training.model))
    settings = settings_of(training.optimizer, training.model)
    write(Path(folder) / file_name(dist.get_rank(), dist.get_world_size()), chunks, {"settings": json.dumps(settings)})
    out = {"bytes": sum(chunk.nbytes for chunk in chunks), **facts(training)}
    training.close()
    return out


def load_files(case: Case, folder: str) -> dict[str, Any]:
    from mars_dist.checkpoint import Reader, load_chunks

    training = build(case, fresh=True)
    reader = Reader(Path(folder))
    load_chunks(
        training.optimizer, training.model, reader, json.loads(next(iter(reader.metadata.values()))["settings"])
    )
    weights = training.weights()
    go(training, case, range(BEGIN, END))
    out = {"weights": weights, "end": training.weights(), **facts(training)}
    training.close()
    return out


def refused(case: Case, states: States) -> str:
    """What the load says, after which nothing is changed; "" where it loads."""
    from mars_dist.checkpoint import CheckpointError, full_states, load_full_states

    training = build(case, fresh=True)
    training.step(0)
    before = full_states(training.optimizer, training.model, rank0_only=False), training.weights()
    said = ""
    try:
        load_full_states(training.optimizer, training.model, states)
    except (CheckpointError, ValueError, RuntimeError) as error:
        said = str(error)
        after = full_states(training.optimizer, training.model, rank0_only=False), training.weights()
        assert equal(before[0]["tensors"], after[0]["tensors"]) and before[0]["settings"] == after[0]["settings"]
        assert equal({"": before[1]}, {"": after[1]})
        training.step(1)
    training.close()
    return said


def adamw(engine: str) -> dict[str, Any]:
    """AdamW of torch's: four steps, its states into a fresh engine, five steps in both."""
    import deepspeed as ds

    from mars_dist.checkpoint import full_states, load_full_states, remember

    def made(fresh: bool) -> tuple[Any, Any, Callable[[int], None], Callable[[], dict[str, Tensor]]]:
        net, zero = engine_nets.build("net"), ENGINES[engine]
        optimizer = torch.optim.AdamW(groups_of(net, SECOND_OF_ADAMW, fresh), lr=0.5 if fresh else 1e-2)
        remember(optimizer)
        ds.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        config = {k: v for k, v in zero_cases.config(zero).items() if k != "optimizer"}
        config |= {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
        made, wrapper, *_ = ds.initialize(model=net, config=config, optimizer=optimizer)
        assert type(wrapper).__name__ in USED and type(wrapper.optimizer) is torch.optim.AdamW
        mine = torch.arange(12).view(dist.get_world_size(), -1)[dist.get_rank()]

        def step(number: int) -> None:
            tokens, targets = nets.batch(number)
            made.backward(made(tokens[mine], targets[mine]))
            made.step()

        return made, wrapper, step, lambda: zero_cases.parameters(net, made, zero)

    from mars_dist.integrations.deepspeed.weights import USED

    first, wrapper, step, end = made(fresh=False)
    for number in range(BEGIN):
        step(number)
    states = full_states(first, first, rank0_only=False)
    for number in range(BEGIN, END):
        step(number)
    expected = end()
    first.destroy()
    second, _, step, end = made(fresh=True)
    load_full_states(second, second, states)
    weights = end()
    for number in range(BEGIN, END):
        step(number)
    out = {"states": states, "expected": expected, "weights": weights, "end": end(), "type": type(wrapper).__name__}
    second.destroy()
    return out


def summoned(case: Case) -> str:
    """States are asked for while FSDP1 shows whole tensors; a step and states after it go well."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    from mars_dist.checkpoint import full_states

    training = build(case, fresh=False)
    training.step(0)
    said = ""
    with FullyShardedDataParallel.summon_full_params(training.model, writeback=False):
        try:
            full_states(training.optimizer, training.model)
        except RuntimeError as error:
            said = str(error)
    training.step(1)
    assert len(full_states(training.optimizer, training.model, rank0_only=False)["tensors"]) == 9
    return said


def equal(a: dict[str, dict[str, Tensor]], b: dict[str, dict[str, Tensor]]) -> bool:
    return {n: {*v} for n, v in a.items()} == {n: {*v} for n, v in b.items()} and all(
        v.dtype == b[name][key].dtype and torch.equal(v, b[name][key])
        for name, its in a.items()
        for key, v in its.items()
    )


def many(calls: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Several functions of this module in one call, each by its name and arguments; tensors from rank 0 only."""
    results = [globals()[name](*args) for name, *args in calls]
    if dist.get_rank() == 0:
        return results
    return [{k: v for k, v in result.items() if k not in ("states", "again", "weights", "end")} for result in results]
