"""``param_groups``: what is a matrix, an embedding, a head, a norm, a bias; each parameter once; under engines."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mars_dist
from mars_dist import MARS, param_groups
from tests import groups_cases, nets
from tests.groups_cases import NUMBERS, gpt2, with_lora
from tests.processes import ROOT
from tests.ranks import RankPool
from tests.reference import ReferenceMARS

VARIANTS = ("mars-adamw", "mars-lion", "mars-shampoo", "mars-m")
ELEMENTWISE = VARIANTS[:2]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads))  # type: ignore[arg-type]


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    return BertForMaskedLM(BertConfig(**sizes, num_attention_heads=2, tie_word_embeddings=False))  # type: ignore[arg-type]


class Odd(nn.Module):
    """What a name alone, a type alone or a shape alone would get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 2)
        self.pos_embed = nn.Parameter(torch.zeros(5, 8))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.time_embedding = nn.Sequential(nn.Linear(8, 8))  # a matrix
        self.attention = nn.MultiheadAttention(8, 2)
        self.norm_proj = nn.Linear(8, 8)  # a matrix
        self.ln_2 = nn.LayerNorm((5, 8))  # two dimensions
        self.expert_bias = nn.Parameter(torch.zeros(4, 8))  # two dimensions
        self.gain = nn.Parameter(torch.ones(8))  # neither norm nor bias
        self.bags = nn.EmbeddingBag(7, 8)
        self.tokens = nn.Embedding(24, 8)
        self.output = nn.Linear(8, 24)
        self.inner = nn.ModuleDict({"output": nn.Linear(8, 8), "overhead": nn.Linear(8, 8)})  # matrices
        self.head = nn.Linear(8, 3)


MODELS = {"gpt2": gpt2, "mixtral": mixtral, "bert": bert, "net": nets.build, "odd": Odd}


def roles(groups: list[dict[str, Any]]) -> dict[str, str]:
    return {name: group["role"] for group in groups for name, _ in group["params"]}


def group_of(groups: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (group,) = [group for group in groups if name in [n for n, _ in group["params"]]]
    return group


def step_once(groups: list[dict[str, Any]], **settings: Any) -> MARS:
    optimizer = MARS(groups, **settings)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn_like(p)
    optimizer.step()
    return optimizer


# ------------------------------------------------------------------------------------------------------------ the table

ELEMENTWISE_TABLE = """\
parameter groups for MARS(groups, mars_type='mars-adamw')
group                rule        tensors  elements     lr  decay  names
matrices             MARS-AdamW        8    24,576  0.002   0.01  transformer.h.*.attn.c_attn.weight, \
transformer.h.*.attn.c_proj.weight, transformer.h.*.mlp.c_fc.weight, and 1 more
embeddings and head  MARS-AdamW        2     2,560  0.002   0.01  transformer.wte.weight = lm_head.weight, \
transformer.wpe.weight
others, no decay     AdamW            18       896  0.002      0  transformer.h.*.ln_1.weight, \
transformer.h.*.ln_1.bias, transformer.h.*.attn.c_attn.bias, and 7 more"""

MATRIX_TABLE = """\
parameter groups for MARS(groups, mars_type='mars-m')
group                          rule    tensors  elements     lr  decay  names
matrices (in, out)             MARS-M        6    18,432   0.01   0.05  transformer.h.*.attn.c_proj.weight, \
transformer.h.*.mlp.c_fc.weight, transformer.h.*.mlp.c_proj.weight
matrices (in, out) of 3 parts  MARS-M        2     6,144   0.01   0.05  transformer.h.*.attn.c_attn.weight
embeddings and head            AdamW         2     2,560  0.007   0.03  transformer.wte.weight = lm_head.weight, \
transformer.wpe.weight
others                         AdamW         5       160  0.004   0.02  transformer.h.*.ln_1.weight, \
transformer.h.*.ln_2.weight, transformer.ln_f.weight
others, no decay               AdamW        11       672  0.004      0  transformer.h.*.ln_1.bias, \
transformer.h.*.attn.c_attn.bias, transformer.h.*.attn.c_proj.bias, and 3 more
left out, frozen: 2 tensors of 64 elements"""

EXPERTS = """\
under AdamW with 3 and more dimensions (experts, convolutions): model.layers.*.mlp.experts.gate_up_proj, \
model.layers.*.mlp.experts.down_proj; matrix_ndim=(2, 3) here and in MARS makes matrices of them"""


def test_the_table_word_by_word(capsys: pytest.CaptureFixture[str]) -> None:
    groups = param_groups(gpt2(), lr=2e-3, weight_decay=0.01)
    assert str(groups) == ELEMENTWISE_TABLE
    assert capsys.readouterr().out == ""
    model = gpt2()
    for block in model.transformer.h:
        block.mlp.c_proj.bias.requires_grad_(False)
    param_groups(model, "mars-m", split_qkv=True, verbose=True, **NUMBERS)
    assert capsys.readouterr().out == MATRIX_TABLE + "\n"


def test_only_rank_0_prints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    param_groups(gpt2(), verbose=True)
    assert capsys.readouterr().out == ""


def test_the_table_is_that_of_the_groups_as_they_are() -> None:
    groups = param_groups(gpt2(), lr=2e-3, weight_decay=0.01)
    groups[0]["lr"], groups[1]["weight_decay"] = 0.5, 0.25
    table = ELEMENTWISE_TABLE.replace("24,576  0.002", "24,576    0.5").replace(
        "2,560  0.002   0.01", "2,560  0.002   0.25"
    )
    assert str(groups) == table


def test_experts_are_matrices_where_both_are_told() -> None:
    model = mixtral()
    assert str(param_groups(model, "mars-m")).splitlines()[-1] == EXPERTS
    groups = param_groups(model, "mars-m", matrix_ndim=(2, 3), matrix_parts={"gate_up_proj": 2})
    table = str(groups)
    assert table.splitlines()[0] == "parameter groups for MARS(groups, mars_type='mars-m', matrix_ndim=(2, 3))"
    assert "under AdamW" not in table
    assert group_of(groups, "model.layers.0.mlp.experts.gate_up_proj")["matrix_parts"] == 2
    assert "matrix_parts" not in group_of(groups, "model.layers.0.mlp.experts.down_proj")
    optimizer = step_once(param_groups(model, "mars-m", matrix_ndim=(2, 3)), mars_type="mars-m", matrix_ndim=(2, 3))
    assert optimizer.rule_counts() == {"MARS-M": 2 * 5 + 2 * 2, "AdamW": 2 + 5}


# ----------------------------------------------------------------------------------------------- what is taken for what


def test_embeddings_heads_norms_and_biases_of_odd_models() -> None:
    found = roles(param_groups(Odd(), "mars-m"))
    assert found == {
        "patches.weight": "others",
        "patches.bias": "others, no decay",
        "pos_embed": "embeddings and head",
        "cls_token": "others",
        "time_embedding.0.weight": "matrices",
        "time_embedding.0.bias": "others, no decay",
        "attention.in_proj_weight": "matrices",
        "attention.in_proj_bias": "others, no decay",
        "attention.out_proj.weight": "matrices",
        "attention.out_proj.bias": "others, no decay",
        "norm_proj.weight": "matrices",
        "norm_proj.bias": "others, no decay",
        "ln_2.weight": "others, no decay",
        "ln_2.bias": "others, no decay",
        "expert_bias": "others, no decay",
        "gain": "others",
        "bags.weight": "embeddings and head",
        "tokens.weight": "embeddings and head",
        "output.weight": "embeddings and head",
        "output.bias": "others, no decay",
        "inner.output.weight": "matrices",
        "inner.output.bias": "others, no decay",
        "inner.overhead.weight": "matrices",
        "inner.overhead.bias": "others, no decay",
        "head.weight": "embeddings and head",
        "head.bias": "others, no decay",
    }


def test_the_head_is_the_one_that_the_model_names() -> None:
    """BERT's is called decoder, below other names, and not tied here."""
    model = bert()
    head = "cls.predictions.decoder.weight"
    assert head in dict(model.named_parameters())
    assert roles(param_groups(model, "mars-m"))[head] == "embeddings and head"
    model.cls.predictions.decoder = nn.Linear(16, 16)  # neither the name nor the shape says what it is
    assert roles(param_groups(model, "mars-m"))[head] == "embeddings and head"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", MODELS)
def test_every_trainable_parameter_is_in_one_group(name: str, variant: str) -> None:
    model = MODELS[name]()
    for i, p in enumerate(model.parameters()):
        p.requires_grad_(i % 7 != 3)
    numbers = {key: value for key, value in NUMBERS.items() if key != "no_decay"}
    groups = param_groups(model, variant, split_qkv=name == "gpt2", **numbers)
    counts = Counter(p for group in groups for _, p in group["params"])
    assert counts == Counter(p for p in model.parameters() if p.requires_grad)
    assert any(not p.requires_grad for p in model.parameters())
    named = {p: name for name, p in model.named_parameters()}
    assert all(named[p] == name for group in groups for name, p in group["params"])
    assert all(group["params"] for group in groups)
    optimizer = MARS(groups, mars_type=variant)
    assert [n for g in optimizer.param_groups for n in g["param_names"]] == [n for g in groups for n, _ in g["params"]]


def test_a_tied_parameter_is_an_embedding_under_any_of_its_names() -> None:
    model = nn.Sequential(nn.Linear(6, 9), nn.Embedding(9, 6))
    model[0].weight = model[1].weight
    groups = param_groups(model, "mars-m")
    assert roles(groups) == {"0.weight": "embeddings and head", "0.bias": "others, no decay"}
    assert "0.weight = 1.weight" not in str(groups) and "*.weight = *.weight" in str(groups)
    assert roles(param_groups(model, "mars-m", matrices=r"^1\.weight"))["0.weight"] == "matrices"


def test_adapters_are_matrices_and_those_of_embeddings_are_none() -> None:
    model = with_lora(gpt2())
    groups = param_groups(model, "mars-shampoo", lr_1d=1e-3)
    found = roles(groups)
    inner = "base_model.model.transformer"
    assert {name.replace("h.1.", "h.0.") for name in found} == {
        f"{inner}.h.0.attn.c_attn.lora_A.default.weight",
        f"{inner}.h.0.attn.c_attn.lora_B.default.weight",
        f"{inner}.wte.lora_embedding_A.default",
        f"{inner}.wte.lora_embedding_B.default",
        "base_model.model.lm_head.modules_to_save.default.weight",
    }
    for name, role in found.items():
        assert role == ("matrices" if "c_attn" in name else "embeddings and head"), name
    # The adapters of a Conv1D are ordinary linear layers: (out, in).
    assert not any(group.get("fan_in_fan_out") for group in groups)
    # 24 in the blocks, 2 in the last norm, the positions, and the tied table once.
    assert str(groups).splitlines()[-1] == "left out, frozen: 28 tensors of 28,032 elements"
    with pytest.raises(ValueError, match="split_qkv=True found no fused weights to train"):
        param_groups(model, "mars-m", split_qkv=True)  # the adapters of fused weights are not fused
    model.base_model.model.transformer.h[0].attn.c_attn.base_layer.weight.requires_grad_(True)
    group = group_of(param_groups(model, "mars-m", split_qkv=True), f"{inner}.h.0.attn.c_attn.base_layer.weight")
    assert (group["fan_in_fan_out"], group["matrix_parts"]) == (True, 3)


# ---------------------------------------------------------------------------------------------------- rules and numbers


@pytest.mark.parametrize("variant", VARIANTS)
def test_rates_and_decays_reach_the_rule_that_uses_them(variant: str) -> None:
    model = gpt2()
    optimizer = step_once(param_groups(model, variant, **NUMBERS), mars_type=variant)
    matrix_variant = variant not in ELEMENTWISE
    label = {"mars-adamw": "MARS-AdamW", "mars-lion": "MARS-Lion", "mars-shampoo": "MARS-Shampoo", "mars-m": "MARS-M"}
    matrices = 8 if matrix_variant else 10
    assert optimizer.rule_counts() == {label[variant]: matrices, "AdamW": 28 - matrices}
    by_tensor = {p: group for group in optimizer.param_groups for p in group["params"]}
    for name, p in model.named_parameters():
        group = by_tensor[p]
        kind = "embeddings" if "wte" in name or "wpe" in name else "matrices" if p.ndim == 2 else "others"
        plain = kind == "others" or kind == "embeddings" and matrix_variant
        lr = group["lr"] * group["lr_1d_ratio"] if plain else group["lr"]
        assert lr == pytest.approx({"matrices": 1e-2, "embeddings": 7e-3, "others": 4e-3}[kind], rel=1e-12), name
        decay = group["weight_decay_1d" if plain else "weight_decay"]
        expected = {"matrices": 0.05, "embeddings": 0.03, "others": 0.0 if name.endswith("bias") else 0.02}
        assert decay == expected[kind], name
        assert ("prev_grad" in optimizer.state[p]) == (not plain), name
    assert optimizer.param_groups[0]["lr"] == 1e-2


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_not_given(variant: str) -> None:
    """One rate for all, and one decay for all but norms and biases; a rate of 0 keeps the ratio as well."""
    for lr in (1e-3, 0.0):
        groups = param_groups(gpt2(), variant, lr=lr, weight_decay=0.1)
        optimizer = MARS(groups, mars_type=variant)
        assert all((g["lr"], g["lr_1d_ratio"]) == (lr, 1.0) for g in optimizer.param_groups if g["role"] != "matrices")
        assert optimizer.param_groups[0]["lr"] == lr
        decays = {g["role"]: (g["weight_decay"], g["weight_decay_1d"]) for g in optimizer.param_groups}
        assert decays == {
            "matrices": (0.1, 0.1),
            "embeddings and head": (0.1, 0.1),
            "others, no decay": (0.0, 0.0),
        }


def test_only_transformers_conv1d_is_kept_as_in_out() -> None:
    class Conv1D(nn.Linear):
        """Of the same name, from elsewhere."""

    model = nn.ModuleDict({"gpt2": gpt2(), "own": Conv1D(8, 4), "linear": nn.Linear(8, 4), "turned": nn.Linear(8, 4)})
    groups = param_groups(model, "mars-shampoo", fan_in_fan_out="^turned")
    turned = {name for group in groups for name, _ in group["params"] if group.get("fan_in_fan_out")}
    expected = {n for n, p in model.named_parameters() if ".h." in n and p.ndim == 2} | {"turned.weight"}
    assert turned == expected and len(expected) == 9
    assert not any("fan_in_fan_out" in group for group in param_groups(model, "mars-adamw"))


def test_fused_weights_are_cut_on_request() -> None:
    model = nn.ModuleDict({"gpt2": gpt2(), "odd": Odd(), "mine": nn.Linear(8, 40)})
    parts = {r"mine\.weight": 5}
    groups = param_groups(model, "mars-m", split_qkv=True, matrix_parts=parts)
    cut = {n: g["matrix_parts"] for g in groups for n, _ in g["params"] if "matrix_parts" in g}
    attention = [f"gpt2.transformer.h.{i}.attn.c_attn.weight" for i in (0, 1)]
    assert cut == {**dict.fromkeys(attention, 3), "odd.attention.in_proj_weight": 3, "mine.weight": 5}
    assert not any("matrix_parts" in group for group in param_groups(model, "mars-m"))
    assert not any("matrix_parts" in group for group in param_groups(model, "mars-lion", split_qkv=True))
    groups = param_groups(model, "mars-m", split_qkv=True, matrix_parts={r"h\.0\.attn\.c_attn": 1})
    assert "matrix_parts" not in group_of(groups, attention[0]) and "matrix_parts" in group_of(groups, attention[1])


def test_patterns_come_before_what_was_found() -> None:
    groups = param_groups(
        gpt2(),
        "mars-m",
        weight_decay=0.1,
        matrices=["wpe"],
        embeddings=[r"h\.0\.mlp\.c_fc\.weight"],
        others=[r"h\.1\.mlp\.c_fc\.weight"],
        no_decay=["wte", r"h\.1\.mlp\.c_proj\.weight"],
    )
    found = roles(groups)
    assert found["transformer.wpe.weight"] == "matrices"
    assert found["transformer.h.0.mlp.c_fc.weight"] == "embeddings and head"
    assert found["transformer.h.1.mlp.c_fc.weight"] == "others"
    assert found["transformer.wte.weight"] == "embeddings and head, no decay"
    assert found["transformer.h.1.mlp.c_proj.weight"] == "matrices, no decay"
    assert found["transformer.ln_f.bias"] == "others"
    optimizer = step_once(groups, mars_type="mars-m")
    assert optimizer.rule_counts() == {"MARS-M": 8 - 2 + 1, "AdamW": 28 - 7}
    # What is claimed as others takes plain AdamW under every variant.
    groups = param_groups(gpt2(), "mars-adamw", others=[r"h\.1\.mlp\.c_fc\.weight"])
    assert step_once(groups).rule_counts() == {"MARS-AdamW": 9, "AdamW": 19}


@pytest.mark.parametrize("by_torch", [False, True], ids=["state_dict", "torch.distributed.checkpoint"])
def test_groups_are_saved_and_loaded(tmp_path: Path, by_torch: bool) -> None:
    """Their further key and their names as well, also where only tensors and plain values may be unpickled."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    models = [gpt2(), gpt2()]
    first = step_once(param_groups(models[0], "mars-m", split_qkv=True, **NUMBERS), mars_type="mars-m")
    saved: Any = get_optimizer_state_dict(models[0], first) if by_torch else first.state_dict()
    torch.save(saved, tmp_path / "optimizer.pt")
    saved = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    second = MARS(param_groups(models[1], "mars-m", split_qkv=True, **NUMBERS), mars_type="mars-m")
    set_optimizer_state_dict(models[1], second, saved) if by_torch else second.load_state_dict(saved)
    for group, other in zip(first.param_groups, second.param_groups, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {k: v for k, v in other.items() if k != "params"}
        for p, q in zip(group["params"], other["params"], strict=True):
            assert torch.equal(first.state[p]["exp_avg"], second.state[q]["exp_avg"])


def test_the_trainer_takes_them(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    model = gpt2()
    optimizer = MARS(param_groups(model, "mars-shampoo", **NUMBERS), mars_type="mars-shampoo")
    tokens = torch.arange(8)
    arguments = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, report_to="none", save_strategy="no")
    data: Any = [{"input_ids": tokens, "labels": tokens}] * 16
    trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))
    trainer.train()
    assert getattr(trainer.optimizer, "optimizer", trainer.optimizer) is optimizer
    assert optimizer.rule_counts() == {"MARS-Shampoo": 8, "AdamW": 20}
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0} and len(optimizer.state) == 28
    assert [g["initial_lr"] for g in optimizer.param_groups] == [1e-2] * 4


def test_the_rate_that_shampoo_would_give_to_adamw(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="mars_dist"):
        param_groups(gpt2(), "mars-m", lr=0.02)
        param_groups(gpt2(), "mars-shampoo", lr=0.02, lr_1d=1e-3)
        param_groups(gpt2(), "mars-shampoo")
        assert caplog.messages == []
        param_groups(gpt2(), "mars-shampoo", lr=0.02)
    assert caplog.messages == [
        "param_groups: lr_1d was not given: under mars-shampoo plain AdamW trains embeddings, norms and biases with "
        "lr = 0.02. Give lr_1d (the default of MARS is 3e-3)."
    ]


# ------------------------------------------------------------------------------------------------------------- refusals

WTE, QKV = "'transformer.wte.weight'", "'transformer.h.0.attn.c_attn.weight'"
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"variant": "mars-n"}, "mars_type must be one of 'mars-adamw', 'mars-lion', 'mars-shampoo', 'mars-m', got 'm"),
    ({"matrix_ndim": 1}, "matrix_ndim must be a number of dimensions of at least 2"),
    ({"matrices": "none"}, "matrices: the pattern 'none' matches no parameter (of 28: 'transformer.wte.weight', "),
    ({"embeddings": ["wte", "nix"]}, "embeddings: the pattern 'nix' matches no parameter (of 28: "),
    ({"others": ["no"]}, "others: the pattern 'no' matches no parameter (of 28: "),
    ({"no_decay": ["bias", "norm"]}, "no_decay: the pattern 'norm' matches no parameter (of 28: "),
    ({"no_decay": "("}, "no_decay: '(' is no regular expression (missing ), unterminated subpattern at position 0)"),
    ({"fan_in_fan_out": "c_fk"}, "fan_in_fan_out: the pattern 'c_fk' matches no parameter (of 28: "),
    ({"fan_in_fan_out": "wte"}, f"fan_in_fan_out: the pattern 'wte' matches no matrix (but {WTE} of shape (64, 32))"),
    ({"matrix_parts": {"ln_1": 3}}, "matrix_parts: the pattern 'ln_1' matches no matrix (but 'transformer.h.0.ln_1.w"),
    ({"matrix_parts": {"c_fc": 0}}, "matrix_parts['c_fc'] must be a whole number of at least 1, got 0"),
    ({"matrix_parts": {"c_attn": 5}}, f"{QKV} has 96 outputs, which 5 parts do not divide"),
    ({"matrix_parts": {"c_attn": 3, "h.0": 2}}, f"matrix_parts: {QKV} is claimed twice: by 'c_attn' (3 parts) and"),
    ({"matrices": "wte", "embeddings": "transformer.wte"}, f"{WTE} is claimed twice: by 'wte' of matrices and by "),
    ({"matrices": "ln_f.weight"}, "matrices: the pattern 'ln_f.weight' matches 'transformer.ln_f.weight' of shape (32"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[re.sub(r"\W+", "_", str(a))[:40] for a, _ in WRONG])
def test_what_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        param_groups(gpt2(), **{"variant": "mars-m", **arguments})
    assert message in str(error.value)


def test_further_refusals() -> None:
    model = gpt2()
    model.transformer.wte.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=f"matches only frozen parameters, which are left out \\({WTE}\\)$"):
        param_groups(model, embeddings="wte")
    with pytest.raises(ValueError, match="the model has no trainable parameter"):
        param_groups(model.requires_grad_(False))
    with pytest.raises(TypeError, match=r"takes a model \(torch.nn.Module\), got generator"):
        param_groups(model.parameters())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="split_qkv=True found no fused weights to train"):
        param_groups(mixtral(), "mars-m", split_qkv=True)
    grouped = nn.ModuleDict({"qkv_proj": nn.Linear(8, 12)})  # grouped-query attention
    with pytest.raises(ValueError, match=r"12 outputs for 8 inputs, no three equal matrices.*\{'qkv_proj.weight': 1\}"):
        param_groups(grouped, "mars-m", split_qkv=True)
    param_groups(grouped, "mars-m", split_qkv=True, matrix_parts={"qkv_proj.weight": 1})


def test_adapters_of_an_embedding_whose_name_says_nothing() -> None:
    from peft import LoraConfig, inject_adapter_in_model

    model = nn.ModuleDict({"table": nn.Embedding(9, 6), "layer": nn.Linear(6, 6)})
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["table", "layer"]), model)
    found = roles(param_groups(model, "mars-m"))
    assert found == {
        "table.lora_embedding_A.default": "embeddings and head",
        "table.lora_embedding_B.default": "embeddings and head",
        "layer.lora_A.default.weight": "matrices",
        "layer.lora_B.default.weight": "matrices",
    }


def test_what_the_first_page_says_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = [
        b for b in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S) if "groups" in b
    ]
    names: dict[str, Any] = {"model": gpt2()}
    exec(compile(snippet, "README.md", "exec"), names)
    assert capsys.readouterr().out == f"{names['groups']}\n"
    for p in names["model"].parameters():
        p.grad = torch.ones_like(p)
    names["optimizer"].step()
    assert names["optimizer"].rule_counts() == {"MARS-M": 8, "AdamW": 20}
    # The same two lines are the example of the docstring.
    assert all(line.split("  #")[0] in str(param_groups.__doc__) for line in snippet.splitlines()[2:])


def test_the_package_offers_it_without_importing_torch() -> None:
    code = "import sys, mars_dist; assert 'param_groups' in mars_dist.__all__; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"] and mars_dist.param_groups is param_groups
    with pytest.raises(AttributeError, match="no attribute 'param_group'"):
        _ = mars_dist.param_group  # type: ignore[attr-defined]


# -------------------------------------------------------------------------------------------------------------- engines

# What the model is then, and what its matrices are: FSDP1's are vectors without a shape.
WAYS = {
    "compile": ("OptimizedModule", ("Parameter", 2)),
    "ddp": ("DistributedDataParallel", ("Parameter", 2)),
    "compile of ddp": ("OptimizedModule", ("Parameter", 2)),
    "ddp of compile": ("DistributedDataParallel", ("Parameter", 2)),
    "fsdp1": ("FullyShardedDataParallel", ("Parameter", 1)),
    "fsdp2": ("FSDPGPT2LMHeadModel", ("DTensor", 2)),
    "checkpointed fsdp2": ("FSDPGPT2LMHeadModel", ("DTensor", 2)),
    "lora, fsdp1": ("FullyShardedDataParallel", ("Parameter", 1)),
    "lora, fsdp2": ("FSDPPeftModel", ("DTensor", 2)),
}


def test_a_wrapped_model_gives_the_same_groups(pool: RankPool) -> None:
    for result in pool.run(groups_cases.tables, [*WAYS, "fsdp1 flat"], "mars-shampoo", timeout=120):
        kind, _, _, after = result.pop("fsdp1 flat")
        assert kind == "FullyShardedDataParallel"
        assert after.startswith("ValueError: param_groups: FSDP1 (FullyShardedDataParallel) has melted parameters")
        assert {how: (kind, matrix) for how, (kind, matrix, _, _) in result.items()} == WAYS
        for how, (_, _, before, after) in result.items():
            assert after == before, how
            assert "MARS-Shampoo" in after and ("(in, out) of 3 parts" in after) != how.startswith("lora"), how


def replayed(result: dict[str, Any], variant: str) -> float:
    """How far the model is from the float64 reference on the gradients that reached MARS."""
    reference = ReferenceMARS(result["start"], result["groups"], mars_type=variant, clip=0.1)
    for gradients in result["gradients"]:
        reference.step({name: g.view(result["start"][name].shape) for name, g in gradients.items()})
    for name, value in result["end"].items():
        moved = (value - result["start"][name]).abs().max()
        assert moved > 1e-3 or name not in result["gradients"][0], f"{name} did not move"
    return max((reference.params[name] - result["end"][name]).abs().max().item() for name in result["start"])


ENGINES = [
    ("ddp", "mars-m", {}, {"whole tensors"}, "DistributedDataParallel"),
    ("ddp", "mars-adamw", {"compile": True}, {"whole tensors"}, "DistributedDataParallel"),
    ("fsdp1", "mars-adamw", {"nested": True}, {"FSDP1"}, "FullyShardedDataParallel"),
    ("fsdp2", "mars-adamw", {}, {"DTensor (Shard(dim=0),)"}, "FSDPNet"),
    ("fsdp2", "mars-lion", {}, {"DTensor (Shard(dim=0),)"}, "FSDPNet"),
]


@pytest.mark.parametrize(("engine", "variant", "options", "engines", "kind"), ENGINES)
def test_replay_on_groups_of_a_wrapped_model(
    pool: RankPool, engine: str, variant: str, options: dict[str, Any], engines: set[str], kind: str
) -> None:
    results = pool.run(groups_cases.train, engine, variant, options, timeout=90)
    # embedding and head: MARS or AdamW; linear, narrow, gain: matrices; two biases, a norm (two) and shift: no matrices
    label, matrices = {"mars-m": ("MARS-M", 3), "mars-adamw": ("MARS-AdamW", 5), "mars-lion": ("MARS-Lion", 5)}[variant]
    for result in results:
        assert result["same"] and result["engines"] == engines and result["facts"]["type"] == kind
        assert result["rule_counts"] == {label: matrices, "AdamW": 9 - matrices}
    assert replayed(results[0], variant) < (5e-6 if variant == "mars-m" else 2e-6)


@pytest.mark.parametrize(
    ("stage", "zero_init", "frozen"),
    [(2, False, ("norm", "linear.bias")), (3, True, ()), (3, True, ("narrow",))],
)
def test_replay_as_a_client_optimizer_of_deepspeed(
    pool: RankPool, stage: int, zero_init: bool, frozen: tuple[str, ...]
) -> None:
    """Stage 2: some groups have nothing to train, and are not there. Stage 3: the shapes of a model born in pieces."""
    results = pool.run(groups_cases.train_with_deepspeed, stage, zero_init, "mars-adamw", frozen, timeout=120)
    matrices = nets.MATRICES - ("narrow" in frozen)
    vectors = nets.VECTORS - (3 if stage == 2 else 0)
    wrapper = {2: "DeepSpeedZeroOptimizer", 3: "DeepSpeedZeroOptimizer_Stage3"}[stage]
    for result in results:
        assert result["inner"] and result["wrapper"] == wrapper
        assert result["engines"] == {{2: "ZeRO-1/2", 3: "ZeRO-3"}[stage]}
        counts = {"MARS-AdamW": matrices, "AdamW": vectors}
        assert result["rule_counts"] == {rule: n for rule, n in counts.items() if n}
        assert (result["shapes"] == [(0,)]) == zero_init
        assert len(result["groups"]) == (3 if stage == 2 else 4)
        assert f"{math.prod((nets.VOCABULARY, 6)) + nets.VOCABULARY * 11:,}" in result["table"]
    assert replayed(results[0], "mars-adamw") < 2e-6


@pytest.mark.parametrize(
    "given", [{"matrices": 3}, {"others": None}, {"no_decay": 5}, {"matrix_parts": ["qkv"]}], ids=str
)
def test_an_argument_of_another_type_is_named(given: dict[str, Any]) -> None:
    (argument,) = given
    with pytest.raises(TypeError, match=f"param_groups: {argument} must be a"):
        param_groups(nn.Linear(2, 2), **given)
