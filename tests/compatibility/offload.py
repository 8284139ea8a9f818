"""Optimizer and weights kept in the memory of the host or on disk."""

from dataclasses import replace
from typing import Any

from tests.compatibility.offload_training import (
    continue_from_disk,
    continue_universal,
    train,
    train_and_move,
    train_on_disk,
)
from tests.compatibility.row import BASE, Row
from tests.zero_cases import ZeroCase

SECTION = "Offload"
ZERO = "zero_optimization"
OPTIMIZER = f"{ZERO}.offload_optimizer"
PARAM = f"{ZERO}.offload_param"
SMALL = {"sub_group_size": 60}
ZENFLOW = {"topk_ratio": 0.1, "select_strategy": "step", "select_interval": 2, "update_interval": 2}


def memory(stage: int, zero: dict[str, Any] | None = None, **case: Any) -> ZeroCase:
    """The optimizer in the memory of the host; ``zero`` is merged with that."""
    offload = {"device": "cpu", **(zero or {}).get("offload_optimizer", {})}
    whole = {**(SMALL if stage == 3 else {}), **(zero or {}), "offload_optimizer": offload}
    return ZeroCase(stage, **{"params": BASE, "zero": whole, **case})


# With one tensor in each sub-group every gradient is read to the start of a buffer: the op needs aligned memory.
DISK = {"sub_group_size": 1, "stage3_param_persistence_threshold": 0}
AIO = {"aio": {"block_size": 512, "queue_depth": 4, "single_submit": True, "overlap_events": False}}


def disk(buffers: int, params: dict[str, Any] = BASE, weights: int = 0, **options: Any) -> ZeroCase:
    """The optimizer on disk; ``weights`` is the size of the buffers for weights on disk as well."""
    case = {key: options.pop(key) for key in ("dtype", "construct", "clip", "net") if key in options}
    zero = {**DISK, "offload_optimizer": {"device": "nvme", "buffer_count": buffers, **options}}
    if weights:
        zero["offload_param"] = {"device": "nvme", "buffer_count": 12, "buffer_size": weights, "max_in_cpu": 0}
    return ZeroCase(3, params=params, zero=zero, extra=AIO, **{"net": "wide", **case})


AMSGRAD = {**BASE, "amsgrad": True}
LION = {**BASE, "mars_type": "mars-lion"}
BOTH: dict[str, Any] = {"pipeline_read": True, "pipeline_write": True}
ON_DISK_FOR_GOOD: dict[str, Any] = {
    "answer": "warns",
    "message": "cannot restore the optimizer from a checkpoint",
    "note": "No checkpoint can be loaded. Run with a double of DeepSpeed's `async_io` op.",
}
ON_DISK = (
    f"{OPTIMIZER}.device",
    f"{OPTIMIZER}.nvme_path",
    f"{OPTIMIZER}.buffer_count",
    *(f"aio.{key}" for key in AIO["aio"]),
)

OFFLOAD = [
    Row(
        SECTION,
        '`offload_optimizer`, `"device": "cpu"`',
        (f"{OPTIMIZER}.device", f"{OPTIMIZER}.pin_memory"),
        tuple(memory(s, {"offload_optimizer": {"pin_memory": True}}, construct="groups") for s in (1, 2, 3)),
        "offload, pinned",
        train,
        note="On a CPU DeepSpeed pins nothing.",
    ),
    Row(
        SECTION,
        "the same, `pin_memory: false`",
        (f"{OPTIMIZER}.pin_memory",),
        tuple(memory(s, {"offload_optimizer": {"pin_memory": False}}, construct="groups") for s in (1, 2, 3)),
        "offload, not pinned",
        train,
    ),
    Row(
        SECTION,
        "a MARS object with `zero_force_ds_cpu_optimizer: false`",
        ("zero_force_ds_cpu_optimizer",),
        tuple(memory(s, construct="instance", extra={"zero_force_ds_cpu_optimizer": False}) for s in (1, 2, 3)),
        "offload",
        train,
    ),
    Row(
        SECTION,
        "a MARS object without that key",
        (),
        (
            memory(1, construct="instance"),
            memory(2, construct="instance", extra={"zero_force_ds_cpu_optimizer": True}),
            memory(3, construct="instance"),
        ),
        "",
        train,
        "refused",
        '"zero_force_ds_cpu_optimizer": false',
        "DeepSpeed says so itself.",
    ),
    Row(
        SECTION,
        "`cpu_offload` (the old name)",
        (f"{ZERO}.cpu_offload", f"{ZERO}.cpu_offload_use_pin_memory"),
        tuple(
            ZeroCase(s, params=BASE, zero={"cpu_offload": True, "cpu_offload_use_pin_memory": True}) for s in (1, 2, 3)
        ),
        "offload",
        train,
    ),
    Row(
        SECTION,
        '`offload_param`, `"device": "cpu"`',
        (f"{PARAM}.device", f"{PARAM}.pin_memory", f"{ZERO}.cpu_offload_param"),
        (
            ZeroCase(3, params=BASE, zero={**SMALL, "offload_param": {"device": "cpu"}}, construct="groups"),
            ZeroCase(3, "bf16", params=BASE, zero={"offload_param": {"device": "cpu", "pin_memory": False}}),
            ZeroCase(3, params=BASE, zero={"cpu_offload_param": True}),
        ),
        "weights",
        train,
    ),
    Row(
        SECTION,
        '`offload_param` and `offload_optimizer`, `"device": "cpu"`',
        (f"{PARAM}.device", f"{OPTIMIZER}.device"),
        (
            memory(3, {"offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}),
            memory(3, {"offload_param": {"device": "cpu"}}, dtype="bf16", construct="groups"),
        ),
        "weights and optimizer",
        train,
    ),
    Row(
        SECTION,
        "`offload_optimizer.ratio` below 1",
        (f"{OPTIMIZER}.ratio",),
        tuple(memory(3, {"offload_optimizer": {"ratio": ratio}}) for ratio in (0.3, 0.9)),
        "",
        train,
        "refused",
        r"offload_optimizer\.ratio",
        "DeepSpeed takes it with its own CPU Adam only.",
    ),
    Row(
        SECTION,
        "`offload_optimizer.super_offload`",
        (f"{OPTIMIZER}.super_offload",),
        (memory(3, {"offload_optimizer": {"super_offload": True}}),),
        "",
        train,
        "refused",
        r"offload_optimizer\.super_offload",
        "DeepSpeed would step with its own Adam.",
    ),
    Row(
        SECTION,
        "`zenflow`",
        (f"{ZERO}.zenflow",),
        tuple(memory(s, {"zenflow": ZENFLOW}) for s in (2, 3)),
        "",
        train,
        "refused",
        r"zero_optimization\.zenflow",
        "DeepSpeed would step with its own AdamW.",
    ),
    Row(
        SECTION,
        '`offload_optimizer`, `"device": "nvme"`',
        ON_DISK,
        (
            disk(5, clip=0.3),
            disk(5, dtype="bf16", construct="groups"),
            disk(6, AMSGRAD),
        ),
        "disk",
        train_on_disk,
        **ON_DISK_FOR_GOOD,
    ),
    Row(
        SECTION,
        "the same, MARS-Lion",
        ON_DISK,
        (disk(4, LION),),
        "disk",
        train_on_disk,
        counts={"MARS-Lion": 5, "AdamW": 4},
        **ON_DISK_FOR_GOOD,
    ),
    Row(
        SECTION,
        "the same, `pipeline_read`, `pipeline_write`",
        (f"{OPTIMIZER}.pipeline_read", f"{OPTIMIZER}.pipeline_write"),
        (disk(10, pipeline_read=True), disk(10, pipeline_write=True), disk(15, **BOTH)),
        "disk, pipelined",
        train_on_disk,
        **ON_DISK_FOR_GOOD,
    ),
    Row(
        SECTION,
        '`offload_param`, `"device": "nvme"`, beside it',
        tuple(f"{PARAM}.{key}" for key in ("device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu")),
        (disk(5, weights=40_000), disk(15, weights=40_000, **BOTH)),
        "disk, weights too",
        train_on_disk,
        **ON_DISK_FOR_GOOD,
    ),
    Row(
        SECTION,
        "vectors on disk as well",
        ON_DISK,
        (disk(5, net="even"),),
        "disk",
        train_on_disk,
        **ON_DISK_FOR_GOOD,
    ),
    Row(
        SECTION,
        "vectors on disk as well, `fast_init`",
        (f"{OPTIMIZER}.fast_init",),
        (
            disk(5, net="even", construct="groups", weights=70_000, fast_init=True),
            disk(15, net="even", weights=70_000, fast_init=True, **BOTH),
        ),
        "disk",
        train_on_disk,
        **ON_DISK_FOR_GOOD,
        ranks=(2,),
    ),
    Row(
        SECTION,
        "`buffer_count` too small for the states",
        (f"{OPTIMIZER}.buffer_count",),
        (disk(4), disk(5, AMSGRAD), disk(3, LION), disk(9, pipeline_read=True), disk(14, **BOTH)),
        "",
        train_on_disk,
        "refused",
        r"zero_optimization\.offload_optimizer\.buffer_count = ",
        "value, gradient and every state need a buffer: 5 for MARS-AdamW, once more for each pipeline.",
    ),
    Row(
        SECTION,
        "gradients that would be read to an odd place in a buffer",
        (f"{OPTIMIZER}.device",),
        (replace(disk(5), zero={**disk(5).zero, "sub_group_size": 256}),),
        "",
        train_on_disk,
        "refused",
        r"zero_optimization\.offload_optimizer\.device.*512 bytes",
        "DeepSpeed's `async_io` would leave wrong numbers there, without a word.",
    ),
    Row(
        SECTION,
        '`"device": "nvme"` below stage 3',
        (f"{OPTIMIZER}.device",),
        tuple(memory(s, {"offload_optimizer": {"device": "nvme"}}) for s in (1, 2)),
        "offload",
        train_on_disk,
        "warns",
        r"zero_optimization\.offload_optimizer\.device",
        "DeepSpeed keeps it in memory.",
    ),
    Row(
        SECTION,
        "`checkpoint.load_universal`",
        ("checkpoint.load_universal",),
        tuple(ZeroCase(s, params=BASE, extra={"checkpoint": {"load_universal": True}}) for s in (1, 2, 3)),
        "",
        continue_universal,
        note="After `mars-dist checkpoint convert`; other numbers of ranks and stages: `tests/test_universal.py`.",
        ranks=(2,),
    ),
    Row(
        SECTION,
        "`checkpoint.load_universal` without ZeRO",
        ("checkpoint.load_universal",),
        (ZeroCase(0, params=BASE, extra={"checkpoint": {"load_universal": True}}),),
        "",
        train,
        "refused",
        r"Error: MARS: checkpoint\.load_universal",
        "DeepSpeed would not load the weights.",
        ranks=(2,),
    ),
    Row(
        SECTION,
        "`load_checkpoint` where the optimizer is on disk",
        (f"{OPTIMIZER}.device",),
        (disk(5),),
        "",
        continue_from_disk,
        "refused",
        r"Error: MARS: load_checkpoint with zero_optimization\.offload_optimizer\.device",
        "DeepSpeed does not restore what stayed in memory: counters, small tensors, all states in a new engine.",
    ),
    Row(
        SECTION,
        "`engine.offload_states()` and `reload_states()`",
        (),
        (ZeroCase(1, params=BASE, construct="groups"), ZeroCase(2, "bf16", params=BASE, construct="groups")),
        "all",
        train_and_move,
    ),
    Row(
        SECTION,
        "the same at stage 3, weights and gradients",
        (),
        (ZeroCase(3, params=BASE, zero=SMALL), ZeroCase(3, "bf16", params=BASE, construct="groups")),
        "lp_params,lp_grads,contiguous_grad_buffer",
        train_and_move,
    ),
    Row(
        SECTION,
        "the same at stage 3, optimizer states and master weights",
        (),
        (ZeroCase(3, params=BASE),),
        "all",
        train_and_move,
        "refused",
        "Offloading is supported only for DeepSpeed FusedAdam",
        "DeepSpeed says so itself, for every optimizer but its FusedAdam.",
    ),
]
