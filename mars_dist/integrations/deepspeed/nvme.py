"""DeepSpeed's swapping of the optimizer to NVMe (ZeRO stage 3): what goes wrong there without a word, refused by name.

Read and measured in DeepSpeed 0.19 (runtime/swap_tensor/), with its async_io op and with torch's AdamW as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mars_dist.integrations.deepspeed.features import OFFLOAD, PARAM, lookup, number, stage_of, truth

SECTOR = 512  # bytes: what O_DIRECT reads to and from


def is_on(config: Mapping[str, Any]) -> bool:
    """Whether the optimizer goes to NVMe; below stage 3 DeepSpeed keeps it in memory, whatever the file says."""
    return lookup(config, f"{OFFLOAD}.device") == "nvme" and stage_of(config) == 3


def buffers_needed(config: Mapping[str, Any], states: int) -> int:
    """``buffer_count`` for tensors with ``states`` states: value, gradient and states, once more for each pipeline."""
    pipelines = [lookup(config, f"{OFFLOAD}.{name}", False) for name in ("pipeline_read", "pipeline_write")]
    return (2 + states) * (1 + sum(map(truth, pipelines)))


def too_few_buffers(config: Mapping[str, Any], states: int) -> str:
    """What to say of ``buffer_count``, or ""."""
    needed = buffers_needed(config, states)
    if not is_on(config) or number(lookup(config, f"{OFFLOAD}.buffer_count"), 4) >= needed:
        return ""
    return (
        f"swapping to NVMe needs {needed} buffers here: value, gradient and {states} states of a tensor"
        + ", as often as there are reads and writes under way" * (needed > 2 + states)
        + f'. Set "buffer_count": {needed} in "offload_optimizer".'
    )


def misplaced_gradient(zero_optimizer: Any, config: Mapping[str, Any]) -> str:
    """What to say when DeepSpeed would read a gradient, or initialise weights, at an address that O_DIRECT cannot use.

    Its async_io op then leaves wrong numbers there and reports success. Each gradient is read to its own offset in the
    flat gradient of its sub-group.
    """
    swapper = getattr(zero_optimizer, "optimizer_swapper", None)
    if swapper is None:
        return ""
    size = swapper.swap_element_size
    fast = lookup(config, f"{OFFLOAD}.fast_init") and lookup(config, f"{PARAM}.device") == "nvme"
    for members in zero_optimizer.fp16_groups:
        offset = 0
        for p in members:
            n = p.partition_numel()
            swapped = n * size >= swapper.min_aio_bytes
            if swapped and offset * size % SECTOR:
                return (
                    f"{OFFLOAD}.device = 'nvme': the gradient of a tensor of shape {tuple(p.ds_shape)} would be read "
                    f"to a place that is not a multiple of {SECTOR} bytes, where DeepSpeed's async_io leaves wrong "
                    'numbers and reports success. Set "sub_group_size": 1 in "zero_optimization".'
                )
            if swapped and fast and n * size % SECTOR:
                return (
                    f"{OFFLOAD}.fast_init = True: a tensor of shape {tuple(p.ds_shape)} has {n * size} bytes on each "
                    f'rank, not a multiple of {SECTOR}, and is not initialised. Remove "fast_init".'
                )
            offset += n
    return ""


NO_LOADING = (
    "load_checkpoint with zero_optimization.offload_optimizer.device = 'nvme': DeepSpeed does not restore the step "
    "counters, small tensors and, in a new engine, any state of the optimizer; nor the weights with load_module_only. "
    "Train with device 'cpu' to be able to resume."
)
