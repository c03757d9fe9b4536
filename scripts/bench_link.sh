#!/usr/bin/env bash
# Measures methods over a slow link: two hosts on this machine, made of network namespaces, one rank
# on each, and a model of 6.5 million parameters. Local step, exposed time of a synchronisation,
# bytes on the link and peak memory go into a table and a plot. 30 minutes on 2 cores.
#
# Needs root and /dev/net/tun; says so and ends with code 0 where they are missing.
#
#   bench_link.sh [--quick]     --quick: a tiny model, three methods, one link; within a minute
#
# RATE_MBIT    of the link (default 100)
# DELAYS_MS    delays in each direction to measure with (default "0 20")
# METHODS      of none sync torch edit edit_delay edit_int8 edit_delay_int8, in the order of their
#              turns (default all; none, the run without communication, is what the others are
#              compared with, and those that differ from it least come next to it)
# CYCLES       measured blocks of 16 steps of each method (default 4)
# PREFETCH     --edit-sync-prefetch (default that of the flag)
# WORK_DIR     data and logs are written here (default runs/link)
# OUTPUT       of table and plot, without suffix (default docs/results/link; --quick: in WORK_DIR)
# PYTHON VENV  see setup_env.sh
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/.."
lab=benchmarks/link/lab.sh
command_line="scripts/bench_link.sh${*:+ $*}"

if [[ ${1-} == --quick ]]; then
  shift
  QUICK=(--quick)
  METHODS=${METHODS:-none edit_delay_int8 torch}
  DELAYS_MS=${DELAYS_MS:-20}
  CYCLES=${CYCLES:-1}
  OUTPUT=${OUTPUT:-${WORK_DIR:-runs/link}/quick}
else
  QUICK=()
fi
if (($#)); then
  echo "error: $1: unknown; allowed: --quick" >&2
  exit 2
fi
RATE_MBIT=${RATE_MBIT:-100}
read -ra delays_ms <<<"${DELAYS_MS:-0 20}"
read -ra methods <<<"${METHODS:-sync torch edit none edit_delay edit_delay_int8 edit_int8}"
CYCLES=${CYCLES:-4}
WORK_DIR=${WORK_DIR:-runs/link}
OUTPUT=${OUTPUT:-docs/results/link}

skip() {
  echo "skipped: needs $1"
  exit 0
}

[[ $(id -u) == 0 && -c /dev/net/tun ]] || skip "root and /dev/net/tun"
for tool in ip tc unshare setpriv; do
  command -v "$tool" >/dev/null || skip "$tool (iproute2, util-linux)"
done
"$lab" run --rate-mbit "$RATE_MBIT" --delay-ms "${delays_ms[-1]}" -- true ||
  skip "the right to make network namespaces, and a kernel with tbf"

# shellcheck source=scripts/setup_env.sh
source "$here/setup_env.sh"
export HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore
mkdir -p "$WORK_DIR" "$(dirname "$OUTPUT")"
tokenizer=$WORK_DIR/tokenizer
data_path=$WORK_DIR/kjv_text_document
if [[ ! -f $tokenizer/tokenizer.json ]]; then
  python scripts/train_tokenizer.py \
    --input data/kjv-1mb.txt --vocab-size 1024 --output "$tokenizer"
fi
if [[ ! -f $data_path.idx ]]; then
  python scripts/preprocess_data.py \
    --input data/kjv-1mb.txt --txt-document 32 --output-prefix "${data_path%_text_document}" \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$tokenizer" --append-eod
fi

"$lab" run --rate-mbit "$RATE_MBIT" -- \
  python -m benchmarks.link.bench --data-path "$data_path" --tokenizer-model "$tokenizer" \
  --log-dir "$WORK_DIR/logs" --output "$OUTPUT.json" --cycles "$CYCLES" \
  --delays-ms "${delays_ms[@]}" --methods "${methods[@]}" \
  ${PREFETCH:+--prefetch "$PREFETCH"} "${QUICK[@]}"
python -m benchmarks.link.report \
  --results "$OUTPUT.json" --output "$OUTPUT" --command "$command_line"
