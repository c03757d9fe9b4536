#!/usr/bin/env bash
# Pre-trains Llama 2 7B with EDiT on 8 hosts of 8 GPUs: 8 replicas, each sharded over one host.
#
#   DATA_PATH=... TOKENIZER=... HOSTFILE=hostfile ./scripts/pretrain_llama_7b_edit.sh
#
# Every variable of the first block may be overridden by the environment; further arguments go to
# pretrain_edit.py. A start with a checkpoint in CHECKPOINT_PATH resumes it.
#
# How it is launched
#   HOSTFILE=FILE                  by DeepSpeed through ssh, from one host
#   HOSTFILE=FILE NODE_RANK=n      by DeepSpeed without ssh: run the script on every host
#   LAUNCHER=torchrun NODE_RANK=n  by torchrun: run the script on every host
#   NNODES=1                       on this host
# The forms without ssh meet at MASTER_ADDR:MASTER_PORT, on the host with NODE_RANK 0.
#
# DRY_RUN=1 prints the command only.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NNODES=${NNODES:-8}
NODE_RANK=${NODE_RANK:-}
MASTER_ADDR=${MASTER_ADDR:-}
MASTER_PORT=${MASTER_PORT:-29500}
HOSTFILE=${HOSTFILE:-hostfile}
LAUNCHER=${LAUNCHER:-deepspeed}
DRY_RUN=${DRY_RUN:-0}

TP=${TP:-1}
PP=${PP:-1}
REPLICAS=${REPLICAS:-8}
DS_CONFIG=${DS_CONFIG:-ds_configs/edit_7b.json}

DATA_PATH=${DATA_PATH:-data/corpus_text_document} # or a blend: "weight prefix weight prefix"
TOKENIZER=${TOKENIZER:-data/tokenizer}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-runs/llama_7b_edit/checkpoints}
TENSORBOARD_DIR=${TENSORBOARD_DIR:-runs/llama_7b_edit/tensorboard}

NUM_LAYERS=${NUM_LAYERS:-32}
HIDDEN_SIZE=${HIDDEN_SIZE:-4096}
FFN_HIDDEN_SIZE=${FFN_HIDDEN_SIZE:-11008}
NUM_ATTENTION_HEADS=${NUM_ATTENTION_HEADS:-32}
SEQ_LENGTH=${SEQ_LENGTH:-4096}
VOCAB_SIZE=${VOCAB_SIZE:-32000}
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-1}
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-1024} # all replicas: 4 million tokens
TRAIN_ITERS=${TRAIN_ITERS:-25000}            # 105 billion tokens
EVAL_ITERS=${EVAL_ITERS:-4}
SAVE_INTERVAL=${SAVE_INTERVAL:-1000}

read -ra DATA <<<"$DATA_PATH"

MODEL_ARGS=(
  --num-layers "$NUM_LAYERS"
  --hidden-size "$HIDDEN_SIZE"
  --ffn-hidden-size "$FFN_HIDDEN_SIZE"
  --num-attention-heads "$NUM_ATTENTION_HEADS"
  --seq-length "$SEQ_LENGTH"
  --max-position-embeddings "$SEQ_LENGTH"
  --position-embedding-type rope
  --swiglu
  --normalization RMSNorm
  --norm-epsilon 1e-5
  --disable-bias-linear
  --untie-embeddings-and-output-weights
  --attention-dropout 0
  --hidden-dropout 0
)
PARALLEL_ARGS=(
  --tensor-model-parallel-size "$TP"
  --pipeline-model-parallel-size "$PP"
  --edit-replicas "$REPLICAS"
  --recompute-granularity selective
  --distributed-timeout-minutes 30
)
if ((TP > 1)); then
  PARALLEL_ARGS+=(--sequence-parallel)
fi
TRAINING_ARGS=(
  --micro-batch-size "$MICRO_BATCH_SIZE"
  --global-batch-size "$GLOBAL_BATCH_SIZE"
  --train-iters "$TRAIN_ITERS"
  --lr 3e-4
  --min-lr 3e-5
  --lr-decay-style cosine
  --lr-warmup-fraction 0.04
  --weight-decay 0.1
  --adam-beta1 0.9
  --adam-beta2 0.95
  --exit-signal-handler
)
DATA_ARGS=(
  --data-path "${DATA[@]}"
  --split "989,10,1"
  --tokenizer-type HuggingFaceTokenizer
  --tokenizer-model "$TOKENIZER"
  --vocab-size "$VOCAB_SIZE"
)
LOGGING_ARGS=(
  --log-throughput
  --eval-interval 1000
  --eval-iters "$EVAL_ITERS"
  --save "$CHECKPOINT_PATH"
  --save-interval "$SAVE_INTERVAL"
  --tensorboard-dir "$TENSORBOARD_DIR"
)
if [[ -f $CHECKPOINT_PATH/latest_checkpointed_iteration.txt ]]; then
  LOGGING_ARGS+=(--load "$CHECKPOINT_PATH")
fi
DEEPSPEED_ARGS=(
  --deepspeed
  --deepspeed_config "$DS_CONFIG"
)

fail() {
  echo "error: $*" >&2
  exit 2
}

if [[ -n $NODE_RANK && $NNODES != 1 && -z $MASTER_ADDR ]]; then
  fail "NODE_RANK=$NODE_RANK needs MASTER_ADDR, the address of the host with NODE_RANK=0"
fi
if [[ $LAUNCHER == torchrun ]]; then
  LAUNCH=(torchrun --nproc_per_node "$GPUS_PER_NODE" --nnodes "$NNODES")
  LAUNCH+=(--node_rank "${NODE_RANK:-0}" --master_port "$MASTER_PORT")
elif [[ $NNODES == 1 ]]; then
  LAUNCH=(deepspeed --num_accelerators "$GPUS_PER_NODE" --master_port "$MASTER_PORT")
else
  # Without the file DeepSpeed would train on this host alone.
  [[ -f $HOSTFILE || $DRY_RUN == 1 ]] || fail "HOSTFILE $HOSTFILE is missing; a line a host: NAME slots=8"
  LAUNCH=(deepspeed -H "$HOSTFILE" --num_nodes "$NNODES" --num_gpus "$GPUS_PER_NODE")
  LAUNCH+=(--master_port "$MASTER_PORT")
  if [[ -n $NODE_RANK ]]; then
    LAUNCH+=(--no_ssh --node_rank "$NODE_RANK")
  fi
fi
if [[ -n $MASTER_ADDR ]]; then
  LAUNCH+=(--master_addr "$MASTER_ADDR")
fi

COMMAND=(
  "${LAUNCH[@]}" pretrain_edit.py
  "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}"
  "${LOGGING_ARGS[@]}" "${DEEPSPEED_ARGS[@]}" "$@"
)
if [[ $DRY_RUN == 1 ]]; then
  printf '%q ' "${COMMAND[@]}"
  echo
else
  exec "${COMMAND[@]}"
fi
