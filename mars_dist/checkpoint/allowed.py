"""The names that the pickles of a checkpoint may use, each with its reason: whatever is not here is refused.

What the tested releases of torch, DeepSpeed, Accelerate and transformers write (tests/test_checkpoint_trust.py holds
real folders against it), name by name: no module as a whole, no name that loads, imports, opens or calls what it is
given. ``How`` says what the pickle may do with it:

- VALUE: name it, as a dtype or as the class of a storage, and no more
- NEW: make an object of that class without calling ``__init__``, and fill in its attributes
- CALL: call it with data
- a function: call it with arguments for which that function returns None (else it returns what is wrong with them)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any


class How(Enum):
    VALUE = "name"
    NEW = "make an object of"
    CALL = "call"


@dataclass(frozen=True)
class Global:
    """A name in a module, as a pickle has it. It was not looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


VALUE, NEW, CALL = How.VALUE, How.NEW, How.CALL
Check = Callable[[tuple[Any, ...]], "str | None"]
NUMBERS = re.compile(r"[<>|=]?([biufc]\d{1,2}|\?)")
REBUILT = {Global("torch._utils", "_rebuild_tensor_v2"), Global("torch._utils", "_rebuild_parameter")}
TENSORS = {Global("torch", "Tensor"), Global("torch.nn.parameter", "Parameter")}


def _bytes_as_text(args: tuple[Any, ...]) -> str | None:
    """Python's own way to write bytes with protocol 2."""
    return None if len(args) == 2 and args[1] in ("latin1", "latin-1") else "only with latin1"


def _of_numbers(args: tuple[Any, ...]) -> str | None:
    """An array of objects holds pointers, which a file must not make up."""
    return None if args and isinstance(args[0], str) and NUMBERS.fullmatch(args[0]) else "only with a type of numbers"


def _empty_array(args: tuple[Any, ...]) -> str | None:
    return None if args and args[0] == Global("numpy", "ndarray") else "only for numpy.ndarray"


def _tensor(args: tuple[Any, ...]) -> str | None:
    """It calls its first argument."""
    named = all(isinstance(arg, Global) for arg in args[:2])  # to hash what is deep overflows the stack
    good = len(args) == 4 and named and args[0] in REBUILT and args[1] in TENSORS
    return None if good else "only for a plain tensor or parameter"


_DCP = "torch.distributed.checkpoint.metadata"
_TABLE: list[tuple[str, str, How | Check, str]] = [
    # Python
    ("collections", "OrderedDict", CALL, "a model's state dict; hooks of a tensor (none)"),
    ("collections", "Counter", CALL, "milestones of torch's MultiStepLR"),
    ("_codecs", "encode", _bytes_as_text, "bytes in protocol 2: numpy's random state"),
    ("builtins", "set", CALL, "a set in protocol 2"),
    ("builtins", "bytearray", CALL, "bytes in protocol 2"),
    ("builtins", "complex", CALL, "a complex number"),
    ("pathlib", "PosixPath", CALL, "DCP's note of where it saved"),
    # torch: tensors
    ("torch._utils", "_rebuild_tensor_v2", CALL, "a tensor"),
    ("torch._utils", "_rebuild_parameter", CALL, "a parameter"),
    ("torch._tensor", "_rebuild_from_type_v2", _tensor, "a tensor that carries attributes: DeepSpeed's flat ones"),
    ("torch", "Tensor", VALUE, "type of the tensor before"),
    ("torch.nn.parameter", "Parameter", VALUE, "type of the tensor before"),
    ("torch", "Size", CALL, "a shape"),
    ("torch", "device", CALL, "a device"),
    ("torch.serialization", "_get_layout", CALL, "a layout: DCP's properties of a tensor"),
    # DCP: what .metadata consists of
    (_DCP, "Metadata", NEW, "the whole"),
    (_DCP, "MetadataIndex", NEW, "a key: which piece of which tensor"),
    (_DCP, "TensorStorageMetadata", NEW, "a tensor"),
    (_DCP, "TensorProperties", NEW, "its dtype and layout"),
    (_DCP, "ChunkStorageMetadata", NEW, "a piece of it"),
    (_DCP, "BytesStorageMetadata", NEW, "a value that is no tensor"),
    (_DCP, "StorageMeta", NEW, "where it was saved"),
    (_DCP, "_MEM_FORMAT_ENCODING", CALL, "a memory format (an enum)"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo", NEW, "where a piece lies"),
    # numpy: random states, numbers in a client's state
    ("numpy", "ndarray", VALUE, "class of an array"),
    ("numpy", "dtype", _of_numbers, "type of an array of numbers"),
    ("numpy._core.multiarray", "_reconstruct", _empty_array, "an array (numpy 2)"),
    ("numpy.core.multiarray", "_reconstruct", _empty_array, "an array (numpy 1)"),
    ("numpy._core.multiarray", "scalar", CALL, "a number (numpy 2); its type was checked"),
    ("numpy.core.multiarray", "scalar", CALL, "a number (numpy 1); its type was checked"),
    # DeepSpeed: states of its optimizers
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler", NEW, "the scale of the loss"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler", NEW, "the scale of the loss in float16"),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum", CALL, "the stage (an enum)"),
    ("deepspeed.utils.tensor_fragment", "fragment_address", NEW, "where a parameter lies in a flat tensor"),
    # the Trainer: training_args.bin
    ("transformers.training_args", "TrainingArguments", NEW, "the arguments"),
    ("transformers.training_args_seq2seq", "Seq2SeqTrainingArguments", NEW, "the arguments"),
    ("transformers.training_args", "OptimizerNames", CALL, "optim (an enum)"),
    ("transformers.trainer_utils", "IntervalStrategy", CALL, "logging_strategy, eval_strategy (an enum)"),
    ("transformers.trainer_utils", "SaveStrategy", CALL, "save_strategy (an enum)"),
    ("transformers.trainer_utils", "SchedulerType", CALL, "lr_scheduler_type (an enum)"),
    ("transformers.trainer_utils", "HubStrategy", CALL, "hub_strategy (an enum)"),
    ("transformers.trainer_utils", "FSDPOption", CALL, "fsdp (an enum)"),
    ("transformers.debug_utils", "DebugOption", CALL, "debug (an enum)"),
    ("transformers.trainer_pt_utils", "AcceleratorConfig", NEW, "accelerator_config"),
    ("transformers.integrations.deepspeed", "HfTrainerDeepSpeedConfig", NEW, "deepspeed"),
    ("transformers.integrations.deepspeed", "HfDeepSpeedConfig", NEW, "deepspeed"),
    ("accelerate.utils.dataclasses", "DeepSpeedPlugin", NEW, "deepspeed_plugin"),
    ("accelerate.utils.dataclasses", "DistributedType", CALL, "which engine ran (an enum)"),
    ("accelerate.state", "PartialState", NEW, "distributed_state"),
]
_DTYPES = ("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool", "uint8", "uint16", "uint32",
           "uint64", "int8", "int16", "int32", "int64", "float8_e4m3fn", "float8_e5m2")  # fmt: skip
_STORAGES = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool", "ComplexFloat",
             "ComplexDouble")  # fmt: skip
_TABLE += [("torch", name, VALUE, "a dtype") for name in _DTYPES]
_TABLE += [("torch", f"{name}Storage", VALUE, "type of the elements of a tensor") for name in _STORAGES]
_TABLE += [("torch.storage", "UntypedStorage", VALUE, "type of the elements of a tensor")]

ALLOWED: dict[Global, How | Check] = {Global(module, name): how for module, name, how, _ in _TABLE}
