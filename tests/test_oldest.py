"""The oldest releases that setup.py allows: a second environment, and in it a part of these tests for every engine.

What is run there is what depends on the other libraries' private names: the names that are registered, the guard, and
REPLAY under each engine. The numbers of the formulas do not depend on them and are not repeated.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from processes import ROOT, run
from test_versions import declared

from mars_dist.versions import TESTED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

# File: which tests of its default tier (an expression for -k on their names), and how many must have passed at least.
PART: dict[str, tuple[str, int]] = {
    "tests/test_registration.py": ("", 60),
    "tests/test_guard.py": ("", 45),
    "tests/test_ddp.py": ("2ranks", 40),
    "tests/test_zero.py": ("2ranks and test_replay and weight_decay and (fp32-mars or groups or instance)", 30),
    "tests/test_accelerate.py": ("", 20),
    "tests/test_accelerate_launch.py": ("", 12),
    "tests/test_trainer.py": ("", 90),
    "tests/test_trainer_training.py": ("", 15),
    "tests/test_trainer_launchers.py": ("", 3),
    "tests/test_pretrain_model.py": ("gradient_checkpointing", 1),
}
CHECKERS = ("ruff", "mypy")  # of the text, not of what it does

# The interpreter that runs the tests says what it would import; it imports nothing yet, as some tests look at that.
IN_THE_ENVIRONMENT = """
import sys
from importlib import metadata, util
import pytest
libraries = "torch", "deepspeed", "transformers", "accelerate"
print("RELEASES", *(f"{name}={metadata.version(name)}" for name in libraries))
print("FROM", *(util.find_spec(name).origin for name in libraries))
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the oldest releases, which pip took by the ranges of setup.py."""
    folder = tmp_path_factory.mktemp("oldest")
    asked = declared()
    needed = {line for extra in ("", "deepspeed", "hf", "train", "test") for line in asked[extra]}
    needed = {line for line in needed if Requirement(line).name not in CHECKERS}
    done = run(sys.executable, "-m", "venv", folder / "venv", seconds=120)
    assert done.returncode == 0, done.stdout
    constraints = [f"-c{ROOT}/launch/constraints-{name}.txt" for name in ("cpu", "oldest")]
    pip = (folder / "venv/bin/python", "-m", "pip", "install", "--quiet", "--progress-bar=off")
    done = run(*pip, *constraints, *sorted(needed), folder=folder, seconds=1500)
    assert done.returncode == 0, f"{done.stdout}\npip could not make the environment (it needs a package index)"
    return folder / "venv/bin/python"


@pytest.mark.parametrize("path", PART)
def test_a_part_of_the_tests_passes_with_the_oldest_releases(python: Path, path: str, tmp_path: Path) -> None:
    expression, least = PART[path]
    chosen = ["-k", expression] if expression else []
    environment = {
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_ADDOPTS": "",
        "PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]]),
        "VIRTUAL_ENV": str(python.parent.parent),
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "HF_HOME": str(tmp_path / "hf"),
    }
    pytest_arguments = ["-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'base'}", path, *chosen]
    done = run(python, "-c", IN_THE_ENVIRONMENT, *pytest_arguments, seconds=1500, env=environment)
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    (releases,) = re.findall("^RELEASES (.*)$", done.stdout, re.MULTILINE)
    found = {name: release.split("+")[0] for name, release in (pair.split("=") for pair in releases.split())}
    assert found == {name: TESTED[name][0] for name in TESTED}
    (files,) = re.findall("^FROM (.*)$", done.stdout, re.MULTILINE)
    assert all(file.startswith(str(python.parent.parent)) for file in files.split())
    *_, last = done.stdout.strip().splitlines()
    passed = re.search(r"(\d+) passed", last)
    assert passed and int(passed[1]) >= least, last
    assert not re.search(r"failed|skipped|error|xfailed", last), last
