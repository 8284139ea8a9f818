"""The matrix rules: momentum pieces to the owner of each matrix, the direction, and its pieces back into the values.

For every process group one plan (``sharding/assemble.py``), made when its tensors are first stepped and kept. One
round: collect, orthogonalise equal shapes as a batch, hand out, move the values. On one rank nothing travels and the
rounds only bound the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mars_dist import kernels
from mars_dist.config import Settings
from mars_dist.maths.orthogonalize import flops
from mars_dist.maths.rules import PLAIN, MatrixForm, Orthogonalizer
from mars_dist.pieces import Bucket, Piece
from mars_dist.sharding.assemble import Exchange, Matrix, Part, Plan, make_plan, matrices_of
from mars_dist.sharding.layout import Layout
from mars_dist.sharding.norms import check_same, communication_device, is_shared

DEFAULT_SETTINGS = Settings()

# Which tensors have a gradient may change from step to step where nothing is shared: then so many plans are kept.
MOST_LOCAL_PLANS = 32


@dataclass
class Plans:
    """The rounds of an optimizer's plans, by process group and tensors. Forgotten when a layout is found anew."""

    shared: dict[Any, tuple[list[Exchange], list[Layout]]] = field(default_factory=dict)
    local: dict[Any, tuple[list[Exchange], list[Layout]]] = field(default_factory=dict)

    @torch.compiler.disable
    def rounds(self, job: Job, settings: Settings) -> list[Exchange]:
        """Those of ``job``. Where they are new and ranks share them, one small all-reduce and host read."""
        known = self.local if job.group is None else self.shared
        dtype, device = _sent_as(job, settings), _device(job)
        key = (job.group, dtype, device, tuple((id(p.shard.layout), p.segment.name) for p in job.pieces))
        if key not in known:
            if len(self.local) >= MOST_LOCAL_PLANS:
                self.local.clear()
            plan = _plan(job, settings)
            exchanges = [Exchange(plan, chosen, job.group, dtype, device) for chosen in plan.rounds]
            known[key] = exchanges, [p.shard.layout for p in job.pieces]  # while they live, their ids are theirs
        return known[key][0]


@dataclass(frozen=True)
class Job:
    """The pieces of matrices that one process group works on together, in an order that is the same on its ranks."""

    group: ProcessGroup | None
    copies: bool
    pieces: list[Piece]
    buckets: list[Bucket]


def move_matrices(
    buckets: Sequence[Bucket], pieces: Sequence[Piece], settings: Settings, taken: dict[int, Tensor], plans: Plans
) -> None:
    """Move the values of all tensors under matrix rules, in place; their momentum has been updated.

    Args:
        buckets, pieces: of the step; the order of the pieces is the same on every rank.
        taken: for shards that may be left alone in this step, whether they take it, as a 0-dim bool.

    Costs: for a process group and round, two all-to-alls (each rank sends about numel / W there and back), or one
    broadcast from each owner where the ranks hold copies; nothing for matrices that one rank holds whole.
    """
    for job in _jobs(buckets, pieces):
        for exchange in plans.rounds(job, settings):
            _Round(job, exchange, settings, taken).run()


def _jobs(buckets: Sequence[Bucket], pieces: Sequence[Piece]) -> list[Job]:
    homes = {id(piece): bucket for bucket in buckets if bucket.rule.whole_matrix for piece in bucket.pieces}
    jobs: dict[Any, Job] = {}
    for piece in pieces:
        if id(piece) not in homes:
            continue
        layout = piece.shard.layout
        group, copies = layout.together, False
        if group is None and is_shared(layout.copies):
            group, copies = layout.copies, True
        # What stays here is one job for each kind of tensor; what travels must be in as few messages as possible.
        kind = None if group is not None else (piece.shard.param.device, piece.shard.state["exp_avg"].dtype)
        job = jobs.setdefault((group, copies, kind), Job(group, copies, [], []))
        job.pieces.append(piece)
        job.buckets.append(homes[id(piece)])
    return list(jobs.values())


def cost(
    matrix: Matrix,
    settings: Settings = DEFAULT_SETTINGS,
    form: MatrixForm = PLAIN,
    dtype: torch.dtype = torch.float32,
) -> float:
    """Floating-point operations of its orthogonalisation, iterated in ``dtype``."""
    rows, cols = matrix.sides
    rows, cols = (rows, cols // form.parts) if form.fan_in_fan_out else (rows // form.parts, cols)
    return form.parts * flops(rows, cols, settings.ns_steps, settings.orthogonalizer, settings.mars_type, dtype)


def _plan(job: Job, settings: Settings) -> Plan:
    ranks = 1 if job.group is None else dist.get_world_size(job.group)
    matrices: list[Matrix] = []
    for source, piece in enumerate(job.pieces):
        layout = piece.shard.layout
        number = layout.segments.index(piece.segment)
        held = [segments[number] for segments in layout.on_ranks] if layout.on_ranks else [piece.segment] * ranks
        matrices += matrices_of(source, held)
    numel = int(settings.matrix_buffer_mb * 2**20) // _sent_as(job, settings).itemsize
    forms = [MatrixForm.of(piece.shard.group) for piece in job.pieces]
    costs = [cost(matrix, settings, forms[matrix.source], _iterated_in(job, settings)) for matrix in matrices]
    plan = make_plan(matrices, ranks, costs, numel, job.copies)
    device = job.pieces[0].shard.param.device
    if is_shared(job.group) and not check_same(plan.fingerprint(), job.group, device):  # type: ignore[arg-type]
        raise RuntimeError(
            f"MARS: the ranks do not agree on the {len(matrices)} matrices that they share, the first of "
            f"{job.pieces[0].segment.name}: give every rank the same gradients and the same settings."
        )
    return plan


def _sent_as(job: Job, settings: Settings) -> torch.dtype:
    """The momentum's dtype, or that of the iteration where it is narrower."""
    stored = max((piece.shard.state["exp_avg"].dtype for piece in job.pieces), key=lambda dtype: dtype.itemsize)
    if settings.orthogonalizer == "svd":
        return stored
    return min((stored, _iterated_in(job, settings)), key=lambda dtype: dtype.itemsize)


def _iterated_in(job: Job, settings: Settings) -> torch.dtype:
    if settings.ns_dtype is None and _device(job).type == "cpu":
        return max((piece.shard.state["exp_avg"].dtype for piece in job.pieces), key=lambda dtype: dtype.itemsize)
    dtype: torch.dtype = getattr(torch, settings.ns_dtype or "bfloat16")
    return dtype


def _device(job: Job) -> torch.device:
    """Where matrices are orthogonalised: where their process group communicates, which under CPU offload is the
    accelerator, or where the tensors are."""
    groups, param = job.pieces[0].shard.layout.process_groups, job.pieces[0].shard.param
    return communication_device(param, groups[0]) if groups else param.device


class _Round:
    """One round of a job."""

    def __init__(self, job: Job, exchange: Exchange, settings: Settings, taken: dict[int, Tensor]) -> None:
        self.job, self.plan, self.exchange, self.taken = job, exchange.plan, exchange, taken
        ns_dtype = getattr(torch, settings.ns_dtype) if settings.ns_dtype else None
        self.orthogonalize = Orthogonalizer(settings.orthogonalizer, settings.ns_steps, ns_dtype)
        self.moves: dict[int, tuple[Bucket, list[tuple[Piece, Tensor, Tensor]]]] = {}
        self.copies: dict[int, Tensor] = {}  # of momentum and gradients of other strides
        self.strided: dict[int, tuple[Tensor, Tensor]] = {}  # parameters of other strides, and contiguous copies

    def run(self) -> None:
        whole, batches = self._buffers()
        self.exchange.collect(self._momentum, whole)
        for numbers, buffer in batches:
            bucket = self.job.buckets[self.plan.matrices[numbers[0]].source]
            rule, hyper = bucket.rule, bucket.hyper
            form = MatrixForm.of(bucket.pieces[0].shard.group)
            assert rule.matrix_direction is not None
            rows, cols = self.plan.matrices[numbers[0]].sides
            directions = rule.matrix_direction(
                buffer.view(-1, rows, cols), 1.0 - hyper.beta1, hyper.eps, self.orthogonalize, form
            )
            # Tall matrices are iterated on transposed, and may come back with the strides of that.
            whole |= zip(numbers, directions.reshape(buffer.shape).contiguous().unbind(), strict=True)
        for number, part, direction in self.exchange.hand_out(whole):
            self._take(number, part, direction)
        self._move()

    def _buffers(self) -> tuple[dict[int, Tensor], list[tuple[list[int], Tensor]]]:
        """A place for every matrix that this rank owns in the round; equal shapes of a bucket are one batch."""
        alike: dict[Any, list[int]] = {}
        for i in self.exchange.mine:
            source = self.plan.matrices[i].source
            dtype = self.job.pieces[source].shard.state["exp_avg"].dtype
            alike.setdefault((id(self.job.buckets[source]), dtype, self.plan.matrices[i].shape), []).append(i)
        whole: dict[int, Tensor] = {}
        batches = []
        for (_, dtype, shape), numbers in alike.items():
            buffer = torch.empty((len(numbers), *shape), dtype=dtype, device=self.exchange.device)
            batches.append((numbers, buffer))
            whole |= zip(numbers, buffer.unbind(), strict=True)
        return whole, batches

    def _local(self, tensor: Tensor, number: int, part: Part) -> Tensor:
        """This rank's ``part`` of a matrix in a (contiguous) tensor that the engine hands over, or in a state of it."""
        matrix = self.plan.matrices[number]
        segment = self.job.pieces[matrix.source].segment
        if segment.region is not None:
            first = segment.offset
            if len(segment.shape) == 3:
                first += (matrix.item - segment.region[0][0]) * part.numel
        else:
            first = segment.offset + matrix.item * matrix.numel + part.begin - segment.start
        return tensor.view(-1)[first : first + part.numel]

    def _flat(self, tensor: Tensor) -> Tensor:
        """``tensor``, or one contiguous copy of it for the whole round."""
        if tensor.is_contiguous():
            return tensor
        if id(tensor) not in self.copies:
            self.copies[id(tensor)] = tensor.contiguous()
        return self.copies[id(tensor)]

    def _momentum(self, number: int, part: Part) -> Tensor:
        source = self.plan.matrices[number].source
        shard, hyper = self.job.pieces[source].shard, self.job.buckets[source].hyper
        kept = self._local(self._flat(shard.state["exp_avg"]), number, part)
        if not hyper.one_state:
            return kept
        gradient = self._local(self._flat(shard.grad), number, part)
        momentum = kept.add(gradient, alpha=-hyper.gamma if hyper.maximize else hyper.gamma)
        # The gradient of a step that is left out may be NaN, which no orthogonalisation should see.
        return torch.where(self.taken[id(shard)], momentum, kept) if id(shard) in self.taken else momentum

    def _take(self, number: int, part: Part, direction: Tensor) -> None:
        source = self.plan.matrices[number].source
        piece, bucket = self.job.pieces[source], self.job.buckets[source]
        param = value = piece.shard.param
        if not param.is_contiguous():
            value = self.strided.setdefault(id(param), (param, param.contiguous()))[1]
        direction = direction.to(device=param.device, dtype=torch.promote_types(param.dtype, torch.float32))
        its = self.moves.setdefault(id(bucket), (bucket, []))[1]
        its.append((piece, self._local(value, number, part), direction))

    def _move(self) -> None:
        for bucket, its in self.moves.values():
            lr = bucket.hyper.lr
            rates = [self.taken[id(piece.shard)].double() * lr for piece, _, _ in its] if bucket.masked else lr
            values, directions = [value for _, value, _ in its], [direction for _, _, direction in its]
            kernels.move(values, directions, None, rates, bucket.hyper.weight_decay)
        for param, copy in self.strided.values():
            param.copy_(copy)
