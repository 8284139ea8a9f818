"""setup.py, the constraints, the README and every message name the releases of mars_dist/versions.py, and no others."""

from __future__ import annotations

import ast
import re
import runpy
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import setuptools
import torch
from packaging.requirements import Requirement
from packaging.version import Version
from processes import ROOT, run_python

from mars_dist import versions
from mars_dist.versions import TESTED, installed, missing_hook, requirement

SOURCE = ROOT / "mars_dist"


def declared() -> dict[str, list[str]]:
    """What setup.py asks pip for, by extra; "" for the package without any."""
    given: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **arguments: given.update(arguments))
        runpy.run_path(str(ROOT / "setup.py"))
    return {"": given["install_requires"], **given["extras_require"]}


def pins(name: str) -> dict[str, str]:
    """``{"torch": "2.13.0"}`` from a file of constraints."""
    lines = [line for line in (ROOT / "launch" / name).read_text().splitlines() if line and not line.startswith("#")]
    assert all("==" in line for line in lines)
    return dict(line.split("==") for line in lines)


# ---- one truth, said in several places


def test_a_torch_without_the_hooks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed.fsdp
    import torch.distributed.tensor._utils as utils
    from torch import nn

    from mars_dist.sharding import dtensor, fsdp1

    class Wrapped(nn.Module):
        pass

    monkeypatch.setattr(torch.distributed.fsdp, "FullyShardedDataParallel", Wrapped)
    with pytest.raises(RuntimeError, match="has no Wrapped._handle.*" + re.escape(versions.tested("torch"))):
        list(fsdp1.layouts(Wrapped()))
    monkeypatch.delattr(utils, "compute_local_shape_and_global_offset")
    with pytest.raises(RuntimeError, match="has no .*global_offset: .*" + re.escape(versions.tested("torch"))):
        dtensor._sizes_and_offsets((2, 3), None, ())


def test_every_requirement_of_setup_py_is_the_tested_range() -> None:
    asked = {line for lines in declared().values() for line in lines if Requirement(line).name in TESTED}
    assert asked == {requirement(name) for name in TESTED}


def test_the_constraints_are_the_ends_of_the_range() -> None:
    assert pins("constraints-oldest.txt") == {name: TESTED[name][0] for name in TESTED if name != "torch"}
    assert pins("constraints-cpu.txt") == {"torch": TESTED["torch"][1]}
    assert TESTED["torch"][0] == TESTED["torch"][1], "the oldest environment needs a constraint for torch of its own"


@pytest.mark.parametrize("name", TESTED)
def test_a_range_holds_its_ends_and_not_the_next_minor_release(name: str) -> None:
    oldest, newest = TESTED[name]
    allowed = Requirement(requirement(name)).specifier
    assert Version(oldest) <= Version(newest) and oldest in allowed and newest in allowed
    major, minor, patch = map(int, newest.split("."))
    assert allowed.contains(f"{major}.{minor}.{patch + 1}")
    assert allowed.contains(f"{major}.{minor + 1}.0") == (name in versions.NO_UPPER_BOUND)
    assert not allowed.contains(".".join([*oldest.split(".")[:1], "0", "0"]))


@pytest.mark.parametrize("name", TESTED)
def test_these_tests_run_with_a_release_that_setup_py_allows(name: str) -> None:
    assert Requirement(requirement(name)).specifier.contains(installed(name))


def test_the_first_page_names_the_tested_releases() -> None:
    page = " ".join((ROOT / "README.md").read_text().split())
    sentence = versions.tested("torch", "deepspeed", "transformers", "accelerate")
    assert sentence.capitalize()[0] + sentence[1:] in page


# ---- messages


def literals(path: Path) -> list[str]:
    """The string constants of the file but for its docstrings, which may say what was read where."""
    tree = ast.parse(path.read_text())
    documents = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    strings = (n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return [str(node.value) for node in strings if id(node) not in documents]


ENDS = {".".join(release.split(".")[:2]) for pair in TESTED.values() for release in pair}
NAMED = re.compile(rf"(?<![\d.])({'|'.join(map(re.escape, sorted(ENDS)))})(?!\d)")


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_message_names_a_release_by_itself(path: Path) -> None:
    """It would be forgotten when the range moves."""
    found = [text for text in literals(path) if NAMED.search(text)]
    assert bool(found) == (path.name == "versions.py"), found


def test_the_search_for_releases_sees_what_it_must(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('"""Read in 0.19."""\nA = f"{1} (tested with 0.19)"\nB = "1.15"\nC = "10.190"\n')
    assert [text for text in literals(path) if NAMED.search(text)] == ["1.15", " (tested with 0.19)"]


def test_tested_names_both_ends_or_the_one_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TESTED, "deepspeed", ("1.2.3", "1.4.0"))
    monkeypatch.setitem(TESTED, "torch", ("2.9.0", "2.9.0"))
    assert versions.tested("deepspeed") == "tested with DeepSpeed 1.2.3 and 1.4.0"
    assert versions.tested("torch", "deepspeed") == "tested with torch 2.9.0, DeepSpeed 1.2.3 and 1.4.0"
    assert requirement("deepspeed") == "deepspeed>=1.2.3,<1.5" and requirement("torch") == "torch>=2.9.0"


def test_a_missing_hook_is_named_with_the_release_and_the_remedy() -> None:
    said = missing_hook("accelerate", ["Accelerator.a", "Accelerator.b"], "nothing is attached", "call attach yourself")
    assert said == (
        f"Accelerate {installed('accelerate')} has no Accelerator.a and no Accelerator.b: nothing is attached. "
        f"mars_dist was {versions.tested('accelerate')}: "
        f'pip install "{requirement("accelerate")}", or call attach yourself.'
    )
    assert missing_hook("torch", "torch.x", "it stops").endswith(f'pip install "{requirement("torch")}".')
    with pytest.raises(AttributeError) as error:
        (1.5).real.nothing  # type: ignore[attr-defined]  # noqa: B018
    assert " has no float.nothing: " in missing_hook("torch", error.value, "it stops")
    assert " has no such thing: " in missing_hook("torch", AttributeError("such thing"), "it stops")


def test_the_release_of_what_pip_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed("mars_dist_no_such_library") == "(unknown)"
    module = types.ModuleType("mars_dist_no_such_library")
    module.__dict__["__version__"] = "7.8.9"
    monkeypatch.setitem(sys.modules, "mars_dist_no_such_library", module)
    assert installed("mars_dist_no_such_library") == "7.8.9"


def test_the_table_can_be_read_before_anything_is_installed(tmp_path: Path) -> None:
    """A message about a library that does not fit must not depend on one."""
    code = (
        "import runpy, sys\n"
        f"table = runpy.run_path({str(SOURCE / 'versions.py')!r})\n"
        "print(table['missing_hook']('torch', 'torch.x', 'it stops'))\n"
        "assert not {'torch', 'numpy', 'deepspeed', 'transformers', 'accelerate'} & sys.modules.keys()"
    )
    done = run_python("-S", "-c", code, folder=tmp_path, seconds=30)
    assert done.returncode == 0, done.stdout
    assert "torch (unknown) has no torch.x: it stops." in done.stdout


# ---- each hook, in a release that lacks it


def test_deepspeed_without_its_list(caplog: pytest.LogCaptureFixture) -> None:
    from mars_dist.integrations.deepspeed import ZERO_UTILS, _allow_in_zero

    _allow_in_zero(types.ModuleType(ZERO_UTILS))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"DeepSpeed {installed('deepspeed')} has no {ZERO_UTILS}.ZERO_SUPPORTED_OPTIMIZERS" in record.message
    assert versions.tested("deepspeed") in record.message and "zero_allow_untested_optimizer" in record.message


@pytest.mark.parametrize("name", ["DeepSpeedEngine", "_take_model_step", "_do_optimizer_sanity_check"])
def test_deepspeed_whose_engine_has_changed(name: str) -> None:
    """Said when DeepSpeed is imported: an engine that cannot be watched must not train with MARS unwatched."""
    from mars_dist.integrations.deepspeed.guard import WATCHED, guard

    module = types.ModuleType("deepspeed.runtime.engine")
    methods = {n: lambda *_: "ran" for n in WATCHED if n != name}
    engine = type("DeepSpeedEngine", (), dict(methods))
    if name != "DeepSpeedEngine":
        module.__dict__["DeepSpeedEngine"] = engine
    with pytest.raises(RuntimeError, match=re.escape(name)) as error:
        guard(module)
    assert versions.tested("deepspeed") in str(error.value) and "MARS_DIST_REGISTER=0" in str(error.value)
    assert all(engine.__dict__[n] is methods[n] for n in methods), "nothing is half done"


def test_deepspeed_whose_engine_lacks_what_the_guard_reads() -> None:
    from mars_dist import MARS
    from mars_dist.integrations.deepspeed.guard import READ, WATCHED

    engine = types.SimpleNamespace(**dict.fromkeys(READ))
    engine._config = types.SimpleNamespace(_param_dict={})
    del engine._step_applied
    optimizer = MARS([torch.nn.Parameter(torch.ones(2, 2))], lr=1e-3)
    with pytest.raises(RuntimeError, match="no DeepSpeedEngine._step_applied: ") as error:
        WATCHED["_do_optimizer_sanity_check"](lambda *_: "ran", engine, optimizer)
    assert versions.tested("deepspeed") in str(error.value)


@pytest.mark.parametrize("name", ["fp32_partitioned_groups_flat", "fp16_groups", "ds_process_group"])
def test_deepspeed_that_keeps_its_pieces_under_other_names(name: str) -> None:
    from mars_dist.sharding import zero

    flat, original = torch.ones(4), torch.nn.Parameter(torch.ones(2, 2))
    engine = types.SimpleNamespace(fp32_partitioned_groups_flat=[flat], fp16_groups=[[original]])
    if name != "ds_process_group":
        delattr(engine, name)
    original._z3_optimizer = engine  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=rf" has no \w+\.{name}: ") as error:
        zero.locate(flat, [("weight", original)])
    assert versions.tested("deepspeed") in str(error.value)
