#!/usr/bin/env bash
# A small scaling study on the embedded text: `sync`, and `edit` with 1, 2 and 4 replicas, for four
# model sizes and three numbers of tokens; then laws are fitted to the losses. 48 trainings, half an
# hour on 2 cores; what is done is not repeated, so it may be stopped and started again. All
# arguments go to benchmarks/scaling_study.py; see its --help.
#
#   ./scripts/scaling_study.sh            results in docs/results/scaling/study.*
#   ./scripts/scaling_study.sh --smoke    six tiny trainings, to see that it works
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/setup_env.sh
source "$here/setup_env.sh"
cd "$here/.."
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore
exec python -m benchmarks.scaling_study "$@"
