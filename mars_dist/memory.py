"""``python -m mars_dist.memory``: bytes that training with MARS keeps on each rank under DeepSpeed ZeRO, for GPT-2.

n elements in a flat tensor of W ranks, w bytes per weight (2 in 16 bits), P = 2 ceil(n / 2W), Q = sum of ceil(n / W)
over the tensors of the flat. ``sums`` is ``data_types.grad_accum_dtype: fp32`` in 16-bit training.

| stage | weights | gradients | master, each state |
|---|---|---|---|
| 0 | w n | w n | 4 n (no master in fp32) |
| 1 | w P W | w n; with sums 4 P W more, under offload 4 n instead | 4 P |
| 2 | w P W | w for each element of the tensors that lie in the rank's part; with sums 4 P | 4 P |
| 3 | w Q, and tensors below the persistence threshold whole | w Q; with sums 4 Q | 4 Q |

A flat has a state when one of its tensors needs it. Named in a JSON, MARS makes a flat of the matrices and one of all
others: ``prev_grad`` is kept for the matrices only, and MARS-Lion and the matrix variants keep ``exp_avg_sq`` for the
others only. Exact mode keeps a second buffer of the size of ``prev_grad``. Offload moves master and states to the host
and keeps a float32 gradient beside them; at stages 1 and 2 also a copy of the rank's weights, at stages 2 (without
sums) and 3 the summed gradients. NVMe takes flats from 1 MiB.

Read in DeepSpeed 0.19 (runtime/zero/stage_1_and_2.py and stage3.py, bf16_optimizer.py, fp16/unfused_optimizer.py) and
compared with running engines, all but NVMe, by tests/test_memory_plan.py. Not counted: activations, buffers (buckets,
prefetched weights, swapping, two copies of the largest gradient under offload), what a step holds for a moment, one
step counter per flat, and the allocator's waste.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

from mars_dist.bench import SIZES
from mars_dist.maths.rules import rule_for

Shape = Sequence[int]
PERSISTENT = 100_000  # DeepSpeed's default of stage3_param_persistence_threshold, in elements
SWAPPED = 1 << 20  # bytes from which DeepSpeed's default aio block size sends a flat to NVMe


@dataclass(frozen=True)
class Memory:
    """Bytes in one place."""

    weights: int = 0
    gradients: int = 0
    master: int = 0
    exp_avg: int = 0
    exp_avg_sq: int = 0
    prev_grad: int = 0

    def __add__(self, other: Memory) -> Memory:
        return Memory(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))


@dataclass(frozen=True)
class Plan:
    """Bytes of one rank, the fullest: on its device, in the host's memory and on NVMe."""

    device: Memory = Memory()
    host: Memory = Memory()
    nvme: Memory = Memory()

    def __add__(self, other: Plan) -> Plan:
        return Plan(self.device + other.device, self.host + other.host, self.nvme + other.nvme)


def numel(shape: Shape) -> int:
    n = 1
    for size in shape:
        n *= size
    return n


def zero_memory(
    shapes: Iterable[tuple[str, Shape]],
    stage: int,
    world_size: int,
    *,
    mars_type: str = "mars-adamw",
    precision: str = "bf16",
    float32_sums: bool = False,
    offload: str = "none",
    optimize_1d: bool = False,
    matrix_ndim: Sequence[int] = (2,),
    split: bool = True,
    persistent: int = PERSISTENT,
    exact: bool = False,
) -> Plan:
    """What a rank keeps between two steps of training with gradient accumulation.

    Args:
        shapes: name and shape of every trainable parameter, each once (a tied head is the embedding), in the model's
            order.
        stage, world_size: ZeRO stage, and the ranks that share the states.
        mars_type, optimize_1d, matrix_ndim: as in ``MARS``.
        precision: "bf16", "fp16" or "fp32".
        float32_sums: ``data_types.grad_accum_dtype`` is "fp32".
        offload: ``offload_optimizer.device``: "none", "cpu", or "nvme" (stage 3 only).
        split: MARS is named in the configuration. False: one group of all parameters, as made by hand.
        persistent: ``stage3_param_persistence_threshold``.
        exact: exact mode, which keeps h of the next step beside that of this one: ``prev_grad`` counts both.

    Raises:
        ValueError: for a combination that DeepSpeed does not train.
    """
    if precision not in ("bf16", "fp16", "fp32") or offload not in ("none", "cpu", "nvme") or stage not in range(4):
        raise ValueError(f"unknown precision={precision!r}, offload={offload!r} or stage={stage!r}")
    sixteen = precision != "fp32"
    float32_sums = float32_sums and sixteen
    if exact and offload == "nvme":
        raise ValueError(f"exact mode does not work with optimizer states on NVMe (ZeRO stage {stage})")
    if (offload != "none" and stage == 0) or (offload == "nvme" and stage != 3) or (float32_sums and stage == 0):
        raise ValueError(f"DeepSpeed does not train with offload={offload!r}, {float32_sums=} at ZeRO stage {stage}")
    tensors = [tuple(shape) for _, shape in shapes if numel(shape)]
    matrices = [s for s in tensors if len(s) in matrix_ndim]
    others = [s for s in tensors if len(s) not in matrix_ndim]
    flats = [flat for flat in (matrices, others) if flat] if split else [tensors]
    if stage == 0:
        flats = [[s] for s in tensors]
    plan = Plan()
    for flat in flats:
        part, kept = _kept(flat, stage, world_size, 2 if sixteen else 4, float32_sums, offload != "none", persistent)
        rules = [rule_for(s, mars_type, matrix_ndim, None, optimize_1d) for s in flat]
        states = Memory(
            gradients=4 * part if offload != "none" else 0,
            master=4 * part if stage or sixteen else 0,
            exp_avg=4 * part,
            exp_avg_sq=4 * part if any(r.second_moment for r in rules) else 0,
            prev_grad=4 * part * (1 + exact) if any(r.corrected for r in rules) else 0,
        )
        place = {"none": "device", "cpu": "host", "nvme": "nvme" if 4 * part >= SWAPPED else "host"}[offload]
        plan += kept + replace(Plan(), **{place: states})
    return plan


def _kept(
    flat: list[tuple[int, ...]], stage: int, ranks: int, w: int, float32_sums: bool, offload: bool, persistent: int
) -> tuple[int, Plan]:
    """Elements of ``flat`` that a rank updates; its weights and gradients, without the float32 ones of offload."""
    n = sum(map(numel, flat))
    if stage == 0:
        return n, Plan(Memory(w * n, w * n))
    if stage == 3:
        pieces = [(-(-numel(s) // ranks), numel(s) <= persistent) for s in flat]
        part = sum(n for n, _ in pieces)
        weights = w * (part + sum(n * ranks for n, is_persistent in pieces if is_persistent))
        gradients = Memory(gradients=(4 if float32_sums else w) * part)
        return part, Plan(Memory(weights)) + (Plan(host=gradients) if offload else Plan(gradients))
    part = 2 * -(-n // (2 * ranks))
    plan = Plan(Memory(w * part * ranks), Memory(w * part * offload))
    if stage == 1:
        # Plain: the model's own gradients. With float32 sums beside them a flat (BF16_Optimizer), or sums alone.
        own = 4 * n if offload and float32_sums else w * n
        return part, plan + Plan(Memory(gradients=own + (4 * part * ranks if float32_sums and not offload else 0)))
    if float32_sums:
        return part, plan + Plan(Memory(gradients=4 * part))
    touched = Memory(gradients=w * max(_touched(flat, r * part, (r + 1) * part) for r in range(ranks)))
    return part, plan + (Plan(host=touched) if offload else Plan(touched))


def _touched(flat: list[tuple[int, ...]], first: int, last: int) -> int:
    """Elements of the tensors that have some in [first, last) of the flat."""
    total, begin = 0, 0
    for shape in flat:
        end = begin + numel(shape)
        total += numel(shape) if begin < last and end > first else 0
        begin = end
    return total


def gpt2_shapes(size: str, vocabulary: int = 50304, positions: int = 1024) -> list[tuple[str, tuple[int, ...]]]:
    """GPT-2 as in the published runs: no biases, head tied to the embedding."""
    layers, d = SIZES[size]
    shapes: list[tuple[str, tuple[int, ...]]] = [("wte", (vocabulary, d)), ("wpe", (positions, d))]
    block = {"ln_1": (d,), "attn": (3 * d, d), "attn_proj": (d, d), "ln_2": (d,), "mlp": (4 * d, d), "proj": (d, 4 * d)}
    return [*shapes, *((f"h.{i}.{name}", s) for i in range(layers) for name, s in block.items()), ("ln_f", (d,))]


def table() -> str:
    """What the configurations of ds_configs/ keep, in GB of 10^9 bytes, as Markdown."""
    places = ["GPU (8 ranks)", "host", "disk", "GPU (32 ranks)", "host", "disk"]
    heads = ["", *(f.name for f in fields(Memory)), *places]
    lines = [heads, ["---"] * len(heads)]
    rows = [(size, stage, "none") for size in SIZES if size != "tiny" for stage in (1, 2, 3)]
    more = [("large", 2, "cpu"), ("xl", 2, "cpu"), ("xl", 3, "cpu"), ("xl", 3, "nvme")]
    for size, stage, offload in [*rows, *more]:
        at8, at32 = (
            zero_memory(gpt2_shapes(size), stage, ranks, float32_sums=True, offload=offload) for ranks in (8, 32)
        )
        both = at8.device + at8.host + at8.nvme
        numbers = [getattr(both, f.name) for f in fields(both)]
        for plan in (at8, at32):
            numbers += [plan.device.total, plan.host.total, plan.nvme.total]
        name = f"{size}, ZeRO-{stage}" + {"none": "", "cpu": ", CPU offload", "nvme": ", NVMe"}[offload]
        lines.append([name, *(f"{n / 1e9:.2f}" if n else "" for n in numbers)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m mars_dist.memory",
        description="Print what the configurations of ds_configs/ keep on each rank, in GB, as a Markdown table.",
    ).parse_args()
    print(table())
