"""What ``mars_dist.memory`` says is what running engines hold: bytes of one rank, read off in the middle of an
accumulation, when every kind of memory is in use."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import pytest
from torch import Tensor

from mars_dist import memory
from mars_dist.memory import Memory, Plan, zero_memory
from tests import nets
from tests.processes import ROOT
from tests.ranks import RankPool

pytestmark = pytest.mark.timeout(180)
VARIANT = {"mars_type": "mars-adamw"}
# Where engines of DeepSpeed keep gradients, besides the parameters and the flats.
GRADIENTS = (
    "averaged_gradients",
    "all_grad_tensors",
    "accumulated_grads_in_cpu",
    "fp32_groups_gradients_flat",
    "grad_partitions_flat_buffer",
)


@dataclass(frozen=True)
class Case:
    stage: int
    precision: str = "bf16"
    float32_sums: bool = False
    offload: str = "none"
    params: dict[str, Any] = field(default_factory=lambda: dict(VARIANT))
    split: bool = True
    persistent: int = 20  # some of the net's tensors have fewer elements, some have more

    def __str__(self) -> str:
        words = [f"zero{self.stage}", self.precision, *self.params.values()]
        words += ["float32_sums"] * self.float32_sums + [self.offload] * (self.offload != "none")
        words += ["one_group"] * (not self.split)
        return "-".join(map(str, words))

    def config(self) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage, "reduce_bucket_size": 1000, "allgather_bucket_size": 1000}
        if self.stage == 3:
            zero |= {"stage3_param_persistence_threshold": self.persistent, "stage3_prefetch_bucket_size": 100}
        if self.offload != "none":
            zero["offload_optimizer"] = {"device": self.offload}
        out: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 3,
            "zero_optimization": zero,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "MARS", "params": {"lr": 1e-2, "lr_1d": 1e-2, **self.params}},
        }
        if self.precision == "bf16":
            out["bf16"] = {"enabled": True}
        if self.float32_sums:
            out["data_types"] = {"grad_accum_dtype": "fp32"}
        return out

    def plan(self, shapes: list[tuple[str, tuple[int, ...]]], world_size: int) -> Plan:
        names = ("stage", "precision", "float32_sums", "offload", "split", "persistent")
        return zero_memory(shapes, world_size=world_size, **{n: getattr(self, n) for n in names}, **self.params)


def tensors(x: Any) -> Iterator[Tensor]:
    """Every tensor in nested containers; what a list subclass holds besides its items as well."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, dict):
        yield from tensors(list(x.values()))
    elif isinstance(x, (list, tuple)):
        for item in [*x, *getattr(x, "__dict__", {}).values()]:
            yield from tensors(item)


def storages(found: Iterable[Tensor]) -> dict[int, int]:
    """Address and bytes of the memory behind the tensors, each once."""
    return {s.data_ptr(): s.nbytes() for t in found if (s := t.untyped_storage()).nbytes()}


def measure(case: Case) -> dict[str, int]:
    """Bytes by kind on this rank, all places together: on a CPU the device is the host."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for minutes
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    import mars_dist

    net = nets.build("net")
    given = list(net.parameters()) if case.split else [{"params": list(net.parameters())}]
    engine, wrapper, *_ = deepspeed.initialize(model=net, config=case.config(), model_parameters=given)
    mars = wrapper if isinstance(wrapper, mars_dist.MARS) else wrapper.optimizer
    assert type(mars) is mars_dist.MARS
    for micro in range(4):  # three make a step; the fourth is kept
        tokens, targets = (t[:2].to(engine.device) for t in nets.batch(micro))
        engine.backward(engine(tokens, targets))
        engine.step()
    parameters = list(net.parameters())
    weights = storages(t for p in parameters for t in tensors([p.data, getattr(p, "ds_tensor", None)]))
    flats = list(mars.state)
    kept = [getattr(wrapper, name, None) for name in GRADIENTS] + [p.grad for p in [*parameters, *flats]]
    gradients = storages(tensors([kept, [getattr(p, "grad_accum", None) for p in parameters]]))
    master = {address: n for address, n in storages(flats).items() if address not in weights}
    staged = storages(tensors(getattr(wrapper, "param_buffer_of_bit16_for_cpu_offload_groups", [])))
    out = {
        "weights": sum(weights.values()) + sum(staged.values()),
        "gradients": sum(gradients.values()),
        "master": sum(master.values()),
        "steps": engine.global_steps,
    }
    for key in ("exp_avg", "exp_avg_sq", "prev_grad"):
        out[key] = sum(storages(s[key] for s in mars.state.values() if key in s).values())
    kinds = {key for s in mars.state.values() for key in s}
    assert kinds <= {"step", "exp_avg", "exp_avg_sq", "prev_grad"}, kinds
    engine.destroy()
    return out


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    pools = {size: RankPool(size) for size in (2, 3)}
    yield pools
    for pool in pools.values():
        pool.close()


LION = {"mars_type": "mars-lion"}
CASES = [
    *(Case(stage, precision) for stage in (0, 1, 2, 3) for precision in ("bf16", "fp32")),
    *(Case(stage, float32_sums=True) for stage in (1, 2, 3)),
    *(Case(stage, offload="cpu", float32_sums=sums) for stage in (1, 2, 3) for sums in (False, True)),
    *(Case(stage, "fp32", offload="cpu") for stage in (2, 3)),
    *(Case(stage, params=LION) for stage in (0, 1, 2, 3)),
    *(Case(stage, params=params, split=False) for stage in (2, 3) for params in (LION, VARIANT)),
    *(Case(stage, params={**VARIANT, "optimize_1d": True}) for stage in (2, 3)),
    Case(3, persistent=0),
]


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_running_engine_holds_what_the_plan_says(pools: dict[int, RankPool], case: Case, size: int) -> None:
    results = pools[size].run(measure, case, timeout=90)
    shapes = [(name, tuple(p.shape)) for name, p in nets.build("net").named_parameters()]
    plan = case.plan(shapes, size)
    planned = plan.device + plan.host
    assert all(result["steps"] == 1 for result in results)
    fullest = {f.name: max(result[f.name] for result in results) for f in fields(Memory)}
    assert fullest == {f.name: getattr(planned, f.name) for f in fields(Memory)}
    if case.offload == "none":
        assert plan.host.total == 0
    else:
        assert plan.device.master == plan.device.exp_avg == plan.device.exp_avg_sq == plan.device.prev_grad == 0


# ------------------------------------------------------------------------------------------- without an engine


def test_the_published_sizes() -> None:
    millions = {size: sum(memory.numel(s) for _, s in memory.gpt2_shapes(size)) // 10**6 for size in PUBLISHED}
    assert millions == PUBLISHED


PUBLISHED = {"small": 124, "medium": 354, "large": 773, "xl": 1556}


def test_by_hand() -> None:
    """One matrix of 10 and one vector of 3 on 2 ranks: flats of 12 and 4 under ZeRO-2, 6 and 2 a rank."""
    shapes = [("w", (5, 2)), ("b", (3,))]
    plan = zero_memory(shapes, 2, 2, float32_sums=True)
    assert plan == Plan(Memory(weights=32, gradients=32, master=32, exp_avg=32, exp_avg_sq=32, prev_grad=24))
    lion = zero_memory(shapes, 2, 2, float32_sums=True, mars_type="mars-lion")
    assert lion.device.exp_avg_sq == 8 and lion.device.prev_grad == 24
    exact = zero_memory(shapes, 2, 2, float32_sums=True, exact=True)
    assert exact == plan + Plan(Memory(prev_grad=24)), "h of the next step beside that of this one"
    offloaded = zero_memory(shapes, 3, 2, float32_sums=True, offload="cpu", persistent=0)
    assert offloaded == Plan(Memory(weights=14), Memory(0, 56, 28, 28, 28, 20))


def test_the_small_flat_does_not_go_to_nvme() -> None:
    shapes = [("w", (2048, 256)), ("b", (2048,))]
    plan = zero_memory(shapes, 3, 2, offload="nvme")
    assert plan.nvme == Memory(0, *[1 << 20] * 5)
    assert plan.host == Memory(0, 4096 + 2 * (2048 * 256 + 2048) // 2, 4096, 4096, 4096, 0)
    assert plan.device.total == (2048 * 256 + 2048) + 2 * 2048


@pytest.mark.parametrize(
    "arguments",
    [
        {"stage": 3, "offload": "nvme", "exact": True},
        {"stage": 2, "offload": "nvme"},
        {"stage": 0, "offload": "cpu"},
        {"stage": 0, "float32_sums": True},
        {"stage": 4},
        {"stage": 1, "precision": "bfloat16"},
        {"stage": 1, "offload": "disk"},
    ],
    ids=str,
)
def test_what_deepspeed_does_not_train_is_an_error(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=re.escape(str(arguments["stage"]))):
        zero_memory([("w", (2, 2))], world_size=2, **arguments)


def test_the_readme_of_the_configurations_shows_the_table() -> None:
    """To renew it: ``python -m mars_dist.memory``."""
    text = (ROOT / "ds_configs/README.md").read_text()
    (block,) = re.findall(r"<!-- memory:begin -->\n+(.*?)\n+<!-- memory:end -->", text, re.DOTALL)
    assert block == memory.table()
