"""``examples/exact_loop.py`` and ``examples/exact_deepspeed.py`` under their launchers, on CPUs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.processes import ROOT, free_port, run_python

EXAMPLES = ROOT / "examples"
SMALL = "--steps 3 --accumulate 2 --layers 2 --width 32 --sequence 16 --batch 2".split()
RULES = "rules: {'AdamW': 18, 'MARS-AdamW': 10}"
PYTHON: list[str] = []
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "PORT"]
DEEPSPEED = ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--no_local_rank", "--master_port", "PORT"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("launcher", "script", "arguments", "ran"),
    [
        (PYTHON, "exact_loop.py", "", "GPT2LMHeadModel on 1 processes; pieces: ['whole tensors']; "),
        (DEEPSPEED, "exact_deepspeed.py", "--stage 3 --out .", "ZeRO-3 on 2 processes, 3 steps; pieces: ['ZeRO-3']; "),
        pytest.param(
            *(TORCHRUN, "exact_loop.py", "", "DistributedDataParallel on 2 processes; pieces: ['whole tensors']; "),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(DEEPSPEED, "exact_deepspeed.py", "--stage 2 --offload --bf16 --out ."),
            "ZeRO-2 on 2 processes, 3 steps; pieces: ['ZeRO-1/2']; ",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["loop", "deepspeed", "loop-torchrun", "deepspeed-offload"],
)
def test_the_example_runs(launcher: list[str], script: str, arguments: str, ran: str, tmp_path: Path) -> None:
    started = [free_port() if word == "PORT" else word for word in launcher]
    done = run_python(*started, EXAMPLES / script, *SMALL, *arguments.split(), folder=tmp_path, seconds=100)
    assert done.returncode == 0, done.stdout
    assert ran + RULES in done.stdout, done.stdout
    lines = re.findall(r"step (\d)/3  loss (\d+\.\d+)  gradients (\d+)", done.stdout)
    # Two for each of two micro-batches in a step, but for the first, which nothing could be taken for.
    assert [(int(step), int(count)) for step, _, count in lines] == [(1, 4), (2, 8), (3, 10)], done.stdout
    assert 9.0 < float(lines[0][1]) < 12.0
    assert "exact mode:" not in done.stdout, "no step lacked its h"


@pytest.mark.parametrize("script", ["exact_loop.py", "exact_deepspeed.py"])
def test_the_example_stays_short(script: str) -> None:
    lines = (EXAMPLES / script).read_text().splitlines()
    assert len(lines) < 110 and max(map(len, lines)) <= 120
