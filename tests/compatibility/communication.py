"""How gradients and weights travel between the ranks, and parallelism beside ZeRO."""

from typing import Any

from tests.compatibility import communication_training, expert_training, parallel_training
from tests.compatibility.row import BASE, Row
from tests.zero_cases import ZeroCase

ZERO = "zero_optimization"
SECTION = "Communication"

NO_SCATTER = {"reduce_scatter": False}
NO_PERSISTENT = {"stage3_param_persistence_threshold": 0}  # the nets are small: nothing would be gathered otherwise
ACCUMULATE = {"grad_accum_dtype": "fp32"}
ALL_OF_IT = {"zero_hpz_partition_size": 2, "zero_quantized_weights": True, "zero_quantized_gradients": True}
MIXTURE = {**BASE, "clip": 0.01}  # acts on the experts as well: their gradients are small


def case(
    stage: int,
    dtype: str = "fp32",
    construct: str = "json",
    zero: dict[str, Any] | None = None,
    params: dict[str, Any] = BASE,
    **extra: Any,
) -> ZeroCase:
    return ZeroCase(stage, dtype, params=params, zero=zero or {}, extra=extra, construct=construct)


TRANSPORT = [
    Row(
        SECTION,
        "`communication_data_type`",
        ("communication_data_type",),
        tuple(case(stage, communication_data_type="bf16") for stage in (0, 2, 3)),
        "communicates in bf16",
        communication_training.communicate,
    ),
    Row(
        SECTION,
        "`prescale_gradients`",
        ("prescale_gradients", f"{ZERO}.reduce_scatter"),
        (
            case(0, prescale_gradients=True),
            *(case(stage, zero=NO_SCATTER, prescale_gradients=True) for stage in (2, 3)),
        ),
        "prescales",
        communication_training.communicate,
        note="ZeRO-2 and ZeRO-3 take it with `reduce_scatter: false` only",
    ),
    Row(
        SECTION,
        "`gradient_predivide_factor`",
        ("gradient_predivide_factor",),
        (
            case(0, gradient_predivide_factor=4.0),
            *(case(stage, zero=NO_SCATTER, gradient_predivide_factor=4.0) for stage in (2, 3)),
        ),
        "predivides",
        communication_training.communicate,
        note="ZeRO-2 and ZeRO-3 take it with `reduce_scatter: false` only",
    ),
    Row(
        SECTION,
        "`gradient_predivide_factor` equal to the number of ranks, with ZeRO-3",
        ("gradient_predivide_factor",),
        (case(3, zero=NO_SCATTER, gradient_predivide_factor=2.0),),
        "predivides",
        communication_training.communicate,
        "refused",
        r"Error: MARS: gradient_predivide_factor = 2.0 equals",
        "DeepSpeed 0.19 does not multiply it back: gradients would be that many times too small",
        ranks=(2,),
    ),
    Row(
        SECTION,
        '`gradient_allreduce_op: "sum"`',
        ("gradient_allreduce_op",),
        tuple(case(stage, gradient_allreduce_op="sum") for stage in (0, 1, 2)),
        "sums",
        communication_training.communicate,
        note="DeepSpeed refuses it with ZeRO-3",
    ),
    Row(
        SECTION,
        "`reduce_scatter: false`",
        (f"{ZERO}.reduce_scatter",),
        tuple(case(stage, zero=NO_SCATTER) for stage in (1, 2, 3)),
        "reduces without scatter",
        communication_training.communicate,
    ),
    Row(
        SECTION,
        "`overlap_comm` with small buckets",
        (
            f"{ZERO}.overlap_comm",
            f"{ZERO}.reduce_bucket_size",
            f"{ZERO}.allgather_bucket_size",
            f"{ZERO}.stage3_prefetch_bucket_size",
        ),
        (
            case(2, zero={"overlap_comm": True, "reduce_bucket_size": 50, "allgather_bucket_size": 50}),
            case(3, zero={"overlap_comm": True, "reduce_bucket_size": 50, "stage3_prefetch_bucket_size": 50}),
        ),
        "overlaps",
        communication_training.communicate,
    ),
    Row(
        SECTION,
        "`use_multi_rank_bucket_allreduce: false`",
        (f"{ZERO}.use_multi_rank_bucket_allreduce",),
        tuple(case(stage, zero={"use_multi_rank_bucket_allreduce": False}) for stage in (1, 2)),
        "reduces to one rank",
        communication_training.communicate,
    ),
    Row(
        SECTION,
        "`contiguous_gradients: false`",
        (f"{ZERO}.contiguous_gradients",),
        tuple(case(stage, zero={"contiguous_gradients": False}) for stage in (1, 2, 3)),
        "gradients apart",
        communication_training.communicate,
    ),
    Row(
        SECTION,
        "`stage3_use_all_reduce_for_fetch_params`",
        (f"{ZERO}.stage3_use_all_reduce_for_fetch_params", f"{ZERO}.stage3_param_persistence_threshold"),
        (case(3, zero={"stage3_use_all_reduce_for_fetch_params": True, **NO_PERSISTENT}),),
        "fetches by all-reduce",
        communication_training.communicate,
    ),
    Row(
        SECTION,
        "`stage3_allgather_sequential`",
        (f"{ZERO}.stage3_allgather_sequential",),
        (case(3, zero={"stage3_allgather_sequential": True, **NO_PERSISTENT}),),
        "gathers one by one",
        communication_training.communicate,
    ),
]

ZERO_PLUS_PLUS = [
    Row(
        SECTION,
        "`zero_hpz_partition_size` (ZeRO++)",
        (f"{ZERO}.zero_hpz_partition_size",),
        tuple(case(3, dtype, zero={"zero_hpz_partition_size": 2, **NO_PERSISTENT}) for dtype in ("fp32", "bf16")),
        "second partition",
        communication_training.communicate,
        ranks=(2, 4),
    ),
    Row(
        SECTION,
        "`zero_quantized_weights` (ZeRO++)",
        (f"{ZERO}.zero_quantized_weights",),
        tuple(case(3, dtype, zero={"zero_quantized_weights": True, **NO_PERSISTENT}) for dtype in ("fp32", "bf16")),
        "weights",
        communication_training.quantised,
        "warns",
        r"zero_quantized_weights.*kernels",
        "its CUDA kernels were replaced by torch operations",
        communication_training.EVEN_COUNTS,
        (2, 4),
    ),
    Row(
        SECTION,
        "`zero_quantized_gradients` (ZeRO++)",
        (f"{ZERO}.zero_quantized_gradients",),
        (case(3, zero={"zero_quantized_gradients": True, **NO_PERSISTENT}),),
        "gradients",
        communication_training.quantised,
        "warns",
        r"zero_quantized_gradients.*kernels",
        "its CUDA kernels were replaced by torch operations, one device per machine",
        communication_training.EVEN_COUNTS,
        (2, 4),
    ),
    Row(
        SECTION,
        "all of ZeRO++, as in `gpt2_xl_zeropp.json`",
        (f"{ZERO}.zero_hpz_partition_size", f"{ZERO}.zero_quantized_weights", f"{ZERO}.zero_quantized_gradients"),
        (case(3, "bf16", zero={**ALL_OF_IT, **NO_PERSISTENT}, data_types=ACCUMULATE),),
        "weights",
        communication_training.quantised,
        "warns",
        r"zero_quantized_weights.*kernels",
        "its CUDA kernels were replaced by torch operations, one device per machine",
        communication_training.EVEN_COUNTS,
        (2, 4),
    ),
    Row(
        SECTION,
        "`zero_quantized_nontrainable_weights` (ZeRO++) with frozen weights",
        (f"{ZERO}.zero_quantized_nontrainable_weights",),
        (case(3, zero={"zero_quantized_nontrainable_weights": True, **NO_PERSISTENT}),),
        "frozen",
        communication_training.quantised,
        "refused",
        r"Error: MARS: zero_optimization\.zero_quantized_nontrainable_weights",
        "DeepSpeed 0.19 quantises memory that it has not written yet: the model computes with other frozen weights",
        ranks=(2,),
    ),
    Row(
        SECTION,
        "`mics_shard_size` (MiCS)",
        (f"{ZERO}.mics_shard_size",),
        (case(3, zero={"mics_shard_size": 2}),),
        function=communication_training.communicate,
        answer="refused",
        message=r"Error: MiCS ZeRO-3 sharding has been removed; 'zero_optimization\.mics_shard_size'",
        note="DeepSpeed 0.19 has no MiCS any more and says so itself",
        ranks=(2,),
    ),
]

PARALLEL = [
    Row(
        SECTION,
        "Mixture of experts (`deepspeed.moe.layer.MoE`)",
        (),
        (
            case(0, params=MIXTURE),
            *(
                case(stage, construct=construct, params=MIXTURE)
                for stage in (1, 2)
                for construct in ("json", "instance")
            ),
            case(0, "bf16", params=MIXTURE),
            case(2, "bf16", params=MIXTURE),
            case(1, "bf16", params=MIXTURE, data_types=ACCUMULATE),
        ),
        function=expert_training.experts,
        note="DeepSpeed refuses it with ZeRO-3",
        counts=expert_training.MIXTURE_COUNTS,
        ranks=(2, 4),
    ),
    Row(
        SECTION,
        "`use_data_before_expert_parallelism`",
        ("use_data_before_expert_parallelism",),
        (case(2, params=MIXTURE, use_data_before_expert_parallelism=True),),
        function=expert_training.experts,
        counts=expert_training.MIXTURE_COUNTS,
        ranks=(4,),
    ),
    Row(
        SECTION,
        "`expert_parallel` (AutoEP)",
        ("expert_parallel",),
        (*(case(stage, params=MIXTURE) for stage in (0, 1, 2, 3)), case(3, "bf16", params=MIXTURE)),
        function=expert_training.auto_experts,
        answer="warns",
        message="experts of a layer become one tensor",
        note="its experts have three dimensions: plain AdamW by default",
        counts=expert_training.AUTO_COUNTS,
        ranks=(2, 4),
    ),
    Row(
        SECTION,
        "`expert_parallel` (AutoEP) with MARS on its experts (`matrix_ndim: [2, 3]`, `optimize_1d`)",
        ("expert_parallel",),
        tuple(case(2, params={**MIXTURE, **more}) for more in ({"matrix_ndim": [2, 3]}, {"optimize_1d": True})),
        function=expert_training.auto_experts,
        answer="refused",
        message=r"Error: MARS: expert_parallel\.autoep_size = 2",
        note="it would clip by the norm of the experts that a rank holds",
        ranks=(2,),
    ),
    Row(
        SECTION,
        "Pipeline (`PipelineModule`, `engine.train_batch`)",
        (),
        (case(0), case(1), case(0, "bf16"), case(1, "bf16"), case(1, "bf16", data_types=ACCUMULATE)),
        function=parallel_training.pipeline,
        note="DeepSpeed refuses it with ZeRO-2 and ZeRO-3",
        counts=parallel_training.PIPELINE_COUNTS,
        ranks=(2, 4),
    ),
    Row(
        SECTION,
        "Pipeline with a tied layer (`TiedLayerSpec`)",
        (),
        (case(0), case(1)),
        "tied",
        parallel_training.pipeline,
        counts=parallel_training.PIPELINE_COUNTS,
        ranks=(2, 4),
    ),
    Row(
        SECTION,
        "Ulysses sequence parallelism with `mpu`",
        ("seq_parallel_communication_data_type",),
        (
            *(case(stage) for stage in (0, 1, 2, 3)),
            case(2, "bf16"),
            case(2, seq_parallel_communication_data_type="bf16"),
        ),
        "mpu",
        parallel_training.sequence,
        ranks=(2, 4),
    ),
    Row(
        SECTION,
        "`sequence_parallel_size` and `data_parallel_size`, with ZeRO-3",
        ("sequence_parallel_size", "data_parallel_size"),
        (case(3),),
        "mesh",
        parallel_training.sequence,
        ranks=(2, 4),
    ),
    Row(
        SECTION,
        "`sequence_parallel_size` and `data_parallel_size`, with ZeRO-0/1/2",
        ("sequence_parallel_size", "data_parallel_size"),
        tuple(case(stage) for stage in (0, 1, 2)),
        "mesh",
        parallel_training.sequence,
        "refused",
        r"Error: MARS: sequence_parallel_size = 2",
        "DeepSpeed does not add the gradients up over the sequence then: every rank of it trains weights of its own",
        ranks=(2, 4),
    ),
    Row(
        SECTION,
        "`tensor_parallel.autotp_size` (AutoTP)",
        ("tensor_parallel.autotp_size", "tensor_parallel.partition_config"),
        tuple(case(stage, construct=construct) for stage in (0, 2, 3) for construct in ("json", "instance")),
        "autotp",
        parallel_training.slices,
        "refused",
        r"Error: .*tensor_parallel\.autotp_size",
        "MARS would clip by the norm of a slice: shard with ZeRO-3",
        ranks=(2,),
    ),
    Row(
        SECTION,
        "Tensor parallelism of the client: slices with Megatron's mark (`tensor_model_parallel`)",
        (),
        tuple(case(stage) for stage in (0, 2, 3)),
        "marked",
        parallel_training.slices,
        "refused",
        r"Error: .* is one rank's slice of a larger tensor \(tensor parallelism\)",
        "MARS would clip by the norm of a slice: shard with ZeRO-3",
        ranks=(2,),
    ),
    Row(
        SECTION,
        "Tensor parallelism of the client: an `mpu` that says so",
        (),
        tuple(case(stage) for stage in (0, 2, 3)),
        "mpu",
        parallel_training.slices,
        "refused",
        r"Error: MARS: .*mpu",
        "MARS would clip by the norm of a slice: shard with ZeRO-3",
        ranks=(2,),
    ),
]

COMMUNICATION: list[Row] = [*TRANSPORT, *ZERO_PLUS_PLUS, *PARALLEL]
