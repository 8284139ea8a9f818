"""The plug-in for FSDP2, launch/accelerate/*.yaml against the real parser, and the example under each of them."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

import pytest
import torch
import yaml

from mars_dist.integrations import accelerate as integration
from tests.processes import ROOT, assert_left_properly, noting_exits, run_python

# ----------------------------------------------------------------------------------------------------------- plug-in


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without anything of a launcher."""
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_")):
            monkeypatch.delenv(name)
    return monkeypatch


def test_the_plug_in_has_defaults_and_the_file_of_the_launcher_and_the_call_win(launched: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    plugin = integration.fsdp2_plugin()
    assert (plugin.fsdp_version, plugin.reshard_after_forward) == (2, True)
    assert plugin.auto_wrap_policy is transformer_auto_wrap_policy
    assert plugin.state_dict_type.name == "SHARDED_STATE_DICT"
    for name, value in {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_RESHARD_AFTER_FORWARD": "false",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP",
        "FSDP_MIN_NUM_PARAMS": "7",
    }.items():
        launched.setenv(name, value)
    plugin = integration.fsdp2_plugin()
    assert (plugin.reshard_after_forward, plugin.state_dict_type.name) == (False, "FULL_STATE_DICT")
    assert (plugin.auto_wrap_policy, plugin.min_num_params) == (size_based_auto_wrap_policy, 7)
    plugin = integration.fsdp2_plugin(reshard_after_forward=True, state_dict_type="SHARDED_STATE_DICT")
    assert (plugin.reshard_after_forward, plugin.state_dict_type.name) == (True, "SHARDED_STATE_DICT")


def test_gradients_are_summed_in_float32_unless_a_policy_is_given(launched: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    plugin = integration.fsdp2_plugin()
    for said, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        plugin.set_mixed_precision(said)  # as Accelerator does
        assert plugin.mixed_precision_policy == MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    given = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    plugin = integration.fsdp2_plugin(mixed_precision_policy=given)
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy is given


def test_wrong_options_of_the_plug_in_are_named(launched: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no option 'reshard_after_foward'; did you mean 'reshard_after_forward'"):
        integration.fsdp2_plugin(reshard_after_foward=True)
    with pytest.raises(ValueError, match="fsdp_version=1: this is for FSDP2.*use_orig_params=True"):
        integration.fsdp2_plugin(fsdp_version=1)


# ------------------------------------------------------------------------------------------- launch/accelerate/*.yaml

LAUNCH = ROOT / "launch" / "accelerate"
FILES = sorted(LAUNCH.glob("*.yaml"))
# What `accelerate launch` really hands to the processes.
HANDED: dict[str, dict[str, str]] = {
    "gpu_1": {"ACCELERATE_MIXED_PRECISION": "bf16"},
    "ddp_8": {"ACCELERATE_MIXED_PRECISION": "bf16"},
    "cpu_2": {"ACCELERATE_MIXED_PRECISION": "no"},
    "fsdp2_8": {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        "FSDP_OFFLOAD_PARAMS": "false",
        "ACCELERATE_MIXED_PRECISION": "bf16",
    },
    "fsdp1_8": {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "1",
        "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
        "FSDP_USE_ORIG_PARAMS": "true",
        "FSDP_SYNC_MODULE_STATES": "true",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    },
    "hsdp_4x8": {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "4",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": "8",
    },
    **{
        f"deepspeed_zero{stage}": {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage),
            "ACCELERATE_GRADIENT_CLIPPING": "1.0",
            "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
            "ACCELERATE_MIXED_PRECISION": "bf16",
        }
        for stage in (2, 3)
    },
}
PROCESSES = {"gpu_1": 1, "cpu_2": 2, "hsdp_4x8": 32}


def test_every_file_is_listed() -> None:
    assert {file.stem for file in FILES} == HANDED.keys()
    readme = (LAUNCH / "README.md").read_text()
    assert all(f"`{file.name}`" in readme for file in FILES)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_accelerate_launch_takes_every_key_of_the_file(file: Path, launched: pytest.MonkeyPatch) -> None:
    """It refuses unknown keys at the top level and ignores them below, so those are held against its options."""
    from accelerate.commands import launch
    from accelerate.utils import launch as environment

    parser = launch.launch_command_parser()
    options = {action.dest for action in parser._actions}
    content = yaml.safe_load(file.read_text())
    for section in ("fsdp_config", "deepspeed_config", "parallelism_config"):
        assert set(content.get(section, {})) <= options, section
    more = ["--main_process_port", "0"] if file.stem != "gpu_1" else []
    if file.stem == "hsdp_4x8":  # as its README says
        more = ["--machine_rank", "3", "--main_process_ip", "10.0.0.1"]
    args = parser.parse_args(["--config_file", str(file), *more, "script.py"])
    args, defaults, _ = launch._validate_launch_command(args)
    assert args.num_processes == PROCESSES.get(file.stem, 8)
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ""
        _, env = environment.prepare_deepspeed_cmd_env(args)
    elif args.use_fsdp or args.multi_gpu:
        env = environment.prepare_multi_gpu_env(args)
        per_machine = {"hsdp_4x8": ("8", "4")}.get(file.stem, (str(args.num_processes), "1"))
        assert (args.nproc_per_node, str(args.num_machines)) == per_machine
        if file.stem == "hsdp_4x8":
            assert (args.node_rank, args.rdzv_backend, args.rdzv_endpoint) == (3, "static", "10.0.0.1:29500")
    else:
        _, env = environment.prepare_simple_launcher_cmd_env(args)
    handed = HANDED[file.stem]
    assert {name: env.get(name) for name in handed} == handed
    engines = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_PARALLELISM_CONFIG")
    assert {name for name in engines if env.get(name) == "true"} == set(engines) & handed.keys()


# ------------------------------------------------------------------------------------------------------- the example

EXAMPLE = ROOT / "examples" / "gpt2_accelerate.py"
SMALL = "--steps 3 --accumulate 2 --layers 2 --width 32 --sequence 16 --log-every 1".split()
GLOBAL_BATCH = 4  # sequences, on all processes together
# wte, wpe and 4 matrices in each of 2 layers; under matrix variants param_groups leaves the embeddings to AdamW.
RULES = {
    "mars-adamw": ("{'AdamW': 18, 'MARS-AdamW': 10}", "MARS-AdamW on 10 matrices, AdamW on 18 other tensors"),
    "mars-m": ("{'AdamW': 20, 'MARS-M': 8}", "MARS-M on 8 matrices, AdamW on 20 other tensors"),
}
# What the file says beyond what a CPU can do: number of processes, and that FSDP1 broadcasts from GPUs only.
OVERRIDES = {
    "gpu_1": "",
    "cpu_2": "",
    "ddp_8": "--num_processes 2",
    "fsdp2_8": "--num_processes 2",
    "fsdp1_8": "--num_processes 2 --fsdp_sync_module_states false",
    "hsdp_4x8": "--num_machines 1 --num_processes 4 --parallelism_config_dp_replicate_size 2 "
    "--parallelism_config_dp_shard_size 2",
    "deepspeed_zero2": "--num_processes 2",
    "deepspeed_zero3": "--num_processes 2",
    "deepspeed_zero3+offload": "--num_processes 2 --offload_optimizer_device cpu --offload_param_device cpu",
}
RAN = {
    "gpu_1": "NO on 1 processes: GPT2LMHeadModel, MARS; pieces: ['whole tensors']; ",
    "cpu_2": "MULTI_CPU on 2 processes: DistributedDataParallel, MARS; pieces: ['whole tensors']; ",
    "ddp_8": "MULTI_CPU on 2 processes: DistributedDataParallel, MARS; pieces: ['whole tensors']; ",
    "fsdp2_8": "FSDP on 2 processes: FSDPGPT2LMHeadModel, MARS; pieces: ['DTensor (Shard(dim=0),)']; ",
    "fsdp1_8": "FSDP on 2 processes: FullyShardedDataParallel, MARS; pieces: ['FSDP1']; ",
    "hsdp_4x8": "FSDP on 4 processes: FSDPGPT2LMHeadModel, MARS; pieces: ['DTensor (Replicate(), Shard(dim=0))']; ",
    "deepspeed_zero2": "DEEPSPEED on 2 processes: DeepSpeedEngine, MARS; pieces: ['ZeRO-1/2']; ",
    "deepspeed_zero3": "DEEPSPEED on 2 processes: DeepSpeedEngine, MARS; pieces: ['ZeRO-3']; ",
    "deepspeed_zero3+offload": "DEEPSPEED on 2 processes: DeepSpeedEngine, MARS; pieces: ['ZeRO-3']; ",
}
# Updates 1 to 3 under a schedule that is stepped once per update: warm-up over one, then down to a tenth of 1e-2.
NEXT_LR = [1e-2, 5.5e-3, 1e-3]


def launch_example(name: str, folder: Path, variant: str = "mars-adamw") -> list[float]:
    """Run the example by ``accelerate launch`` with the file; returns the losses after checking what ran."""
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(LAUNCH / f"{name.partition('+')[0]}.yaml")]
    launcher += OVERRIDES[name].split() + ["--main_process_port", "0"]
    shim = [str(ROOT / "tests" / "cpu_fsdp.py")] if "fsdp" in name or "hsdp" in name or "deepspeed" in name else []
    share = str(GLOBAL_BATCH // {"gpu_1": 1, "hsdp_4x8": 4}.get(name, 2))
    options = [*SMALL, "--mars-type", variant, "--batch", share]
    folder.mkdir(exist_ok=True)
    env = noting_exits(folder)
    done = run_python(*launcher, *shim, EXAMPLE, *options, folder=folder, seconds=240, env=env)
    assert done.returncode == 0, done.stdout
    if name == "cpu_2":  # caches keep the groups of the other engines: their threads are only given time
        assert_left_properly(folder, ranks=2)
    rules, told = RULES[variant]
    assert f"{RAN[name]}rules: {rules}; skipped updates: 0" in done.stdout, done.stdout
    lines = re.findall(r"update +(\d)/3  loss (\d+\.\d+)  next lr (\S+)", done.stdout)
    assert [int(step) for step, _, _ in lines] == [1, 2, 3], "printed by one process, once per update"
    assert [float(lr) for _, _, lr in lines] == NEXT_LR
    losses = [float(loss) for _, loss, _ in lines]
    assert losses[2] < losses[1] < losses[0] < math.log(50304) + 0.1
    assert done.stdout.count(told) == 1
    assert ("DeepSpeed keeps MARS under offload" in done.stdout) == ("offload" in name)
    lower = "FSDP sums gradients over the ranks in bfloat16"
    assert (lower in done.stdout) == (name == "fsdp1_8"), "FSDP2 sums in float32 by fsdp2_plugin()"
    return losses


@pytest.fixture(scope="module")
def on_two_cpus(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return launch_example("cpu_2", tmp_path_factory.mktemp("cpu_2"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    ["cpu_2", *(pytest.param(name, marks=pytest.mark.slow) for name in RAN if name != "cpu_2")],
)
def test_the_example_runs_under_every_file(name: str, on_two_cpus: list[float], tmp_path: Path) -> None:
    """All read the same data from the same weights (one process in another order); all but cpu_2 in bfloat16."""
    losses = on_two_cpus if name == "cpu_2" else launch_example(name, tmp_path)
    if name != "gpu_1":
        assert losses == pytest.approx(on_two_cpus, abs=0.02)


@pytest.mark.timeout(600)
def test_the_example_trains_a_matrix_variant_under_fsdp2_and_zero3(tmp_path: Path) -> None:
    """``--mars-type mars-m``: two engines that cut the matrices in different ways, and the same losses."""
    fsdp2, zero3 = (launch_example(name, tmp_path / name, "mars-m") for name in ("fsdp2_8", "deepspeed_zero3"))
    assert fsdp2 == pytest.approx(zero3, abs=0.02)


def test_the_example_stays_short() -> None:
    lines = EXAMPLE.read_text().splitlines()
    assert len(lines) < 120 and max(map(len, lines)) <= 120
