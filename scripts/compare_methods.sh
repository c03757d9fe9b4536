#!/usr/bin/env bash
# Trains every method on the embedded text at equal tokens and compares them: see
# benchmarks/compare_methods.py --help, to which all arguments go. Finished runs are not repeated.
#
#   ./scripts/compare_methods.sh            two replicas, 3 seeds, and the ablation of the penalty
#   ./scripts/compare_methods.sh --smoke    a few steps of each, to see that it works
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/setup_env.sh
source "$here/setup_env.sh"
cd "$here/.."
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore
exec python -m benchmarks.compare_methods "$@"
