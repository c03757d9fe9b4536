#!/usr/bin/env bash
# Trains a Llama-style model of one million parameters with EDiT on the text in data/: two replicas,
# each sharded over half of the ranks. A second start skips what is done, and resumes a training that
# was interrupted. Arguments go to pretrain_edit.py.
#
# With NVIDIA GPUs: 1, 2, 4 or 8 ranks, as many as there are GPUs for (one GPU: one replica), in
# bf16. Without: 4 ranks on the CPU, in fp32.
#
# GPUS         GPUs to use (default: all that nvidia-smi lists)
# CONFIG       DeepSpeed JSON (default ds_configs/edit_tiny_cpu.json, or edit_tiny_gpu.json)
# TRAIN_ITERS  steps (default 360); the first third is warm-up
# EVAL_ITERS   global batches of an evaluation (default 8)
# NUM_TOKENS   tokens of the sampled text (default 100)
# WORK_DIR     everything is written here (default runs/quickstart)
# MASTER_PORT  port for the ranks to meet at (default 29500)
# PYTHON VENV  see setup_env.sh
# DRY_RUN=1    print the commands only
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/.."

count_gpus() {
  if command -v nvidia-smi >/dev/null; then
    nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true
  else
    echo 0
  fi
}

GPUS=${GPUS:-$(count_gpus)}
TRAIN_ITERS=${TRAIN_ITERS:-360}
EVAL_ITERS=${EVAL_ITERS:-8}
NUM_TOKENS=${NUM_TOKENS:-100}
WORK_DIR=${WORK_DIR:-runs/quickstart}
MASTER_PORT=${MASTER_PORT:-29500}
DRY_RUN=${DRY_RUN:-0}

if ((GPUS > 0)); then
  RANKS=1
  while ((RANKS < 8 && 2 * RANKS <= GPUS)); do RANKS=$((2 * RANKS)); done
  CONFIG=${CONFIG:-ds_configs/edit_tiny_gpu.json}
else
  RANKS=4
  CONFIG=${CONFIG:-ds_configs/edit_tiny_cpu.json}
  # Said beforehand, or every process warns that it found no accelerator.
  export DS_ACCELERATOR=cpu
  # The ranks share the cores.
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
fi
export HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore

TOKENIZER=$WORK_DIR/tokenizer
DATA_PATH=$WORK_DIR/kjv_text_document
RUN_DIR=$WORK_DIR/$(basename "$CONFIG" .json)_$TRAIN_ITERS
CHECKPOINT_PATH=$RUN_DIR/checkpoints
TENSORBOARD_DIR=$RUN_DIR/tensorboard
LOG=$RUN_DIR/train.log

MODEL_ARGS=(
  --num-layers 4
  --hidden-size 128
  --ffn-hidden-size 352
  --num-attention-heads 4
  --seq-length 128
  --max-position-embeddings 128
  --swiglu
  --normalization RMSNorm
  --disable-bias-linear
  --untie-embeddings-and-output-weights
  --attention-dropout 0
  --hidden-dropout 0
)
PARALLEL_ARGS=(
  --edit-replicas $((RANKS > 1 ? 2 : 1))
)
TRAINING_ARGS=(
  --micro-batch-size $((16 / RANKS))
  --global-batch-size 16
  --train-iters "$TRAIN_ITERS"
  --edit-warmup-steps $((TRAIN_ITERS / 3))
  --lr 3e-3
  --min-lr 3e-4
  --lr-decay-style cosine
  --lr-warmup-fraction 0.05
  --weight-decay 0.1
  --adam-beta2 0.95
  --exit-signal-handler
)
DATA_ARGS=(
  --data-path "$DATA_PATH"
  --split "95,5,0"
  --tokenizer-type HuggingFaceTokenizer
  --tokenizer-model "$TOKENIZER"
  --num-workers 0
)
LOGGING_ARGS=(
  --eval-interval $((TRAIN_ITERS > 6 ? TRAIN_ITERS / 6 : 1))
  --eval-iters "$EVAL_ITERS"
  --save "$CHECKPOINT_PATH"
  --save-interval $((TRAIN_ITERS > 3 ? TRAIN_ITERS / 3 : 1))
  --tensorboard-dir "$TENSORBOARD_DIR"
)

run() {
  if [[ $DRY_RUN == 1 ]]; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}

say() {
  if [[ $DRY_RUN != 1 ]]; then
    printf '\n== %s\n' "$*"
  fi
}

steps_done() { cat "$CHECKPOINT_PATH/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0; }

if [[ $DRY_RUN != 1 ]]; then
  # shellcheck source=scripts/setup_env.sh
  source "$here/setup_env.sh"
  mkdir -p "$RUN_DIR"
fi
started=$SECONDS

if [[ ! -f $TOKENIZER/tokenizer.json ]]; then
  say "tokenizer: byte-level BPE of 1024 tokens"
  run python scripts/train_tokenizer.py \
    --input data/kjv-1mb.txt --vocab-size 1024 --output "$TOKENIZER"
fi

if [[ ! -f $DATA_PATH.idx ]]; then
  say "data: tokenised, in documents of 32 verses"
  run python scripts/preprocess_data.py \
    --input data/kjv-1mb.txt --txt-document 32 --output-prefix "${DATA_PATH%_text_document}" \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER" --append-eod
fi

first=$(steps_done)
if ((first >= TRAIN_ITERS)); then
  say "training: done before, $TRAIN_ITERS steps"
else
  say "training: $TRAIN_ITERS steps on $RANKS ranks, from step $first"
  if ((first > 0)); then
    LOGGING_ARGS+=(--load "$CHECKPOINT_PATH")
  fi
  train() {
    run deepspeed --log_level error --num_accelerators "$RANKS" --master_port "$MASTER_PORT" \
      pretrain_edit.py \
      "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" \
      "${LOGGING_ARGS[@]}" --deepspeed --deepspeed_config "$CONFIG" "$@"
  }
  if [[ $DRY_RUN == 1 ]]; then
    train "$@"
  else
    train "$@" 2>&1 | tee -a "$LOG"
    if (($(steps_done) < TRAIN_ITERS)); then
      say "stopped at step $(steps_done); start again to resume"
      exit 0
    fi
  fi
fi

say "text sampled from the model"
run python scripts/generate_text.py --load "$CHECKPOINT_PATH" --tokenizer-model "$TOKENIZER" \
  --prompt "And the LORD said unto" --num-tokens "$NUM_TOKENS"

if [[ $DRY_RUN != 1 ]]; then
  perplexity=$(grep 'on validation set' "$LOG" | tail -1 | sed 's/.*PPL: \([^ ]*\).*/\1/')
  guessing=$(python scripts/unigram_perplexity.py --data-path "$DATA_PATH")
  say "results, after $((SECONDS - started)) s"
  printf 'validation perplexity %.1f (from token frequencies alone: %.1f)\n' \
    "$perplexity" "$guessing"
  cat <<END
checkpoints   $CHECKPOINT_PATH
log           $LOG
TensorBoard   tensorboard --logdir $TENSORBOARD_DIR
tokenizer     $TOKENIZER
data          $DATA_PATH.bin, .idx
END
fi
