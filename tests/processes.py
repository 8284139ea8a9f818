"""Starting other processes in tests: what they print, and a time limit past which all of them show their stacks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run_python(
    *arguments: str | Path, folder: Path, seconds: float = 120, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run this interpreter with ``arguments`` in ``folder``; standard output and error come back as one text.

    Everything that DeepSpeed or torch may cache goes into ``folder``. Past the limit the whole process group is
    aborted, so that every process prints where it was, and the test fails with the output.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    settings = {
        "PYTHONPATH": path,
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    return run(sys.executable, *arguments, folder=folder, seconds=seconds, env=settings | dict(env or {}))


def run(
    *command: str | Path, folder: Path = ROOT, seconds: float = 240, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run any command in ``folder`` (the repository's root) under the same rules."""
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=folder,
        env=os.environ | {"PYTHONFAULTHANDLER": "1"} | dict(env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)
        try:
            output, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        pytest.fail(f"{process.args!r} ran longer than {seconds} s:\n{output}")
    return subprocess.CompletedProcess(process.args, process.returncode, output)


# The last thing that an interpreter does before it ends (the first exit handler runs last): note the threads of gloo.
EXIT_NOTE = """
import atexit, os
from pathlib import Path

def note():
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    with open(f"{os.environ['EXIT_NOTES']}/rank{os.environ['RANK']}-{os.getpid()}", "w") as file:
        file.write(" ".join(t for t in threads if "gloo" in t))

if "RANK" in os.environ:
    atexit.register(note)
"""


def noting_exits(folder: Path) -> dict[str, str]:
    """Environment in which every process with a RANK notes down which threads of gloo it still has when it ends."""
    notes = folder / "exit-notes"
    notes.mkdir()
    (notes / "sitecustomize.py").write_text(EXIT_NOTE)
    path = os.pathsep.join(filter(None, [str(notes), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {"EXIT_NOTES": str(notes), "PYTHONPATH": path}


def assert_left_properly(folder: Path, ranks: int) -> None:
    """No rank went while a thread of gloo lived: one that asks for the interpreter's lock then aborts the process."""
    notes = {file.name: file.read_text() for file in (folder / "exit-notes").glob("rank*")}
    assert {name.partition("-")[0] for name in notes} == {f"rank{r}" for r in range(ranks)}, notes
    assert not any(notes.values()), notes


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])
