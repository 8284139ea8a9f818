"""What runs on the ranks where DeepSpeed divides more than the batch: pipeline stages, sequences, matrices.

Tensors that differ between ranks under one name (the two ends of a tied layer, experts) get a name of their own each,
so that the reference sees every one of them; what several ranks hold alike must be equal on all of them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import nets, zero_cases
from tests.zero_cases import LR, Messages, Recorder, ZeroCase

MICRO_BATCHES = 2


# ------------------------------------------------------------------------------------------------------- the record


def union(mine: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of all ranks by name, on every rank.

    Raises:
        AssertionError: when two ranks hold different values under one name.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    out: dict[str, Tensor] = {}
    for tensors in everyone:
        for name, tensor in tensors.items():
            assert torch.equal(out.setdefault(name, tensor), tensor), f"the ranks hold different values of {name}"
    return out


class Engine:
    """One DeepSpeed engine with MARS and its records, where ranks may hold different tensors.

    Args:
        own_name: the name that a tensor of this rank has among those of all ranks.
        rebuilt: DeepSpeed puts other parameters in the place of the net's.
    """

    def __init__(
        self,
        case: ZeroCase,
        net: nn.Module,
        own_name: Callable[[str, nn.Parameter], str] = lambda name, p: name,
        config: dict[str, Any] | None = None,
        rebuilt: bool = False,
        **arguments: Any,
    ) -> None:
        import deepspeed

        import mars_dist

        self.case, self.net = case, net
        self.messages = Messages()
        logging.getLogger("mars_dist").addHandler(self.messages)
        if "optimizer" not in arguments:
            arguments.setdefault("model_parameters", list(net.parameters()))
        config = {**zero_cases.config(case), **(config or {})}
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[case.dtype]
        start = {name: p.detach().to(dtype).double().clone() for name, p in net.named_parameters()}
        self.engine, wrapper, *_ = deepspeed.initialize(model=net, config=config, **arguments)
        self.mars = wrapper if isinstance(wrapper, mars_dist.MARS) else wrapper.optimizer
        assert type(self.mars) is mars_dist.MARS
        if rebuilt:
            start = zero_cases.parameters(net, self.engine, case)
        self.own = {name: own_name(name, p) for name, p in net.named_parameters()}
        self.start = {self.own[name]: tensor for name, tensor in start.items()}
        self.recorder = Recorder(self.mars, net)
        self.recorder.names = {ours: self.own[name] for ours, name in self.recorder.names.items()}

    def result(self, first: dict[str, Tensor] | None = None) -> dict[str, Any]:
        """What the row's function returns.

        Args:
            first: the gradients that must have reached MARS at its first step, by another way of computing them.
        """
        case = self.case
        if case.stage == 0 and hasattr(self.engine.optimizer, "fp32_groups_flat_partition"):
            case = replace(case, stage=1)  # BF16_Optimizer, which DeepSpeed takes under a pipeline: flat as in stage 1
        end = zero_cases.parameters(self.net, self.engine, case)
        gradients = self.recorder.gathered()
        for name, gradient in (first or {}).items():
            torch.testing.assert_close(gradients[0][name], gradient.double().flatten(), rtol=0.0, atol=1e-6)
        result = {
            "start": union(self.start),
            "end": union({self.own[name]: t for name, t in end.items()}),
            "gradients": gradients,
            "rule_counts": self.mars.rule_counts(),
            "engines": self.mars.engines(),
            "messages": self.messages.texts,
            "collectives": self.recorder.collectives,
        }
        logging.getLogger("mars_dist").removeHandler(self.messages)
        self.engine.destroy()
        return result


@contextlib.contextmanager
def groups_of_its_own() -> Iterator[None]:
    """DeepSpeed keeps the parallel groups of an engine in a module for ever: the next case begins without them."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for minutes
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    from deepspeed.utils import groups

    deepspeed.init_distributed()
    collectives = {name: getattr(dist, name) for name in zero_cases.COLLECTIVES}
    try:
        yield
    finally:
        groups._release_process_group_references()
        for name, function in collectives.items():  # the recorder leaves its own there when a step is refused
            setattr(dist, name, function)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def of_one_process(loss: Tensor, names: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """The gradients of ``loss`` by name."""
    return dict(zip(names, torch.autograd.grad(loss, list(names.values())), strict=True))


# ------------------------------------------------------------------------------------------------- pipeline stages

STAGES = 2
TIED = "tied_embedding"


def head(embedding: Any, x: Tensor) -> Tensor:
    return nn.functional.linear(x, embedding.weight)


def layers(tied: bool = False) -> list[nn.Module]:
    """The layers of a sequential net, the same on every rank whatever it keeps of them."""
    torch.manual_seed(1234)
    return [
        nn.Embedding(nets.VOCABULARY, 6),
        nn.Linear(6, 11),
        nn.LayerNorm(11),
        nn.Tanh(),
        nn.Linear(11, 6 if tied else 9),
        nn.LayerNorm(6 if tied else 9),
        *([] if tied else [nn.Linear(9, nets.VOCABULARY, bias=False)]),
    ]


PIPELINE_COUNTS = {"MARS-AdamW": 4, "AdamW": 6}


def pipeline(case: ZeroCase, active: str) -> dict[str, Any]:
    """``PipelineModule`` in two stages: each rank knows the tensors of its own. ``active``: "", or "tied"."""
    tied = active == "tied"
    with groups_of_its_own():
        from deepspeed.pipe import PipelineModule, TiedLayerSpec

        replicas = dist.get_world_size() // STAGES
        plain = layers(tied)
        named = {f"{i}.{name}": p for i, layer in enumerate(plain) for name, p in layer.named_parameters()}
        tokens, targets = nets.batch(0)
        outputs = nn.Sequential(*plain)(tokens)
        first = of_one_process(token_loss(head(plain[0], outputs) if tied else outputs, targets), named)
        parts: list[Any] = layers(tied)
        if tied:
            ends = [TiedLayerSpec(TIED, nn.Embedding, nets.VOCABULARY, 6, forward_fn=f) for f in (None, head)]
            parts = [ends[0], *parts[1:], ends[1]]
            gradient = first.pop("0.weight")
            first |= {f"tied_modules.{TIED}.weight at stage {stage}": gradient for stage in range(STAGES)}
            torch.manual_seed(1234)  # for the embedding, which DeepSpeed builds
        net = PipelineModule(parts, num_stages=STAGES, loss_fn=token_loss, partition_method="uniform")
        config = {
            "train_micro_batch_size_per_gpu": 12 // replicas // MICRO_BATCHES,
            "gradient_accumulation_steps": MICRO_BATCHES,
        }
        run = Engine(case, net, lambda name, p: f"{name} at stage {net.stage_id}" if TIED in name else name, config)
        engine = run.engine
        for step in range(case.steps):
            tokens, targets = nets.batch(step)
            rows = torch.arange(12).view(replicas, MICRO_BATCHES, -1)[engine.grid.get_data_parallel_id()]
            engine.train_batch(iter([(tokens[part], targets[part]) for part in rows]))
            run.recorder.end_of_update()
        stage = engine.stage_id
        proof = type(engine).__name__ == "PipelineEngine" and engine.num_stages == STAGES
        proof = proof and 0 < len(run.own) < len(first)
        result = run.result(first if case.dtype == "fp32" else None)
        counts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(counts, (stage, result["rule_counts"]))
        of_stages = dict(counts)  # one rank of each stage
        labels = sorted({label for _, count in counts for label in count})
        totals = {label: sum(count.get(label, 0) for count in of_stages.values()) for label in labels}
        proof = proof and all(of_stages[s] == count for s, count in counts)
        ends_of_tied = [tensor for name, tensor in result["end"].items() if TIED in name]
        proof = proof and len(ends_of_tied) == (STAGES if tied else 0)
        apart = max(((t - ends_of_tied[0]).abs().max().item() for t in ends_of_tied), default=0.0)
        assert apart < 1e-6, f"the two ends of the tied layer are {apart:g} apart"
        return {**result, "rule_counts": totals, "active": proof, "apart": apart}


# ---------------------------------------------------------------------------------------------------- the sequence

SEQUENCE_RANKS = 2


def sequence(case: ZeroCase, active: str) -> dict[str, Any]:
    """Ulysses: two ranks see a half each of every sequence. ``active``: "mpu" or "mesh", how the groups are made."""
    with groups_of_its_own():
        from deepspeed.runtime.sequence_parallel import parallel_state_sp

        config: dict[str, Any] = {}
        arguments: dict[str, Any] = {}
        replicas = dist.get_world_size() // SEQUENCE_RANKS
        config["train_micro_batch_size_per_gpu"] = 12 // replicas
        if active == "mpu":
            parallel_state_sp.initialize_sequence_parallel(SEQUENCE_RANKS)
            arguments["mpu"] = parallel_state_sp
        else:
            config |= {"sequence_parallel_size": SEQUENCE_RANKS, "data_parallel_size": replicas}
        plain = nets.build("net")
        first = of_one_process(plain(*nets.batch(0)), dict(plain.named_parameters()))
        run = Engine(case, nets.build("net"), config=config, **arguments)
        engine = run.engine
        replica, part = divmod(dist.get_rank(), SEQUENCE_RANKS)
        for step in range(case.steps):
            tokens, targets = nets.batch(step)
            rows = torch.arange(12).view(replicas, -1)[replica]
            tokens, targets = (t[rows].chunk(SEQUENCE_RANKS, dim=1)[part] for t in (tokens, targets))
            # DeepSpeed averages gradients over the batch. Over the sequence it adds them up, but for stage 3.
            share = 1 if case.stage == 3 else SEQUENCE_RANKS
            engine.backward(engine(tokens, targets) / share)
            engine.step()
            run.recorder.end_of_update()
        proof = engine.sequence_parallel_size == SEQUENCE_RANKS
        narrow = case.extra.get("seq_parallel_communication_data_type") == "bf16"
        proof = proof and engine.communication_data_type == (torch.bfloat16 if narrow else torch.float32)
        return {**run.result(first if case.dtype == "fp32" and not narrow else None), "active": proof}


# ------------------------------------------------------------------------------------------------ tensor parallelism


class Slices(nn.Module):
    """Two linear layers that AutoTP cuts, the first by columns and the second by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(nets.VOCABULARY, 6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.head = nn.Linear(6, nets.VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return token_loss(self.head(x + self.down(torch.tanh(self.up(x)))), targets)


SPECS = [
    {"patterns": [r".*up\.weight$"], "partition_type": "column"},
    {"patterns": [r".*down\.weight$"], "partition_type": "row"},
]


class Mpu:
    """What a client with tensor parallelism of its own hands to DeepSpeed: all ranks share every matrix."""

    def __init__(self) -> None:
        self.world = dist.new_group()
        self.alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size()

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_model_parallel_group(self) -> Any:
        return self.world

    def get_data_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_group(self) -> Any:
        return self.alone


def slices(case: ZeroCase, active: str) -> dict[str, Any]:
    """Tensor parallelism over the ranks. ``active``: "autotp", "marked" (slices that carry Megatron's mark), "mpu"."""
    with groups_of_its_own():
        torch.manual_seed(1234)
        net = Slices()
        config: dict[str, Any] = {}
        if active == "autotp":
            specs = {"use_default_specs": False, "layer_specs": SPECS}
            config["tensor_parallel"] = {"autotp_size": dist.get_world_size(), "partition_config": specs}
            config["train_micro_batch_size_per_gpu"] = 12
        if active == "marked":
            net.up.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
        arguments: dict[str, Any] = {"mpu": Mpu()} if active == "mpu" else {}
        if case.construct == "instance":
            import mars_dist

            arguments["optimizer"] = mars_dist.MARS(net.named_parameters(), **{**LR, **case.params})
        run = Engine(case, net, config=config, **arguments)
        tokens, targets = nets.batch(0)
        run.engine.backward(run.engine(tokens, targets))
        run.engine.step()
        return run.result()
