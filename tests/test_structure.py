"""The house of mars_dist: imports point downwards, frameworks are known in one place, files stay small."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mars_dist

SOURCE = Path(mars_dist.__file__).parent
MODULES = sorted(SOURCE.rglob("*.py"))

# What each part may import of mars_dist, besides itself.
ALLOWED: dict[str, set[str]] = {
    "maths": set(),
    "versions": set(),
    "sharding": {"versions"},
    "config": set(),
    "log": set(),
    "kernels": {"maths"},
    "states": {"maths"},
    "pieces": {"kernels", "maths", "sharding", "states"},
    "one_state": {"maths", "config"},
    "matrices": {"pieces", "kernels", "maths", "sharding", "config"},
    "step": {"matrices", "pieces", "kernels", "maths", "sharding", "states", "config"},
    "agreement": {"maths", "sharding", "config"},
    "tables": {"agreement", "matrices", "step", "maths", "sharding", "config", "log"},
    "previous": {"maths", "sharding"},
    "loading": {"one_state", "previous", "tables", "states", "maths", "sharding", "config"},
    "saving": {"loading", "previous", "tables", "step", "states", "maths", "sharding", "config"},
    "optimizer": {"saving", "previous", "tables", "step", "pieces", "one_state", "states", "sharding", "config", "log"},
    "checkpoint": {"optimizer", "tables", "states", "maths", "sharding", "config", "log", "versions"},
    "integrations": {
        "optimizer",
        "checkpoint",
        "tables",
        "step",
        "states",
        "maths",
        "sharding",
        "config",
        "log",
        "versions",
    },
}
BELOW_THE_OPTIMIZER = {
    "maths",
    "versions",
    "sharding",
    "config",
    "log",
    "kernels",
    "states",
    "pieces",
    "one_state",
    "matrices",
    "step",
    "agreement",
    "tables",
    "saving",
    "loading",
    "previous",
}
ABOVE = {
    "optimizer",
    "checkpoint",
    "integrations",
    "pretrain",
    "groups",
    "cli",
    "checkpoint_cli",
    "plan",
    "memory",
    "doctor",
    "bench",
    "exact",
    "",
}

PRETRAIN_MAY = {"transformers", "datasets", "pyarrow", "tiktoken", "pydantic", "yaml"}
PRETRAIN_MAY |= {"matplotlib", "tqdm", "tensorboard", "wandb"}
FRAMEWORKS = PRETRAIN_MAY | {"deepspeed", "hjson", "accelerate"}


def part(path: Path) -> str:
    """``maths`` for mars_dist/maths/rules.py, ``step`` for mars_dist/step.py, "" for mars_dist/__init__.py."""
    relative = path.relative_to(SOURCE)
    name = relative.parts[0] if len(relative.parts) > 1 else relative.stem
    return "" if name == "__init__" else name


def imports(path: Path) -> set[str]:
    """Every module that the file imports, anywhere in it; ``from a import b`` is both ``a`` and ``a.b``."""
    return imported(ast.parse(path.read_text()), path)


def imported(tree: ast.AST, path: Path) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = path.relative_to(SOURCE.parent).parts[: -node.level]
                base = ".".join((*above, base)).rstrip(".")
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                found.add(str(node.args[0].value))
    return found


def parts_imported(path: Path) -> set[str]:
    """The parts of mars_dist that the file imports; "" for a name of the package itself."""
    found = set()
    for name in imports(path):
        first, _, rest = name.partition(".")
        if first == "mars_dist" and rest:
            head = rest.split(".")[0]
            found.add(head if (SOURCE / head).is_dir() or (SOURCE / f"{head}.py").exists() else "")
        elif name == "mars_dist" and "import mars_dist" in path.read_text():
            found.add("")
    return found


def ident(path: Path) -> str:
    return str(path.relative_to(SOURCE))


EVERY_MODULE = pytest.mark.parametrize("path", MODULES, ids=ident)


@pytest.mark.parametrize("path", [path for path in MODULES if part(path) in ALLOWED], ids=ident)
def test_imports_point_downwards_only(path: Path) -> None:
    mine = part(path)
    assert parts_imported(path) <= ALLOWED[mine] | {mine}


def test_every_part_below_the_optimizer_is_covered_and_imports_nothing_above_it() -> None:
    assert BELOW_THE_OPTIMIZER | {"optimizer", "checkpoint", "integrations"} == ALLOWED.keys()
    for path in MODULES:
        if part(path) in BELOW_THE_OPTIMIZER:
            assert not parts_imported(path) & ABOVE, ident(path)
    assert not any(ALLOWED[name] & ABOVE for name in BELOW_THE_OPTIMIZER)


def test_no_part_is_missing_from_the_table() -> None:
    """A new file has to be given its place in the house."""
    assert {part(path) for path in MODULES} <= ALLOWED.keys() | ABOVE | {"__main__"}


@pytest.mark.parametrize("path", [path for path in MODULES if part(path) == "maths"], ids=ident)
def test_the_maths_imports_torch_and_nothing_distributed(path: Path) -> None:
    outside = {name for name in imports(path) if not name.startswith("mars_dist")}
    assert {name.split(".")[0] for name in outside} <= sys.stdlib_module_names | {"torch"}
    assert not any("distributed" in name for name in outside)


@EVERY_MODULE
def test_frameworks_are_imported_in_their_one_place(path: Path) -> None:
    used = {name.split(".")[0] for name in imports(path)} & FRAMEWORKS
    assert used <= {"integrations": FRAMEWORKS, "pretrain": PRETRAIN_MAY}.get(part(path), set())


@EVERY_MODULE
def test_a_module_has_at_most_450_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 450


@EVERY_MODULE
def test_nothing_but_torch_numpy_and_the_extras_is_needed(path: Path) -> None:
    known = sys.stdlib_module_names | {"mars_dist", "torch", "numpy", "triton"} | FRAMEWORKS
    assert {name.split(".")[0] for name in imports(path)} <= known


def test_importing_the_package_imports_no_framework() -> None:
    code = "import sys, torch; before = set(sys.modules); import mars_dist; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=SOURCE.parent)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "mars_dist" in loaded
    assert not loaded & FRAMEWORKS
    assert not done.stderr, "importing says nothing"


# ---- the parser of imports sees what it must


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import deepspeed.ops as ops", {"deepspeed.ops"}),
        ("def f():\n    from deepspeed import zero", {"deepspeed", "deepspeed.zero"}),
        ("import importlib\nimportlib.import_module('transformers')", {"importlib", "transformers"}),
        ("from . import optimizer", {"mars_dist", "mars_dist.optimizer"}),
        ("from .step import take_step", {"mars_dist.step", "mars_dist.step.take_step"}),
        ("if TYPE_CHECKING:\n    import datasets", {"datasets"}),
    ],
)
def test_the_parser_finds_imports_wherever_they_are(code: str, expected: set[str]) -> None:
    assert imported(ast.parse(code), SOURCE / "states.py") == expected
