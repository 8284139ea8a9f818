"""Rows of the matrix variants: pieces of the momentum go to the owner of each matrix and come back as pieces of d."""

from __future__ import annotations

from tests.compatibility import communication_training, expert_training, model, parallel_training
from tests.compatibility.layout import ZERO
from tests.compatibility.offload import ON_DISK, ON_DISK_FOR_GOOD, disk, memory
from tests.compatibility.offload_training import train as train_offloaded
from tests.compatibility.offload_training import train_on_disk
from tests.compatibility.precision_training import train as train_precisely
from tests.compatibility.row import BASE, Row
from tests.zero_cases import ZeroCase

SECTION = "Matrix variants"
# The iteration in float32, whatever the model computes in: what the numbers are compared in.
SHAMPOO = {**BASE, "mars_type": "mars-shampoo", "ns_dtype": "float32"}
MARS_M = {**BASE, "mars_type": "mars-m", "ns_dtype": "float32"}
UNPINNED = {"offload_optimizer": {"pin_memory": False}}
BOTH = (SHAMPOO, MARS_M)
FLOAT32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}

MATRICES: list[Row] = [
    Row(
        SECTION,
        "ZeRO stages",
        (f"{ZERO}.stage",),
        tuple(ZeroCase(s, d, params=p) for s in (3, 2, 1, 0) for d in ("fp32", "bf16") for p in BOTH),
        ranks=(2, 3, 4),
    ),
    Row(
        SECTION,
        "`gradient_clipping`, `gradient_accumulation_steps`",
        ("gradient_clipping", "gradient_accumulation_steps"),
        (
            ZeroCase(1, params=MARS_M, clip=0.1, accumulation=2, steps=20),
            ZeroCase(2, params=SHAMPOO, clip=0.1, accumulation=2, steps=20),
            ZeroCase(3, params=MARS_M, clip=0.1, accumulation=2, steps=20),
        ),
        "accumulates",
        train_offloaded,
    ),
    Row(
        SECTION,
        "`data_types.grad_accum_dtype: fp32` at stage 1",
        ("data_types.grad_accum_dtype",),
        (ZeroCase(1, "bf16", params=SHAMPOO, extra=FLOAT32_SUMS, accumulation=2, steps=20),),
        "BF16_Optimizer",
        train_precisely,
        note="DeepSpeed's BF16_Optimizer",
    ),
    Row(
        SECTION,
        '`offload_optimizer`, `"device": "cpu"`',
        (f"{ZERO}.offload_optimizer.device", f"{ZERO}.offload_optimizer.pin_memory"),
        (
            memory(1, UNPINNED, params=SHAMPOO, construct="groups"),
            memory(2, UNPINNED, params=MARS_M, construct="groups"),
            memory(3, UNPINNED, params=SHAMPOO, construct="groups"),
        ),
        "offload, not pinned",
        train_offloaded,
        note="with sub-groups at stage 3",
    ),
    Row(
        SECTION,
        '`offload_optimizer`, `"device": "nvme"`',
        ON_DISK,
        (disk(4, MARS_M),),
        "disk",
        train_on_disk,
        **ON_DISK_FOR_GOOD,
    ),
    Row(
        SECTION,
        "small `sub_group_size`",
        (f"{ZERO}.sub_group_size",),
        (ZeroCase(3, params=MARS_M, zero={"sub_group_size": 30}, construct="groups"),),
        "sub-groups",
        train_offloaded,
    ),
    Row(
        SECTION,
        "`round_robin_gradients`",
        (f"{ZERO}.round_robin_gradients",),
        (ZeroCase(2, params=SHAMPOO, zero={"round_robin_gradients": True}, construct="groups"),),
        "round_robin",
        train_offloaded,
    ),
    Row(
        SECTION,
        "several rounds (`matrix_buffer_mb`)",
        (),
        tuple(ZeroCase(s, params={**MARS_M, "matrix_buffer_mb": 1e-5}) for s in (1, 2, 3)),
    ),
    Row(
        SECTION,
        "batches of matrices (experts) with `matrix_ndim: [2, 3]`",
        (),
        tuple(ZeroCase(s, params={**SHAMPOO, "matrix_ndim": [2, 3]}, net="high ranks") for s in (0, 2, 3)),
        "high ranks",
        model.train,
        counts={"MARS-AdamW": 3, "AdamW": 2},
        note="orthogonalised one by one; convolutions with `matrix_ndim: [2, 3, 4]`",
    ),
    Row(
        SECTION,
        "convolutions with `matrix_ndim: [2, 3, 4]`",
        (),
        tuple(ZeroCase(s, params={**MARS_M, "matrix_ndim": [2, 3, 4]}, net="high ranks") for s in (2, 3)),
        "high ranks",
        model.train,
        counts={"MARS-AdamW": 4, "AdamW": 1},
    ),
    Row(
        SECTION,
        "tied weights",
        (),
        tuple(ZeroCase(s, params=MARS_M, net="tied") for s in (0, 2, 3)),
        "tied",
        train_precisely,
        counts={"MARS-AdamW": 2, "AdamW": 3},
    ),
    Row(
        SECTION,
        "LoRA adapters of PEFT",
        (),
        tuple(ZeroCase(s, params=SHAMPOO, net="lora") for s in (2, 3)),
        "frozen",
        model.train,
        counts={"MARS-AdamW": 6, "AdamW": 2},
    ),
    Row(
        SECTION,
        "(in, out) weights, the exact factor, one state",
        (),
        (
            *(ZeroCase(s, params={**SHAMPOO, "fan_in_fan_out": True}) for s in (1, 3)),
            *(ZeroCase(s, params={**MARS_M, "orthogonalizer": "svd"}) for s in (1, 3)),
            *(ZeroCase(s, params={**MARS_M, "clip": None}) for s in (1, 3)),
        ),
        note="`fan_in_fan_out`, `orthogonalizer`, `clip: null`",
    ),
    Row(
        SECTION,
        "Mixture of experts (`deepspeed.moe.layer.MoE`)",
        (),
        tuple(ZeroCase(s, params={**MARS_M, "clip": 0.01}) for s in (0, 1, 2)),
        function=expert_training.experts,
        counts=expert_training.MIXTURE_COUNTS,
        ranks=(2, 4),
    ),
    Row(
        SECTION,
        "Pipeline (`PipelineModule`, `engine.train_batch`)",
        (),
        tuple(ZeroCase(s, params=p) for s in (0, 1) for p in BOTH),
        function=parallel_training.pipeline,
        counts=parallel_training.PIPELINE_COUNTS,
        ranks=(2, 4),
    ),
    Row(
        SECTION,
        "Ulysses sequence parallelism with `mpu`",
        (),
        tuple(ZeroCase(s, params=MARS_M) for s in (0, 1, 2, 3)),
        "mpu",
        parallel_training.sequence,
        ranks=(2, 4),
    ),
    Row(
        SECTION,
        "`zero_hpz_partition_size` (ZeRO++)",
        (f"{ZERO}.zero_hpz_partition_size",),
        (ZeroCase(3, params=MARS_M, zero={"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}),),
        "second partition",
        communication_training.communicate,
        ranks=(2, 4),
    ),
]
