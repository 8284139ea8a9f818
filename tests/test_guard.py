"""The guard: an engine in which MARS does not make every update raises; keys are refused or warned about."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import mars_dist
from mars_dist.integrations.deepspeed import nvme
from mars_dist.integrations.deepspeed.features import lookup, refused, stage_of, unknown, warned
from tests import guard_cases, nets
from tests.compatibility.row import BASE
from tests.ranks import RankError, RankPool
from tests.zero_cases import ZeroCase

pytestmark = pytest.mark.timeout(180)
TENSORS = nets.MATRICES + nets.VECTORS
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


def raised(pool: RankPool, case: ZeroCase, take_over: Any) -> str:
    with pytest.raises(RankError, match="something else updates the weights in place of MARS") as error:
        pool.run(guard_cases.train, case, take_over)
    found = re.findall(r"MARS updated \d+ tensors in step \d+ of the DeepSpeed engine, which has \d+", str(error.value))
    assert len(found) >= pool.world_size, "every rank must raise"
    return found[0]


@pytest.mark.parametrize("case", [ZeroCase(s, d, params=BASE) for s in (0, 1, 2, 3) for d in ("fp32", "bf16")], ids=str)
def test_an_ordinary_engine_updates_every_tensor_once_in_each_step(pool: RankPool, case: ZeroCase) -> None:
    dry_run = TENSORS * ((case.stage, case.dtype) == (0, "bf16"))  # the wrapper's step at construction
    assert pool.run(guard_cases.train, case, guard_cases.nothing) == [(2 * TENSORS + dry_run, 2)] * 2


@STAGES
def test_a_feature_that_takes_the_whole_update(pool: RankPool, stage: int) -> None:
    told = raised(pool, ZeroCase(stage, params=BASE), guard_cases.everything)
    assert told == f"MARS updated 0 tensors in step 1 of the DeepSpeed engine, which has {TENSORS}"


@STAGES
def test_a_feature_that_takes_a_part_of_it(pool: RankPool, stage: int) -> None:
    """Built by name there are two flats, the matrices' first."""
    told = raised(pool, ZeroCase(stage, params=BASE), guard_cases.one_group)
    assert told == f"MARS updated {nets.MATRICES} tensors in step 1 of the DeepSpeed engine, which has {TENSORS}"


@STAGES
def test_a_feature_that_takes_it_after_some_steps(pool: RankPool, stage: int) -> None:
    told = raised(pool, ZeroCase(stage, params=BASE), guard_cases.later)
    assert told == f"MARS updated 0 tensors in step 4 of the DeepSpeed engine, which has {TENSORS}"


@pytest.mark.parametrize("stage", [0, 2])
def test_a_plug_in_that_steps_twice(pool: RankPool, stage: int) -> None:
    told = raised(pool, ZeroCase(stage, params=BASE), guard_cases.twice)
    assert told == f"MARS updated {2 * TENSORS} tensors in step 1 of the DeepSpeed engine, which has {TENSORS}"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_without_zero_a_part_is_missed_as_well(pool: RankPool, dtype: str) -> None:
    told = raised(pool, ZeroCase(0, dtype, params=BASE), guard_cases.half)
    assert re.match(rf"MARS updated [1-{TENSORS - 1}] tensors in step 1 of .* which has {TENSORS}", told)


@pytest.mark.parametrize(
    "case",
    [
        ZeroCase(1, "bf16", params=BASE, extra={"data_types": {"grad_accum_dtype": "fp32"}}),
        ZeroCase(2, "fp32", True, params=BASE),
        ZeroCase(3, "bf16", True, params=BASE),
    ],
    ids=str,
)
def test_other_wrappers_are_watched_too(pool: RankPool, case: ZeroCase) -> None:
    assert raised(pool, case, guard_cases.everything).startswith("MARS updated 0 tensors in step 1")


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("kind", ["object", "callable"])
def test_another_optimizer_beside_the_name_in_the_file_is_refused(pool: RankPool, stage: int, kind: str) -> None:
    """DeepSpeed takes the one of the script and says nothing: the file says MARS and AdamW would train."""
    with pytest.raises(
        RankError, match=r"optimizer.type = 'MARS', but DeepSpeed would train with \S+AdamW: .*Give none"
    ) as error:
        pool.run(guard_cases.json_and_client, stage, kind)
    assert str(error.value).count("RuntimeError: MARS: optimizer.type") == 2


@pytest.mark.parametrize("stage", [0, 2])
def test_a_mars_object_beside_the_name_in_the_file_is_told(pool: RankPool, stage: int) -> None:
    first, second = pool.run(guard_cases.json_and_client, stage, "mars")
    assert any("the params of the file are not used" in message for message in first) and second == []


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"compile": {"deepcompile": True}}, "compile.deepcompile = True: it needs a GPU"),
        ({"hybrid_engine": {"enabled": True}}, "hybrid_engine.enabled = True: it was not run"),
    ],
)
def test_what_was_not_run_is_said(pool: RankPool, extra: dict[str, Any], told: str) -> None:
    messages = pool.run(guard_cases.start, ZeroCase(2, params=BASE, extra=extra))[0]
    assert any(told in message for message in messages)


@pytest.mark.parametrize(
    ("kind", "updates"),
    [
        ("no backward", TENSORS),
        ("discard", TENSORS),
        ("unfreeze", TENSORS - 1 + TENSORS),
        ("add", 2 * TENSORS + 1),
        ("empty", 2 * TENSORS + 4),
    ],
)
def test_unusual_flows_that_are_right_raise_no_alarm(pool: RankPool, kind: str, updates: int) -> None:
    assert [n for n, _ in pool.run(guard_cases.valid_flow, kind)] == [updates] * 2


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_layer_that_was_frozen_since_an_earlier_engine(pool: RankPool, stage: int, dtype: str) -> None:
    counts = pool.run(guard_cases.frozen_when_built_again, stage, dtype)
    assert counts == [{"MARS-AdamW": nets.MATRICES - 1, "AdamW": nets.VECTORS}] * 2


def test_a_float16_autocast_left_on_by_an_earlier_engine_is_refused(pool: RankPool) -> None:
    with pytest.raises(RankError, match="an earlier engine in this process turned on torch_autocast in float16"):
        pool.run(guard_cases.autocast_that_stays_on)


def test_only_the_first_rank_warns(pool: RankPool) -> None:
    case = ZeroCase(2, params=BASE, extra={"some_new_key": {"enabled": True}})
    first, second = pool.run(guard_cases.start, case)
    assert "some_new_key.enabled = True: mars_dist was not tested with this key" in first and second == []


def test_a_refused_key_raises_at_every_stage(pool: RankPool) -> None:
    case = ZeroCase(3, params=BASE, zero={"offload_optimizer": {"device": "cpu", "super_offload": True}})
    with pytest.raises(RankError, match="offload_optimizer.super_offload = True: DeepSpeed would update") as error:
        pool.run(guard_cases.start, case)
    assert str(error.value).count("RuntimeError: MARS: zero_opt") == 2


# ------------------------------------------------------------------------------------------------------ without ranks


def mars(shapes: list[tuple[int, ...]], **kwargs: Any) -> mars_dist.MARS:
    return mars_dist.MARS([torch.zeros(shape, requires_grad=True) for shape in shapes], **kwargs)


@pytest.mark.parametrize(
    ("optimizer", "needed"),
    [
        (mars([(2, 2), (2,)]), 5),
        (mars([(2, 2), (2,)], amsgrad=True), 6),
        (mars([(2, 2)], mars_type="mars-lion"), 4),
        (mars([(2,)], mars_type="mars-lion"), 4),
        (mars([(2, 2), (2,)], mars_type="mars-lion"), 5),  # one flat of both needs the states of both
    ],
)
def test_too_few_buffers_for_nvme(optimizer: mars_dist.MARS, needed: int) -> None:
    def told(stage: int = 3, device: str = "nvme", **more: Any) -> str:
        config = {"zero_optimization": {"stage": stage, "offload_optimizer": {"device": device, **more}}}
        return nvme.too_few_buffers(config, optimizer.most_states())

    assert told(buffer_count=needed) == ""
    assert f"needs {needed} buffers here" in told(buffer_count=needed - 1)
    assert f'Set "buffer_count": {needed}' in told(buffer_count=needed - 1)
    assert bool(told()) == (needed > 4), "DeepSpeed's default is 4"
    # Each pipeline reads or writes one tensor ahead.
    assert told(buffer_count=2 * needed, pipeline_read=True) == ""
    assert f'Set "buffer_count": {2 * needed}' in told(buffer_count=2 * needed - 1, pipeline_write=True)
    assert f'Set "buffer_count": {3 * needed}' in told(buffer_count=needed, pipeline_read=True, pipeline_write=True)
    # Nothing is swapped there.
    assert told(stage=2, buffer_count=1) == told(device="cpu", buffer_count=1) == ""


def test_looking_keys_up() -> None:
    config = {"a": {"b": {"c": 0}}, "lr": "auto", "none": None}
    assert (lookup(config, "a.b.c", 5), lookup(config, "a.x.c", 5), lookup(config, "a.b.c.d", 5)) == (0, 5, 5)
    assert (lookup(config, "lr", 1), lookup(config, "none", 2)) == (1, 2)
    assert (stage_of({}), stage_of({"zero_optimization": {"stage": 3}}), stage_of({"zero_optimization": True})) == (
        0,
        3,
        1,
    )


def test_keys_that_are_off_say_nothing() -> None:
    off = {
        "fp16": {"enabled": False},
        "zero_optimization": {"stage": 2, "zenflow": None, "offload_optimizer": {"device": "cpu", "ratio": 1.0}},
        "some_new_key": {"enabled": False, "level": None, "more": "auto"},
        "tensor_parallel": {"autotp_size": 1},
    }
    assert [*refused(off)] == [*warned(off)] == []
    assert "some_new_key" not in " ".join(unknown(off))


def test_a_matrix_variant_on_embeddings_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A file knows no layers; groups of ``param_groups`` have none of them under the matrix rule."""
    from mars_dist import MARS, param_groups
    from mars_dist.integrations.deepspeed import guard

    net = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 3))
    for params, told in ((list(net.parameters()), 1), (param_groups(net, "mars-m"), 0)):
        caplog.clear()
        guard._say_what_is_orthogonalised(net, MARS(params, lr=1e-3, lr_1d=1e-3, mars_type="mars-m"))
        assert (
            len([m for m in caplog.messages if "orthogonalises 1 embeddings or Conv1D weights (0, ...)" in m]) == told
        )
    guard._say_what_is_orthogonalised(net, MARS(net.parameters(), lr=1e-3, lr_1d=1e-3))
    assert not [m for m in caplog.messages if "orthogonalises" in m]
