"""`import mars_dist` is enough for `"type": "MARS"`: the name, the import hook, and what they hold on to in DeepSpeed.

Training under the name is in test_zero.py, through the launchers in test_launchers.py; here is the mechanism.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
import threading
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mars_dist
from mars_dist.integrations import deepspeed as registration
from mars_dist.integrations import import_hook
from mars_dist.integrations.deepspeed import mars_from_config
from mars_dist.sharding import zero
from tests.processes import run_python

NAMES = ("MARS", "Mars", "mars")


ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def python(code: str, folder: Path, **env: str) -> str:
    """What a fresh interpreter prints for ``code``."""
    run = run_python("-c", code, folder=folder, env=ALONE | env)
    assert run.returncode == 0, run.stdout
    return run.stdout


@pytest.fixture
def clean() -> Iterator[None]:
    """Start unregistered; leave things as the suite found them."""
    mars_dist.unregister()
    yield
    mars_dist.unregister()
    mars_dist.register()


def registered() -> list[str]:
    return [name for name in NAMES if hasattr(torch.optim, name)]


# ------------------------------------------------------------------------------------------------------ the name


def test_importing_the_package_registers_and_imports_no_framework(tmp_path: Path) -> None:
    code = """
import sys, torch
import mars_dist
frameworks = {"deepspeed", "transformers", "accelerate", "datasets", "triton", "apex"}
print("frameworks", frameworks & {name.partition(".")[0] for name in sys.modules})
print("callable", torch.optim.MARS, torch.optim.mars is torch.optim.Mars is torch.optim.MARS)
mars_dist.unregister()
before = set(sys.modules)
mars_dist.register()
print("by register", set(sys.modules) - before)
"""
    printed = python(code, tmp_path)
    assert "frameworks set()" in printed and "by register set()" in printed
    assert "callable <function mars_from_config" in printed and printed.count("True") == 1


def test_registering_is_idempotent_and_reversible(clean: None) -> None:
    optim, meta_path = dict(vars(torch.optim)), list(sys.meta_path)
    mars_dist.unregister()  # also when there is nothing to undo
    for _ in range(3):
        mars_dist.register()
    assert registered() == list(NAMES) and len(sys.meta_path) == len(meta_path) + 1
    mars_dist.unregister()
    assert vars(torch.optim) == optim and sys.meta_path == meta_path


def test_deepspeeds_list_has_mars_once_and_is_restored(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    utils = types.ModuleType(registration.ZERO_UTILS)
    utils.ZERO_SUPPORTED_OPTIMIZERS = [torch.optim.Adam]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, registration.ZERO_UTILS, utils)
    for _ in range(2):
        mars_dist.register()
    assert utils.ZERO_SUPPORTED_OPTIMIZERS == [torch.optim.Adam, mars_dist.MARS]
    mars_dist.unregister()
    assert utils.ZERO_SUPPORTED_OPTIMIZERS == [torch.optim.Adam]


@pytest.mark.parametrize("name", NAMES)
def test_a_foreign_class_of_that_name_is_not_overwritten(
    clean: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    class Foreign(torch.optim.SGD):
        pass

    monkeypatch.setattr(torch.optim, name, Foreign, raising=False)
    with pytest.raises(RuntimeError, match=rf"torch\.optim\.{name} is already .*Foreign.*MARS_DIST_REGISTER=0"):
        mars_dist.register()
    assert registered() == [name] and getattr(torch.optim, name) is Foreign, "all names or none"
    mars_dist.unregister()
    assert getattr(torch.optim, name) is Foreign, "undoing removes only what is ours"


def test_a_foreign_class_stops_the_import_unless_the_variable_says_so(tmp_path: Path) -> None:
    code = """
import os, torch
torch.optim.MARS = torch.optim.SGD
try:
    import mars_dist
except RuntimeError as error:
    print(error)
os.environ["MARS_DIST_REGISTER"] = "0"
import mars_dist
print("kept", torch.optim.MARS is torch.optim.SGD, mars_dist.MARS.__name__)
"""
    printed = python(code, tmp_path)
    assert "torch.optim.MARS is already <class 'torch.optim.sgd.SGD'>" in printed and "kept True MARS" in printed


def test_loading_the_package_anew_replaces_our_own_older_function(tmp_path: Path) -> None:
    """As notebooks do (autoreload), and test runners that empty sys.modules."""
    code = """
import importlib, sys, torch
import mars_dist
older = torch.optim.MARS
registration = importlib.reload(mars_dist.integrations.deepspeed)
registration.register()
print("reloaded", torch.optim.MARS is registration.mars_from_config is not older)
for name in [name for name in sys.modules if name.partition(".")[0] == "mars_dist"]:
    del sys.modules[name]
import mars_dist
print("imported", torch.optim.MARS is mars_dist.integrations.deepspeed.mars_from_config)
mars_dist.unregister()
print("left", hasattr(torch.optim, "MARS"))
"""
    printed = python(code, tmp_path)
    assert "reloaded True" in printed and "imported True" in printed and "left False" in printed


# ----------------------------------------------------------------------------------- with the real DeepSpeed

INITIALIZE = """
def initialize():
    import deepspeed
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", "file://" + os.path.abspath("meeting"), rank=0, world_size=1)
    config = {
        "train_batch_size": 1,
        "zero_optimization": {"stage": 2},
        "gradient_clipping": 0.0,
        "optimizer": {"type": "MARS", "params": {"lr": 0.01, "lr_1d": 0.01}},
    }
    net = torch.nn.Linear(4, 3)
    return deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=config)[0]

def show(engine):
    from deepspeed.runtime.zero import utils
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    optimizer = engine.optimizer.optimizer
    print("list", utils.ZERO_SUPPORTED_OPTIMIZERS.count(type(optimizer)))
    print("optimizer", type(optimizer).__module__, sorted(optimizer.rule_counts().items()), optimizer.engines())
"""
ORDERS = {
    "deepspeed_first": "import deepspeed; import mars_dist",
    "mars_dist_first": "import mars_dist; assert 'deepspeed' not in sys.modules; import deepspeed",
    "instance_first": "import mars_dist; mars = mars_dist.MARS(torch.nn.Linear(2, 2).parameters())",
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("order", ORDERS)
def test_either_order_of_imports_reaches_zero(order: str, tmp_path: Path) -> None:
    """Without ``zero_allow_untested_optimizer``; and afterwards everything can be undone."""
    code = f"""
import os, sys, torch
{ORDERS[order]}
{INITIALIZE}
show(initialize())
mars_dist.unregister()
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
ours = [finder for finder in sys.meta_path if type(finder).__module__.startswith("mars_dist")]
from deepspeed.runtime.engine import DeepSpeedEngine
print("engine", DeepSpeedEngine._take_model_step.__module__, vars(DeepSpeedEngine._take_model_step))
print("left", mars_dist.MARS in ZERO_SUPPORTED_OPTIMIZERS, hasattr(torch.optim, "MARS"), ours)
"""
    printed = python(code, tmp_path)
    assert "list 1" in printed
    assert "optimizer mars_dist.optimizer [('AdamW', 1), ('MARS-AdamW', 1)] {'ZeRO-1/2'}" in printed
    assert "left False False []" in printed and "engine deepspeed.runtime.engine {}" in printed


@pytest.mark.timeout(180)
def test_turned_off_deepspeed_says_so_and_registering_by_hand_works(tmp_path: Path) -> None:
    code = f"""
import os, sys, torch
import mars_dist
{INITIALIZE}
print("hooks", [finder for finder in sys.meta_path if type(finder).__module__.startswith("mars_dist")])
try:
    initialize()
except AssertionError as error:
    print("refused:", error)
mars_dist.register()
show(initialize())
"""
    printed = python(code, tmp_path, MARS_DIST_REGISTER="0")
    assert "hooks []" in printed and "refused: MARS is not a supported DeepSpeed Optimizer" in printed
    assert "optimizer mars_dist.optimizer" in printed and "list 1" in printed


# ----------------------------------------------------------------------------- canary: DeepSpeed's private names

DEEPSPEED = "deepspeed"
READ_BY_SHARDING = [
    ("utils/mixed_precision_linkage.py", "_dp_group"),
    ("runtime/zero/stage3.py", "_z3_optimizer"),
    ("runtime/zero/stage3.py", "fp16_groups"),
    ("runtime/zero/stage3.py", "fp32_partitioned_groups_flat"),
    ("runtime/zero/partition_parameters.py", "partition_numel"),
    ("runtime/zero/partition_parameters.py", "ds_shape"),
    ("runtime/zero/partition_parameters.py", "ds_numel"),
    ("runtime/zero/partition_parameters.py", "ds_tensor"),
    ("runtime/zero/partition_parameters.py", "ds_process_group"),
    ("runtime/zero/partition_parameters.py", "ds_id"),
]
READ_BY_THE_GLUE = [
    ("runtime/zero/utils.py", "ZERO_SUPPORTED_OPTIMIZERS"),
    ("runtime/engine.py", "_do_optimizer_sanity_check"),
    ("runtime/engine.py", "_configure_zero_optimizer"),
    ("runtime/engine.py", "_take_model_step"),
    ("runtime/engine.py", "load_checkpoint"),
    ("runtime/engine.py", "mpu"),
    ("runtime/engine.py", "sequence_parallel_size"),
    ("runtime/engine.py", "dp_world_size"),
    ("runtime/engine.py", "gradient_predivide_factor"),
    ("runtime/engine.py", "zero_reduce_scatter"),
    ("runtime/engine.py", "zero_quantized_nontrainable_weights"),
    ("runtime/config.py", "expert_parallel_config"),
    ("utils/bwc.py", "bwc_tensor_model_parallel_world_size"),
    ("runtime/zero/stage3.py", "optimizer_swapper"),
    ("runtime/swap_tensor/optimizer_utils.py", "swap_element_size"),
    ("runtime/swap_tensor/optimizer_utils.py", "min_aio_bytes"),
    ("runtime/engine.py", "_step_applied"),
    ("runtime/engine.py", "basic_optimizer"),
    ("runtime/engine.py", "torch_autocast_z0_gradscaler"),
    ("runtime/zero/stage3.py", "torch_autocast_gradscaler"),
    ("runtime/zero/stage_1_and_2.py", "torch_autocast_gradscaler"),
    ("runtime/config.py", "_param_dict"),
]
LEANED_ON = READ_BY_SHARDING + READ_BY_THE_GLUE


def assigned(source: str) -> set[str]:
    """Every name and attribute that ``source`` assigns, and every function that it defines."""
    targets: list[ast.expr] = []
    names = set()
    for node in ast.walk(ast.parse(source)):
        targets += node.targets if isinstance(node, ast.Assign) else []
        targets += [node.target] if isinstance(node, (ast.AnnAssign, ast.AugAssign)) else []
        names |= {node.name} if isinstance(node, ast.FunctionDef) else set()
    names |= {t.attr for t in targets if isinstance(t, ast.Attribute)}
    return names | {t.id for t in targets if isinstance(t, ast.Name)}


def canary(source: str, file: str, name: str) -> None:
    assert name in assigned(source), (
        f"DeepSpeed {importlib.metadata.version(DEEPSPEED)} no longer sets {name} in deepspeed/{file}: "
        "mars_dist/sharding/zero.py or mars_dist/integrations/deepspeed/ reads it and must be changed"
    )


@pytest.mark.parametrize(("file", "name"), LEANED_ON)
def test_deepspeed_still_sets(file: str, name: str) -> None:
    source = installed(file)
    canary(source, file, name)
    with pytest.raises(AssertionError, match=f"no longer sets {name} in deepspeed/{file}"):
        canary(re.sub(rf"\b{name}\b", "renamed", source), file, name)


def installed(file: str) -> str:
    spec = importlib.util.find_spec(DEEPSPEED)  # found, not imported
    assert spec is not None and spec.origin is not None, "the tests need DeepSpeed"
    return (Path(spec.origin).parent / file).read_text(encoding="utf-8")


def test_deepspeed_still_looks_names_up_in_torch_optim() -> None:
    source = installed("runtime/engine.py")
    assert re.search(r"getattr\(torch\.optim, self\.optimizer_name\(\)\)", source)
    assert re.search(r"type\(optimizer\) in ZERO_SUPPORTED_OPTIMIZERS", installed("runtime/zero/utils.py"))


def test_the_canary_knows_every_private_name_in_use() -> None:
    tree = ast.parse(inspect.getsource(zero))
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    deepspeeds = {n for n in attributes | words if re.fullmatch(r"_?(ds|dp|z3|fp16|fp32|partition|hp)_\w+", n)}
    assert deepspeeds == {name for _, name in READ_BY_SHARDING}


def test_a_deepspeed_without_the_list_is_reported_by_name(
    clean: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning: the script that imports DeepSpeed may not use MARS at all."""
    monkeypatch.setitem(sys.modules, registration.ZERO_UTILS, types.ModuleType(registration.ZERO_UTILS))
    mars_dist.register()
    assert re.search(r"has no [\w.]+ZERO_SUPPORTED_OPTIMIZERS: .*zero_allow_untested_optimizer", caplog.text)


# ---------------------------------------------------------------------------------------------- the import hook

HOOKED = "mars_dist_test_hooked"
OTHER = "mars_dist_test_other"


class Calls(list[Any]):
    """A callback that remembers what it was called with."""

    def __call__(self, module: types.ModuleType) -> None:
        self.append(module.VALUE)


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """Two modules on sys.path; the first is hooked."""
    for name in (HOOKED, OTHER):
        (tmp_path / f"{name}.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    meta_path, calls = list(sys.meta_path), Calls()
    import_hook.when_imported(HOOKED, calls)
    yield calls
    import_hook.forget(HOOKED)
    sys.meta_path[:] = meta_path
    for name in (HOOKED, OTHER):
        sys.modules.pop(name, None)


def test_the_hook_calls_back_once_and_leaves_other_modules_alone(calls: Calls) -> None:
    other = importlib.import_module(OTHER)
    assert calls == [] and import_hook._finder.find_spec(OTHER, None) is None
    assert other.__spec__ and type(other.__spec__.loader) is importlib.machinery.SourceFileLoader
    for _ in range(2):
        importlib.import_module(HOOKED)
    assert calls == [1]


def test_the_hooked_module_keeps_its_own_loader_and_source(calls: Calls) -> None:
    module = importlib.import_module(HOOKED)
    assert (
        module.__spec__
        and type(module.__loader__) is type(module.__spec__.loader) is importlib.machinery.SourceFileLoader
    )
    assert inspect.getsource(module) == "VALUE = 1\n"


def test_looking_for_a_spec_runs_nothing_and_the_import_still_calls_back(calls: Calls) -> None:
    spec = importlib.util.find_spec(HOOKED)
    assert spec is not None and spec.loader.get_source(HOOKED) == "VALUE = 1\n"  # type: ignore[union-attr]
    assert calls == [] and HOOKED not in sys.modules
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    importlib.import_module(HOOKED)
    assert calls == [1, 1]


def test_each_reload_calls_back_once(calls: Calls, tmp_path: Path) -> None:
    module = importlib.import_module(HOOKED)
    for value in (22, 333, 4444):
        (tmp_path / f"{HOOKED}.py").write_text(f"VALUE = {value}\n")
        assert importlib.reload(module) is module
    assert calls == [1, 22, 333, 4444]


def test_a_module_imported_before_is_called_back_at_once_and_when_reloaded(calls: Calls) -> None:
    other, more = importlib.import_module(OTHER), Calls()
    import_hook.when_imported(OTHER, more)
    assert more == [1]
    importlib.reload(other)
    assert more == [1, 1] and type(other.__loader__) is importlib.machinery.SourceFileLoader
    import_hook.forget(OTHER)
    importlib.reload(other)
    assert more == [1, 1]


def test_an_error_in_the_imported_module_comes_through_and_a_later_import_works(calls: Calls, tmp_path: Path) -> None:
    (tmp_path / f"{HOOKED}.py").write_text("raise ValueError('its own')\n")
    with pytest.raises(ValueError, match="its own"):
        importlib.import_module(HOOKED)
    assert calls == [] and HOOKED not in sys.modules
    (tmp_path / f"{HOOKED}.py").write_text("VALUE = 12345\n")
    importlib.import_module(HOOKED)
    assert calls == [12345]


def test_a_module_that_does_not_exist_is_reported_as_ever(calls: Calls, tmp_path: Path) -> None:
    (tmp_path / f"{HOOKED}.py").unlink()
    importlib.invalidate_caches()
    with pytest.raises(ModuleNotFoundError, match=f"No module named '{HOOKED}'"):
        importlib.import_module(HOOKED)
    assert importlib.util.find_spec(HOOKED) is None


def test_an_error_of_the_callback_reaches_whoever_imports(calls: Calls) -> None:
    def refuse(module: types.ModuleType) -> None:
        raise RuntimeError("not this release")

    import_hook.when_imported(HOOKED, refuse)
    with pytest.raises(RuntimeError, match="not this release"):
        importlib.import_module(HOOKED)
    assert HOOKED not in sys.modules


def test_modules_of_a_zip_archive_that_share_a_loader_are_told_apart(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "modules.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr(f"{HOOKED}.py", "VALUE = 7\n")
        file.writestr(f"{OTHER}.py", "pass\n")
    monkeypatch.syspath_prepend(archive)
    module = importlib.import_module(HOOKED)
    importlib.import_module(OTHER)  # has no VALUE: the callback would fail on it
    assert calls == [7] and type(module.__loader__).__name__ == "zipimporter"


def test_a_second_hook_of_the_same_kind_is_served_as_well(calls: Calls) -> None:
    spec = importlib.util.spec_from_file_location("second_hook", import_hook.__file__)
    assert spec is not None and spec.loader is not None
    second, more = importlib.util.module_from_spec(spec), Calls()
    spec.loader.exec_module(second)
    second.when_imported(HOOKED, more)
    module = importlib.import_module(HOOKED)
    assert (calls, more) == ([1], [1]) and type(module.__loader__) is importlib.machinery.SourceFileLoader
    second.forget(HOOKED)


@pytest.mark.timeout(60)
def test_threads_that_import_at_the_same_time_see_one_callback(calls: Calls) -> None:
    start, seen = threading.Barrier(8), []

    def work() -> None:
        start.wait(20)
        seen.append((importlib.import_module(HOOKED).VALUE, list(calls)))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert seen == [(1, [1])] * 8, "a thread came back before the callback had run"


@pytest.mark.timeout(60)
def test_asking_while_another_thread_is_importing_waits_for_the_whole_module(calls: Calls, tmp_path: Path) -> None:
    import_hook.forget(HOOKED)
    events = types.SimpleNamespace(started=threading.Event(), go_on=threading.Event())
    sys.modules["mars_dist_test_events"] = events  # type: ignore[assignment]
    (tmp_path / f"{HOOKED}.py").write_text(
        "import mars_dist_test_events as e\ne.started.set()\nassert e.go_on.wait(20)\nVALUE = 5\n"
    )
    thread = threading.Thread(target=importlib.import_module, args=(HOOKED,), daemon=True)
    thread.start()
    assert events.started.wait(20) and HOOKED in sys.modules
    threading.Timer(0.2, events.go_on.set).start()
    import_hook.when_imported(HOOKED, calls)
    thread.join(20)
    del sys.modules["mars_dist_test_events"]
    assert calls == [5]


# --------------------------------------------------------------------------------------------- mars_from_config


def shapes(optimizer: mars_dist.MARS) -> list[list[tuple[int, ...]]]:
    return [[tuple(p.shape) for p in group["params"]] for group in optimizer.param_groups]


def parameters(*sizes: tuple[int, ...]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(size)) for size in sizes]


LR: dict[str, Any] = {"lr": 1e-3, "lr_1d": 1e-3}


def test_a_bare_list_is_split_into_matrices_and_others_in_their_order() -> None:
    optimizer = mars_from_config(iter(parameters((2,), (2, 3), (4, 1, 1), (5, 6), ())), **LR)
    assert shapes(optimizer) == [[(2, 3), (5, 6)], [(2,), (4, 1, 1), ()]]
    assert type(optimizer) is mars_dist.MARS


@pytest.mark.parametrize("sizes", [[(2, 3), (3, 2)], [(2,), (3,)]])
def test_a_list_of_one_kind_stays_one_group(sizes: list[tuple[int, ...]]) -> None:
    assert shapes(mars_from_config(parameters(*sizes), **LR)) == [sizes]


@pytest.mark.parametrize("matrix_ndim", [(2, 4), [2, 4]])
def test_what_counts_as_a_matrix_decides_the_split(matrix_ndim: Any) -> None:
    optimizer = mars_from_config(parameters((2,), (2, 3), (3, 2, 1, 1), (2, 2, 2)), matrix_ndim=matrix_ndim, **LR)
    assert shapes(optimizer) == [[(2, 3), (3, 2, 1, 1)], [(2,), (2, 2, 2)]]


def test_groups_that_the_caller_made_are_kept() -> None:
    vector, matrix, third = parameters((2,), (2, 3), (3, 3))
    optimizer = mars_from_config([{"params": [vector, matrix]}, {"params": third, "lr": 0.5}], **LR)
    assert shapes(optimizer) == [[(2,), (2, 3)], [(3, 3)]]
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.5]


def test_named_parameters_keep_their_names() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
    optimizer = mars_from_config(net.named_parameters(), **LR)
    assert [group["param_names"] for group in optimizer.param_groups] == [
        ["0.weight"],
        ["0.bias", "1.weight", "1.bias"],
    ]


def test_parameters_of_zero_init_are_split_by_their_real_shapes() -> None:
    params = parameters((0,), (0,), (0,))
    for p, shape in zip(params, [(3,), (3, 4), (2, 2)], strict=True):
        p.ds_shape = torch.Size(shape)  # type: ignore[attr-defined]
    optimizer = mars_from_config(params, **LR)
    assert [[tuple(p.ds_shape) for p in g["params"]] for g in optimizer.param_groups] == [[(3, 4), (2, 2)], [(3,)]]


def test_values_as_json_has_them_are_taken_and_wrong_ones_named() -> None:
    optimizer = mars_from_config(parameters((2, 2)), betas=[0.9, 0.99], clip=None, mars_type="mars-lion", **LR)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.99) and optimizer.settings.mars_type == "mars-lion"
    with pytest.raises(TypeError, match="'gama'; did you mean 'gamma'"):
        mars_from_config(parameters((2, 2)), gama=0.1)
    with pytest.raises(ValueError, match="empty parameter list"):
        mars_from_config([])
