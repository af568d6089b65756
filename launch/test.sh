#!/usr/bin/env bash
# Sets up and runs the tests; arguments go to pytest (bash launch/test.sh -k contract). --whole runs them all.
# TORCH=2.11.0 bash launch/test.sh: with another torch, the part that tells whether the layouts work with it.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/setup.sh
if [ -n "${TORCH:-}" ] && [ $# = 0 ]; then
    # Ranks that are processes, since torch 2.11 knows no DTensors in threads.
    set -- tests/test_contract_wrapped.py tests/masks/test_fsdp2.py tests/shards/test_in_step.py \
        tests/training/test_hold.py tests/oneshot/test_prune_blocks.py tests/oneshot/test_tensor_parallel.py \
        tests/calibration/test_walk.py tests/jobs/test_prune.py tests/jobs/test_shrink.py
fi
exec "$PYTHON" -m pytest -n 2 --dist loadgroup "$@"
