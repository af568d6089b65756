#!/usr/bin/env bash
# What distprune does on this machine's GPU, in at most 8 minutes: tests, then what calls take. Needs python3 with torch
# 2.11 or later; nothing is installed, and what is missing is named.
#   bash benchmarks/gpu.sh [--small] [--limit SECONDS] [--output FILE] [PART ...]
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" benchmarks/bench_gpu.py "$@"
