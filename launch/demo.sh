#!/usr/bin/env bash
# Sets up, prunes SmolLM2-135M over 2 ranks, calibrated on speeches, and shows what that did to other speeches it is
# asked to predict.
#   bash launch/demo.sh [sparsity] [output directory]
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/setup.sh

sparsity=${1:-0.5}
output=${2:-build/demo/smollm2-135m-pruned}
# The model and the texts, written below build/demo the first time.
"$PYTHON" launch/demo_inputs.py build/demo

# One thread for each of the two ranks; torchrun would say so itself, at length.
export OMP_NUM_THREADS=1
torchrun --standalone --nproc-per-node 2 -m distprune prune build/demo/smollm2-135m --sparsity "$sparsity" \
    --calibration build/demo/calibration.txt --samples 16 --sequence-length 256 --own-words 0 \
    $(printf -- '--eval %s ' build/demo/evaluation-*.txt) --eval-tokens 2048 \
    --output "$output" --overwrite

echo
echo "What is on disk now, as distprune inspect sees it:"
"$PYTHON" -m distprune inspect "$output"

echo
echo "Plain transformers, from $output:"
"$PYTHON" - "$output" <<'PYTHON'
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

logging.disable_progress_bar()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
prompt = tokenizer("My fellow Americans, the state of our union is", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=24, do_sample=False)[0], skip_special_tokens=True))
PYTHON
