"""The table in ds_configs/README.md, the package's lists of keys, the rows and DeepSpeed's own keys agree."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from mars_dist.integrations.deepspeed.features import NEUTRAL, REFUSED, TESTED, WARNED, lookup, unknown
from tests.compatibility import ROWS
from tests.compatibility.__main__ import README, written
from tests.compatibility.row import Row
from tests.zero_cases import ZeroCase


def keys(*answers: str) -> set[str]:
    return {key for row in ROWS if row.answer in answers for key in row.keys}


def test_the_readme_shows_the_table_of_today() -> None:
    text = README.read_text()
    assert written(text) == text, "run `python -m tests.compatibility --write`"


def test_what_the_package_calls_tested_is_what_the_rows_run() -> None:
    assert keys("works", "warns") == TESTED


def test_every_refusal_and_every_warning_has_its_row() -> None:
    """Rows may say more: some refusals hang on the model or the ranks, not on the file alone."""
    assert {feature.key for feature in REFUSED} <= keys("refused")
    assert {feature.key for feature in WARNED} <= keys("warns", "untested")


# Their values are known on the ranks only: folders, and parallelism that the row's function sets up.
SET_BY_THE_FUNCTION = {"expert_parallel", "sequence_parallel_size", "data_parallel_size"}
SET_BY_THE_FUNCTION |= {"tensor_parallel.autotp_size", "tensor_parallel.partition_config"}
SET_BY_THE_FUNCTION |= {f"zero_optimization.offload_{what}.nvme_path" for what in ("optimizer", "param")}


@pytest.mark.parametrize("row", [row for row in ROWS if row.cases], ids=lambda row: row.feature)
def test_the_keys_of_a_row_are_in_its_cases(row: Row) -> None:
    missing = object()
    for key in set(row.keys) - SET_BY_THE_FUNCTION:
        assert any(lookup(written_out(case), key, missing) is not missing for case in row.cases), key


def written_out(case: ZeroCase) -> dict[str, object]:
    """What of the configuration the case says, as ``zero_cases.config`` writes it."""
    out: dict[str, object] = {"zero_optimization": {"stage": case.stage, **case.zero}, **case.extra}
    if case.offload:
        out["zero_optimization"] = {"stage": case.stage, **case.zero, "offload_optimizer": {"device": "cpu"}}
    if case.dtype == "bf16":
        out["bf16"] = {"enabled": True, **case.extra.get("bf16", {})}
    out |= {"gradient_clipping": case.clip} if case.clip else {}
    return out | ({"gradient_accumulation_steps": case.accumulation} if case.accumulation > 1 else {})


def test_a_row_that_is_not_run_says_so() -> None:
    for row in ROWS:
        assert bool(row.cases) == (row.answer != "untested"), row.feature
        assert bool(row.message) == (row.answer in ("warns", "refused")), row.feature
        assert row.note or row.answer == "works", row.feature


# ------------------------------------------------------------------------------------------- DeepSpeed's own keys

MODELS = {
    ("runtime/zero/config.py", "DeepSpeedZeroConfig"): "zero_optimization",
    ("runtime/zero/offload_config.py", "DeepSpeedZeroOffloadOptimizerConfig"): "zero_optimization.offload_optimizer",
    ("runtime/zero/offload_config.py", "DeepSpeedZeroOffloadParamConfig"): "zero_optimization.offload_param",
    ("runtime/precision_config.py", "DeepSpeedFP16Config"): "fp16",
    ("runtime/precision_config.py", "DeepSpeedBF16Config"): "bf16",
    ("compile/config.py", "CompileConfig"): "compile",
}
SECTIONS = {"zero_optimization.offload_optimizer", "zero_optimization.offload_param"}  # their fields are keys


def source(file: str) -> ast.Module:
    spec = importlib.util.find_spec("deepspeed")  # found, not imported
    assert spec is not None and spec.origin is not None
    return ast.parse((Path(spec.origin).parent / file).read_text(encoding="utf-8"))


def deepspeeds_keys() -> Iterator[str]:
    """The fields of DeepSpeed's configuration models by the names that a file gives them, and the top-level keys."""
    for (file, model), section in MODELS.items():
        found = [node for node in ast.walk(source(file)) if isinstance(node, ast.ClassDef) and node.name == model]
        assert found, f"DeepSpeed no longer has {model} in {file}"
        for field in found[0].body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                given = field.value.keywords if isinstance(field.value, ast.Call) else []
                alias = [k.value.value for k in given if k.arg == "alias" and isinstance(k.value, ast.Constant)]
                yield f"{section}.{alias[0] if alias else field.target.id}"
    names = {"TRAIN_BATCH_SIZE", "GRADIENT_ACCUMULATION_STEPS", "MANAGED_GRADIENT_ACCUMULATION", "GRADIENT_CLIPPING"}
    names |= {"COMMUNICATION_DATA_TYPE", "PRESCALE_GRADIENTS", "GRADIENT_PREDIVIDE_FACTOR", "GRADIENT_ALLREDUCE_OP"}
    names |= {"SEQ_PARALLEL_COMMUNICATION_DATA_TYPE", "ZERO_FORCE_DS_CPU_OPTIMIZER", "DISABLE_ALLGATHER"}
    names |= {"DATALOADER_DROP_LAST", "USE_DATA_BEFORE_EXPERT_PARALLEL", "LOG_LEVEL", "STEPS_PER_PRINT"}
    for node in source("runtime/constants.py").body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in names:
            assert isinstance(node.value, ast.Constant)
            yield str(node.value.value)


@pytest.mark.parametrize("key", sorted(set(deepspeeds_keys()) - SECTIONS))
def test_every_key_of_deepspeed_has_an_answer(key: str) -> None:
    """A release with a new key fails here until somebody has found out what MARS does with it."""
    assert not list(unknown(nested(key))), f"{key} is in none of TESTED, NEUTRAL, REFUSED and WARNED"


def nested(key: str) -> dict[str, object]:
    value: object = 1
    for part in reversed(key.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def test_the_lists_do_not_overlap() -> None:
    assert not TESTED & NEUTRAL
    assert not NEUTRAL & {feature.key for feature in REFUSED + WARNED}
