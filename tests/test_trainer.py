"""``optim="mars_adamw"`` in transformers' Trainer: names, arguments, precedence, the block of a ds_config.json."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import mars_dist
from mars_dist.integrations import trainer as integration
from mars_dist.integrations.trainer_arguments import KINDS, TRAINERS_OWN, choose, parse
from mars_dist.optimizer import KEYWORDS
from tests import trainer_cases
from tests.ddp_cases import messages
from tests.processes import run_python
from tests.trainer_cases import LR

ROOT = Path(__file__).parent.parent
LABELS = {"mars_adamw": "MARS-AdamW", "mars_lion": "MARS-Lion", "mars_shampoo": "MARS-Shampoo", "mars_m": "MARS-M"}


@pytest.fixture(autouse=True)
def _accelerates_state_is_left_clean() -> Iterator[None]:
    with trainer_cases.clean_environment():
        yield


def arguments(folder: Path, **given: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(**{"output_dir": str(folder), "use_cpu": True, "report_to": [], **given})


# ---------------------------------------------------------------------------------------------------------- names


def test_the_names_are_real_members(tmp_path: Path) -> None:
    from transformers.training_args import OptimizerNames

    for name, value in integration.NAMES.items():
        member = OptimizerNames(value)
        assert member is getattr(OptimizerNames, name) is OptimizerNames[name]
        assert (member.name, member.value, member == value, type(member)) == (name, value, True, OptimizerNames)
        assert [m for m in OptimizerNames if m.value == value] == [member] and member in OptimizerNames
        assert hash(member) == hash(value) and isinstance(member, str) and str(value) in f"{member!r}"
        for made in (copy.deepcopy(member), copy.copy(member), pickle.loads(pickle.dumps(member))):
            assert made is member
        args = arguments(tmp_path, optim=value)
        assert args.optim is member and copy.deepcopy(args).optim is member
        assert pickle.loads(pickle.dumps(args)).optim is member
        assert args.to_dict()["optim"] == value and json.loads(args.to_json_string())["optim"] == value
        assert args.set_optimizer(name="sgd").set_optimizer(name=value).optim is member
    with pytest.raises(ValueError, match="mars_adam is not a valid OptimizerNames, .*mars_adamw.*mars_m"):
        OptimizerNames("mars_adam")


def snapshot() -> tuple[Any, ...]:
    from transformers import TrainingArguments, trainer_optimizer
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig
    from transformers.training_args import OptimizerNames

    handlers = {str(k.value): v for k, v in trainer_optimizer._OPTIMIZER_HANDLERS.items()}
    watched = [getattr(HfTrainerDeepSpeedConfig, name) for name in integration.WATCHED]
    names = (
        list(OptimizerNames.__members__),
        [m.value for m in OptimizerNames],
        list(OptimizerNames._value2member_map_),
    )
    return (*names, sorted(vars(OptimizerNames)), handlers, TrainingArguments.__post_init__, watched)


def test_registering_is_idempotent_and_reversible(tmp_path: Path) -> None:
    from transformers import Trainer
    from transformers.training_args import OptimizerNames

    registered = snapshot()
    integration.register()
    assert snapshot() == registered
    try:
        integration.unregister()
        before = snapshot()
        assert not re.search("mars", str(before)) and len(before[0]) == len(registered[0]) - len(LABELS)
        with pytest.raises(ValueError, match="not a valid OptimizerNames"):
            arguments(tmp_path, optim="mars_adamw")
        integration.register()
        integration.unregister()
        assert snapshot() == before
    finally:
        integration.register()
    assert snapshot()[:5] == registered[:5] and OptimizerNames.MARS_M.value == "mars_m"
    assert Trainer.get_optimizer_cls_and_kwargs(arguments(tmp_path, optim="mars_m"))[0] is mars_dist.MARS


@pytest.mark.parametrize(
    ("module", "owner", "name"),
    [
        ("transformers.trainer_optimizer", None, "_OPTIMIZER_HANDLERS"),
        ("transformers.training_args", None, "OptimizerNames"),
        ("transformers.integrations.deepspeed", "HfTrainerDeepSpeedConfig", "trainer_config_process"),
    ],
)
def test_a_release_without_a_name_is_refused_when_mars_is_asked_for_and_not_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, owner: str | None, name: str
) -> None:
    import importlib

    holder: Any = importlib.import_module(module)
    holder = getattr(holder, owner) if owner else holder
    if name == "OptimizerNames":  # an enum that refuses another member
        monkeypatch.setattr(holder, name, [m for m in holder.OptimizerNames if "mars" not in m.value])
    else:
        monkeypatch.delattr(holder, name)
    integration.register()  # what an import of transformers does
    with pytest.raises(RuntimeError, match=rf"transformers 5\..* has no .*{name}.*tested with transformers 5\."):
        arguments(tmp_path, optim="mars_adamw")
    if name != "OptimizerNames":
        assert arguments(tmp_path, optim="sgd").optim == "sgd"


def test_a_name_that_somebody_else_has_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from transformers import trainer_optimizer
    from transformers.training_args import OptimizerNames

    monkeypatch.setitem(trainer_optimizer._OPTIMIZER_HANDLERS, OptimizerNames("mars_lion"), lambda context: None)
    integration.register()
    with pytest.raises(RuntimeError, match="does not replace it"):
        arguments(tmp_path, optim="mars_lion")
    assert arguments(tmp_path, optim="mars_m").optim == "mars_m"


# ------------------------------------------------------------------------------------------------------ optim_args


def test_every_keyword_of_mars_can_be_given() -> None:
    parts = {"beta1", "beta2", "beta1_1d", "beta2_1d"}
    assert KINDS.keys() - parts == set(KEYWORDS) - TRAINERS_OWN.keys() and parts < KINDS.keys()


VALUES: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("gamma=0.05,lr_1d=1e-3,eps=1e-6", {"gamma": 0.05, "lr_1d": 1e-3, "eps": 1e-6}),
    ("gamma=0, lr_1d=0.0 ,weight_decay_1d=0", {"gamma": 0.0, "lr_1d": 0.0, "weight_decay_1d": 0.0}),
    ("beta1=0,beta2=0.0,beta1_1d=0", {"beta1": 0.0, "beta2": 0.0, "beta1_1d": 0.0}),
    ("betas=0.9/1e-1,betas_1d=0/0", {"betas": (0.9, 0.1), "betas_1d": (0.0, 0.0)}),
    *((f"amsgrad={word}", {"amsgrad": True}) for word in ("True", "true", "1", "yes", "YES")),
    *((f"optimize_1d={word}", {"optimize_1d": False}) for word in ("False", "false", "0", "no", "No")),
    ("maximize=0,skip_nonfinite=1,is_approx=True", {"maximize": False, "skip_nonfinite": True, "is_approx": True}),
    ("use_mars=None", {"use_mars": None}),
    ("use_mars=False", {"use_mars": False}),
    ("clip=none,ns_dtype=None", {"clip": None, "ns_dtype": None}),
    ("clip=0.5,ns_dtype=float32,ns_steps=6", {"clip": 0.5, "ns_dtype": "float32", "ns_steps": 6}),
    ("matrix_ndim=2", {"matrix_ndim": (2,)}),
    ("matrix_ndim=2+3", {"matrix_ndim": (2, 3)}),
    ("mars_type=mars_m,first_step=paper,orthogonalizer=svd", {"mars_type": "mars-m", "first_step": "paper"}),
]


@pytest.mark.parametrize(("text", "expected"), VALUES, ids=[text for text, _ in VALUES])
def test_values_are_read(text: str, expected: dict[str, Any]) -> None:
    found = parse(text)
    assert {key: found[key] for key in expected} == expected
    assert all(type(found[key]) is type(value) for key, value in expected.items())


REFUSED = [
    ("gama=0.1", "no key 'gama'; did you mean 'gamma'\\?"),
    ("beta_1=0.1", "no key 'beta_1'; did you mean 'beta1'\\?"),
    ("amsgrad=maybe", "amsgrad=maybe cannot be read; amsgrad is True or False"),
    ("amsgrad=2", "amsgrad=2 cannot be read"),
    ("gamma=high", "gamma=high cannot be read; gamma is a number"),
    ("gamma=none", "gamma=none cannot be read"),
    ("ns_steps=5.5", "ns_steps=5.5 cannot be read; ns_steps is a whole number"),
    ("matrix_ndim=two", "matrix_ndim=two cannot be read.* 2\\+3"),
    ("betas=0.9", "betas=0.9 cannot be read; betas is two numbers with a slash"),
    ("betas=(0.9,0.95)", "cuts it at every comma. A tuple is given by its numbers: beta1=0.95,beta2=0.99"),
    ("gamma", "'gamma' in 'gamma' is not of the form key=value"),
    ("gamma=0.1,", "'' in 'gamma=0.1,' is not of the form"),
    ("gamma=1=2", "'gamma=1=2' .* not of the form"),
    ("gamma=", "'gamma=' .* not of the form"),
    ("gamma=1,gamma=1", "gamma is given twice"),
    ("betas=0.9/0.95,beta1=0.9", "gives betas and beta1"),
    ("betas_1d=0.9/0.95,beta2_1d=0.9", "gives betas_1d and beta2_1d"),
    ("lr=1e-3", "give --learning_rate 1e-3 instead"),
    ("weight_decay=0.1", "give --weight_decay 0.1 instead"),
    # what needs the other arguments
    ("mars_type=mars-lion", "mars_type=mars-lion and optim says mars-adamw"),
    ("weight_decay_1d=0.1", "weight_decay_1d=0.1 would have no effect.*--weight_decay 0"),
    # ranges
    ("beta1=1", "betas\\[0\\] must be in \\[0, 1\\), got 1"),
    ("eps=-1", "eps must be in"),
    ("lr_1d=-1", "lr_1d must be in"),
    ("gamma=nan", "gamma must be finite"),
    ("clip=0", "clip must be in .*None turns the clip off"),
    ("ns_dtype=float8", "ns_dtype must be one of"),
    ("first_step=papers", "did you mean 'paper'"),
    ("matrix_ndim=1", "matrix_ndim must be"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[text for text, _ in REFUSED])
def test_what_cannot_be_right_is_refused_before_a_model_is_loaded(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, optim="mars_adamw", optim_args=text)
    assert arguments(tmp_path, optim="sgd", optim_args=text).optim_args == text, "other optimizers are not ours"


# ------------------------------------------------------------------------------------------------------ precedence

OURS = "MARS's default"
PRECEDENCE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"betas": (0.95, 0.99), "eps": 1e-8, "lr_1d": 1e-2}, f"betas (0.95, 0.99) ({OURS}), eps 1e-08 ({OURS})"),
    ({"adam_beta1": 0.8}, {"betas": (0.8, 0.99)}, f"betas (0.8, 0.99) (adam_beta1 and {OURS})"),
    ({"adam_beta2": 0.95}, {"betas": (0.95, 0.95)}, f"({OURS} and adam_beta2)"),
    ({"adam_beta1": 0.8, "adam_beta2": 0.0}, {"betas": (0.8, 0.0)}, "(adam_beta1 and adam_beta2)"),
    ({"adam_beta1": 0.8, "optim_args": "beta1=0"}, {"betas": (0.0, 0.99)}, f"(0, 0.99) (optim_args and {OURS})"),
    ({"adam_beta1": 0.8, "optim_args": "beta2=0.5"}, {"betas": (0.8, 0.5)}, "(adam_beta1 and optim_args)"),
    ({"adam_beta1": 0.8, "optim_args": "betas=0.6/0.7"}, {"betas": (0.6, 0.7)}, "betas (0.6, 0.7) (optim_args)"),
    ({"adam_epsilon": 0.0}, {"eps": 0.0}, "eps 0 (adam_epsilon)"),
    ({"adam_epsilon": 1e-6, "optim_args": "eps=0"}, {"eps": 0.0}, "eps 0 (optim_args)"),
    ({"optim_args": "beta1_1d=0"}, {"betas_1d": (0.0, 0.95), "betas": (0.95, 0.99)}, "betas_1d=(0.0, 0.95)"),
    ({"optim_args": "lr_1d=4e-3"}, {"lr": 1e-2, "lr_1d": 4e-3}, "lr 0.01 (learning_rate), lr_1d 0.004 (optim_args)"),
    ({"optim_args": "lr_1d=0"}, {"lr_1d": 0.0}, "lr_1d 0 (optim_args)"),
    ({"learning_rate": 3e-4}, {"lr": 3e-4, "lr_1d": 3e-4}, "lr 0.0003 (learning_rate), lr_1d = lr"),
    ({"learning_rate": 0.0}, {"lr": 0.0, "lr_1d": 0.0}, "lr 0 (learning_rate)"),
    ({"optim_args": "clip=none,amsgrad=0"}, {"clip": None, "amsgrad": False}, "clip=None, amsgrad=False (optim_args)"),
]


@pytest.mark.parametrize(("given", "keywords", "said"), PRECEDENCE, ids=[str(given) for given, _, _ in PRECEDENCE])
def test_precedence(tmp_path: Path, given: dict[str, Any], keywords: dict[str, Any], said: str) -> None:
    found, sentence = choose(arguments(tmp_path, **{"learning_rate": LR, "optim": "mars_adamw", **given}))
    assert {name: found[name] for name in keywords} == keywords
    assert said in sentence and "\n" not in sentence


def test_registration_can_be_turned_off(tmp_path: Path) -> None:
    code = """
import mars_dist
from accelerate import Accelerator
from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS as handlers
from transformers.training_args import OptimizerNames

def registered():
    return ["mars_adamw" in handlers, "mars_adamw" in list(OptimizerNames), hasattr(Accelerator.prepare, "__wrapped__")]

print("BEFORE", *registered())
mars_dist.register()
print("AFTER", *registered())
"""
    done = run_python("-c", code, folder=tmp_path, env={"MARS_DIST_REGISTER": "0"})
    assert "BEFORE False False False" in done.stdout and "AFTER True True True" in done.stdout, done.stdout


@pytest.mark.parametrize("optim", ["mars_adamw", "mars_m"])
def test_matrix_variants_say_what_trainers_groups_do_with_embeddings(optim: str, tmp_path: Path) -> None:
    from transformers import Trainer

    model = torch.nn.Sequential(torch.nn.Embedding(4, 4), torch.nn.Linear(4, 4))
    with mock.patch.object(integration, "_said", set()) as said:
        Trainer.get_optimizer_cls_and_kwargs(arguments(tmp_path, optim=optim), model)
        told = [sentence for sentence in said if "param_groups" in sentence]
    assert len(told) == (optim == "mars_m") and all("this model has Embedding)" in sentence for sentence in told)


def test_it_is_said_once_in_one_line(tmp_path: Path) -> None:
    from transformers import Trainer

    args = arguments(tmp_path, optim="mars_lion", learning_rate=1.25e-3, optim_args="gamma=0.0625,beta1=0.75")
    with messages() as texts:
        for _ in range(2):
            trainer = Trainer(model=trainer_cases.model(), args=args)
            Trainer.get_optimizer_cls_and_kwargs(args)
            trainer.create_optimizer()
    assert texts == [
        "Trainer's optimizer is mars-lion: lr 0.00125 (learning_rate), lr_1d = lr, betas (0.75, 0.99) (optim_args "
        "and MARS's default), eps 1e-08 (MARS's default), gamma 0.0625 (optim_args), weight_decay 0, and 0 in "
        "Trainer's no-decay group"
    ]


class Named(nn.Module):
    """A matrix that Trainer keeps from decay by its name, and a vector that it decays."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.bias_table = nn.Parameter(torch.randn(4, 3))
        self.gain = nn.Parameter(torch.randn(3))
        self.bias = nn.Parameter(torch.randn(3))


@pytest.mark.parametrize("weight_decay_1d", [None, 0.0, 0.2])
def test_the_no_decay_group_stays_undecayed(tmp_path: Path, weight_decay_1d: float | None) -> None:
    """A step on gradients of zero is nothing but decay."""
    from transformers import Trainer

    text = None if weight_decay_1d is None else f"weight_decay_1d={weight_decay_1d}"
    args = arguments(tmp_path, optim="mars_adamw", learning_rate=0.5, weight_decay=0.1, optim_args=text)
    net = Named()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer = Trainer(model=net, args=args).create_optimizer()
    assert type(optimizer) is mars_dist.MARS
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    gain = 0.1 if weight_decay_1d is None else weight_decay_1d
    for name, decay in {"weight": 0.1, "bias_table": 0.0, "gain": gain, "bias": 0.0}.items():
        torch.testing.assert_close(getattr(net, name).detach(), before[name] * (1 - 0.5 * decay), rtol=1e-6, atol=0)
    assert optimizer.rule_counts() == {"MARS-AdamW": 2, "AdamW": 2}


# ------------------------------------------------------------------------------- the block of a DeepSpeed configuration


def process(args: Any, block: dict[str, Any] | None) -> dict[str, Any]:
    """What TrainingArguments does with a DeepSpeed configuration, and Trainer again when training starts."""
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    text: dict[str, Any] = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}
    config = HfTrainerDeepSpeedConfig(text if block is None else {**text, "optimizer": copy.deepcopy(block)})
    for _ in range(2):
        config.trainer_config_process(args)
        config.trainer_config_finalize(args, nn.Linear(2, 2), 10)
    return dict(config.config.get("optimizer", {}))


def mars(**params: Any) -> dict[str, Any]:
    return {"type": "MARS", "params": params}


M: dict[str, Any] = {"optim": "mars_adamw"}
CONTRADICTIONS = [
    (M, {"type": "AdamW", "params": {"lr": "auto"}}, '"type": "AdamW", which DeepSpeed would train with'),
    (M, {"type": "Adam"}, "has an optimizer block of its own"),
    ({"optim": "sgd"}, mars(lr="auto"), 'optim="sgd" asks for another optimizer'),
    ({"optim_args": "gamma=0.1"}, mars(lr="auto"), "optim_args='gamma=0.1' would have no effect"),
    ({"optim": "mars_lion"}, mars(mars_type="mars-adamw"), "mars_type is 'mars-adamw' in the block and 'mars-lion'"),
    (M | {"optim_args": "gamma=0.1"}, mars(gamma=0.05), "gamma is 0.05 in the block and 0.1 by the arguments"),
    (M | {"optim_args": "gamma=0"}, mars(gamma=0.05), "gamma is 0.05 in the block and 0.0 by"),
    (M | {"optim_args": "clip=none"}, mars(clip=1.0), "clip is 1.0 in the block and None"),
    (M | {"adam_beta1": 0.8}, mars(betas=[0.9, 0.95]), "betas is \\[0.9, 0.95\\] in the block and \\[0.8, 0.99\\]"),
    ({"adam_beta1": 0.8}, mars(betas=[0.9, 0.95]), "optimizer.params.betas.*adam_beta1"),  # transformers' own words
    (
        M | {"weight_decay": 0.1, "optim_args": "weight_decay_1d=0.2"},
        mars(),
        "weight_decay_1d=0.2 would decay biases and norms",
    ),
    (M, mars(lr=1e-3), "optimizer.params.lr=0.001 vs hf learning_rate=0.01"),
    (M, mars(weight_decay=0.5), "optimizer.params.weight_decay=0.5 vs hf"),
]


@pytest.mark.parametrize(("given", "block", "message"), CONTRADICTIONS, ids=str)
def test_a_block_that_contradicts_optim_is_an_error(
    tmp_path: Path, given: dict[str, Any], block: dict[str, Any], message: str
) -> None:
    args = arguments(tmp_path, **{"learning_rate": LR, **given})
    with pytest.raises(ValueError, match=message):
        process(args, block)


AGREEMENTS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({}, mars(lr="auto", betas="auto", eps="auto"), {"lr": LR, "betas": [0.95, 0.99], "eps": 1e-8}),
    ({"adam_beta2": 0.5}, mars(betas="auto"), {"betas": [0.95, 0.5]}),
    ({}, mars(betas=[0.9, 0.95], eps=1e-6, gamma=0.1), {"betas": [0.9, 0.95], "eps": 1e-6, "gamma": 0.1}),
    (
        M | {"weight_decay": 0.1},
        {"type": "mars"},
        {"mars_type": "mars-adamw", "lr": LR, "lr_1d": LR, "weight_decay": 0.1, "weight_decay_1d": 0.0},
    ),
    (M | {"optim_args": "gamma=0,beta1=0.5"}, mars(lr="auto"), {"gamma": 0.0, "betas": [0.5, 0.99], "lr": LR}),
    (
        {"optim": "mars_m", "optim_args": "matrix_ndim=2,lr_1d=1e-3"},
        mars(mars_type="mars-m", matrix_ndim=2, lr_1d=1e-3, weight_decay_1d=0.3, betas="auto"),
        {"matrix_ndim": 2, "lr_1d": 1e-3, "weight_decay_1d": 0.3, "betas": [0.95, 0.99]},
    ),
]


@pytest.mark.parametrize(("given", "block", "expected"), AGREEMENTS, ids=str)
def test_a_block_and_optim_that_agree(
    tmp_path: Path, given: dict[str, Any], block: dict[str, Any], expected: dict[str, Any]
) -> None:
    with messages() as texts:
        params = process(arguments(tmp_path, **{"learning_rate": LR, **given}), block)["params"]
    assert {name: params[name] for name in expected} == expected
    if given.get("optim"):
        assert params.keys() >= {"lr", "lr_1d", "weight_decay", "weight_decay_1d", "mars_type"}
    assert all(f"{name} {value}" in texts[0] for name, value in expected.items()), texts
    mars_dist.MARS(nn.Linear(2, 2).parameters(), **params)


@pytest.mark.parametrize(("given", "block"), [({}, mars(lr="auto")), (M, mars()), (M, None)], ids=str)
def test_an_environment_in_which_accelerate_drops_deepspeed_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: dict[str, Any], block: dict[str, Any] | None
) -> None:
    """Accelerate would run DDP, and AdamW in place of the block."""
    args = arguments(tmp_path, **given)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(ValueError, match="ACCELERATE_USE_CPU is set.*leaves DeepSpeed out"):
        process(args, block)
    assert process(arguments(tmp_path, optim="sgd"), {"type": "AdamW", "params": {}}) == {"type": "AdamW", "params": {}}


def test_blocks_that_have_nothing_to_do_with_mars_are_left_alone(tmp_path: Path) -> None:
    adam = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}
    assert process(arguments(tmp_path, optim="sgd"), adam)["params"]["betas"] == [0.9, 0.999]
    assert process(arguments(tmp_path, **M), None) == {}
