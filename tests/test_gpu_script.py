"""``tests/gpu/run.sh`` where there is no GPU: it says so, and never passes for a run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ROOT


def run_script(python: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "tests/gpu/run.sh")],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHON": python} | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("has_path", [True, False], ids=["path", "name"])
def test_without_a_gpu_it_says_so(has_path: bool, tmp_path: Path) -> None:
    (tmp_path / "my-python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "my-python").chmod(0o755)
    python = sys.executable if has_path else "my-python"  # a name is looked up in PATH
    result = run_script(python, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert result.returncode == 77, result.stderr
    assert result.stdout == "tests/gpu/run.sh: torch sees no GPU here: nothing was run.\n"


def test_a_python_without_torch_is_an_error_and_not_a_machine_without_gpu(tmp_path: Path) -> None:
    (tmp_path / "bare").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bare").chmod(0o755)
    result = run_script(str(tmp_path / "bare"))
    assert result.returncode == 1
    assert f"{tmp_path / 'bare'} cannot import torch" in result.stderr
