#!/usr/bin/env bash
# Trains a small GPT-2 on the shipped text with MARS-AdamW and then with AdamW: same model, data order and steps, through
# the `deepspeed` launcher with ZeRO-2. Prints a table and writes runs/quickstart/. Arguments go to `mars-dist train`
# (`--set training.steps=50`). GPUs are used when torch sees them, otherwise 2 ranks on the CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

make_environment deepspeed,hf,train

run=runs/quickstart
mkdir -p "$run" || die "cannot write to $run"
# On a CPU the logits are freed and taken again at every step; kept on the heap they are not mapped anew each time (1.4x).
export MALLOC_MMAP_THRESHOLD_=8589934592 MALLOC_TRIM_THRESHOLD_=17179869184

settings=$(python -m mars_dist.integrations.deepspeed.launch --batch 16)
read -r -a launch <<<"$settings" # the device, the number of ranks, then the launcher's arguments
export DS_ACCELERATOR=${launch[0]} PYTHONWARNINGS=ignore::FutureWarning
for optimizer in mars-adamw adamw; do
  deepspeed --quiet --no_local_rank "${launch[@]:2}" --module mars_dist.cli train "tiny-$optimizer" \
    --set "training.micro_batch=$((16 / launch[1]))" --out "$run/$optimizer" --fresh "$@"
done
mars-dist report "$run/mars-adamw" "$run/adamw" --png "$run/curves.png"
