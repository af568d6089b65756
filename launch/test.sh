#!/usr/bin/env bash
# Sets up and runs the whole suite; arguments go to pytest (bash launch/test.sh -k contract).
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/setup.sh
exec "$PYTHON" -m pytest -n 2 --dist loadgroup "$@"
