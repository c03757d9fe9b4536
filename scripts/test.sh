#!/usr/bin/env bash
# Makes the environment if needed and runs all checks and tests. Arguments go to pytest.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/setup_env.sh
source "$here/setup_env.sh"
cd "$here/.."
export OMP_NUM_THREADS=1
if [ $# -eq 0 ]; then
  ruff check .
  ruff format --check .
  mypy
fi
python -m pytest --durations=15 "$@"
