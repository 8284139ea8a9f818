"""After values were loaded into the optimizer, the weights that the model under DeepSpeed computes with follow.

The one place that knows how each wrapper of DeepSpeed brings values from the float32 master (or its own copy of them)
to the model, as it does at the end of a step. ``mars_dist.checkpoint`` asks here through ``FOLLOWERS``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mars_dist.checkpoint.named import FOLLOWERS
from mars_dist.versions import missing_hook

CONSEQUENCE = "the model's weights cannot follow the values that are loaded"
# What is used of each wrapper.
USED: dict[str, tuple[str, ...]] = {
    "DeepSpeedZeroOptimizer": ("update_lp_params", "_link_all_hp_params", "_hp_optimizer_states_linked"),
    "BF16_Optimizer": ("update_lp_params", "_link_all_hp_params", "_hp_optimizer_states_linked"),
    "DeepSpeedZeroOptimizer_Stage3": (
        "swap_optimizer",
        "fp16_groups",
        "fp16_partitioned_groups_flat",
        "persistent_parameters",
        "_partition_all_parameters",
        "_reassign_or_swap_out_partitioned_parameters",
        "invalidate_secondary_tensor",
    ),
    "FP16_UnfusedOptimizer": ("fp16_groups", "fp32_groups"),
}


def follower(optimizer: Any, model: Any) -> Callable[[], None] | None:
    """What brings the weights of a DeepSpeed engine up to date; None where neither of the two is of DeepSpeed.

    Raises:
        RuntimeError: for weights or states on NVMe, and a release of DeepSpeed that does it in another way.
    """
    wrapper = _wrapper(optimizer) or _wrapper(model)
    if wrapper is None:
        return None
    kind = type(wrapper).__name__
    missing = [f"{kind}.{name}" for name in USED[kind] if not hasattr(wrapper, name)]
    if missing:
        raise RuntimeError(missing_hook("deepspeed", missing, CONSEQUENCE))
    if kind == "DeepSpeedZeroOptimizer_Stage3":
        if wrapper.swap_optimizer or any(flat is None for flat in wrapper.fp16_partitioned_groups_flat):
            raise RuntimeError(
                "offload to NVMe: values and states that are swapped out cannot be loaded by parameter name. Load them "
                'into an engine with "device": "cpu" in offload_optimizer and offload_param, save it with '
                "engine.save_checkpoint, and load that."
            )
        return lambda: _partitions(wrapper)
    if kind == "FP16_UnfusedOptimizer":
        return lambda: _copies(wrapper)
    return lambda: _flats(wrapper)


def _wrapper(given: Any) -> Any:
    """The wrapper around MARS in an engine, in what Accelerate made of it, or itself."""
    while given is not None:
        if type(given).__name__ in USED:
            return given
        given = given.__dict__.get("optimizer") if hasattr(given, "__dict__") else None
    return None


@torch.no_grad()
def _flats(wrapper: Any) -> None:
    """Stages 1 and 2, BF16_Optimizer."""
    wrapper.update_lp_params()
    # safe_get_full_optimizer_state and universal checkpoints look at the states that were there before.
    wrapper._link_all_hp_params()
    wrapper._hp_optimizer_states_linked = False


@torch.no_grad()
def _partitions(wrapper: Any) -> None:
    """Stage 3: what is gathered now is gathered anew."""
    wrapper._partition_all_parameters()
    for sub_group, _ in enumerate(wrapper.fp16_groups):
        wrapper._reassign_or_swap_out_partitioned_parameters(sub_group)
    if len(wrapper.persistent_parameters) > 0:
        wrapper.persistent_parameters[0].all_gather(wrapper.persistent_parameters)
    wrapper.invalidate_secondary_tensor()


@torch.no_grad()
def _copies(wrapper: Any) -> None:
    """Stage 0 in 16 bits."""
    pairs = zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
    for weights, masters in pairs:
        for weight, master in zip(weights, masters, strict=True):
            weight.data.copy_(master.data)


if follower not in FOLLOWERS:
    FOLLOWERS.append(follower)
