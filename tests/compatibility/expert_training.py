"""What runs on the ranks where experts are spread over them: DeepSpeed's own layer, and AutoEP."""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import nets, zero_cases
from tests.compatibility.parallel_training import Engine, groups_of_its_own, token_loss, union
from tests.zero_cases import LR, ZeroCase

EXPERTS, EXPERT_RANKS = 4, 2


class Mixture(nn.Module):
    """Embedding, a layer of experts, norm, head. ``gain`` and ``shift`` have fewer elements than there are ranks."""

    def __init__(self) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.embedding = nn.Embedding(nets.VOCABULARY, 6)
        expert = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6))
        self.moe = MoE(6, expert, EXPERTS, EXPERT_RANKS, k=1, capacity_factor=EXPERTS, use_rts=False)
        self.norm = nn.LayerNorm(6)
        self.gain = nn.Parameter(torch.full((1, 1), 0.5))
        self.shift = nn.Parameter(torch.full((1,), 0.25))
        self.head = nn.Linear(6, nets.VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        y, auxiliary, _ = self.moe(x)
        x = self.norm(x + y.to(x.dtype) * self.gain)
        x = x + torch.tanh(x + self.shift)
        return token_loss(self.head(x), targets) + 0.01 * auxiliary


# Of one rank: embedding, gate, gain, head and two matrices of each of its two experts; norm (2), shift, and biases.
MIXTURE_COUNTS = {"MARS-AdamW": 4 + 4, "AdamW": 3 + 4}


def experts(case: ZeroCase, active: str) -> dict[str, Any]:
    """``deepspeed.moe.layer.MoE``: four experts on pairs of ranks. ``construct``: "json", "instance" (client's)."""
    with groups_of_its_own():
        from deepspeed.moe.utils import is_moe_param

        torch.manual_seed(1234)
        net = Mixture()
        # Which ranks hold the same experts: every second one, or those that follow each other.
        first_data = case.extra.get("use_data_before_expert_parallelism", False)
        world = dist.get_world_size()
        turn = dist.get_rank() // (world // EXPERT_RANKS) if first_data else dist.get_rank() % EXPERT_RANKS
        with torch.no_grad():  # DeepSpeed begins with copies of one expert
            for number, p in enumerate(p for p in net.parameters() if is_moe_param(p)):
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * turn + number)) * 0.1)
        arguments = {"optimizer": mars_of_client(net, case)} if case.construct == "instance" else {}
        run = Engine(case, net, lambda name, p: f"{name} of {turn}" if is_moe_param(p) else name, **arguments)
        engine, public = run.engine, {}
        for step in range(case.steps):
            tokens, targets = nets.batch(step)
            mine = torch.arange(12).view(world, -1)[dist.get_rank()]
            engine.backward(engine(tokens[mine], targets[mine]))
            if step == 0 and case.stage > 0 and case.dtype == "fp32":
                public = union({run.own[name]: g for name, g in zero_cases.public_gradients(net).items()})
            engine.step()
            run.recorder.end_of_update()
        proof = engine.has_moe_layers and engine.num_experts == [EXPERTS]
        if case.stage > 0:  # one table over the ranks that share an expert, one over all; one sum over each
            sizes = {dist.get_world_size(*layout.process_groups) for layout in run.mars._tables.seen()}
            proof = proof and sizes == {world // EXPERT_RANKS, world}
            calls_per_update = len(run.recorder.collectives) // case.steps
            last = [call for calls in run.recorder.collectives[-calls_per_update:] for call in calls]
            sums = [call for call in last if call[0] == "all_reduce"]  # matrix variants: pieces of matrices besides
            assert sums == [("all_reduce", 4)] * 2, f"not exactly one for each of the two groups: {last}"
        return {**run.result(public), "active": proof}


def mars_of_client(net: nn.Module, case: ZeroCase) -> Any:
    """MARS on the groups that DeepSpeed's documentation tells the client to make, vectors apart from matrices."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    import mars_dist

    groups = split_params_into_different_moe_groups_for_optimizer(
        [
            {"params": [p for p in net.parameters() if p.ndim == 2], "name": "matrices"},
            {"params": [p for p in net.parameters() if p.ndim != 2], "name": "vectors"},
        ]
    )
    return mars_dist.MARS(groups, **{**LR, **case.params})


class Bank(nn.Module):
    """Experts as transformers keeps them: a tensor with three dimensions for each of their layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 24, 8) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, 8, 12) * 0.3)
        self.act_fn = nn.SiLU()


class Router(nn.Module):
    """What AutoEP looks for in a model; it puts a layer of its own in its place before the first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, EXPERTS, bias=False)
        self.experts = Bank()

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("DeepSpeed did not put its own layer in the place of this one")


class AutoMixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(
            model_type="mine", num_local_experts=EXPERTS, num_experts_per_tok=2, hidden_size=8
        )
        self.embedding = nn.Embedding(nets.VOCABULARY, 8)
        self.mlp = Router()
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, nets.VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return token_loss(self.head(self.norm(x + self.mlp(x))), targets)


AUTO_EP = {
    "enabled": True,
    "autoep_size": EXPERT_RANKS,
    "use_grouped_mm": False,
    "moe_layer_pattern": "mlp",
    "router_pattern": "gate",
    "expert_pattern": "experts",
    "expert_w1": "gate_up_proj",
    "expert_w2": "down_proj",
    "expert_w3": None,
    "num_experts_attr": "num_local_experts",
    "top_k_attr": "num_experts_per_tok",
}
# Embedding, router, head; the norm (2). The experts have three dimensions.
AUTO_COUNTS = {"MARS-AdamW": 3, "AdamW": 2 + 3}


def auto_experts(case: ZeroCase, active: str) -> dict[str, Any]:
    """AutoEP: DeepSpeed puts a layer of its own in the place of the model's, its experts spread over pairs of ranks."""
    with groups_of_its_own():
        from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
        from deepspeed.moe.utils import is_moe_param

        torch.manual_seed(1234)
        net = AutoMixture()
        world, turn = dist.get_world_size(), dist.get_rank() % EXPERT_RANKS
        run = Engine(
            case,
            net,
            lambda name, p: f"{name} of {turn}" if is_moe_param(p) else name,
            {"expert_parallel": AUTO_EP},
            rebuilt=True,
        )
        for step in range(case.steps):
            tokens, targets = nets.batch(step)
            mine = torch.arange(12).view(world, -1)[dist.get_rank()]
            run.engine.backward(run.engine(tokens[mine], targets[mine]))
            run.engine.step()
            run.recorder.end_of_update()
        layers = [module for module in run.engine.module.modules() if isinstance(module, AutoEPMoELayer)]
        proof = len(layers) == 1 and layers[0].ep_size == EXPERT_RANKS
        if case.stage > 0:
            sizes_of_groups = {dist.get_world_size(*layout.process_groups) for layout in run.mars._tables.seen()}
            proof = proof and sizes_of_groups == {world // EXPERT_RANKS, world}
        return {**run.result(), "active": proof, "shapes": {n: tuple(t.shape) for n, t in run.start.items()}}
