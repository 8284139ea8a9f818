"""An unedited script under `python -m mars_dist`, `deepspeed --module` and `torchrun -m`: as if run directly."""

from __future__ import annotations

import json
import py_compile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.processes import free_port, run_python

OURS = ("-m", "mars_dist")

# ---------------------------------------------------------------------------- what a script sees of its start

PROBE = """
import json, os, sys, threading
import beside  # a module in the folder of the script

class Thing:
    pass

def late():
    threading.main_thread().join()
    record["main_after_the_last_line"] = sys.modules["__main__"].__dict__ is globals()
    with open(os.environ["RECORD"], "w") as file:
        json.dump(record, file)

record = {
    "argv": sys.argv,
    "first_path": sys.path[0],
    "folders": [p for p in sys.path[1:]],
    "beside": beside.__file__,
    "name": __name__,
    "file": __file__,
    "package": __package__,
    "spec": getattr(__spec__, "name", None),
    "loader": type(__loader__).__name__,
    "builtins": type(__builtins__).__name__,
    "globals": sorted(name for name in globals() if not name.startswith("__")),
    "is_main": sys.modules["__main__"].__dict__ is globals(),
    "pickled": type(beside.pickled(Thing())) is Thing,
    "code": late.__code__.co_filename,
}
threading.Thread(target=late).start()
"""
BESIDE = "import pickle\ndef pickled(thing): return pickle.loads(pickle.dumps(thing))\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder, which is not the working directory, with a script, a module beside it, and a package."""
    folder = tmp_path / "project"
    (folder / "package").mkdir(parents=True)
    (folder / "probe.py").write_text(PROBE)
    (folder / "beside.py").write_text(BESIDE)
    (folder / "package" / "__init__.py").write_text("")
    (folder / "package" / "sibling.py").write_text("")
    (folder / "package" / "part.py").write_text("from . import sibling\n" + PROBE)
    (folder / "package" / "__main__.py").write_text("from . import sibling\n" + PROBE)
    return folder


def record(folder: Path, *arguments: str, **env: str) -> dict[str, Any]:
    """What the script wrote down when this interpreter was started with ``arguments`` in ``folder``."""
    file = folder / "record.json"
    file.unlink(missing_ok=True)
    run = run_python(*arguments, folder=folder, env={"RECORD": str(file), **env})
    assert run.returncode == 0 and file.exists(), run.stdout
    return json.loads(file.read_text())


def test_a_script_sees_what_it_would_see_if_run_directly(project: Path) -> None:
    """From another folder, by a relative path, with arguments that look like ours."""
    arguments = ["project/probe.py", "--help", "-m", "--lr", "1e-3", "a b"]
    direct = record(project.parent, *arguments)
    assert (direct["argv"], direct["first_path"]) == (arguments, str(project))
    assert direct["name"] == "__main__" and direct["file"] == str(project / "probe.py") and direct["pickled"]
    assert record(project.parent, *OURS, *arguments) == direct


def test_a_module_sees_what_it_would_see_if_run_directly(project: Path) -> None:
    """Relative imports included."""
    direct = record(project, "-m", "package.part", "--help", "-m")
    assert direct["package"] == "package" and direct["first_path"] == str(project)
    assert record(project, *OURS, "-m", "package.part", "--help", "-m") == direct


# The cases below share one process that has imported torch and mars_dist, and forks for each of them.
FORKS = """
import json, os, runpy, sys
import mars_dist
for folder, record, arguments in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        os.environ["RECORD"] = record
        sys.path[0] = folder
        sys.argv = ["-m", *arguments]
        runpy._run_module_as_main("mars_dist")
        break  # an ordinary end of the interpreter, with its threads
    os.waitpid(child, 0)
"""


def test_links_folders_archives_packages_and_compiled_scripts_run_as_they_would_directly(project: Path) -> None:
    outside = project.parent
    (outside / "link.py").symlink_to(project / "probe.py")  # finds what lies beside the file it points to
    (project / "__main__.py").write_text(PROBE)
    with zipfile.ZipFile(outside / "app.zip", "w") as archive:
        archive.writestr("__main__.py", PROBE)
        archive.writestr("beside.py", BESIDE)
    py_compile.compile(str(project / "probe.py"), cfile=str(project / "compiled.pyc"))
    cases = [
        (outside, ["link.py", "x"]),
        (outside, ["project", "x"]),
        (outside, ["app.zip", "x"]),
        (project, ["-m", "package", "x"]),
        (project, ["compiled.pyc", "x"]),
    ]
    asked = [(str(folder), str(outside / f"ours{i}.json"), arguments) for i, (folder, arguments) in enumerate(cases)]
    run = run_python("-c", FORKS, json.dumps(asked), folder=outside)
    assert run.returncode == 0, run.stdout
    for (folder, arguments), (_, file, _) in zip(cases, asked, strict=True):
        assert Path(file).exists(), run.stdout
        assert json.loads(Path(file).read_text()) == record(folder, *arguments), arguments


def test_the_rank_that_the_deepspeed_launcher_puts_first_goes_to_the_script(project: Path) -> None:
    cases = [["--local_rank=1", "probe.py", "--lr", "1"], ["--local_rank=1", "-m", "package.part", "--lr", "1"]]
    files = [project / "script.json", project / "module.json"]
    asked = [(str(project), str(file), arguments) for file, arguments in zip(files, cases, strict=True)]
    run = run_python("-c", FORKS, json.dumps(asked), folder=project)
    assert run.returncode == 0, run.stdout
    script, module = (json.loads(file.read_text())["argv"] for file in files)
    assert script == ["probe.py", "--local_rank=1", "--lr", "1"]
    assert module == [str(project / "package" / "part.py"), "--local_rank=1", "--lr", "1"]


def test_under_a_safe_path_no_folder_is_put_in_front(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys\nprint('path', sys.path)\n")
    direct = run_python("-P", "script.py", folder=tmp_path)
    assert str(tmp_path) not in direct.stdout
    assert run_python("-P", *OURS, "script.py", folder=tmp_path).stdout == direct.stdout


# --------------------------------------------------------------------------------------------------- exit codes


ENDINGS = {
    "exit_code": "import sys; sys.exit(7)",
    "exit_message": "import sys; sys.exit('stopped: no data')",
    "error": "raise ValueError('its own')",
    "syntax_error": "def broken(:",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "plain": "pass",
}
ENDS = """
import os, runpy, sys
import mars_dist
for name in sys.argv[1].split():
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        sys.argv = ["-m", name + ".py"]
        runpy._run_module_as_main("mars_dist")
        break
    status = os.waitpid(child, 0)[1]
    print("END", name, os.waitstatus_to_exitcode(status))
"""


def test_a_script_ends_with_its_own_exit_code_and_message(tmp_path: Path) -> None:
    for name, code in ENDINGS.items():
        (tmp_path / f"{name}.py").write_text(code + "\n")
    ours = run_python("-c", ENDS, " ".join(ENDINGS), folder=tmp_path).stdout
    for name in ENDINGS:
        direct = run_python(f"{name}.py", folder=tmp_path)
        assert f"END {name} {direct.returncode}\n" in ours, ours
        assert not direct.stdout or direct.stdout.splitlines()[-1] in ours


def test_what_cannot_be_run_is_refused_in_one_line_with_pythons_exit_code(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    missing = [["missing.py"], ["-m", "nowhere.at_all"], ["-m", "package.missing"], ["-m", "package"]]
    code = ENDS.replace("sys.argv[1].split()", "json.loads(sys.argv[1])").replace("import os", "import json, os")
    code = code.replace('["-m", name + ".py"]', '["-m", *name]')
    output = run_python("-c", code, json.dumps([*missing, ["-m"], []]), folder=tmp_path).stdout
    assert "Traceback" not in output
    for arguments in missing:
        direct = run_python(*arguments, folder=tmp_path)
        assert f"END {arguments} {direct.returncode}\n" in output
        assert arguments == ["missing.py"] or direct.stdout in output, "Python's own words"
    assert f"mars_dist: there is no script 'missing.py' (in {tmp_path})" in output
    assert "mars_dist: -m needs the name of a module" in output and "END ['-m'] 2" in output
    assert "mars_dist: the script to run is missing\n\nusage: python -m mars_dist" in output and "END [] 2" in output


def test_help_says_how_to_start_it(tmp_path: Path) -> None:
    run = run_python(*OURS, "--help", folder=tmp_path)
    assert run.returncode == 0
    for line in ("usage: python -m mars_dist [-m] SCRIPT", "deepspeed --module mars_dist", "torchrun -m mars_dist"):
        assert line in run.stdout


# ---------------------------------------------------------------------------------------- training under launchers

TRAIN = """
import argparse, json, os, sys
import torch
import torch.distributed as dist
import deepspeed
import beside

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for minutes on a CPU
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--out", required=True)
parser.add_argument("--exit-code", type=int, default=0)
args = deepspeed.add_config_arguments(parser).parse_args()

deepspeed.init_distributed("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
net = torch.nn.Sequential(
    torch.nn.Embedding(7, 4), torch.nn.Linear(4, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 7, bias=False)
)
engine, *_ = deepspeed.initialize(args=args, model=net, model_parameters=net.parameters())
losses = []
for step in range(5):
    tokens = torch.arange(4) + dist.get_rank()
    loss = torch.nn.functional.cross_entropy(engine(tokens), (tokens + 1) % 7)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
mars = engine.optimizer.optimizer
with open(os.path.join(args.out, f"rank{dist.get_rank()}.json"), "w") as file:
    json.dump({
        "argv": sys.argv,
        "name": __name__,
        "file": __file__,
        "first_path": sys.path[0],
        "beside": beside.__file__,
        "is_main": sys.modules["__main__"].__dict__ is globals(),
        "ranks": dist.get_world_size(),
        "optimizer": f"{type(mars).__module__}.{type(mars).__name__}",
        "rules": mars.rule_counts(),
        "engines": sorted(mars.engines()),
        "wrapper": type(engine.optimizer).__name__,
        "states": sorted({key for state in mars.state.values() for key in state}),
        "better": losses[-1] < losses[0],
        "weights": [p.detach().double().sum().item() for p in net.parameters()],
    }, file)
dist.barrier()
sys.exit(args.exit_code)
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "MARS", "params": {"lr": 1e-2, "lr_1d": 1e-2, "mars_type": "mars-adamw"}},
}


def train(project: Path, launcher: list[str], exit_code: int, ranks: int, **env: str) -> tuple[int, str]:
    """Train under ``launcher`` and check what each rank wrote down; returns the exit code and what was printed."""
    folder = project.parent
    (project / "train.py").write_text(TRAIN)
    (folder / "ds_config.json").write_text(json.dumps(CONFIG))
    assert "mars_dist" not in TRAIN, "the script must not know of mars_dist"
    arguments = ["--deepspeed_config", "ds_config.json", "--out", ".", "--exit-code", str(exit_code)]
    run = run_python(*launcher, "project/train.py", *arguments, folder=folder, seconds=240, env=env)
    records = []
    for rank in range(ranks):
        file = folder / f"rank{rank}.json"
        assert file.exists(), run.stdout
        records.append(json.loads(file.read_text()))
        given = [f"--local_rank={rank}"] if "--num_gpus" in launcher else []  # as for a script without us
        assert records[-1].pop("argv") == ["project/train.py", *given, *arguments]
    assert records == [records[0]] * ranks, "the ranks must agree, also on the weights"
    weights = records[0].pop("weights")
    assert len(weights) == 6 and all(w == w for w in weights)
    assert records[0] == {
        "name": "__main__",
        "file": str(project / "train.py"),
        "first_path": str(project),
        "beside": str(project / "beside.py"),
        "is_main": True,
        "ranks": ranks,
        "optimizer": "mars_dist.optimizer.MARS",
        "rules": {"MARS-AdamW": 3, "AdamW": 3},
        "engines": ["ZeRO-1/2"],
        "wrapper": "DeepSpeedZeroOptimizer",
        "states": ["exp_avg", "exp_avg_sq", "prev_grad", "step"],
        "better": True,
    }
    assert run.stdout.count("mars_dist: MARS-AdamW on 3 matrices, AdamW on 3 other tensors (ZeRO-1/2)") == 1
    return run.returncode, run.stdout


@pytest.mark.timeout(300)
def test_training_under_python(project: Path) -> None:
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    assert train(project, [*OURS], 0, 1, **alone)[0] == 0


@pytest.mark.timeout(300)
def test_training_under_the_deepspeed_launcher(project: Path) -> None:
    launcher = ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", free_port()]
    code, printed = train(project, [*launcher, "--module", "mars_dist"], 5, 2)
    assert code == 5, printed


@pytest.mark.timeout(300)
def test_training_under_torchrun(project: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", free_port()]
    code, printed = train(project, [*launcher, "-m", "mars_dist"], 5, 2)
    assert code == 1 and "exitcode  : 5" in printed, printed  # torchrun's own way of saying it
