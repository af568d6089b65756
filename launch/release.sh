#!/usr/bin/env bash
# Builds the sdist and the wheel, checks them, installs the wheel without extras into a new environment, and runs the
# README's example there on one process and on two ranks. Uploads nothing.
#   bash launch/release.sh [folder]        what is built goes there (dist); what distprune was there is removed
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
folder=$(realpath -m "${1:-dist}")
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH
export PIP_DISABLE_PIP_VERSION_CHECK=1

# Constraints are of what is tested; these only build and look.
"$python" -m venv "$work/tools"
"$work/tools/bin/python" -m pip install -qq build==1.6.1 setuptools==84.0.0 twine==7.0.0
mkdir -p "$folder"
rm -f "$folder"/distprune-*.whl "$folder"/distprune-*.tar.gz
"$work/tools/bin/python" -m build --no-isolation --outdir "$folder" . >"$work/build.log" 2>&1 || {
    tail -n 30 "$work/build.log" >&2
    exit 1
}
sdist=$(ls "$folder"/distprune-*.tar.gz) wheel=$(ls "$folder"/distprune-*.whl)
"$work/tools/bin/python" -m twine check --strict "$sdist" "$wheel"

packed=$(tar tzf "$sdist" | cut -d / -f 2-)
if tracked=$(git ls-files -- ':!.*' 2>/dev/null); then
    missing=$(grep -vxFf <(echo "$packed") <<<"$tracked" || true)
    if [ -n "$missing" ]; then
        echo "the sdist lacks, and MANIFEST.in should name: $missing" >&2
        exit 1
    fi
fi
others=$("$python" -m zipfile -l "$wheel" | awk 'NR > 1 { print $1 }' | grep -v '^distprune[-/]' || true)
if [ -n "$others" ]; then
    echo "the wheel holds what is not of the package: $others" >&2
    exit 1
fi

# torch is pinned: an unpinned one may bring gigabytes of CUDA packages. PIP_INDEX_URL or PIP_FIND_LINKS say where to look.
"$python" -m venv "$work/env"
"$work/env/bin/python" -m pip install -qq -c constraints.txt "$wheel"
cd "$work"
awk '/^```/ { on = 0 } on; /^```python$/ && !seen { on = seen = 1 }' "$root/README.md" >example.py
awk '/^```/ { on = 0 } on; /^```text$/ && !seen { on = seen = 1 }' "$root/README.md" >expected.txt
env/bin/python example.py >one.txt
OMP_NUM_THREADS=1 env/bin/torchrun --standalone --nproc-per-node 2 example.py >two.txt
diff expected.txt one.txt
diff expected.txt two.txt
env/bin/python -c "import distprune; print(f'distprune {distprune.__version__}: the example ran on 1 process and on 2 ranks')"
echo "$(du -k "$sdist" | cut -f 1) KiB: $sdist"
echo "$(du -k "$wheel" | cut -f 1) KiB: $wheel"
