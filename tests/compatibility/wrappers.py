"""The rows about precision: which wrapper DeepSpeed puts around MARS, what it scales, and what it keeps in 16 bits.

Importing this module adds its net to ``nets.NETS``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests import nets
from tests.compatibility import precision_training as training
from tests.compatibility.precision_training import Result, replay_from_each_point
from tests.compatibility.row import BASE, Row
from tests.zero_cases import LR, ZeroCase

SECTION = "Wrappers"
# Said by mars_dist, or by DeepSpeed, which takes these keys with its own CPU Adam only.
NOT_CPU_ADAM = r"master_weights_and_grads|Master weights feature requires ZeRO-\d Offload with DeepSpeedCPUAdam"


class WithBuffer(nets.Net):
    """A buffer takes part in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.linspace(-0.5, 0.5, 6))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = self.norm(torch.tanh(self.linear(x + self.offset.to(x.dtype))))
        x = x + torch.tanh(self.narrow(x)) @ self.gain + self.shift
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


nets.NETS |= {"buffer": WithBuffer}


def train(case: ZeroCase, active: str) -> Result:
    return training.train(case, active)


def section(name: str, **keys: Any) -> dict[str, Any]:
    return {name: {"enabled": True, **keys}}


def cases(dtype: str, *stages: int | str, **more: Any) -> tuple[ZeroCase, ...]:
    """``stages``: 2, or "2 offload" for the optimizer on the CPU."""
    engines = [(int(str(stage)[0]), "offload" in str(stage)) for stage in stages]
    return tuple(ZeroCase(stage, dtype, offload, **{"params": BASE, **more}) for stage, offload in engines)


FP16_DYNAMIC = section(
    "fp16", initial_scale_power=10, loss_scale_window=2, hysteresis=1, consecutive_hysteresis=True, min_loss_scale=2
)
BF16_STATES = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
LEGACY = {"optimizer": {"type": "MARS", "params": {**LR, **BASE}, "legacy_fusion": True}}

WRAPPERS: list[Row] = [
    Row(
        SECTION,
        "`fp16` with a static `loss_scale`",
        ("fp16.enabled", "fp16.loss_scale", "fp16.auto_cast"),
        cases("fp16", 1, 2, 3, "2 offload", "3 offload", extra=section("fp16", loss_scale=1024, auto_cast=True)),
        "fp16, static",
        training.train_with_an_overflow,
        note="a step that overflows on one rank leaves everything on all ranks as it was",
    ),
    Row(
        SECTION,
        "`fp16` with a dynamic loss scale",
        ("fp16.enabled", *(f"fp16.{key}" for key in FP16_DYNAMIC["fp16"] if key != "enabled")),
        cases("fp16", 1, 2, 3, extra=FP16_DYNAMIC),
        "fp16, dynamic",
        training.train_with_an_overflow,
        answer="warns",
        message=r"fp16\.enabled.*halves",
        note="a step that overflows on one rank leaves everything on all ranks as it was",
    ),
    Row(
        SECTION,
        "`fp16` that begins with overflows",
        ("fp16.enabled", "fp16.initial_scale_power", "fp16.hysteresis"),
        cases("fp16", 1, 2, 3, steps=12, extra=section("fp16", initial_scale_power=24, hysteresis=1)),
        "fp16 from too high a scale",
        training.train,
        answer="warns",
        message=r"fp16\.enabled.*halves",
        note="the first step that is taken is step 1 of MARS",
    ),
    Row(
        SECTION,
        "`fp16` without ZeRO",
        ("fp16.enabled",),
        (
            *cases("fp16", 0, extra=section("fp16", loss_scale=1024)),
            *cases("fp16", 0, extra=section("fp16")),
        ),
        function=training.train,
        answer="refused",
        message=r"MARS: fp16\.enabled",
        note="DeepSpeed divides the gradients by a loss scale that it has not applied",
    ),
    Row(
        SECTION,
        "`fp16_master_weights_and_grads`",
        ("fp16.fp16_master_weights_and_grads",),
        cases("fp16", 1, "2 offload", "3 offload", extra=section("fp16", fp16_master_weights_and_grads=True)),
        function=training.train,
        answer="refused",
        message=NOT_CPU_ADAM,
        note="DeepSpeed takes it with its own CPU Adam only",
    ),
    Row(
        SECTION,
        "`bf16_master_weights_and_grads` with float32 states, or with offload",
        ("bf16.bf16_master_weights_and_grads",),
        (
            *cases("bf16", 1, 3, "1 offload", "2 offload", extra=section("bf16", bf16_master_weights_and_grads=True)),
            *cases("bf16", "2 offload", "3 offload", extra=section("bf16", **BF16_STATES)),
        ),
        function=training.train,
        answer="refused",
        message=NOT_CPU_ADAM,
        note="DeepSpeed takes it with its own CPU Adam only",
    ),
    Row(
        SECTION,
        "`bf16_master_weights_and_grads` with `bf16_optimizer_states`",
        ("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"),
        cases("bf16", 1, 2, 3, extra=section("bf16", **BF16_STATES)),
        "bf16 masters",
        training.train_step_by_step,
        answer="warns",
        message=r"bf16\.bf16_optimizer_states.*float32",
        note="the values are rounded to bfloat16 once a step; MARS keeps its moments in float32",
        replay=replay_from_each_point,
    ),
    Row(
        SECTION,
        "`bf16` with ZeRO",
        ("bf16.enabled",),
        cases("bf16", 1, "1 offload", "2 offload", "3 offload"),
        "bf16",
        training.train,
    ),
    Row(
        SECTION,
        "`bf16` without ZeRO",
        ("bf16.enabled",),
        cases("bf16", 0),
        "FP16_UnfusedOptimizer",
        training.train,
        note="its dry run at construction is no step",
    ),
    Row(
        SECTION,
        "`bf16.check_grad_overflow: false`",
        ("bf16.check_grad_overflow",),
        cases("bf16", 1, 2, "1 offload", "2 offload", extra=section("bf16", check_grad_overflow=False)),
        "no overflow check",
        training.train,
        answer="warns",
        message=r"bf16\.check_grad_overflow.*skip_nonfinite",
        note="stages 1 and 2, where one NaN reaches every weight unless `skip_nonfinite` is set; stage 3 checks anyway",
    ),
    Row(
        SECTION,
        "`data_types.grad_accum_dtype: fp32` at stage 1",
        ("data_types.grad_accum_dtype",),
        cases("bf16", 1, extra={"data_types": {"grad_accum_dtype": "fp32"}}, accumulation=2, steps=20),
        "BF16_Optimizer",
        training.train,
        note="DeepSpeed's BF16_Optimizer",
    ),
    Row(
        SECTION,
        "`bf16.immediate_grad_update`",
        ("bf16.immediate_grad_update",),
        cases(
            "bf16",
            1,
            extra={**section("bf16", immediate_grad_update=True), "data_types": {"grad_accum_dtype": "fp32"}},
        ),
        "gradients at once",
        training.train,
        note="DeepSpeed reads it in its BF16_Optimizer only (stage 1, `grad_accum_dtype: fp32`)",
    ),
    Row(
        SECTION,
        "`data_types.grad_accum_dtype: fp32` at stages 2 and 3",
        ("data_types.grad_accum_dtype",),
        cases(
            "bf16",
            2,
            3,
            "2 offload",
            "3 offload",
            extra={"data_types": {"grad_accum_dtype": "fp32"}},
            accumulation=2,
            steps=20,
        ),
        "accumulation in fp32",
        training.train,
    ),
    Row(
        SECTION,
        "`data_types.grad_accum_dtype: bf16`",
        ("data_types.grad_accum_dtype",),
        cases("bf16", 1, 2, 3, extra={"data_types": {"grad_accum_dtype": "bf16"}}, accumulation=2, steps=20),
        "accumulation in bf16",
        training.train,
    ),
    Row(
        SECTION,
        "`data_types.param_dtype`, `data_types.buffer_dtype`",
        ("data_types.param_dtype", "data_types.buffer_dtype"),
        cases("bf16", 0, 2, 3, net="buffer", extra={"data_types": {"param_dtype": "bf16", "buffer_dtype": "bf16"}}),
        "buffer in bf16",
        train,
    ),
    Row(
        SECTION,
        "`data_types.keep_in_fp32_modules`",
        ("data_types.keep_in_fp32_modules",),
        cases(
            "bf16",
            2,
            3,
            net="buffer",
            extra={"data_types": {"buffer_dtype": "bf16", "keep_in_fp32_modules": ["offset"]}},
        ),
        "buffer in fp32",
        train,
    ),
    Row(
        SECTION,
        "`torch_autocast` in bfloat16",
        ("torch_autocast.enabled", "torch_autocast.dtype"),
        cases("fp32", 0, 1, 2, 3, extra=section("torch_autocast", dtype="bfloat16")),
        "bf16 activations",
        training.train,
    ),
    Row(
        SECTION,
        "`torch_autocast` without a `dtype`",
        ("torch_autocast.enabled",),
        cases("fp32", 0, 2, extra=section("torch_autocast")),
        "bf16 activations",
        training.train,
        answer="warns",
        message=r"torch_autocast\.enabled.*Say .dtype.: .bfloat16",
        note="bfloat16 on a CPU; on a GPU torch takes float16, without a loss scale",
    ),
    Row(
        SECTION,
        "`data_types.grad_accum_dtype: fp16`",
        ("data_types.grad_accum_dtype",),
        (),
        answer="untested",
        note="bf16 and fp32 are tested",
    ),
    Row(
        SECTION,
        "`torch_autocast.lower_precision_safe_modules`",
        ("torch_autocast.lower_precision_safe_modules",),
        cases(
            "fp32",
            1,
            2,
            3,
            extra=section("torch_autocast", dtype="bfloat16", lower_precision_safe_modules=["torch.nn.Embedding"]),
        ),
        "chosen modules in bf16",
        training.train,
        note="their gradients are summed over the ranks in bfloat16",
    ),
    Row(
        SECTION,
        "`torch_autocast` in float16 without ZeRO",
        ("torch_autocast.enabled", "torch_autocast.dtype"),
        cases("fp32", 0, extra=section("torch_autocast", dtype="float16")),
        "fp16 activations",
        training.train_with_an_overflow,
        note="a step that overflows on one rank leaves everything on all ranks as it was",
    ),
    Row(
        SECTION,
        "`torch_autocast` in float16 with ZeRO",
        ("torch_autocast.dtype",),
        cases("fp32", 1, 2, 3, clip=1.0, extra=section("torch_autocast", dtype="float16")),
        function=training.train,
        answer="refused",
        message=r"MARS: torch_autocast\.dtype",
        note="DeepSpeed clips before it takes the loss scale away, and never lowers the scale after an overflow",
    ),
    Row(
        SECTION,
        "`optimizer.legacy_fusion`",
        ("optimizer.legacy_fusion",),
        (*cases("bf16", 0, extra=LEGACY), *cases("fp32", 2, extra=LEGACY)),
        "legacy fusion",
        training.train,
        note="DeepSpeed reads it for its own fused Adam only",
    ),
]
