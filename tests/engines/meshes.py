"""Rows of the engines whose parameters are DTensors: FSDP2, HSDP, tensor parallelism, and both together."""

from __future__ import annotations

from typing import Any

from tests.engine_cases import EngineCase
from tests.engines.data_parallel import LION, MATRIX, every
from tests.engines.row import EVERY, Row

FSDP2 = "`fully_shard` (FSDP2)"
HSDP = "`fully_shard` on a mesh of two dimensions (HSDP)"
TENSOR = "`parallelize_module` (tensor parallel)"
BOTH = "tensor parallel x FSDP2"
ON_ROWS = ("DTensor (Shard(dim=0),)",)


def fsdp2(feature: str, cases: tuple[EngineCase, ...], *active: tuple[str, Any], **more: Any) -> Row:
    options: dict[str, Any] = {"engines": ON_ROWS, **more}
    return Row(FSDP2, feature, cases=cases, active=(("plain", 0), *active), **options)


NO_DECAY = ((("head", "norm"), {"weight_decay": 0.0}),)
SWAPPED = {
    "fsdp2": every("fsdp2", {}, built="swapped", groups=NO_DECAY),
    "hsdp": every("fsdp2", {"mesh": "square"}, built="swapped", groups=NO_DECAY),
}

MESHES: list[Row] = [
    fsdp2(
        "module by module or in one group, uneven and empty shards",
        every("fsdp2", {}, {"nested": False}, {"reshard": False}),
        note="also `reshard_after_forward=False`",
    ),
    fsdp2("ranks without a piece", every("fsdp2", {}, net="single")),
    fsdp2(
        "cut along another dimension (`shard_placement_fn`)",
        every("fsdp2", {"dim": 1}, net="layers"),
        engines=("DTensor (Shard(dim=0),)", "DTensor (Shard(dim=1),)"),
    ),
    fsdp2(
        "`MixedPrecisionPolicy` (bfloat16)",
        every("fsdp2", {"bf16": True}),
        same_as_one_process=False,
    ),
    fsdp2(
        "`CPUOffloadPolicy`",
        every("fsdp2", {"offload": True}),
        note="run without pinned memory",
    ),
    fsdp2(
        "activation checkpointing",
        every("fsdp2", {"checkpoint": True}),
        ("checkpointed", 3),
    ),
    fsdp2(
        "`torch.compile`d model",
        every("fsdp2", {"compile": True}),
        ("compiled", True),
        note="run with the backend `aot_eager`",
    ),
    fsdp2(
        "tied embeddings",
        every("fsdp2", {"nested": False}, net="tied"),
        note="in one group; torch refuses two",
    ),
    fsdp2("frozen parameters (LoRA)", every("fsdp2", {}, net="lora")),
    fsdp2(
        "convolutions, experts",
        tuple(
            EngineCase(
                "fsdp2",
                {},
                "kernels",
                params={"matrix_ndim": (2, 3, 4), **p},
                groups=groups,
            )
            for p in ({}, LION, *MATRIX)
            for groups in ((), ((("head",), {"use_mars": False, "lr": 5e-3}),))
        )
        + tuple(
            EngineCase(
                "fsdp2",
                {},
                "kernels",
                params=p,
                groups=((("experts", "plane.w"), {"use_mars": True}),),
            )
            for p in ({}, LION)
        ),
        note="by `matrix_ndim=(2, 3, 4)` or a group's `use_mars`; the clip is per tensor",
    ),
    fsdp2(
        "matrix variants in rounds",
        tuple(EngineCase("fsdp2", params={**p, "matrix_buffer_mb": 1e-5}) for p in MATRIX),
        in_rounds=True,
        variants=EVERY[2:],
        note="by `matrix_buffer_mb`",
    ),
    fsdp2("parameters put into the groups after construction", SWAPPED["fsdp2"], note="as Accelerate does"),
    fsdp2(
        "`model.to()` after the optimizer was built",
        every("fsdp2", {}, before="to"),
        same_as_one_process=False,
    ),
    Row(
        HSDP,
        "2 x 2 ranks",
        cases=every("fsdp2", {"mesh": "square"}, {"mesh": "square", "nested": False}),
        ranks=(4,),
        engines=("DTensor (Replicate(), Shard(dim=0))",),
        active=(("plain", 0), ("placements", {"(Replicate(), Shard(dim=0))"})),
    ),
    Row(
        HSDP,
        "parameters put into the groups after construction",
        cases=SWAPPED["hsdp"],
        ranks=(4,),
        engines=("DTensor (Replicate(), Shard(dim=0))",),
        active=(("plain", 0),),
        note="as Accelerate does",
    ),
    Row(
        TENSOR,
        "`ColwiseParallel`, `RowwiseParallel`; plain tensors in the same groups",
        cases=every("tensor_parallel", {}, net="layers"),
        engines=(
            "DTensor (Shard(dim=0),)",
            "DTensor (Shard(dim=1),)",
            "DTensor (Replicate(),)",
            "whole tensors",
        ),
        active=(("dtensors", 6), ("plain", 3)),
    ),
    Row(
        TENSOR,
        "`SequenceParallel`",
        cases=every("tensor_parallel", {"sequence": True}, net="layers"),
        collectives=3,
        engines=(
            "DTensor (Shard(dim=0),)",
            "DTensor (Shard(dim=1),)",
            "DTensor (Replicate(),)",
            "whole tensors",
        ),
        active=(("dtensors", 8), ("plain", 1)),
        note="one more all-reduce for each norm weight and bias, whose gradients arrive as partial sums",
    ),
    Row(
        BOTH,
        "2 x 2 ranks, also both on one dimension of a tensor",
        cases=every(
            "tensor_parallel",
            {"data": True},
            {"data": True, "sequence": True},
            net="layers",
        ),
        ranks=(4,),
        collectives=2,
        groups=2,
        engines=(
            "DTensor (Shard(dim=0),)",
            "DTensor (Shard(dim=0), Replicate())",
            "DTensor (Shard(dim=0), Shard(dim=1))",
            "DTensor (_StridedShard(dim=0, sf=2), Shard(dim=0))",
        ),
        active=(("plain", 0),),
    ),
    Row(
        BOTH,
        "2 x 2 ranks, FSDP2 along another dimension",
        cases=every("tensor_parallel", {"data": True, "dim": 1}, net="layers"),
        ranks=(4,),
        collectives=2,
        groups=2,
        engines=(
            "DTensor (Shard(dim=0),)",
            "DTensor (Shard(dim=0), Replicate())",
            "DTensor (Shard(dim=1), Shard(dim=0))",
            "DTensor (_StridedShard(dim=0, sf=2), Shard(dim=0))",
            "DTensor (_StridedShard(dim=1, sf=2), Shard(dim=1))",
        ),
        active=(("plain", 0),),
    ),
    Row(
        FSDP2,
        "exact mode",
        shown_by="tests/test_exact_engines.py::test_replay",
        ranks=(2,),
        note="by `mars_dist.exact.ExactMode`",
    ),
    Row(
        HSDP,
        "exact mode",
        shown_by="tests/test_exact_engines.py::test_replay",
        ranks=(4,),
        note="by `mars_dist.exact.ExactMode`",
    ),
    *(
        Row(
            engine,
            "exact mode",
            shown_by="tests/test_exact_engines.py::test_replay_under_tensor_parallelism",
            variants=("mars-adamw", "mars-m"),
            ranks=(4,),
            note="by `mars_dist.exact.ExactMode`",
        )
        for engine in (TENSOR, BOTH)
    ),
]
