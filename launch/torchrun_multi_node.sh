#!/usr/bin/env bash
# distprune on several machines with torchrun. Start the same line on every machine, with the same
# HEAD; the machines find each other there. MODEL and OUTPUT lie on storage that all of them see.
#
#   HEAD=node1:29500 NODES=2 RANKS_PER_NODE=8 bash launch/torchrun_multi_node.sh MODEL OUTPUT --pattern 2:4
set -euo pipefail
model=$1 output=$2
shift 2

exec torchrun \
    --nnodes "${NODES:-1}" \
    --nproc-per-node "${RANKS_PER_NODE:-1}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "${HEAD:-localhost:29500}" \
    --rdzv-id "${JOB_ID:-distprune}" \
    -m distprune prune "$model" --output "$output" "$@"
