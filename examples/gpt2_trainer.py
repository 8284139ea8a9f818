"""Train GPT-2 with transformers' Trainer and MARS on the text that ships with mars_dist; nothing is downloaded.

    python examples/gpt2_trainer.py --output_dir runs/trainer --optim mars_adamw --optim_args gamma=0.05 \
        --learning_rate 5e-3 --max_steps 200

It takes the arguments of TrainingArguments, and runs under every launcher of the Trainer:

    torchrun --nproc_per_node 2 examples/gpt2_trainer.py ...
    accelerate launch --num_processes 2 examples/gpt2_trainer.py ...
    deepspeed --num_gpus 2 examples/gpt2_trainer.py --deepspeed ds_configs/trainer_auto.json ...

The DeepSpeed configuration may have a MARS block of its own, as trainer_auto.json has: then leave `--optim` and
`--optim_args` out, or let them say the same. On a machine without a GPU add `--use_cpu` (for `deepspeed` also put
`DS_ACCELERATOR=cpu` in front; for `accelerate launch` see launch/accelerate/). `--size small` is GPT-2 with 124
million parameters; by default it is a tiny one.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

import mars_dist  # noqa: F401  the only line that MARS needs: Trainer now knows optim="mars_adamw"
from mars_dist.integrations.deepspeed.launch import prepare_deepspeed
from mars_dist.pretrain.data import encode, shakespeare, split
from mars_dist.pretrain.tokenizer import END_OF_TEXT_ID, PADDED_VOCABULARY, gpt2_tokenizer
from mars_dist.pretrain.world import leave_processes

SIZES = {
    "tiny": {"n_layer": 2, "n_head": 2, "n_embd": 64},
    "small": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
    "large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},
    "xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},
}
HELD_OUT_WORKS = 3  # the last works of the text are never trained on


@dataclass
class Gpt2Arguments:
    """What Trainer does not know: the model and the text."""

    size: str = field(default="tiny", metadata={"help": "size of the model", "choices": list(SIZES)})
    sequence_length: int = field(default=64, metadata={"help": "tokens of one sequence"})
    works: int = field(default=42, metadata={"help": "how many works of the text to read: fewer start sooner"})
    held_out_sequences: int = field(default=64, metadata={"help": "sequences that the loss is measured on at the end"})


class Sequences(Dataset):
    """Blocks of tokens, end to end; the model predicts each token from those before it."""

    def __init__(self, works: list[str], length: int) -> None:
        tokens = torch.from_numpy(encode(works, gpt2_tokenizer()).astype("int64"))
        self.blocks = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"input_ids": self.blocks[i], "labels": self.blocks[i]}


def build_model(arguments: Gpt2Arguments) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=PADDED_VOCABULARY,
        n_positions=arguments.sequence_length,
        **SIZES[arguments.size],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # the default, said explicitly: transformers warns when it has to guess
    return model


def rule_counts(trainer: Trainer) -> dict[str, int]:
    """How many tensors took which rule, from the optimizer inside the wrappers of Accelerate and DeepSpeed."""
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer.rule_counts() if hasattr(optimizer, "rule_counts") else {type(optimizer).__name__: 0}


def main() -> None:
    if "--deepspeed" in sys.argv:  # before TrainingArguments imports DeepSpeed; does nothing where there is a GPU
        prepare_deepspeed(Path("runs"))
    parser = HfArgumentParser((Gpt2Arguments, TrainingArguments))
    arguments, training = parser.parse_args_into_dataclasses()
    torch.manual_seed(training.seed)
    train_works, held_out_works = split(shakespeare()[-arguments.works :], HELD_OUT_WORKS)
    held_out = Sequences(held_out_works, arguments.sequence_length)
    held_out.blocks = held_out.blocks[: arguments.held_out_sequences]
    trainer = Trainer(
        model=build_model(arguments),
        args=training,
        train_dataset=Sequences(train_works, arguments.sequence_length),
        eval_dataset=held_out,
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    rules, model = rule_counts(trainer), type(trainer.model_wrapped).__name__
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"{model} on {training.world_size} processes, {rules}")
        print(f"held-out loss {loss:.3f} after {trainer.state.global_step} steps", flush=True)


if __name__ == "__main__":
    main()
    leave_processes()  # after the trainer is gone
