"""GPT-2 as the recipes have it: size, start, attention, loss, and what of it takes which part of the optimizer."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from mars_dist import MARS
from mars_dist.checkpoint.tensors import Reader, write
from mars_dist.pretrain import model as models
from mars_dist.pretrain.engine import Plain, schedule
from mars_dist.pretrain.recipe import Recipe, load
from tests.small import assert_identical
from tests.train_cases import recipe

EMBEDDINGS = ("transformer.wte.weight", "transformer.wpe.weight")
SIZES = ("gpt2-small", "gpt2-medium", "gpt2-large", "gpt2-xl")
OPTIMIZERS = ("mars-adamw", "mars-lion", "mars-shampoo", "mars-m", "adamw", "muon")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def small(**changes: Any) -> Recipe:
    return recipe(**{"model__width": 16, "model__layers": 2, "model__heads": 2, "model__sequence_length": 8} | changes)


def sequences(rows: int, length: int = 8, seed: int = 5) -> Tensor:
    return torch.randint(50257, (rows, length + 1), generator=torch.Generator().manual_seed(seed))


def plain(made_by: Recipe) -> Plain:
    torch.manual_seed(1)
    return Plain(made_by, CPU)


# ----------------------------------------------------------------------------------------------------------- the model


@pytest.mark.parametrize("name", SIZES)
def test_parameters_of_the_published_sizes(name: str) -> None:
    section = load(name).model
    with torch.device("meta"):
        model = models.build(section)
    width, layers = section.width, section.layers
    matrices, norms = 12 * width * width * layers, (2 * layers + 1) * width
    assert models.count(model) == (section.vocabulary + section.sequence_length) * width + matrices + norms
    assert round(models.count(model) / 1e6) == {12: 124, 24: 355, 36: 774, 48: 1557}[layers]
    # nanoGPT's: 6 N + 12 L H Q T, N without the position table
    n = models.count(model) - section.sequence_length * width
    assert models.flops_per_token(model, section) == 6 * n + 12 * layers * width * section.sequence_length


def test_the_start_is_that_of_gpt2() -> None:
    model = models.build(small(model__width=64, model__layers=4).model)
    for name, p in model.named_parameters():
        if p.ndim == 2:
            expected = 0.02 / math.sqrt(2 * 4) if name.endswith("c_proj.weight") else 0.02
            assert p.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * p.numel())), name  # five deviations
            assert abs(p.mean().item()) < 5 * expected / math.sqrt(p.numel()), name
        else:
            assert torch.equal(p, torch.full_like(p, 0.0 if name.endswith("bias") else 1.0)), name
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.config._attn_implementation == "sdpa"
    assert not any(module.p for module in model.modules() if isinstance(module, torch.nn.Dropout))


def reference_logits(weights: dict[str, Tensor], ids: Tensor, layers: int, heads: int) -> Tensor:
    """nanoGPT's forward pass in float64, written down once more; attention divided by the number of the layer."""

    def norm(x: Tensor, name: str) -> Tensor:
        return torch.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]

    batch, length = ids.shape
    x = weights["transformer.wte.weight"][ids] + weights["transformer.wpe.weight"][:length]
    for i in range(layers):
        at = f"transformer.h.{i}"
        parts = linear(norm(x, f"{at}.ln_1"), f"{at}.attn.c_attn").chunk(3, dim=-1)
        q, k, v = (part.view(batch, length, heads, -1).transpose(1, 2) for part in parts)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) / (i + 1)
        scores = scores.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, -1)
        x = x + linear(mixed, f"{at}.attn.c_proj")
        h = torch.nn.functional.gelu(linear(norm(x, f"{at}.ln_2"), f"{at}.mlp.c_fc"), approximate="tanh")
        x = x + linear(h, f"{at}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ weights["transformer.wte.weight"].T


@pytest.mark.parametrize("bias", ["true", "false"])
def test_the_loss_is_that_of_nanogpt(bias: str) -> None:
    """Inputs x[:T], targets x[1:T+1]. Large weights, so that what attention does is seen."""
    model = models.build(small(model__bias=bias, model__layers=3).model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad and "h." in name:
                p.normal_(std=0.5)
    weights = {name: value.double() for name, value in model.state_dict().items()}
    rows = sequences(3)
    logits = reference_logits(weights, rows[:, :-1], layers=3, heads=2)
    picked = logits.log_softmax(-1).gather(-1, rows[:, 1:, None])
    assert models.loss(model, rows).item() == pytest.approx(-picked.mean().item(), abs=2e-5)


def test_biases_are_zero_and_stay_so() -> None:
    engine = plain(small(model__bias="false"))
    for step in range(3):
        engine.train_step(step, [sequences(2, seed=step)])
    biases = [p for name, p in engine.model.named_parameters() if name.endswith(".bias")]
    assert len(biases) == 2 * 6 + 1
    assert all(not p.requires_grad and p.grad is None and not p.any() for p in biases)
    assert not any(p in engine.optimizer.state for p in biases)


@pytest.mark.parametrize("option", ["gradient_checkpointing", "compile"])
def test_options_change_no_number(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def compile_eagerly(function: Any, **keywords: Any) -> Any:
        compiled.append(function)
        return compile(function, backend="eager")

    compile = torch.compile
    monkeypatch.setattr(torch, "compile", compile_eagerly)
    results, passes = [], []
    for value in ("false", "true"):
        engine = plain(small(**{f"model__{option}": value}))
        engine.model.transformer.h[0].mlp.register_forward_pre_hook(lambda *_, v=value: passes.append(v))
        losses = [engine.train_step(step, [sequences(2, seed=step)])[0].item() for step in range(3)]
        results.append([*losses, engine.evaluate(sequences(2)).item()])
    assert results[0] == pytest.approx(results[1], abs=1e-6)
    assert len(compiled) == (option == "compile")
    if option == "gradient_checkpointing":  # each layer a second time in the backward pass
        assert Counter(passes) == {"false": 3 + 1, "true": 2 * 3 + 1}


# ------------------------------------------------------------------------------------------------- parameter groups


def group_of(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    by_tensor = {p: group for group in optimizer.param_groups for p in group["params"]}
    return {name: by_tensor[p] for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("bias", ["true", "false"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_trainable_parameter_is_in_one_group(name: str, bias: str) -> None:
    made_by = small(model__bias=bias, optimizer__name=name)
    model = models.build(made_by.model)
    optimizer = models.build_optimizer(model, made_by.optimizer)
    counts = Counter(p for group in optimizer.param_groups for p in group["params"])
    assert counts == Counter(p for p in model.parameters() if p.requires_grad)
    assert optimizer.param_groups[0]["lr"] == made_by.optimizer.lr  # what the run reports


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("size", SIZES)
def test_decays_and_rates_are_the_published_ones(size: str, name: str) -> None:
    """MARS: 0.01 on matrices, 0 on embeddings, 0.1 on norms. AdamW: 0.1. Muon: 0 on matrices, 0.1 on the rest."""
    section = load(f"{size}-{name}").optimizer
    model = models.build(small(model__bias="false").model)
    optimizer = models.build_optimizer(model, section)
    groups = group_of(optimizer, model)
    decay = {"adamw": (0.1, 0.0, 0.0), "muon": (0.0, 0.1, 0.1)}.get(name, (0.01, 0.0, 0.1))
    for parameter, group in groups.items():
        kind = 1 if parameter in EMBEDDINGS else 2 if "ln_" in parameter else 0
        plain_adamw = kind == 2 or (kind == 1 and name in ("mars-shampoo", "mars-m", "muon"))
        key = "weight_decay_1d" if plain_adamw and name != "adamw" else "weight_decay"
        assert group["lr"] * group[key] == pytest.approx(section.lr * decay[kind]), parameter
        if plain_adamw and name != "adamw":
            assert group["lr"] * group["lr_1d_ratio"] == pytest.approx(section.lr_1d)
            assert group["betas_1d"] == (0.9, 0.95)
        elif kind == 1:
            assert group["lr"] == section.lr
    if name != "adamw":
        assert {group["gamma"] for group in groups.values()} == {0.0 if name == "muon" else 0.025}
        assert {group["clip"] for group in groups.values()} == {None if name == "muon" else 1.0}


RULES = {
    "mars-adamw": ("MARS-AdamW", 10),
    "mars-lion": ("MARS-Lion", 10),
    "mars-shampoo": ("MARS-Shampoo", 8),
    "mars-m": ("MARS-M", 8),
    "muon": ("MARS-Shampoo", 8),
}


@pytest.mark.parametrize("name", RULES)
def test_which_rule_takes_how_many(name: str) -> None:
    """Two layers of four matrices, two embeddings, five norms of which each has a bias, and eight biases."""
    engine = plain(small(optimizer__name=name))
    engine.train_step(0, [sequences(2)])
    rule, matrices = RULES[name]
    assert isinstance(engine.optimizer, MARS)
    assert engine.optimizer.rule_counts() == {rule: matrices, "AdamW": 10 - matrices + 10 + 8}


def by_rates(model: torch.nn.Module, section: Any) -> list[dict[str, Any]]:
    """The groups of these recipes before MARS knew weights kept as (inputs, outputs): sqrt(outputs / inputs) is in the
    learning rate of MARS-Shampoo and Muon, and the decay divided by it."""
    mars_type = getattr(section, "mars_type", None)
    groups = []
    for name, p in model.named_parameters():
        group: dict[str, Any] = {"params": [p], "lr": section.lr, "weight_decay": section.weight_decay}
        if not p.requires_grad:
            continue
        if name in EMBEDDINGS:
            group["weight_decay"] = section.weight_decay_embeddings
            if mars_type in ("mars-shampoo", "mars-m"):
                group |= {"use_mars": False, "weight_decay_1d": section.weight_decay_embeddings}
        elif p.ndim != 2:
            group["weight_decay"] = section.weight_decay_1d
        elif mars_type == "mars-shampoo":
            factor = math.sqrt(p.shape[1] / p.shape[0])
            group |= {"lr": section.lr * factor, "weight_decay": section.weight_decay / factor}
        groups.append(group)
    return groups


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_update_is_what_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five steps on the same gradients, every decay another, by ``param_groups`` and by the groups of before."""
    decays = {"optimizer__weight_decay": 0.3, "optimizer__weight_decay_1d": 0.2}
    section = small(optimizer__name=name, **decays, optimizer__weight_decay_embeddings=0.1).optimizer
    ends = []
    for before in (False, True):
        torch.manual_seed(1)
        model = models.build(small().model)
        start = {n: p.detach().clone() for n, p in model.named_parameters()}
        with monkeypatch.context() as patch:
            if before:
                patch.setattr(models, "param_groups", lambda model, *_, **__: by_rates(model, section))
            optimizer = models.build_optimizer(model, section)
        if name in ("muon", "mars-shampoo"):
            assert any(group.get("fan_in_fan_out") for group in optimizer.param_groups) == (not before)
        generator = torch.Generator().manual_seed(2)
        for _ in range(5):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
        ends.append({n: p.detach().clone() for n, p in model.named_parameters()})
    for n, end in ends[0].items():
        moved = (end - start[n]).abs().max().item()
        assert moved > 1e-3 * section.lr, n
        torch.testing.assert_close(end, ends[1][n], atol=2e-5 * moved, rtol=2e-7, msg=n)


@pytest.mark.parametrize("name", ["muon", "mars-shampoo"])
def test_the_scale_of_muon_counts_outputs_as_rows(name: str) -> None:
    """The update of W is lr sqrt(max(1, outputs / inputs)) orth(m); transformers keeps W transposed."""
    made_by = small(optimizer__name=name, training__clip=None, optimizer__weight_decay=0.03, schedule__warmup_steps=0)
    engine = plain(made_by)
    before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    engine.train_step(0, [sequences(2)])
    lr, decay = made_by.optimizer.lr, 0.03
    for part, outputs in {"attn.c_attn": 48, "attn.c_proj": 16, "mlp.c_fc": 64, "mlp.c_proj": 16}.items():
        name = f"transformer.h.0.{part}.weight"
        after = dict(engine.model.named_parameters())[name].detach()
        update = (before[name] * (1 - lr * decay) - after) / lr
        inputs = update.numel() // outputs
        largest = torch.linalg.svdvals(update)[0].item()
        # Five Newton-Schulz steps leave singular values between 0.7 and 1.2.
        assert 0.7 < largest / math.sqrt(max(1, outputs / inputs)) < 1.25, part


# ------------------------------------------------------------------------------------------------------- one update


def test_accumulation_is_one_large_batch() -> None:
    rows = sequences(6)
    results = []
    for parts in (1, 3):
        engine = plain(small())
        told = [engine.train_step(step, rows.chunk(parts)) for step in range(3)]
        weights = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
        results.append(([loss.item() for loss, _ in told], [norm.item() for _, norm in told], weights))
    (one, one_norms, one_weights), (three, three_norms, three_weights) = results
    assert one == pytest.approx(three, abs=1e-6)
    assert one_norms == pytest.approx(three_norms, abs=1e-6)
    gradients = {}
    for parts in (1, 3):
        engine = plain(small(training__clip=None))
        engine.optimizer.zero_grad = lambda: None
        engine.train_step(0, rows.chunk(parts))
        gradients[parts] = {name: p.grad for name, p in engine.model.named_parameters()}
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradients[3][name], gradient, atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize("clip", [0.05, None])
def test_the_whole_gradient_is_clipped(clip: float | None) -> None:
    engine = plain(small(training__clip=clip))
    engine.optimizer.zero_grad = lambda: None
    _, norm = engine.train_step(0, [sequences(2)])
    assert norm > 0.3
    left = torch.stack([p.grad.norm() for p in engine.model.parameters()]).norm().item()
    assert left == pytest.approx(clip or norm.item(), rel=1e-4)


def test_the_schedule_is_that_of_nanogpt() -> None:
    made_by = load("gpt2-large")
    lr, min_lr, warmup, steps = 2e-3, 1e-5, 2000, 100000
    expected = {
        0: lr / 2001,
        999: lr * 1000 / 2001,
        1999: lr * 2000 / 2001,
        2000: lr,
        (warmup + steps) // 2: (lr + min_lr) / 2,
        steps: min_lr,
        steps + 5: min_lr,
    }
    for done, value in expected.items():
        assert made_by.optimizer.lr * schedule(made_by, done) == pytest.approx(value, rel=1e-12), done

    def nanogpt(it: int) -> float:
        if it < warmup:
            return lr * (it + 1) / (warmup + 1)
        return min_lr + 0.5 * (1.0 + math.cos(math.pi * (it - warmup) / (steps - warmup))) * (lr - min_lr)

    for done in range(0, steps, 1237):
        assert made_by.optimizer.lr * schedule(made_by, done) == pytest.approx(nanogpt(done), rel=1e-12)


def test_every_group_follows_the_schedule() -> None:
    made_by = small(optimizer__name="muon", schedule__warmup_steps=4)
    engine = plain(made_by)
    before = [group["lr"] for group in engine.optimizer.param_groups]
    for done, factor in {0: 1 / 5, 3: 4 / 5, 4: 1.0}.items():
        engine.apply_settings(done)
        assert [group["lr"] for group in engine.optimizer.param_groups] == pytest.approx([factor * x for x in before])
        assert engine.lr == pytest.approx(factor * made_by.optimizer.lr)


def test_half_precision_is_autocast_over_float32_weights() -> None:
    engines = [plain(small(training__precision=precision)) for precision in ("fp32", "bf16")]
    dtypes = []
    engines[1].model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda m, i, output: dtypes.append(output.dtype))
    losses = [[e.train_step(step, [sequences(2, seed=step)])[0].item() for step in range(4)] for e in engines]
    assert losses[0] == pytest.approx(losses[1], abs=0.05) and losses[0] != losses[1]
    assert set(dtypes) == {torch.bfloat16}
    assert {p.dtype for p in engines[1].model.parameters()} == {torch.float32}


def test_what_is_saved_is_loaded_bit_for_bit(tmp_path: Any) -> None:
    """And the recipe's hyper-parameters win over the checkpoint's: how else could a run go on with another rate?"""
    first = plain(small())
    for step in range(2):
        first.train_step(step, [sequences(2, seed=step)])
    write(tmp_path / "mars-00000-of-00001.safetensors", first.chunks())
    second = plain(small(optimizer__lr=1e-3, optimizer__weight_decay=0.5))
    second.load(tmp_path, Reader(tmp_path), json.loads(json.dumps(first.settings_to_save())))
    assert_identical(dict(second.model.state_dict()), dict(first.model.state_dict()))
    for p, q in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert_identical(second.optimizer.state[q], first.optimizer.state[p])
    second.train_step(2, [sequences(2)])
    assert second.lr == pytest.approx(1e-3)
    assert second.optimizer.param_groups[0]["weight_decay"] == 0.5
