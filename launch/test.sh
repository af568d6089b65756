#!/usr/bin/env bash
# Sets up and runs the tests; arguments go to pytest (bash launch/test.sh -k contract). --whole runs them all.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/setup.sh
exec "$PYTHON" -m pytest -n 2 --dist loadgroup "$@"
