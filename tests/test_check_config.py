"""``python -m mars_dist.integrations.deepspeed CONFIG.json``: one fault in a good configuration, one finding."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mars_dist.integrations.deepspeed import __main__ as command
from mars_dist.integrations.deepspeed.check import check, read
from mars_dist.integrations.deepspeed.features import REFUSED, TESTED, WARNED
from tests.processes import run_python

GOOD: dict[str, Any] = {
    "train_batch_size": 480,
    "train_micro_batch_size_per_gpu": 5,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "MARS", "params": {"lr": 2e-3, "lr_1d": 1e-3, "betas": [0.95, 0.99], "gamma": 0.025}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 1000, "warmup_num_steps": 10}},
}
PARAMS = "optimizer.params"
MISSING = object()


def changed(*changes: tuple[str, Any]) -> dict[str, Any]:
    """GOOD with dotted keys set, or taken out."""
    config = copy.deepcopy(GOOD)
    for key, value in changes:
        *path, last = key.split(".")
        section = config
        for name in path:
            section = section.setdefault(name, {})
        if value is MISSING:
            del section[last]
        else:
            section[last] = value
    return config


def test_a_good_configuration_has_no_findings() -> None:
    assert check(GOOD) == check(GOOD, 8) == check(GOOD, 32) == []


OFFLOAD = "zero_optimization.offload_optimizer"
NVME = (OFFLOAD, {"device": "nvme", "nvme_path": "/local_nvme"})
ONE = {
    # unknown MARS parameters
    "unknown": ([(f"{PARAMS}.gama", 0.1)], "error", f"{PARAMS}.gama", "no such parameter. Did you mean 'gamma'"),
    "far": ([(f"{PARAMS}.zzz", 1)], "error", f"{PARAMS}.zzz", "It knows: lr, betas"),
    # wrong types and ranges
    "type": ([(f"{PARAMS}.eps", "tiny")], "error", f"{PARAMS}.eps", "eps must be a number, got 'tiny'"),
    "boolean": ([(f"{PARAMS}.amsgrad", 1)], "error", f"{PARAMS}.amsgrad", "must be True or False, got 1"),
    "betas": ([(f"{PARAMS}.betas", [0.9])], "error", f"{PARAMS}.betas", "must be two numbers"),
    "range": ([(f"{PARAMS}.lr", -1.0)], "error", f"{PARAMS}.lr", r"lr must be in \[0, inf\), got -1.0"),
    "variant": ([(f"{PARAMS}.mars_type", "mars-adam")], "error", f"{PARAMS}.mars_type", "did you mean 'mars-adamw'"),
    "auto": ([(f"{PARAMS}.gamma", "auto")], "error", f"{PARAMS}.gamma", "only lr, betas, eps, weight_decay are filled"),
    "params": ([(PARAMS, 3)], "error", PARAMS, "must be an object"),
    # the name
    "name": (
        [("optimizer.type", "mars_adamw")],
        "error",
        "optimizer.type",
        'DeepSpeed knows it as "MARS"; the variant',
    ),
    "adam": ([("optimizer.type", "AdamW")], "warning", "optimizer.type", "does not train with MARS"),
    "no optimizer": ([("optimizer", MISSING)], "warning", "optimizer", "is not in the file"),
    # contradictions
    "swapped": ([(f"{PARAMS}.betas", [0.99, 0.95])], "warning", f"{PARAMS}.betas", r"= 2.475. Were they swapped\?"),
    "lr_1d": (
        [(f"{PARAMS}.lr", 2e-5), (f"{PARAMS}.lr_1d", MISSING)],
        "warning",
        f"{PARAMS}.lr_1d",
        "published 0.003, 150 times lr = 2e-05",
    ),
    "schedule": (
        [("scheduler", {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 10}})],
        "warning",
        "scheduler.params.warmup_max_lr",
        "= 0.003 is where WarmupLR takes the learning rate, whatever optimizer.params.lr = 0.002 says",
    ),
    "schedule's default": (
        [("scheduler", {"type": "WarmupDecayLR", "params": {"total_num_steps": 100}})],
        "warning",
        "scheduler.params.warmup_max_lr",
        "= 0.001 is where WarmupDecayLR takes",
    ),
    "one cycle": (
        [("scheduler", {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 2e-3}})],
        "warning",
        "scheduler.params.cycle_momentum",
        r"is not given: this scheduler moves betas unless told otherwise",
    ),
    "no clipping": ([("gradient_clipping", MISSING)], "warning", "gradient_clipping", "is not written out"),
    "batch": ([("train_micro_batch_size_per_gpu", 7)], "error", "train_batch_size", "no multiple of 7 sequences"),
    "accumulation": (
        [("gradient_accumulation_steps", 7)],
        "error",
        "train_batch_size",
        "no multiple of 5 sequences per rank x 7 acc",
    ),
    # what this version does not do
    "exact": ([(f"{PARAMS}.is_approx", False)], "warning", f"{PARAMS}.is_approx", "exact mode.*ExactMode"),
    "exact on NVMe": (
        [
            (f"{PARAMS}.is_approx", False),
            (OFFLOAD, {"device": "nvme", "buffer_count": 12}),
            ("zero_optimization.stage", 3),
        ],
        "error",
        f"{PARAMS}.is_approx",
        "does not work with optimizer states on NVMe",
    ),
    # keys
    "super": (
        [(OFFLOAD, {"device": "cpu", "super_offload": True}), ("zero_optimization.stage", 3)],
        "error",
        f"{OFFLOAD}.super_offload",
        "not call MARS",
    ),
    "fp16 at stage 0": (
        [("bf16", MISSING), ("fp16", {"enabled": True}), ("zero_optimization", MISSING)],
        "error",
        "fp16.enabled",
        "without ZeRO",
    ),
    "fp16": (
        [("bf16", MISSING), ("fp16", {"enabled": True})],
        "warning",
        "fp16.enabled",
        "with a dynamic loss scale",
    ),
    "buffers": (
        [NVME, ("zero_optimization.stage", 3)],
        "error",
        f"{OFFLOAD}.buffer_count",
        r'= 4: swapping to NVMe needs 5 buffers here.*Set "buffer_count": 5',
    ),
    "buffers with amsgrad": (
        [NVME, ("zero_optimization.stage", 3), (f"{OFFLOAD}.buffer_count", 5), (f"{PARAMS}.amsgrad", True)],
        "error",
        f"{OFFLOAD}.buffer_count",
        "needs 6 buffers here",
    ),
    "universal": (
        [("checkpoint", {"load_universal": True}), ("zero_optimization", MISSING)],
        "error",
        "checkpoint.load_universal",
        "without ZeRO",
    ),
    "stage as a string": (
        [("bf16", MISSING), ("fp16", {"enabled": True, "loss_scale": 8}), ("zero_optimization.stage", "0")],
        "error",
        "fp16.enabled",
        "without ZeRO",
    ),
    "number as a string": (
        [("zero_optimization.stage", 3), (OFFLOAD, {"device": "cpu", "ratio": "0.5"})],
        "error",
        f"{OFFLOAD}.ratio",
        "CPU Adam only",
    ),
    "old name": (
        [("bf16", MISSING), ("bfloat16", {"enabled": True, "check_grad_overflow": False})],
        "warning",
        "bf16.check_grad_overflow",
        "one NaN or inf",
    ),
    "autocast": (
        [("bf16", MISSING), ("torch_autocast", {"enabled": True})],
        "warning",
        "torch_autocast.enabled",
        'without a "dtype"',
    ),
    "sequence": ([("sequence_parallel_size", 2)], "error", "sequence_parallel_size", "the mpu of Ulysses"),
    "schedule's name": (
        [("scheduler.type", "WarmupCosineLr")],
        "error",
        "scheduler.type",
        "Did you mean 'WarmupCosineLR'",
    ),
    "schedule's key": ([("scheduler.Type", "WarmupLR")], "warning", "scheduler.Type", "not tested with this key"),
    "schedule's params": ([("scheduler", {"type": "WarmupLR"})], "error", "scheduler.params", "cannot start without"),
    "range test": (
        [("scheduler", {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 1e-4}})],
        "warning",
        "scheduler.params.lr_range_test_min_lr",
        "is where LRRangeTest takes",
    ),
    "no path": (
        [("zero_optimization.stage", 3), (OFFLOAD, {"device": "nvme", "buffer_count": 5})],
        "error",
        f"{OFFLOAD}.nvme_path",
        "is not given",
    ),
    "new": ([("brand_new", {"enabled": True})], "warning", "brand_new.enabled", "not tested with this key"),
    # DeepSpeed's own checks
    "both": ([("fp16", {"enabled": True, "loss_scale": 8})], "error", "", "DeepSpeed does not accept.*simultaneously"),
    "removed": ([("amp", {"enabled": True})], "error", "", "DeepSpeed does not accept"),
}


# What else is said about a fault, beside its own finding.
ON_DISK = {f"{OFFLOAD}.device"}  # its own warning: such a run cannot be resumed
ALSO = {
    "no path": ON_DISK,
    "schedule's params": {"scheduler.params.warmup_max_lr"},
    "removed": {"amp.enabled"},
    "params": {""},
    "buffers": ON_DISK,
    "buffers with amsgrad": ON_DISK,
    "exact on NVMe": ON_DISK | {f"{OFFLOAD}.nvme_path"},
}


@pytest.mark.parametrize("fault", ONE)
def test_one_fault_is_the_one_finding(fault: str) -> None:
    changes, level, key, message = ONE[fault]
    found = check(changed(*changes))
    others = [f for f in found if (f.level, f.key) != (level, key)]
    told = [f for f in found if (f.level, f.key) == (level, key)]
    assert len(told) == 1 and re.search(message, told[0].message, re.DOTALL), found
    assert {f.key for f in others} == ALSO.get(fault, set())


def test_a_typo_in_a_key_of_deepspeed_is_reported_with_the_right_key() -> None:
    found = check(changed(("zero_optimization.reduce_buket_size", 5)))
    assert [f.level for f in found] == ["error", "warning"]
    assert "reduce_buket_size" in found[0].message and "Did you mean 'zero_optimization.reduce_bucket_size'" in (
        found[1].message
    )


def test_clipping_given_twice() -> None:
    found = {f.key: f.message for f in check(changed((f"{PARAMS}.max_grad_norm", 0.5)))}
    assert "clipping is given twice: 1.0 here and 0.5 as" in found["gradient_clipping"]
    assert 'Write "gradient_clipping": 0.5' in found[f"{PARAMS}.max_grad_norm"]


def test_offload_with_an_optimizer_of_the_script() -> None:
    config = changed(("optimizer", MISSING), (OFFLOAD, {"device": "cpu"}))
    assert [f.key for f in check(config)] == ["optimizer", "zero_force_ds_cpu_optimizer"]
    assert [f.key for f in check({**config, "zero_force_ds_cpu_optimizer": False})] == ["optimizer"]


@pytest.mark.parametrize(("ranks", "right"), [(8, True), (32, True), (96, True), (7, False), (64, False)])
def test_batch_sizes_for_a_number_of_ranks(ranks: int, right: bool) -> None:
    found = check(GOOD, ranks)
    assert (found == []) == right
    if not right:
        assert found[0].key == "train_batch_size" and "1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96" in found[0].message
    assert check(changed(("gradient_accumulation_steps", 3)), 16)[0].key == "train_batch_size"


def test_lion_by_name_fits_deepspeeds_default_of_four_buffers() -> None:
    found = check(changed(NVME, ("zero_optimization.stage", 3), (f"{PARAMS}.mars_type", "mars-lion")))
    assert {f.key for f in found} == ON_DISK


VALUES = st.none() | st.booleans() | st.integers(-2, 600) | st.floats(allow_nan=False) | st.text(max_size=3)
ANY = st.recursive(
    VALUES | st.just("auto"), lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=2), v)
)
KEYS = sorted(
    {f.key for f in (*REFUSED, *WARNED)}
    | TESTED
    | {f"{PARAMS}.{name}" for name in ("lr", "lr_1d", "betas", "amsgrad", "mars_type", "matrix_ndim", "is_approx")}
    | {"optimizer", "optimizer.type", PARAMS, "scheduler", "scheduler.type", "scheduler.params", "zero_optimization"}
    | {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", OFFLOAD}
)


@settings(max_examples=150, deadline=None)
@given(key=st.sampled_from(KEYS), value=ANY, ranks=st.none() | st.integers(1, 64))
def test_no_value_of_any_key_makes_the_checker_fail(key: str, value: Any, ranks: int | None) -> None:
    for finding in check(changed((key, value)), ranks):
        assert finding.level in ("error", "warning") and finding.message


def test_reading(tmp_path: Path) -> None:
    """As DeepSpeed reads: comments are allowed, a key given twice is not."""
    path = tmp_path / "ds.json"
    path.write_text("{\n  # the published batch\n  train_batch_size: 480\n}")
    assert read(path) == {"train_batch_size": 480}
    for text, message in [
        ('{"optimizer": {"type": "MARS", "type": "AdamW"}}', "'type' is given twice"),
        ('{"a": [1, 2}', "line 1"),
        ("[1, 2]", "is a JSON object"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read(path)


def test_off_in_any_spelling_says_nothing() -> None:
    off = changed((OFFLOAD, {"device": "cpu", "super_offload": "false"}), ("fp16", {"enabled": "false"}))
    assert check(off) == []
    assert check(changed((OFFLOAD, {"device": "cpu", "super_offload": True}))) == [], "DeepSpeed ignores it at stage 2"


def test_a_huge_batch_takes_no_longer() -> None:
    found = check(changed(("train_batch_size", 10**12 + 7), ("train_micro_batch_size_per_gpu", 2)))
    assert [f.key for f in found] == ["train_batch_size"]


def test_the_command(tmp_path: Path) -> None:
    good, bad, broken = tmp_path / "good.json", tmp_path / "bad.json", tmp_path / "broken.json"
    good.write_text(json.dumps(GOOD))
    bad.write_text(json.dumps(changed((f"{PARAMS}.gama", 1))))
    broken.write_text("{")
    module = "mars_dist.integrations.deepspeed"
    done = run_python("-m", module, good, folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{good}: MARS, 0 errors, 0 warnings\n")
    done = run_python("-m", module, good, bad, folder=tmp_path)
    assert done.returncode == 1 and f"{bad}: error: {PARAMS}.gama MARS has no such parameter" in done.stdout


def test_exit_codes_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad, broken = tmp_path / "bad.json", tmp_path / "broken.json"
    bad.write_text(json.dumps(changed((f"{PARAMS}.gama", 1))))
    broken.write_text("{")
    assert command.main([str(bad), "--json"]) == 1
    report: Mapping[str, Any] = json.loads(capsys.readouterr().out)
    assert [f["key"] for f in report[str(bad)]] == [f"{PARAMS}.gama"]
    assert command.main([str(broken), str(tmp_path / "none.json")]) == 2
    printed = capsys.readouterr().err
    assert f"{broken}: cannot be read" in printed and f"{tmp_path / 'none.json'}: cannot be read" in printed
    with pytest.raises(SystemExit, match="2"):
        command.main([str(bad), "--world-size", "0"])
    assert "--world-size must be at least 1, got 0" in capsys.readouterr().err
