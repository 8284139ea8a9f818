"""What runs on the ranks where the gradients or the weights travel in another way, quantised for example."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import nets
from tests.compatibility.parallel_training import Engine, groups_of_its_own, of_one_process, token_loss
from tests.zero_cases import ZeroCase


def gathers(net: nn.Module) -> Any:
    """The object with which stage 3 gathers the weights."""
    parameter: Any = next(net.parameters())
    return inspect.getclosurevars(inspect.unwrap(parameter.all_gather)).nonlocals["self"]


# Read off the engine between a backward pass and its step: does it really do what the configuration asks for?
ACTIVE: dict[str, Callable[[Any], Any]] = {
    "communicates in bf16": lambda engine: (
        engine.communication_data_type == torch.bfloat16
        and getattr(engine.optimizer, "communication_data_type", torch.bfloat16) == torch.bfloat16
    ),
    "prescales": lambda engine: not getattr(engine.optimizer, "postscale_gradients", engine.postscale_gradients()),
    "predivides": lambda engine: (
        getattr(engine.optimizer, "gradient_predivide_factor", engine.gradient_predivide_factor()) == 4.0
    ),
    "sums": lambda engine: not getattr(engine.optimizer, "gradient_average", engine.gradient_average),
    "reduces without scatter": lambda engine: not engine.optimizer.reduce_scatter,
    "overlaps": lambda engine: (
        engine.zero_overlap_comm()
        and engine.optimizer.reduce_bucket_size == 50
        and getattr(engine.optimizer, "overlap_comm", True)
    ),
    "reduces to one rank": lambda engine: not engine.optimizer.use_multi_rank_bucket_allreduce,
    "fetches by all-reduce": lambda engine: gathers(engine.module).use_all_reduce_for_fetch_params,
    "gathers one by one": lambda engine: gathers(engine.module).allgather_sequential,
    "gradients apart": lambda engine: not engine.optimizer.contiguous_gradients,
    "second partition": lambda engine: all(
        p.ds_secondary_tensor.numel() == -(-p.ds_numel // dist.get_world_size()) * dist.get_world_size() // 2
        for p in engine.module.parameters()
    ),
    "": lambda engine: True,
}


def communicate(case: ZeroCase, active: str) -> dict[str, Any]:
    """The ordinary training, with the gradients of the first step as one process has them."""
    with groups_of_its_own():
        plain = nets.build(case.net)
        first = of_one_process(plain(*nets.batch(0)), dict(plain.named_parameters()))
        if active == "sums":
            first = {name: gradient * dist.get_world_size() for name, gradient in first.items()}
        run = Engine(case, nets.build(case.net))
        engine = run.engine
        for step in range(case.steps):
            tokens, targets = nets.batch(step)
            mine = torch.arange(12).view(dist.get_world_size(), -1)[dist.get_rank()]
            engine.backward(engine(tokens[mine], targets[mine]))
            proof = bool(ACTIVE[active](engine))
            engine.step()
            run.recorder.end_of_update()
        narrow = active == "communicates in bf16"
        result = run.result(first if case.dtype == "fp32" and not narrow else None)
        if narrow:  # the first gradients are those of one process, but for the rounding on the way
            pairs = [(result["gradients"][0][name], gradient.double().flatten()) for name, gradient in first.items()]
            off = max(((got - want).norm() / want.norm()).item() for got, want in pairs)
            proof = proof and 1e-4 < off < 1e-2
        return {**result, "active": proof}


# ------------------------------------------------------------------------------------------------ quantised transport


class Quantizer:
    """A double of DeepSpeed's CUDA op: the same calls and shapes, symmetric quantisation by plain torch operations.

    It shows what DeepSpeed and MARS do with such weights and gradients, and nothing of the kernels.
    """

    Symmetric = 0

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def quantize(self, tensor: Tensor, groups: int, bits: int, kind: int) -> tuple[Tensor, Tensor]:
        self.calls["quantize"] += 1
        return self._pack(tensor, groups, bits)

    def dequantize(self, packed: Tensor, scales: Tensor, groups: int, bits: int, kind: int) -> Tensor:
        self.calls["dequantize"] += 1
        return self._unpack(packed, scales, bits).half()

    def swizzle_quant(
        self, tensor: Tensor, groups: int, bits: int, kind: int, pipeline: int, nodes: int, devices: int
    ) -> tuple[Tensor, Tensor]:
        assert devices == 1, "this double keeps the order of the pieces, which is right for one device per machine"
        self.calls["swizzle_quant"] += 1
        return self._pack(tensor.flatten(), groups, bits)

    def quantized_reduction(
        self, packed: Tensor, scales: Tensor, groups: int, groups_out: int, bits: int, kind: int, devices: int
    ) -> tuple[Tensor, Tensor]:
        assert devices == 1
        return self._pack(self._unpack(packed, scales, bits), groups_out, bits)

    @staticmethod
    def _pack(tensor: Tensor, groups: int, bits: int) -> tuple[Tensor, Tensor]:
        highest = 2 ** (bits - 1) - 1
        rows = tensor.detach().float().reshape(groups, -1)
        scales = rows.abs().amax(1).clamp_min(1e-12) / highest
        whole = (rows / scales.unsqueeze(1)).round().to(torch.int8).reshape(tensor.shape)
        if bits == 4:
            whole = (whole[..., ::2] & 15) | (whole[..., 1::2] << 4)
        return whole.contiguous(), scales

    @staticmethod
    def _unpack(packed: Tensor, scales: Tensor, bits: int) -> Tensor:
        if bits == 4:
            packed = torch.stack(((packed << 4) >> 4, packed >> 4), dim=-1).flatten(-2)
        return (packed.float().reshape(scales.numel(), -1) * scales.reshape(-1, 1)).reshape(packed.shape)


class Even(nn.Module):
    """A net whose pieces have as many elements as the quantiser asks for, with a layer in the middle to freeze."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 16)
        self.middle = nn.Linear(16, 16, bias=False).requires_grad_(not frozen)
        self.linear = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 16, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = torch.tanh(self.linear(self.middle(self.embedding(tokens))))
        return token_loss(self.head(self.norm(x)), targets)


EVEN_COUNTS = {"MARS-AdamW": 4, "AdamW": 3}
QUANTISED = {
    "weights": lambda double, net: double.calls["quantize"] > 0 and double.calls["dequantize"] > 0,
    "gradients": lambda double, net: double.calls["swizzle_quant"] > 0,
    "frozen": lambda double, net: net.middle.weight.ds_tensor.dtype == torch.int8 and double.calls["dequantize"] > 0,
}


@contextlib.contextmanager
def double_of_the_quantizer() -> Iterator[Quantizer]:
    from deepspeed.runtime.comm import coalesced_collectives
    from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer

    double = Quantizer()
    before = CUDAQuantizer.quantizer_cuda_module, coalesced_collectives.quantizer_module, os.environ.get("LOCAL_SIZE")
    CUDAQuantizer.quantizer_cuda_module = coalesced_collectives.quantizer_module = double
    os.environ["LOCAL_SIZE"] = "1"  # one device per machine
    try:
        yield double
    finally:
        CUDAQuantizer.quantizer_cuda_module, coalesced_collectives.quantizer_module, size = before
        os.environ.pop("LOCAL_SIZE") if size is None else os.environ.update(LOCAL_SIZE=size)


def quantised(case: ZeroCase, active: str) -> dict[str, Any]:
    """ZeRO++ with a double of the CUDA op. ``active``: "weights", "gradients" or "frozen"."""
    with groups_of_its_own(), double_of_the_quantizer() as double:
        import deepspeed

        torch.manual_seed(1234)
        net = Even(frozen=active == "frozen")
        before = net.middle.weight.detach().clone()
        run = Engine(case, net)
        for step in range(case.steps):
            tokens, targets = nets.batch(step)
            mine = torch.arange(12).view(dist.get_world_size(), -1)[dist.get_rank()]
            run.engine.backward(run.engine(tokens[mine], targets[mine]))
            run.engine.step()
            run.recorder.end_of_update()
        proof = bool(QUANTISED[active](double, net))
        with deepspeed.zero.GatheredParameters([net.middle.weight]):
            off = (net.middle.weight.float() - before).abs().max().item()
        result = run.result()
        if active == "frozen":
            for part in ("start", "end"):
                del result[part]["middle.weight"]
        return {**result, "active": proof, "calls": dict(double.calls), "off": off}
