"""What only the engine can show, beside its configuration: parallelism that MARS does not train with rightly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mars_dist.optimizer import MARS
from mars_dist.sharding.layout import Segment
from mars_dist.step import rule_of

SPREAD_EXPERT = "ds_autoep_uc_meta"  # DeepSpeed's mark of a tensor that holds some of a layer's experts


def faults(engine: Any, optimizer: MARS) -> Iterator[str]:
    """Why MARS must not train in ``engine``, which has made its process groups and not yet wrapped ``optimizer``."""
    from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size

    mpu, stage = engine.mpu, engine.zero_optimization_stage()
    if mpu is not None and not hasattr(mpu, "initialize_sequence_parallel"):
        slices = bwc_tensor_model_parallel_world_size(mpu)
        if slices > 1:
            yield (
                f"the mpu given to deepspeed.initialize keeps matrices in slices over {slices} ranks, and MARS would "
                "clip by the norm of a slice. Give no mpu with tensor parallelism, and shard with ZeRO stage 3."
            )
    sequence = engine.sequence_parallel_size
    if mpu is None and sequence > 1 and stage < 3:
        yield (
            f"sequence_parallel_size = {sequence}: without an mpu DeepSpeed reduces the gradients at ZeRO stage "
            f"{stage} over data_parallel_size ranks only, and the ranks that share a sequence would train weights "
            "of their own. Give deepspeed.initialize the mpu of Ulysses "
            "(deepspeed.runtime.sequence_parallel.parallel_state_sp) instead of data_parallel_size, or use stage 3."
        )
    ranks, factor = engine.dp_world_size, engine.gradient_predivide_factor()
    if stage == 3 and not engine.zero_reduce_scatter() and factor == ranks > 1:
        yield (
            f"gradient_predivide_factor = {factor} equals the number of data-parallel ranks: at ZeRO stage 3 without "
            f"reduce_scatter DeepSpeed does not multiply it back, and gradients reach MARS {ranks} times too small, "
            "which its clip would see. Remove the key, or choose another factor."
        )
    if stage == 3 and engine.zero_quantized_nontrainable_weights():
        frozen = sum(not p.requires_grad for p in engine.module.parameters())
        if frozen:
            yield (
                f"zero_optimization.zero_quantized_nontrainable_weights = True, and {frozen} tensors are frozen: "
                "DeepSpeed quantises their memory before it has written the weights into it, and the model would "
                "compute with others. Remove the key."
            )
    experts = getattr(engine._config.expert_parallel_config, "autoep_size", 1)
    if experts > 1:
        for group in optimizer.param_groups:
            for p in group["params"]:
                segment = Segment("", tuple(getattr(p, "ds_shape", p.shape)), 0, 0, 0)
                if hasattr(p, SPREAD_EXPERT) and group["clip"] is not None:
                    if rule_of(segment, group, optimizer.settings).corrected:
                        yield (
                            f"expert_parallel.autoep_size = {experts}, and the experts, which are one tensor with "
                            f"three dimensions, take a MARS rule: it would clip by the norm of those that a rank "
                            'holds. Leave them to AdamW ("optimize_1d": false, "matrix_ndim": 2), or set "clip": null.'
                        )
                        return
