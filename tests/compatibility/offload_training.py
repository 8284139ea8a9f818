"""What runs on the ranks for the rows of offload.py and layout.py."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import nets
from tests.compatibility import aio_double
from tests.zero_cases import ZeroCase
from tests.zero_more_cases import Run, same


class Wide(nets.Net):
    """Large enough that pieces of it are swapped to disk, and small pieces beside them that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(nets.VOCABULARY, 63)
        self.linear = nn.Linear(63, 401)
        self.norm = nn.LayerNorm(401)
        self.narrow = nn.Linear(401, 1, bias=False)
        self.head = nn.Linear(401, nets.VOCABULARY, bias=False)


class Even(nets.Net):
    """On two ranks every piece is a multiple of 512 bytes, and all but two single numbers are large enough for disk."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(nets.VOCABULARY, 256)
        self.linear = nn.Linear(256, 512)
        self.norm = nn.LayerNorm(512)
        self.narrow = nn.Linear(512, 1, bias=False)
        self.head = nn.Linear(512, nets.VOCABULARY, bias=False)


class Nested(nets.Net):
    """Two layers in a module of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(self.linear, self.norm)
        del self.linear, self.norm

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.block(self.embedding(tokens))
        x = x + torch.tanh(self.narrow(x)) @ self.gain + self.shift
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


class Block(nn.Module):
    def __init__(self, linear: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = linear, norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.linear(x)))


nets.NETS |= {"wide": Wide, "even": Even, "nested": Nested}

ACTIVE: dict[str, Callable[[Any], Any]] = {}


def finish(run: Run, active: str) -> dict[str, Any]:
    proof = bool(ACTIVE[active](run.engine))
    return {**run.close(), "active": proof}


def train(case: ZeroCase, active: str) -> dict[str, Any]:
    run = Run(case)
    run.train(0, case.steps)
    return finish(run, active)


def train_born_partitioned(case: ZeroCase, active: str) -> dict[str, Any]:
    """In a model built under ``deepspeed.zero.Init``."""
    shapes: list[tuple[int, ...]] = []

    def build(name: str) -> nn.Module:
        net = nets.NETS[name]()
        shapes.extend(tuple(p.shape) for p in net.parameters())
        return net

    with mock.patch.object(nets, "build", build):
        run = Run(case, zero_init=True)
    assert set(shapes) == {(0,)}, "these parameters were not born partitioned"
    run.train(0, case.steps)
    return finish(run, active)


def train_with_torchs_linear(case: ZeroCase, active: str) -> dict[str, Any]:
    """DeepSpeed's own, once put into ``nn.functional``, stays there for the whole process: taken out for this run."""
    with mock.patch.object(nn.functional, "linear", torch._C._nn.linear):
        return train(case, active)


def continue_from_checkpoint(case: ZeroCase, active: str) -> dict[str, Any]:
    """Half of the training, a checkpoint, and the rest in another engine; replayed as one."""
    half = case.steps // 2
    everyone: list[Any] = [None] * dist.get_world_size()
    with tempfile.TemporaryDirectory() as folder:
        dist.all_gather_object(everyone, folder)
        run = Run(case)
        run.train(0, half)
        run.engine.save_checkpoint(everyone[0], tag="half")
        begun = run.close()
        run = Run(case)
        run.engine.load_checkpoint(everyone[0], tag="half")
        run.train(half, case.steps)
        ended = finish(run, active)
    return {**ended, "start": begun["start"], "gradients": begun["gradients"] + ended["gradients"]}


def _optimizer(attribute: str, *others: str) -> Callable[[Any], Any]:
    return lambda engine: any(getattr(engine.optimizer, name, False) for name in (attribute, *others))


def _in_order(engine: Any) -> bool:
    """Whether the parameters of each group lie in its flat in the order in which the group has them."""
    groups = [[p.storage_offset() for p in group] for group in engine.optimizer.bit16_groups]
    return all(offsets == sorted(offsets) for offsets in groups)


def _off(attribute: str) -> Callable[[Any], Any]:
    return lambda engine: getattr(engine.optimizer, attribute) is False


def _coordinator(engine: Any) -> dict[str, Any]:
    return vars(engine.optimizer.parameter_offload.get_param_coordinator())


def _aligned(engine: Any) -> bool:
    """Every parameter starts at a multiple of 16 bytes, and some would not without the padding."""
    padded = False
    for group in engine.optimizer.bit16_groups:
        for p, following in itertools.pairwise(group):
            padded |= p.data.storage_offset() + p.numel() < following.data.storage_offset()
    return padded and all(p.data.storage_offset() % 4 == 0 for g in engine.optimizer.bit16_groups for p in g)


def _is_leaf(engine: Any) -> bool:
    from deepspeed.utils import z3_leaf_module

    return any(z3_leaf_module(module) for module in engine.module.modules())


# ------------------------------------------------------------------------------------------------------------ layout

ACTIVE |= {
    "round_robin": lambda e: _optimizer("round_robin_gradients")(e) and not _in_order(e),
    "sub-groups": lambda e: len(e.optimizer.fp16_groups) > len(e.optimizer.optimizer.param_groups),
    "two groups": lambda e: len(e.optimizer.optimizer.param_groups) == 2,
    "nothing persists": lambda e: len(e.optimizer.persistent_parameters) == 0,
    "some persist": lambda e: 0 < len(e.optimizer.persistent_parameters) < len(list(e.module.parameters())),
    "all persist": lambda e: len(e.optimizer.persistent_parameters) == len(list(e.module.parameters())),
    "fetched late": lambda e: (
        _coordinator(e)["_PartitionedParameterCoordinator__max_n_available_params"] == 80
        and _coordinator(e)["_PartitionedParameterCoordinator__max_reuse_dist_in_numel"] == 10
        and _coordinator(e)["_PartitionedParameterCoordinator__prefetch_bucket_sz"] == 20
    ),
    "gradients apart": _off("contiguous_gradients"),
    "unused are errors": _off("ignore_unused_parameters"),
    "aligned": _aligned,
    "no gradient norm": lambda e: e.optimizer.compute_grad_norm is False and not e.get_global_grad_norm(),
    "leaf": _is_leaf,
    "memory-efficient linear": lambda e: nn.functional.linear.__module__ == "deepspeed.runtime.zero.linear",
    "apply as it was": lambda e: _apply_is_plain(),
    "torch's linear": lambda e: nn.functional.linear is torch._C._nn.linear,
    "16-bit weights": lambda e: e.zero_load_from_fp32_weights() is False,
    "unmanaged": lambda e: e.gradient_accumulation_steps() == 2 and e.global_steps == e.micro_steps > 0,
    "accumulates": lambda e: e.global_steps == e.micro_steps // 2 > 0,
}


def _apply_is_plain() -> bool:
    from deepspeed.runtime.zero.partition_parameters import Init

    return Init.override_module_apply is False


# ------------------------------------------------------------------------------------------------------------ memory

ACTIVE |= {
    "offload": lambda e: _optimizer("cpu_offload", "offload_optimizer")(e),
    "offload, pinned": _optimizer("cpu_offload_pin_memory", "offload_optimizer_pin_memory"),
    "offload, not pinned": lambda e: (
        _optimizer("cpu_offload", "offload_optimizer")(e)
        and not _optimizer("cpu_offload_pin_memory", "offload_optimizer_pin_memory")(e)
    ),
    "weights": lambda e: e.optimizer.offload_param and not e.optimizer.offload_optimizer,
    "weights and optimizer": lambda e: e.optimizer.offload_param and e.optimizer.offload_optimizer,
}


# ------------------------------------------------------------------------------------------------------------- disk

SMALLEST = 1024  # bytes; DeepSpeed's alignment. Smaller pieces stay in memory


def on_disk(case: ZeroCase, folder: str) -> ZeroCase:
    zero = {
        key: {**value, "nvme_path": folder} if key.startswith("offload_") and value["device"] == "nvme" else value
        for key, value in case.zero.items()
    }
    return replace(case, zero=zero)


@contextmanager
def disk() -> Iterator[str]:
    """A folder for the files, and the double that writes them."""
    from deepspeed.accelerator import get_accelerator

    # Where float16 is not supported DeepSpeed keeps weights on disk in bfloat16, whatever the model's precision.
    as_on_a_gpu = mock.patch.object(get_accelerator(), "is_fp16_supported", return_value=True)
    with tempfile.TemporaryDirectory() as folder, aio_double.installed(SMALLEST), as_on_a_gpu:
        yield folder


def train_on_disk(case: ZeroCase, active: str) -> dict[str, Any]:
    with disk() as folder:
        return train(on_disk(case, folder), active)


def continue_from_disk(case: ZeroCase, active: str) -> dict[str, Any]:
    """Half of the training, a checkpoint, and the rest in another engine with another folder."""
    from deepspeed.runtime.zero.partition_parameters import Init

    half = case.steps // 2
    everyone: list[Any] = [None] * dist.get_world_size()
    with disk() as first, disk() as second, disk() as checkpoint:
        dist.all_gather_object(everyone, checkpoint)
        Init.param_id = 0  # the files are named after it: count as another process would
        run = Run(on_disk(case, first))
        run.train(0, half)
        run.engine.save_checkpoint(everyone[0], tag="half")
        begun = run.close()
        Init.param_id = 0
        run = Run(on_disk(case, second))
        run.engine.load_checkpoint(everyone[0], tag="half")
        run.train(half, case.steps)
        ended = finish(run, active)
    return {**ended, "start": begun["start"], "gradients": begun["gradients"] + ended["gradients"]}


def continue_universal(case: ZeroCase, active: str) -> dict[str, Any]:
    """Half of the training, a universal checkpoint, and the rest in another engine (on as many ranks)."""
    from mars_dist.integrations.deepspeed.universal import convert

    half = case.steps // 2
    everyone: list[Any] = [None] * dist.get_world_size()
    with disk() as checkpoint:
        dist.all_gather_object(everyone, checkpoint)
        run = Run(case)
        run.train(0, half)
        run.engine.save_checkpoint(everyone[0], tag="half")
        begun = run.close()
        if dist.get_rank() == 0:
            convert(everyone[0], Path(everyone[0]) / "universal")
        dist.barrier()
        run = Run(case)
        run.engine.load_checkpoint(everyone[0])
        is_universal = run.engine.load_universal_checkpoint()
        run.train(half, case.steps)
        ended = {**run.close(), "active": is_universal}
        dist.barrier()  # the folder goes with the first rank
    return {**ended, "start": begun["start"], "gradients": begun["gradients"] + ended["gradients"]}


# ---------------------------------------------------------------------------------------------------- moved by hand


def train_and_move(case: ZeroCase, active: str) -> dict[str, Any]:
    """``engine.offload_states()`` and ``reload_states()`` before the first step and another one.

    ``active`` says what is moved ("all", or names of ``OffloadStateTypeEnum`` with commas). On a CPU DeepSpeed's moves
    are no moves: ``Tensor.to`` is made to copy meanwhile. What was left behind becomes NaN, so that it would show.
    """
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    include = None if active == "all" else [OffloadStateTypeEnum(name) for name in active.split(",")]
    run = Run(case)
    moved = []
    for step in range(case.steps):
        if step in (0, 4):
            before = movable(run, active)
            with copying():
                run.engine.offload_states(include=include, pin_memory=case.dtype == "bf16")
                run.engine.reload_states()
            after = movable(run, active)
            moved.append(len(before))
            for old, new in zip(before, after, strict=True):
                assert old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr(), "not moved"
                assert same([old], [new])
                old.fill_(float("nan"))
        run.train(step, step + 1)
    return {**run.close(), "active": moved[-1] > 0}


def movable(run: Run, what: str) -> list[Tensor]:
    """Aliases of the tensors that DeepSpeed should give other memory."""
    optimizer = run.engine.optimizer
    tensors: list[Tensor] = []
    if what == "all" or "optim_states" in what:
        tensors += [t for state in run.mars.state.values() for t in state.values()]
    if what == "all" or "hp_params" in what:
        tensors += getattr(optimizer, "single_partition_of_fp32_groups", [])
    if what == "all" or "lp_params" in what:
        tensors += getattr(optimizer, "bit16_groups_flat", None) or [optimizer.lp_param_buffer]
    if what != "all" and "lp_grads" in what:
        tensors += [optimizer.grad_partitions_flat_buffer]
    return [t.detach() for t in tensors]


@contextmanager
def copying() -> Iterator[None]:
    to = Tensor.to
    with mock.patch.object(Tensor, "to", lambda self, *args, **kwargs: to(self, *args, **{**kwargs, "copy": True})):
        yield


def _is_on_disk(engine: Any) -> bool:
    """Every swapped tensor has its file; without pipelining it has no memory between steps."""
    optimizer = engine.optimizer
    swapper = optimizer.optimizer_swapper
    files = {path.name for path in Path(swapper.swap_folder).iterdir()}
    swapped = [i for i in range(len(optimizer.fp16_groups)) if optimizer._swappable_optimizer_subgroup(i)]
    for i in swapped:
        flat = optimizer.fp32_partitioned_groups_flat[i]
        state = optimizer.optimizer.state[flat]
        names = [f"{key}-{flat.ds_id}.tensor.swp" for key in state if key != "step"]
        assert {f"{flat.ds_id}.tensor.swp", *names} <= files, files
        if not hasattr(swapper, "swap_ops"):
            assert all(t.numel() == (key == "step") for key, t in [("", flat), *state.items()])
    return len(swapped) > 2 and aio_double.Handle.counts["reads"] > 100


ACTIVE["disk"] = _is_on_disk
ACTIVE["disk, pipelined"] = lambda engine: (
    _is_on_disk(engine)
    and (engine.optimizer.optimizer_swapper.async_swap_in or engine.optimizer.optimizer_swapper.async_swap_out)
)
ACTIVE["disk, weights too"] = lambda engine: (
    _is_on_disk(engine) and any(p.ds_tensor.status.name == "NOT_AVAILABLE" for p in engine.module.parameters())
)
