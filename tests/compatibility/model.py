"""The rows about what the model is and how it is run: compiled, recomputed, frozen in part, with adapters, with tensors
of other ranks, under a schedule. Importing this module adds its nets to ``nets.NETS``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests import nets
from tests.compatibility import precision_training as training
from tests.compatibility.precision_training import Result, replay_with_the_settings_seen
from tests.compatibility.row import BASE, Row
from tests.zero_cases import LR, ZeroCase

SECTION = "Model"


class Recomputed(nets.Net):
    """The hidden layer is computed again in the backward pass."""

    kind = "non-reentrant"

    def hidden(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.linear(x)))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.kind == "deepspeed":
            import deepspeed

            x = deepspeed.checkpointing.checkpoint(self.hidden, x)
        else:
            x = torch.utils.checkpoint.checkpoint(self.hidden, x, use_reentrant=self.kind == "reentrant")
        x = x + torch.tanh(self.narrow(x)) @ self.gain + self.shift
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


class Reentrant(Recomputed):
    kind = "reentrant"


class RecomputedByDeepSpeed(Recomputed):
    kind = "deepspeed"


class HighRanks(nn.Module):
    """A convolution (4-D), one (3-D) weight of two experts, matrices, a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(nets.VOCABULARY, 6)
        self.convolution = nn.Conv2d(1, 5, 3, padding=1)
        self.experts = nn.Parameter(torch.randn(2, 30, 7) * 0.2)
        self.head = nn.Linear(14, nets.VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = torch.tanh(self.convolution(self.embedding(tokens).unsqueeze(1))).transpose(1, 2).flatten(2)
        x = torch.tanh(torch.einsum("btd,edh->bteh", x, self.experts)).flatten(2)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


def bitfit() -> nn.Module:
    """Only the vectors are trained."""
    net = nets.Net()
    for p in net.parameters():
        p.requires_grad_(len(getattr(p, "ds_shape", p.shape)) == 1)
    return net


def lora() -> nn.Module:
    """PEFT's adapters on the embedding and two linear layers of a frozen net; its biases are trained too."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=2, lora_alpha=4, target_modules=["embedding", "linear", "head"], bias="all")
    return get_peft_model(nets.Net(), adapters)


nets.NETS |= {"recomputed": Recomputed, "reentrant": Reentrant, "recomputed by DeepSpeed": RecomputedByDeepSpeed}
nets.NETS |= {"high ranks": HighRanks}
nets.NETS |= {"bitfit": bitfit, "lora": lora}  # type: ignore[dict-item]


def train(case: ZeroCase, active: str) -> Result:
    return training.train(case, active)


def train_born_partitioned(case: ZeroCase, active: str) -> Result:
    return training.train_born_partitioned(case, active)


def everywhere(net: str = "net", stages: tuple[int, ...] = (0, 1, 2, 3), **more: Any) -> tuple[ZeroCase, ...]:
    return tuple(ZeroCase(stage, **{"params": BASE, "net": net, **more}) for stage in stages)


def schedule(kind: str, **params: Any) -> tuple[ZeroCase, ...]:
    """One stage with whole tensors, one with flats, one with sub-groups."""
    return everywhere(stages=(0, 2, 3), extra={"scheduler": {"type": kind, "params": params}})


def scheduled(kind: str, **params: Any) -> Row:
    return Row(
        SECTION,
        f"`scheduler.type`: {kind}",
        ("scheduler.type", "scheduler.params"),
        schedule(kind, **params),
        "lr moves",
        training.train,
        replay=replay_with_the_settings_seen,
    )


MODEL: list[Row] = [
    Row(
        SECTION,
        "`engine.compile()`",
        (),
        everywhere(),
        "compiled",
        training.train_compiled,
        note="with the backend `eager`: the graph is captured, no code is generated",
    ),
    Row(
        SECTION,
        "`torch.utils.checkpoint`",
        (),
        (*everywhere("recomputed", (0, 2, 3)), *everywhere("reentrant", (2, 3))),
        "recomputed",
        train,
    ),
    Row(
        SECTION,
        "`torch.utils.checkpoint` in a model made under `zero.Init`",
        (),
        (*everywhere("recomputed", (3,)), *everywhere("reentrant", (3,))),
        "recomputed",
        train_born_partitioned,
    ),
    Row(
        SECTION,
        "`activation_checkpointing`",
        ("activation_checkpointing.partition_activations", "activation_checkpointing.cpu_checkpointing"),
        everywhere(
            "recomputed by DeepSpeed",
            (0, 2, 3),
            extra={"activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False}},
        ),
        "recomputed by DeepSpeed",
        train,
        note="`deepspeed.checkpointing.checkpoint` in the model",
    ),
    Row(
        SECTION,
        "LoRA adapters of PEFT",
        (),
        everywhere("lora"),
        "frozen",
        train,
        counts={"MARS-AdamW": 6, "AdamW": 2},
        note="on an embedding and two linear layers, with biases",
    ),
    Row(
        SECTION,
        "LoRA adapters of PEFT under `zero.Init`",
        (),
        everywhere("lora", (3,)),
        "frozen",
        train_born_partitioned,
        counts={"MARS-AdamW": 6, "AdamW": 2},
    ),
    Row(
        SECTION,
        "frozen parameters",
        (),
        everywhere("frozen", (0, 2, 3)),
        "frozen",
        training.train,
        counts={"MARS-AdamW": nets.MATRICES - 1, "AdamW": nets.VECTORS - 1},
    ),
    Row(SECTION, "only vectors trained (BitFit)", (), everywhere("bitfit"), "frozen", train, counts={"AdamW": 4}),
    Row(
        SECTION,
        "tied weights",
        (),
        everywhere("tied", (0, 2, 3)),
        "tied",
        training.train,
        counts={"MARS-AdamW": 2, "AdamW": 3},
    ),
    Row(
        SECTION, "layers left out in some steps", (), everywhere("short", (0, 2, 3), steps=16), "short", training.train
    ),
    Row(
        SECTION,
        "convolutions and batches of matrices",
        (),
        everywhere("high ranks", (2, 3)),
        "high ranks",
        train,
        counts={"MARS-AdamW": 2, "AdamW": 3},
        note="plain AdamW unless `matrix_ndim` names their ranks",
    ),
    Row(
        SECTION,
        "convolutions and batches of matrices with `matrix_ndim`",
        (),
        everywhere("high ranks", (0, 2, 3), params={**BASE, "matrix_ndim": [2, 3, 4]}),
        "high ranks",
        train,
        counts={"MARS-AdamW": 4, "AdamW": 1},
    ),
    Row(
        SECTION,
        "convolutions under `zero.Init` with `matrix_ndim`",
        (),
        everywhere("high ranks", (3,), params={**BASE, "matrix_ndim": [2, 3, 4]}),
        "high ranks",
        train_born_partitioned,
        counts={"MARS-AdamW": 4, "AdamW": 1},
    ),
    scheduled("WarmupLR", warmup_min_lr=0.0, warmup_max_lr=LR["lr"], warmup_num_steps=6, warmup_type="linear"),
    scheduled("WarmupDecayLR", warmup_max_lr=LR["lr"], warmup_num_steps=3, total_num_steps=12, warmup_type="linear"),
    scheduled("WarmupCosineLR", warmup_num_steps=3, total_num_steps=12),
    scheduled("LRRangeTest", lr_range_test_min_lr=2e-3, lr_range_test_step_size=2, lr_range_test_step_rate=0.5),
    Row(
        SECTION,
        "`scheduler.type`: OneCycle",
        ("scheduler.type", "scheduler.params", "scheduler.params.cycle_momentum"),
        schedule("OneCycle", cycle_min_lr=2e-3, cycle_max_lr=LR["lr"], cycle_first_step_size=6, cycle_momentum=True),
        "lr and betas move",
        training.train,
        answer="warns",
        message=r"scheduler\.params\.cycle_momentum.*betas",
        note="`cycle_momentum` (on unless turned off) replaces `betas`, and with them the strength of the correction",
        replay=replay_with_the_settings_seen,
    ),
    Row(
        SECTION,
        "`scheduler.type`: OneCycle with `cycle_momentum: false`",
        ("scheduler.type", "scheduler.params"),
        schedule("OneCycle", cycle_min_lr=2e-3, cycle_max_lr=LR["lr"], cycle_first_step_size=6, cycle_momentum=False)[
            1:
        ],
        "only lr moves",
        training.train,
        replay=replay_with_the_settings_seen,
    ),
    Row(
        SECTION,
        "DeepCompile",
        ("compile.deepcompile",),
        (),
        answer="untested",
        note="needs CUDA; `offload_opt_states` would move `exp_avg` and `exp_avg_sq` out of the way, not `prev_grad`",
    ),
    Row(
        SECTION,
        "Hybrid engine",
        ("hybrid_engine.enabled",),
        (),
        answer="untested",
        note="generation between steps of training; needs CUDA kernels",
    ),
]
