"""The configurations of ds_configs/ hold the published numbers, and each starts as MARS and trains as it says."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mars_dist import memory
from mars_dist.integrations.deepspeed.check import check
from mars_dist.memory import zero_memory
from tests import nets
from tests.compatibility import aio_double
from tests.processes import ROOT
from tests.ranks import RankError, RankPool

pytestmark = pytest.mark.timeout(300)
FOLDER = ROOT / "ds_configs"
FILES = sorted(path.name for path in FOLDER.glob("gpt2_*.json"))
RANKS = 2
SWAPPED_FROM = 512  # bytes: the matrices together; neither the vectors nor the gradient of one tensor
UPDATES = 3  # DeepSpeed's warm-up takes the first two with lr = 0

# size: lr, lr_1d, min_lr, sequences of a micro batch (GPT-2 with MARS-AdamW as published)
PUBLISHED = {
    "small": (6e-3, 3e-3, 3e-5, 15),
    "medium": (3e-3, 1.5e-3, 6e-5, 15),
    "large": (2e-3, 1e-3, 1e-5, 5),
    "xl": (2e-3, 1e-3, 1e-5, 5),
}
# What a CPU and a net of 333 elements cannot have is changed before a file is started, and nothing else.
PARTITIONED = {"zero_optimization.stage3_param_persistence_threshold": 0}  # every tensor is below the default
CHANGED: dict[str, dict[str, Any]] = {
    **{name: PARTITIONED for name in FILES if "zero3" in name},
    "gpt2_xl_zero3_nvme.json": {
        **PARTITIONED,
        "zero_optimization.offload_optimizer.nvme_path": "{folder}",
        "aio.block_size": SWAPPED_FROM,
    },
    "gpt2_xl_zeropp.json": {
        **PARTITIONED,
        "zero_optimization.zero_quantized_weights": False,  # the kernels need a GPU
        "zero_optimization.zero_quantized_gradients": False,
    },
}
WRAPPER = {1: "BF16_Optimizer", 2: "DeepSpeedZeroOptimizer", 3: "DeepSpeedZeroOptimizer_Stage3"}


def read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name).read_text())


def size_of(name: str) -> str:
    return name.split("_")[1]


# ------------------------------------------------------------------------------------------------ what is in them


def test_which_files_there_are() -> None:
    kinds = {size: {"zero1", "zero2", "zero3"} for size in PUBLISHED}
    kinds["large"] |= {"zero2_offload"}
    kinds["xl"] |= {"zero2_offload", "zero3_offload", "zero3_nvme", "zeropp"}
    assert {f"gpt2_{size}_{kind}.json" for size, names in kinds.items() for kind in names} == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_the_numbers_are_the_published_ones(name: str) -> None:
    lr, lr_1d, min_lr, micro = PUBLISHED[size_of(name)]
    config = read(name)
    config.pop("zero_optimization"), config.pop("aio", None)
    ratio = config["scheduler"]["params"].pop("cos_min_ratio")
    assert ratio * lr == pytest.approx(min_lr, rel=1e-12)
    assert config == {
        "train_batch_size": 480,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {
            "type": "MARS",
            "params": {
                "mars_type": "mars-adamw",
                "lr": lr,
                "lr_1d": lr_1d,
                "betas": [0.95, 0.99],
                "betas_1d": [0.9, 0.95],
                "gamma": 0.025,
                "weight_decay": 0.01,
                "weight_decay_1d": 0.1,
            },
        },
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": 100000, "warmup_num_steps": 2000, "warmup_type": "linear"},
        },
    }


@pytest.mark.parametrize("size", PUBLISHED)
def test_files_of_one_size_differ_only_in_zero(size: str) -> None:
    def rest(name: str) -> str:
        config = read(name)
        return json.dumps({k: v for k, v in config.items() if k not in ("zero_optimization", "aio")})

    assert len({rest(name) for name in FILES if size_of(name) == size}) == 1
    zero = [read(name)["zero_optimization"] for name in FILES if size_of(name) == size]
    assert len({json.dumps(z) for z in zero}) == len(zero)


@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero3", "zero2_offload"])
def test_files_of_one_kind_have_the_same_zero(kind: str) -> None:
    found = [read(name)["zero_optimization"] for name in FILES if name.endswith(f"_{kind}.json")]
    assert len(found) > 1 and all(zero == found[0] for zero in found)


def test_the_largest_tensor_fits_into_a_bucket() -> None:
    for name in FILES:
        bucket = read(name)["zero_optimization"].get("reduce_bucket_size", 500_000_000)
        assert max(memory.numel(shape) for _, shape in memory.gpt2_shapes(size_of(name))) <= bucket


@pytest.mark.parametrize("ranks", [8, 32])
@pytest.mark.parametrize("name", [*FILES, "trainer_auto.json"])
def test_the_checker_finds_no_error(name: str, ranks: int) -> None:
    assert [finding for finding in check(read(name), ranks) if finding.level == "error"] == []


def test_nvme_has_a_buffer_for_each_tensor_that_mars_steps_on() -> None:
    kept = zero_memory([("w", (2, 2))], 3, 1).device
    states = [n for n in (kept.exp_avg, kept.exp_avg_sq, kept.prev_grad) if n]
    offload = read("gpt2_xl_zero3_nvme.json")["zero_optimization"]["offload_optimizer"]
    assert offload["buffer_count"] == len(["value", "gradient", *states]) and offload["nvme_path"] == "/local_nvme"


# --------------------------------------------------------------------------------------------- what they start as


class DataParallel:
    """As many data-parallel ranks as the test asks for: what DeepSpeed's parser wants to know of them."""

    def __init__(self, size: int) -> None:
        self.get_data_parallel_world_size = lambda: size


def parse(names: list[str], sizes: tuple[int, ...]) -> dict[tuple[str, int], tuple[int, int, int]]:
    """Global batch, micro batch and accumulation as DeepSpeed derives them, by file and number of ranks."""
    import deepspeed
    from deepspeed.runtime.config import DeepSpeedConfig

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for minutes
    deepspeed.init_distributed()  # without it the parser takes the number of ranks as 1
    out = {}
    for name in names:
        for size in sizes:
            c = DeepSpeedConfig(str(FOLDER / name), mpu=DataParallel(size))
            out[name, size] = (c.train_batch_size, c.train_micro_batch_size_per_gpu, c.gradient_accumulation_steps)
    return out


def change(config: dict[str, Any], changes: dict[str, Any], folder: str) -> dict[str, Any]:
    config = copy.deepcopy(config)
    for key, value in changes.items():
        *parents, last = key.split(".")
        node = config
        for parent in parents:
            node = node[parent]
        assert last in node or key in PARTITIONED, f"{key} is not in the file"
        node[last] = value.format(folder=folder) if isinstance(value, str) else value
    return config


def start(name: str, folder: str) -> dict[str, Any]:
    config = change(read(name), CHANGED.get(name, {}), folder)
    with contextlib.ExitStack() as stack:
        counts: dict[str, int] = {}
        if "aio" in config:
            counts = stack.enter_context(aio_double.installed(smallest=SWAPPED_FROM))
        return {**train(config), "swapped": dict(counts)}


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Start an engine from ``config``, take three optimizer steps, and say what it was and did."""
    import deepspeed
    from deepspeed.utils import groups

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for minutes
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    import mars_dist

    net = nets.build("net")
    engine, wrapper, _, scheduler = deepspeed.initialize(
        model=net, config=config, model_parameters=list(net.parameters())
    )
    mars = wrapper.optimizer
    seen = Seen(mars)
    second = []  # ZeRO++: whether every tensor has a second partition, before each step
    micro = engine.train_micro_batch_size_per_gpu()
    for i in range(UPDATES * engine.gradient_accumulation_steps()):
        tokens, targets = nets.batch(RANKS * i + dist.get_rank(), micro)
        engine.backward(100.0 * engine(tokens, targets))  # so that there is something to clip
        second.append(all(getattr(p, "ds_secondary_tensor", None) is not None for p in net.parameters()))
        engine.step()
        if (i + 1) % engine.gradient_accumulation_steps() == 0:
            seen.end_of_update(engine.get_global_grad_norm())
    on_cpu = getattr(wrapper, "cpu_offload", False) or getattr(wrapper, "offload_optimizer", False)
    out = {
        "is_mars": type(mars) is mars_dist.MARS,
        "wrapper": type(wrapper).__name__,
        "stage": engine.zero_optimization_stage(),
        "offload": "nvme" if getattr(wrapper, "swap_optimizer", False) else "cpu" if on_cpu else "none",
        "bf16": {p.dtype for p in net.parameters()} == {torch.bfloat16},
        "sums": str(getattr(wrapper, "gradient_accumulation_dtype", getattr(wrapper, "grad_acc_dtype", None))),
        "clipping": engine.gradient_clipping(),
        "accumulation": engine.gradient_accumulation_steps(),
        "updates": engine.global_steps,
        "steps": {float(s["step"]) for s in mars.state.values()},
        "scheduler": type(scheduler).__name__,
        "rule_counts": mars.rule_counts(),
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in mars.param_groups],
        "second_partition": second,
        **seen.result(),
    }
    engine.destroy()
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # the next engine of this process makes its own
    return out


class Seen:
    """What reached MARS and what it changed, by update: learning rate, norm of the whole gradient, tensors moved."""

    def __init__(self, mars: Any) -> None:
        self.mars = mars
        self.rates: list[set[float]] = [set()]
        self.squares: list[float] = [0.0]
        self.moved: list[set[str]] = [set()]
        self.before_clipping: list[float] = []
        mars.register_step_pre_hook(self._before)
        mars.register_step_post_hook(self._after)

    def _tensors(self) -> list[torch.Tensor]:
        return [p for g in self.mars.param_groups for p in g["params"] if p.grad is not None]

    def _before(self, *_: Any) -> None:
        self.rates[-1] |= {g["lr"] for g in self.mars.param_groups if g["params"]}
        self.values = [p.detach().clone() for p in self._tensors()]

    def _after(self, *_: Any) -> None:
        for p, before in zip(self._tensors(), self.values, strict=True):
            assert p.grad is not None
            for s in self.mars._tables.layout(p).segments:  # what lies between them is padding, and may be anything
                piece = slice(s.offset, s.offset + s.numel)
                self.squares[-1] += float(p.grad.flatten()[piece].double().square().sum())
                if not torch.equal(p.detach().flatten()[piece], before.flatten()[piece]):
                    self.moved[-1].add(s.name)

    def end_of_update(self, norm: Any) -> None:
        self.before_clipping.append(float(norm))
        self.rates.append(set())
        self.squares.append(0.0)
        self.moved.append(set())

    def result(self) -> dict[str, Any]:
        squares = torch.tensor(self.squares[:-1], dtype=torch.float64)
        dist.all_reduce(squares)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.moved[:-1])
        return {
            "rates": self.rates[:-1],
            "norms": squares.sqrt().tolist(),
            "before_clipping": self.before_clipping,
            "moved": [len(set().union(*names)) for names in zip(*everyone, strict=True)],
        }


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(RANKS)
    yield pool
    pool.close()


def test_deepspeed_derives_the_accumulation_on_8_and_on_32_ranks(pool: RankPool) -> None:
    for parsed in pool.run(parse, FILES, (8, 32)):
        for (name, ranks), (batch, micro, accumulation) in parsed.items():
            assert (batch, micro) == (480, PUBLISHED[size_of(name)][3])
            assert accumulation == 480 // micro // ranks
    published = {"small": 4, "medium": 4, "large": 12, "xl": 12}  # on 8 GPUs
    assert all(parsed[name, 8][2] == published[size_of(name)] for name in FILES)


def started() -> Iterator[object]:
    """Every kind of file in the default tier."""
    for name in FILES:
        yield pytest.param(name, marks=[] if size_of(name) == "xl" else [pytest.mark.slow])


@pytest.mark.parametrize("name", started())
def test_it_starts_and_trains_as_it_says(pool: RankPool, tmp_path: Path, name: str) -> None:
    config = read(name)
    zero = config["zero_optimization"]
    lr, lr_1d, _, micro = PUBLISHED[size_of(name)]
    for result in pool.run(start, name, str(tmp_path), timeout=200):
        checked(result, config, lr, lr_1d)
        assert result["stage"] == zero["stage"] and result["wrapper"] == WRAPPER[zero["stage"]]
        assert result["offload"] == zero.get("offload_optimizer", {}).get("device", "none")
        assert result["accumulation"] == 480 // RANKS // micro
        assert result["scheduler"] == "WarmupCosineLR"
        assert result["rates"] == [{0.0}, {0.0}, {lr * (1 / 2000)}]
        assert [g["lr"] for g in result["groups"]] == [pytest.approx(lr * 2 / 2000, rel=1e-9)] * 2
        assert result["moved"] == [0, 0, nets.MATRICES + nets.VECTORS]
        assert set(result["second_partition"]) == {"zero_hpz_partition_size" in zero}
        assert (result["swapped"].get("writes", 0) > 0) == (result["offload"] == "nvme")


def checked(result: dict[str, Any], config: dict[str, Any], lr: float, lr_1d: float) -> None:
    """What holds for every configuration."""
    assert result["is_mars"] and result["bf16"] and result["sums"] == "torch.float32"
    assert result["rule_counts"] == {"MARS-AdamW": nets.MATRICES, "AdamW": nets.VECTORS}
    assert result["updates"] == UPDATES and result["steps"] == {float(UPDATES)}
    assert result["clipping"] == config["gradient_clipping"] == 1.0
    assert all(norm > 2.0 for norm in result["before_clipping"]), "nothing to clip: this would prove nothing"
    assert result["norms"] == [pytest.approx(1.0, abs=1e-3)] * UPDATES
    params = config["optimizer"]["params"]
    for group in result["groups"]:
        for key in ("betas", "betas_1d", "gamma", "weight_decay", "weight_decay_1d"):
            assert group[key] == (tuple(params[key]) if key.startswith("betas") else params[key])
        assert group["lr_1d_ratio"] == pytest.approx(lr_1d / lr)
        assert group["eps"] == 1e-8


# --------------------------------------------------------------------------------------- through transformers' Trainer

TEMPLATE = "trainer_auto.json"
ARGUMENTS = {  # what ds_configs/README.md tells to say beside the template
    "learning_rate": 3e-3,
    "weight_decay": 0.01,
}


def arguments_of(folder: str, **given: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=folder,
        deepspeed=str(FOLDER / TEMPLATE),
        use_cpu=True,
        bf16=True,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        max_steps=UPDATES,
        warmup_steps=2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **given,
    )


def with_trainer(folder: str, given: dict[str, Any]) -> dict[str, Any]:
    """Train a small GPT-2 through transformers' Trainer and the template."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for minutes
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback

    import mars_dist

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=13, n_positions=8, n_embd=16, n_layer=1, n_head=2))
    rows = [{"input_ids": nets.batch(i, 2)[0].flatten(), "labels": nets.batch(i, 2)[0].flatten()} for i in range(64)]
    records: dict[str, Any] = {}

    class Look(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            records["engine"] = engine = trainer.model_wrapped
            records["seen"] = Seen(engine.optimizer.optimizer)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            records["seen"].end_of_update(records["engine"].get_global_grad_norm())

    trainer = Trainer(model, arguments_of(folder, **given), train_dataset=rows, callbacks=[Look()])
    trainer.train()
    engine, mars = records["engine"], records["engine"].optimizer.optimizer
    config = engine.config
    return {
        "is_mars": type(mars) is mars_dist.MARS,
        "wrapper": type(engine.optimizer).__name__,
        "stage": engine.zero_optimization_stage(),
        "batch": [engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()],
        "accumulation": engine.gradient_accumulation_steps(),
        "clipping": engine.gradient_clipping(),
        "bf16": {p.dtype for p in model.parameters()} == {torch.bfloat16},
        "updates": engine.global_steps,
        "rule_counts": mars.rule_counts(),
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in mars.param_groups],
        "config": json.dumps(config, default=str),
        **records["seen"].result(),
    }


def test_the_template_trains_with_mars_through_the_trainer(pool: RankPool, tmp_path: Path) -> None:
    given = {**ARGUMENTS, "max_grad_norm": 0.1}
    config = read(TEMPLATE)
    for result in pool.run(with_trainer, str(tmp_path), given, timeout=200):
        assert result["is_mars"] and result["bf16"]
        assert "auto" not in result["config"]
        assert result["stage"] == config["zero_optimization"]["stage"] == 2
        assert result["wrapper"] == "DeepSpeedZeroOptimizer"
        assert result["batch"] == [3 * 2 * RANKS, 3] and result["accumulation"] == 2 and result["updates"] == UPDATES
        assert result["clipping"] == 0.1 and all(norm > 0.2 for norm in result["before_clipping"])
        assert result["norms"] == [pytest.approx(0.1, abs=1e-4)] * UPDATES
        assert result["rates"] == [{0.0}, {0.0015}, {0.003}]  # the Trainer's own warm-up
        assert result["rule_counts"] == {"MARS-AdamW": 6, "AdamW": 10}
        assert result["moved"] == [0, 16, 16]
        for group in result["groups"]:
            assert group["betas"] == (0.95, 0.99) and group["betas_1d"] == (0.9, 0.95) and group["eps"] == 1e-8
            assert group["gamma"] == 0.025 and group["lr_1d_ratio"] == 0.5
            assert group["weight_decay"] == 0.01 and group["weight_decay_1d"] == 0.1


@pytest.mark.parametrize(
    ("changed", "name"),
    [({"learning_rate": None}, "learning_rate"), ({"adam_beta1": 0.8}, "adam_beta1+adam_beta2")],
    ids=str,
)
def test_the_trainer_refuses_the_template_with_other_numbers(
    pool: RankPool, tmp_path: Path, changed: dict[str, Any], name: str
) -> None:
    """Its default learning rate, 5e-5, is not the template's; betas count where they differ from Adam's defaults."""
    given = {key: value for key, value in {**ARGUMENTS, **changed}.items() if value is not None}
    with pytest.raises(RankError) as error:
        pool.run(with_trainer, str(tmp_path), given, timeout=200)
    told = re.findall(r"- ds optimizer\.params\.\w+=.* vs hf (.*)=", str(error.value))
    assert set(told) == {name} and len(told) >= RANKS


# ------------------------------------------------------------------------------------------------------ the README

README = (FOLDER / "README.md").read_text()


def test_the_readme_names_every_file_and_no_other() -> None:
    named = set(re.findall(r"`(\w+\.json)`", README))
    named |= {f"gpt2_{size}_{kind}.json" for size in PUBLISHED for kind in ("zero1", "zero2", "zero3")}
    assert named == {path.name for path in FOLDER.glob("*.json")}
    assert "`gpt2_{small,medium,large,xl}_zero{1,2,3}.json`" in README


def test_the_readme_lists_the_numbers_of_gpus_that_work() -> None:
    listed = {int(micro): numbers for micro, numbers in re.findall(r"micro batch of (\d+): ([\d, ]+) GPUs", README)}
    assert listed.keys() == {micro for *_, micro in PUBLISHED.values()}
    for micro, numbers in listed.items():
        assert [int(n) for n in numbers.split(",")] == [n for n in range(1, 481) if 480 % (micro * n) == 0]


def test_the_readme_tells_the_trainers_arguments() -> None:
    for name, value in ARGUMENTS.items():
        assert f"--{name} {value:g}" in README
    params = read(TEMPLATE)["optimizer"]["params"]
    assert (params["lr"], params["betas"]) == (ARGUMENTS["learning_rate"], [0.95, 0.99])


def unaligned(ranks: int) -> bool:
    """Whether stage 3 swaps the gradient of one of xl's matrices to or from an odd place in its sub-group."""
    limit = read("gpt2_xl_zero3_nvme.json")["zero_optimization"]["sub_group_size"]
    pieces = [-(-memory.numel(shape) // ranks) for _, shape in memory.gpt2_shapes("xl") if len(shape) == 2]
    offset = 0
    for n in pieces:
        if 4 * n >= memory.SWAPPED and 4 * offset % 512:
            return True
        offset = 0 if offset + n >= limit < sum(pieces) else offset + n
    return False


def test_the_readme_says_where_nvme_would_read_wrongly() -> None:
    (listed,) = re.findall(r"On ([\d, ]+) GPUs MARS refuses to start with this file", README)
    fits = [n for n in range(1, 481) if 480 % (5 * n) == 0]
    assert [int(n) for n in listed.split(",")] == [n for n in fits if unaligned(n)]
