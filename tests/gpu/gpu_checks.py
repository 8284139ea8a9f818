"""Run by tests/gpu/run.sh on a machine with a GPU (the default tests need none and do not collect this file)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch.nn import Parameter

from mars_dist import MARS
from tests import golden_cases, zero_cases
from tests.ranks import RankPool
from tests.test_zero import MATRIX_LABELS, REPLAY_TOLERANCE, furthest, replay
from tests.zero_cases import ZeroCase

VARIANTS = ("mars-adamw", "mars-lion", "mars-shampoo", "mars-m")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", [n for n in golden_cases.names() if "exact" not in n])
def test_golden_trajectories_on_the_gpu(name: str, dtype: torch.dtype) -> None:
    case = golden_cases.case(name)
    params = {n: Parameter(p.to("cuda", dtype)) for n, p in case.p0.items()}
    optimizer = MARS(case.param_groups(params), **case.kwargs)
    for t in range(case.meta["steps"]):
        for group in optimizer.param_groups:
            group["lr"] = case.meta["lrs"][t]
        for n, p in params.items():
            p.grad = case.grads[t][n].to("cuda", dtype)
        optimizer.step()
        for n, p in params.items():
            expected = case.params[t][n]
            assert (p.detach().double().cpu() - expected).abs().max() <= case.tolerance(t, dtype), (t, n)


@pytest.mark.parametrize("skip_nonfinite", [False, True])
@pytest.mark.parametrize("mars_type", VARIANTS)
def test_a_step_does_not_synchronise_with_the_host(mars_type: str, skip_nonfinite: bool) -> None:
    params = [Parameter(torch.randn(s, device="cuda")) for s in ((64, 32), (32,), (16, 64))]
    optimizer = MARS(params, mars_type=mars_type, skip_nonfinite=skip_nonfinite, lr_1d=3e-3)
    for step in range(3):
        for p in params:
            p.grad = torch.randn_like(p)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first step sets up CUDA libraries
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_norms(dtype: torch.dtype) -> None:
    """300^2 overflows float16: the norm is 300 * 128, and c~ has norm 1 all the same."""
    p = Parameter(torch.zeros(128, 128, device="cuda", dtype=dtype))
    optimizer = MARS([p], gamma=0.0, betas=(0.0, 0.99))
    p.grad = torch.full_like(p, 300.0)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], torch.full_like(p, 1 / 128, dtype=torch.float32))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(torch.cuda.device_count() if torch.cuda.device_count() in (1, 2, 3) else 2, device="cuda")
    yield pool
    pool.close()


CASES = [
    ZeroCase(stage, dtype, offload, {"mars_type": variant, "weight_decay": 0.05, "ns_dtype": "float32"}, clip=0.1)
    for stage, dtype, offload, variant in itertools.product((0, 1, 2, 3), ("fp32", "bf16"), (False, True), VARIANTS)
    if not (offload and stage == 0)
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_replay_over_nccl(pool: RankPool, case: ZeroCase) -> None:
    result = pool.run(zero_cases.run, case, timeout=300.0)[0]
    assert result["stage"] == case.stage
    assert {d.split(":")[0] for d in result["devices"]} == {"cpu" if case.offload else "cuda"}
    tolerance = 5e-6 if case.params["mars_type"] in MATRIX_LABELS else REPLAY_TOLERANCE
    assert furthest(replay(result, case), result["end"]) < tolerance
