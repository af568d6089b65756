#!/usr/bin/env bash
# distprune under mpirun or mpiexec, of any MPI that mpi4py runs on (pip install 'distprune[mpi]').
# MODEL and OUTPUT lie on storage that all hosts see.
#
#   RANKS=16 HOSTS=node1,node2 bash launch/mpirun.sh MODEL OUTPUT --pattern 2:4
set -euo pipefail
model=$1 output=$2
shift 2

# --host is what MPICH (hydra), Open MPI and Intel MPI all understand; without it the ranks run here.
hosts=()
if [ -n "${HOSTS:-}" ]; then hosts=(--host "$HOSTS"); fi

exec mpiexec -n "${RANKS:-2}" "${hosts[@]}" \
    "${PYTHON:-python}" -m distprune prune "$model" --output "$output" "$@"
