"""``mars-dist train``: ranks that were not started alike, ranks that are killed, secrets in the environment."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mars_dist
from mars_dist.pretrain import checkpoint, peers
from mars_dist.pretrain.peers import Peer, differences
from mars_dist.pretrain.recipe import Recipe
from mars_dist.pretrain.world import limit_waiting
from tests.processes import free_port, run_python
from tests.ranks import RankPool
from tests.train_cases import SMALL, in_turn, in_world, losses, recipe, records, run, with_deepspeed

pytestmark = pytest.mark.timeout(300)

SECRETS = {
    "HF_TOKEN": "hf_qP4vXw9LmT2rYk7sNdBc",
    "WANDB_API_KEY": "5d1e0c7ba94f4f8e9b3a6c2d8f7e1a0b",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYzzSECRETKEY",
    "DATABASE_URL": "postgresql://writer:kT9-hunter-zebra@db.internal:5432/runs",
}


def assert_no_secret(folder: Path, *printed: str) -> None:
    """In no file of the run, whoever wrote it, nor in what was printed."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert any(path.name == "metrics.jsonl" for path in files) and any("checkpoints" in path.parts for path in files)
    contents = {str(path): path.read_bytes() for path in files}
    contents |= {f"output {i}": text.encode() for i, text in enumerate(printed)}
    for name, secret in SECRETS.items():
        needle = re.search(r"kT9-hunter-zebra|\S+", secret)
        assert needle
        found = [where for where, content in contents.items() if needle[0].encode() in content]
        assert not found, f"{name} is in {found}"


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


# --------------------------------------------------------------------------------------- ranks that disagree


def not_alike(cases: dict[str, dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Start each case with what rank 1 has of its own."""
    rank, version, said = dist.get_rank(), mars_dist.__version__, {}
    os.chdir(folder / f"machine{rank}")
    for name, case in cases.items():
        settings = case.get("both", {}) | (case.get("rank 1", {}) if rank else {})
        if rank and "version" in case:
            mars_dist.__version__ = case["version"]
        said[name] = run(recipe(**settings), folder / f"out-{name}")
        mars_dist.__version__ = version
    return said


def test_ranks_that_disagree_say_so_before_the_first_step(pool: RankPool, tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"machine{rank}/tokens").mkdir(parents=True)
        for split in ("train", "val"):
            tokens = torch.arange(rank, 1000, dtype=torch.int16).numpy()
            tokens.tofile(tmp_path / f"machine{rank}/tokens/{split}.bin")
        sharding = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 1000 + rank}}
        (tmp_path / f"machine{rank}/zero.json").write_text(json.dumps(sharding))
    shutil.copytree(tmp_path / "machine0/tokens", tmp_path / "machine0/one-has-it")
    micro = {"training__micro_batch": 1}
    cases: dict[str, dict[str, Any]] = {
        "recipe": {"both": micro, "rank 1": {"training__seed": 2, "optimizer__lr": 0.25}},
        "model": {"both": micro, "rank 1": {"model__layers": 2}},
        "version": {"both": micro, "version": "0.0.1"},
        "data": {"both": micro | {"data__path": "tokens"}},
        "missing": {"both": micro | {"data__path": "one-has-it"}},
        "sharding": {"both": micro | {"engine__deepspeed": "zero.json"}},
        "alike": {"both": {"training__batch": 8, "training__micro_batch": 8}},
    }
    expected = {
        "recipe": [
            "training.seed is 1 on rank 0 and 2 on rank 1",
            "optimizer.lr is 0.005 on rank 0 and 0.25 on rank 1",
        ],
        "model": ["model.layers is 1 on rank 0 and 2 on rank 1"],
        "version": [f"mars_dist is '{mars_dist.__version__}' on rank 0 and '0.0.1' on rank 1"],
        "data": ["the training data's fingerprint is '"],
        "missing": ["no rank starts, because not all can: ", "one-has-it", "(rank 1)"],
        "sharding": ["engine.deepspeed: zero_optimization.reduce_bucket_size is 1000 on rank 0 and 1001 on rank 1"],
        "alike": ["RecipeError: a batch of 8 sequences does not divide into micro batches of 8 on 2"],
    }
    results = pool.run(in_world, 2, tmp_path / "rendezvous", not_alike, cases, tmp_path)
    for name, parts in expected.items():
        (first, seen), (second, also_seen) = results[0][name], results[1][name]
        assert first == second and not seen.trained and not also_seen.trained, (name, first, second)
        assert all(part in first for part in parts), first
        assert first.startswith("RecipeError" if name == "alike" else "Disagreement: "), first
        assert not (tmp_path / f"out-{name}/checkpoints").exists()
        assert not (tmp_path / f"out-{name}/metrics.jsonl").exists()
    assert results[0]["model"][0].count(" is ") == 1, "only what differs"


def test_what_differs_names_all_ranks() -> None:
    facts = [{"a": 1, "b": "x"} for _ in range(6)]
    for rank in (1, 2, 4):
        facts[rank] = {"a": 2, "b": "x"}
    del facts[5]["a"]
    assert differences(facts) == ["a is 1 on ranks 0, 3 and 2 on ranks 1-2, 4 and None on rank 5"]
    assert differences([facts[0]] * 3) == []


# --------------------------------------------------------------------------------------------- ranks that end


def test_a_process_that_was_killed_has_ended_also_before_its_parent_looks() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        peer = Peer(1, "here", Peer.myself(0).system, process.pid, state[19])
        assert not peer.has_ended() and not Peer.myself(0).has_ended()
        assert Peer(1, "here", peer.system, process.pid, "1").has_ended(), "its number went to another process"
    finally:
        process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
    assert peer.has_ended()
    process.wait()
    assert peer.has_ended()


# A rank is killed at each start that PLAN has something for, as by the system: it can do nothing about it.
KILLED = """
import json, os, signal, sys
from mars_dist import cli
from mars_dist.checkpoint import tensors
from mars_dist.pretrain.engine import Plain, ZeRO
start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", os.environ["START"]))
plan = json.loads(os.environ["PLAN"])
rank, update, part = plan[start] if start < len(plan) else (-1, -1, None)
mine = os.environ["RANK"] == str(rank)
def dying(step):
    def train_step(self, done, micro_batches):
        if mine and part is None and done == update:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, done, micro_batches)
    return train_step
for engine in (Plain, ZeRO):
    engine.train_step = dying(engine.train_step)
write, written = tensors._write_all, 0
def write_all(descriptor, data):  # a part of the bytes of a checkpoint's file, and then nothing
    global written
    if mine and part is not None and f".step-{update:08d}.tmp" in os.readlink(f"/proc/self/fd/{descriptor}"):
        written += len(data)
        if written > part:
            write(descriptor, data[:len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
    write(descriptor, data)
tensors._write_all = write_all
sys.exit(cli.main(sys.argv[1:]))
"""


def start(
    folder: Path, launcher: list[str], plan: list[tuple[int, int, int | None]], number: int = 0, *settings: str
) -> tuple[int, str]:
    """Train SMALL on two ranks of ``launcher``.

    Args:
        plan: by start the rank that is killed, the update before which or the checkpoint in which, and for that the
            bytes of its file that it has written by then.
        number: of the start, where the launcher does not count.
    """
    script = folder / "killed.py"
    script.write_text(KILLED)
    words = [f"--set={key}={value}" for key, value in SMALL.items()]
    words += ["--set=training.micro_batch=1", "--set=logging.tensorboard=true", *settings]
    command = [*launcher, script, "train", "tiny", *words, "--out", folder / "run", "--debug"]
    env = SECRETS | {"PLAN": json.dumps(plan), "START": str(number)}
    done = run_python(*command, folder=folder, seconds=240, env=env)
    return done.returncode, done.stdout


def undisturbed(pool: RankPool, made_by: Recipe, folder: Path, how: Any = in_turn) -> dict[int, float]:
    results = pool.run(in_world, 2, folder / "rendezvous", how, [(made_by, folder / "whole")], timeout=200.0)
    assert [result[0][0] for result in results] == [0, 0]
    return losses(folder / "whole")


def assert_went_on(out: Path, starts: int) -> None:
    """Nothing of the parts that were lost is left."""
    assert [next(iter(record)) for record in records(out)].count("run") == starts
    steps = [path.name for path in checkpoint.complete(out / "checkpoints")]
    assert steps == ["step-00000005", "step-00000010"] and not list((out / "checkpoints").glob(".*"))


HAS_ENDED = r"RankLost: rank {} \(process \d+ on \S+\) has ended: .* goes on from its last checkpoint"


@pytest.mark.slow
def test_torchrun_starts_again_and_the_run_goes_on(pool: RankPool, tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "--master-port", free_port()]
    code, said = start(tmp_path, launcher, [(1, 7, None)])
    assert code == 0, said
    assert re.search(HAS_ENDED.format(1), said), said
    assert losses(tmp_path / "run") == undisturbed(pool, recipe(training__micro_batch=1), tmp_path)
    assert_went_on(tmp_path / "run", starts=2)
    assert_no_secret(tmp_path / "run", said)


@pytest.mark.slow
def test_killed_three_times_also_in_the_middle_of_a_save(pool: RankPool, tmp_path: Path) -> None:
    """Rank 0 while the first checkpoint is written, rank 1 at some update, rank 1 while the last is written."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    plan = [(0, 5, 100_000), (1, random.Random(5).randint(6, 9), None), (1, 10, 2_000_000)]
    code, said = start(tmp_path, launcher, plan)
    assert code == 0, said
    for rank in (0, 1):
        assert re.search(HAS_ENDED.format(rank), said), said
    assert said.count("failed (exitcode: -9)") == 3, said
    assert losses(tmp_path / "run") == undisturbed(pool, recipe(training__micro_batch=1), tmp_path)
    assert_went_on(tmp_path / "run", starts=3)  # the first has left no checkpoint: its curve was put aside
    assert_no_secret(tmp_path / "run", said)


@pytest.mark.slow
def test_the_deepspeed_launcher_ends_and_the_same_command_goes_on(pool: RankPool, tmp_path: Path) -> None:
    def launcher() -> list[str]:
        return ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", free_port()]

    code, said = start(tmp_path, launcher(), [(1, 7, None)])
    assert code != 0 and re.search(HAS_ENDED.format(1), said), said
    code, also_said = start(tmp_path, launcher(), [(1, 7, None)], 1)
    assert code == 0, also_said
    made_by = recipe(training__micro_batch=1, engine__name="deepspeed")
    assert losses(tmp_path / "run") == undisturbed(pool, made_by, tmp_path, with_deepspeed)
    assert_went_on(tmp_path / "run", starts=2)
    assert_no_secret(tmp_path / "run", said, also_said)


# ------------------------------------------------------------------------------------- ranks that do not answer


WAITING = """
import subprocess, sys, time
import torch.distributed as dist
from mars_dist.pretrain import peers
peers.GRACE = 1.0
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
me = peers.Peer.myself(0)
watch = peers.Watch([me, peers.Peer(1, "here", me.system, child.pid, peers._started(child.pid)[1])])
time.sleep(2.5)
print("the other one lives", flush=True)
child.kill()
time.sleep(60)
print("waited for ever", flush=True)
"""


def test_who_still_waits_for_a_rank_that_is_gone_is_ended(tmp_path: Path) -> None:
    """As under NCCL, where a collective says nothing, and a signal from the launcher is only noted."""
    done = run_python("-c", WAITING, folder=tmp_path, seconds=50)
    assert done.returncode == 1, done.stdout
    assert "the other one lives" in done.stdout and "waited for ever" not in done.stdout
    assert re.search(r"mars-dist: error: rank 1 \(process \d+ on here\) has ended: .*still waited", done.stdout)


def one_hangs(seconds: float) -> str:
    """Rank 1 comes late to a collective; what the other one says."""
    peers.SOON = 1.0
    watch = peers.Watch(peers.compare({"a": 1}))
    limit_waiting(2 / 60)
    try:
        if dist.get_rank() == 1:
            time.sleep(seconds)
            return ""
        try:
            dist.barrier()
        except RuntimeError as error:
            assert watch.explain(ValueError("about something else")) is None
            return str(watch.explain(error))
        return "no error"
    finally:
        watch.stop()


def test_a_rank_that_hangs_is_named_after_the_timeout(pool: RankPool, tmp_path: Path) -> None:
    said = pool.run(in_world, 2, tmp_path / "rendezvous", one_hangs, 8.0)[0]
    assert re.search(r"the ranks have lost each other: rank 1 \(process \d+ on .*\) did not answer", said), said
    assert "engine.timeout_minutes" in said
    pool.close()
