"""Where the one all-reduce of a step takes place: always on a device that the process group can reduce on.

With the state offloaded to the CPU and NCCL between the ranks, a vector has to move to the accelerator and back. There
is none here: a second device is acted by the "meta" device, whose tensors keep their values on the side.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from mars_dist.sharding import norms

GROUP = cast(ProcessGroup, object())  # only asked about through torch.distributed
CPU = torch.device("cpu")


class OnAccelerator(Tensor):
    """A tensor of the "accelerator": its device is meta, its values are in ``held``."""

    held: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> OnAccelerator:
        self = Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=torch.device("meta"))
        self.held = values
        return self

    def tolist(self) -> Any:
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"{func} on the accelerator was not expected")


class Machine(TorchDispatchMode):
    """Two ranks and one process group. Counts moves between host and accelerator, and reductions."""

    def __init__(self, backend: str, ranks: int = 2) -> None:
        super().__init__()
        self.backend, self.ranks = backend, ranks
        self.other: list[float] = []  # what the other rank brings
        self.to_accelerator = self.to_host = self.reductions = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default:
            target = kwargs["device"]
            if target.type == "meta":
                self.to_accelerator += 1
                return OnAccelerator(args[0].clone())
            if isinstance(args[0], OnAccelerator):
                self.to_host += 1
                return args[0].held.clone()
        return func(*args, **kwargs)

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        assert group is GROUP
        assert tensor.device.type == ("cpu" if "cpu:" in self.backend else "meta"), (
            f"No backend type associated with device type {tensor.device.type}"
        )
        self.reductions += 1
        mine = tensor.held if isinstance(tensor, OnAccelerator) else tensor
        both = torch.stack([mine, torch.tensor(self.other, dtype=mine.dtype)])
        mine.copy_(both.sum(0) if op == dist.ReduceOp.SUM else both.amax(0))

    def counts(self) -> tuple[int, int, int]:
        return self.to_accelerator, self.reductions, self.to_host


def machine(patch: pytest.MonkeyPatch, backend: str, ranks: int = 2) -> Machine:
    made = Machine(backend, ranks)
    patch.setattr(norms, "KEEP_COLLECTIVES", False)
    patch.setattr(dist, "get_backend_config", lambda group: backend)
    patch.setattr(dist, "get_world_size", lambda group: ranks)
    patch.setattr(dist, "all_reduce", made.all_reduce)
    patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    return made


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with machine(monkeypatch, "cuda:nccl") as made:
        yield made


@pytest.fixture
def gloo(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with machine(monkeypatch, "cpu:gloo,cuda:gloo") as made:
        yield made


def test_a_vector_on_the_host_goes_to_the_accelerator_and_back(nccl: Machine) -> None:
    nccl.other = [10.0, 20.0, 30.0]
    vector = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    total = norms.sum_over_ranks(vector, GROUP)
    assert nccl.counts() == (1, 1, 1)
    assert total.device == CPU and total.dtype == torch.float64
    assert total.tolist() == [11.0, 22.0, 33.0]


def test_a_vector_on_the_accelerator_stays_there(nccl: Machine) -> None:
    nccl.other = [10.0]
    total = norms.sum_over_ranks(OnAccelerator(torch.tensor([1.0])), GROUP)
    assert nccl.counts() == (0, 1, 0)
    assert isinstance(total, OnAccelerator) and total.tolist() == [11.0]


def test_a_group_that_reduces_on_the_host_keeps_the_vector(gloo: Machine) -> None:
    gloo.other = [10.0]
    total = norms.sum_over_ranks(torch.tensor([1.0]), GROUP)
    assert gloo.counts() == (0, 1, 0)
    assert total.tolist() == [11.0]


@pytest.mark.parametrize("other", [77, 78], ids=["same", "different"])
@pytest.mark.parametrize("fixture", ["nccl", "gloo"])
def test_the_comparison_of_the_ranks_moves_and_reduces_once(
    fixture: str, other: int, request: pytest.FixtureRequest
) -> None:
    ranks: Machine = request.getfixturevalue(fixture)
    ranks.other = [other, -other]
    assert norms.check_same(77, GROUP, CPU) is (other == 77)
    assert ranks.counts() == (int(fixture == "nccl"), 1, 0)


def test_large_numbers_are_compared_exactly(gloo: Machine) -> None:
    number = 2**62 + 1
    gloo.other = [number + 1, -number - 1]
    assert not norms.check_same(number, GROUP, CPU)


def test_one_rank_has_nobody_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    vector = torch.tensor([1.0])
    with machine(monkeypatch, "cuda:nccl", ranks=1) as alone:
        assert norms.sum_over_ranks(vector, GROUP) is vector
        assert alone.counts() == (0, 0, 0)
        assert not norms.is_shared(GROUP) and not norms.is_shared(None)

        monkeypatch.setattr(norms, "KEEP_COLLECTIVES", True)  # as tests/gpu/run.sh has it
        alone.other = [0.0]
        assert norms.sum_over_ranks(vector, GROUP).tolist() == [1.0]
        assert alone.counts() == (1, 1, 1)


def test_the_double_refuses_what_nccl_refuses(nccl: Machine) -> None:
    with pytest.raises(AssertionError, match="No backend type associated with device type cpu"):
        nccl.all_reduce(torch.ones(1), group=GROUP)


def test_no_accelerator_is_said(nccl: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    with pytest.raises(AssertionError, match="cannot reduce CPU tensors needs an accelerator"):
        norms.sum_over_ranks(torch.ones(1), GROUP)
