"""Flags of Megatron, Megatron-DeepSpeed and ATorch that are not here, and what to do instead.

A flag that is in neither this table nor `flags` is unknown: perhaps misspelt.
"""

from fnmatch import fnmatchcase

_REASONS = {
    "fp16 is not supported: the shards are fp32, there is no loss scaling; use --bf16": """
        --fp16 --fp16-* --loss-scale --loss-scale-window --initial-loss-scale --min-loss-scale
        --hysteresis""",
    "fp8 and fp4 are not supported; use --bf16": """
        --fp8 --fp4 --fp8-* --fp4-* --keep-fp8-* --no-fp8-* --first-last-layers-bf16
        --num-layers-at-*-in-bf16 --te-precision-config-file""",
    "experts are not supported": """
        --num-experts --num-experts-* --expert-* --moe-* --disable-moe-* --create-moe-*
        --overlap-moe-* --enable-expert-* --enable-router --router-* --mlp-type --use-tutel
        --topk""",
    "the optimizer is always sharded; leave the flag out": """
        --use-distributed-optimizer --zero-reduce-scatter --zero-contigious-gradients""",
    "the inner optimizer is AdamW with fp32 state on the device; leave the flag out": """
        --optimizer --optimizer-* --muon-* --lion-* --sgd-momentum --cpu-optimizer
        --cpu_torch_adam --ds_fused_adam --use-precision-aware-optimizer --exp-avg-dtype
        --exp-avg-sq-dtype --main-grads-dtype --main-params-dtype --overlap-cpu-optimizer-*
        --use-torch-optimizer-for-cpu-offload --no-pin-cpu-*""",
    "use --data-parallel-sharding-strategy": """
        --use-torch-fsdp2 --use-megatron-fsdp --torch-fsdp2-* --megatron-fsdp-* --fsdp-*
        --zero-stage --outer-dp-sharding-strategy --init-model-with-meta-device""",
    "gradients are accumulated and reduced in fp32; leave the flag out": """
        --accumulate-allreduce-grads-in-fp32 --grad-reduce-in-bf16 --ddp-average-in-collective
        --ddp-reduce-scatter-with-fp32-accumulation""",
    "FSDP2 overlaps and buckets what a replica sends; leave the flag out": """
        --overlap-grad-reduce --overlap-param-gather --overlap-param-gather-*
        --no-align-param-gather --ddp-bucket-size --ddp-num-buckets --ddp-pad-*
        --no-contiguous-buffers-in-local-ddp --use-nccl-ub --DDP-impl
        --no-gradient-reduce-div-fusion""",
    "use --tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER": """
        --vocab-file --merge-file --vocab-extra-ids --tiktoken-* --tokenizer-hf-*
        --tokenizer-prompt-format --trust-remote-code""",
    "the vocabulary is padded by --make-vocab-size-divisible-by": "--padded-vocab-size",
    "checkpoints have one format of their own, in any layout; use --save, --load": """
        --ckpt-* --no-ckpt-* --dist-ckpt-* --use-dist-ckpt --async-save --async-ckpt-*
        --async-strategy --auto-detect-ckpt-format --universal-checkpoint --use-checkpoint-args
        --pretrained-checkpoint --load-tag --no-load-lr-state --use-persistent-ckpt-worker
        --ckpt-assume-constant-structure --exit-on-missing-checkpoint --override-ckpt-iteration""",
    "a checkpoint always holds optimizer and random state; leave the flag out": """
        --no-save-optim --no-save-rng""",
    "schedules count steps; use --lr-decay-iters, --lr-warmup-iters or --lr-warmup-fraction": """
        --lr-decay-samples --lr-decay-tokens --lr-warmup-samples --lr-warmup-tokens
        --lr-warmup-init --lr-wsd-*""",
    "one learning rate for all weights; use --lr, --min-lr": """
        --decoupled-lr --decoupled-min-lr --head-lr-mult --mup-* --use-mup""",
    "weight decay is constant; use --weight-decay": """
        --start-weight-decay --end-weight-decay --weight-decay-incr-style
        --no-weight-decay-cond-type --apply-wd-to-qk-layernorm""",
    "the batch size is constant; use --global-batch-size": """
        --rampup-batch-size --step-batch-size-schedule --batch-size --eval-micro-batch-size
        --eval-global-batch-size""",
    "use --train-iters or --train-samples": "--train-tokens --train-data-exact-num-epochs",
    "use --norm-epsilon": "--layernorm-epsilon --apply-layernorm-1p",
    "use --group-query-attention --num-query-groups": "--num-key-value-heads",
    "heads share the hidden size out; use --num-attention-heads": "--kv-channels",
    "rotary embeddings over the whole head are the only kind; use --rotary-base": """
        --use-rotary-position-embeddings --rotary-percent --rotary-interleaved
        --rotary-scaling-* --rotary-seq-len-* --rope-* --use-rope-* --no-rope-* --yarn-*
        --no-yarn-* --no-position-embedding --relative-attention-*
        --rotary-position-embeddings-theta --mscale --mscale-*""",
    "the MLP is GELU, or SiLU with --swiglu": """
        --squared-relu --openai-gelu --onnx-safe --quick-geglu --glu-linear-offset
        --activation-func-*""",
    "the model is a Llama-style decoder; this part of others is not supported": """
        --qk-layernorm --qk-* --add-qkv-bias --multi-latent-attention --q-lora-rank
        --kv-lora-rank --v-head-dim --mla-* --mtp-* --window-* --softmax-type
        --attention-output-gate --apply-query-key-layer-scaling --no-query-key-layer-scaling
        --fp32-residual-connection --apply-residual-connection-post-layernorm --linear-*
        --mamba-* --hybrid-* --is-hybrid-model --heterogeneous-* --experimental-*
        --enable-experimental --spec --bert-* --retro-* --dsa-* --encoder-*
        --decoder-num-layers --decoder-seq-length --vision-* --dino-* --img-* --fim-* --ict-*
        --biencoder-* --sft --sft-*""",
    "--transformer-impl chooses the kernels; leave the flag out": """
        --no-*-fusion --use-flash-attn --use-flash-attn-* --attention-backend
        --attention-softmax-in-fp32 --cross-entropy-* --tp-comm-* --no-async-* --cuda-graph-*
        --enable-cuda-graph --te-rng-tracker --no-persist-layer-norm --disable-mem-efficient-ln
        --use-mcore-models --use-te --use-transformer-engine-op-fuser --defer-embedding-*
        --delay-wgrad-compute --wgrad-* --calculate-per-token-loss --deterministic-mode
        --use-fused-* --use-flashinfer-* --gradient-accumulation-fusion""",
    "weights begin normal with --init-method-std, layer by layer; leave the flag out": """
        --init-method-xavier-uniform --use-cpu-initialization --no-initialization
        --data-parallel-random-init --lazy-mpu-init""",
    "ranks and memory are arranged by the program; leave the flag out": """
        --use-tp-pp-dp-mapping --disable-gloo-process-groups --high-priority-stream-groups
        --manual-gc --manual-gc-interval --empty-unused-memory-level --remote-device""",
    "use --recompute-granularity, --recompute-method, --recompute-num-layers": """
        --recompute-activations --recompute-modules --checkpoint-activations
        --checkpoint-num-layers --checkpoint-in-cpu --deepspeed-activation-checkpointing
        --activations-checkpoint-method --distribute-saved-activations
        --distribute-checkpointed-activations --partition-activations
        --contigious-checkpointing --synchronize-each-layer --profile-backward
        --fine-grained-activation-offloading --offload-modules""",
    "stages hold equal numbers of layers; use --pipeline-model-parallel-size and "
    "--num-layers-per-virtual-pipeline-stage": """
        --num-virtual-stages-per-pipeline-rank --pipeline-model-parallel-layout
        --pipeline-model-parallel-split-rank --decoder-first-pipeline-num-layers
        --decoder-last-pipeline-num-layers --account-for-* --standalone-embedding-stage
        --microbatch-group-size-* --overlap-p2p-* --no-overlap-p2p-* --use-ring-exchange-p2p
        --no-scatter-gather-* --no-pipeline-parallel --num-partitions""",
    "use --tensor-model-parallel-size": "--model-parallel-size --tensor-parallel-num-*",
    "context parallelism is not supported; use --sequence-parallel": """
        --cp-comm-type --hierarchical-context-* --ds-sequence-parallel-*
        --force-ds-sequence-parallel""",
    "attention and loss cross the documents of a sample; leave the flag out": """
        --reset-position-ids --reset-attention-mask --eod-mask-loss
        --no-create-attention-mask-in-dataloader --dataloader-inter-document-masking""",
    "give the data by --data-path, or --train-data-path and its like": """
        --data-args-path --per-split-data-args-path --data-impl --dataloader-type
        --dataloader-* --no-mmap-bin-files --mmap-warmup --num-dataset-builder-threads
        --train-*-idx-path --train-desc-path --repeated-dataloader --no-data-sharding
        --data-efficiency-*""",
    "the log line and --tensorboard-dir hold what there is to see; leave the flag out": """
        --log-* --no-log-* --timing-* --logging-* --tensorboard-queue-size --wandb-save-dir
        --wandb-entity --one-logger-* --no-one-logger --profile --profile-* --nvtx-ranges
        --record-memory-* --memory-snapshot-* --no-barrier-with-level-1-timing --check-for-*
        --no-check-for-* --check-weight-hash-*""",
    "use --exit-duration-in-mins, --exit-signal-handler, and start again with --load": """
        --inprocess-* --rerun-mode --error-injection-* --enable-ft-package --calc-ft-timeouts
        --ft-* --adlr-* --*straggler* --result-rejected-*""",
    "it is the launcher's; give it before the script": """
        --nnodes --nproc-per-node --nproc_per_node --node_rank --node-rank --master_addr
        --master_port --master-addr --master-port --max-restarts --num_gpus --num_nodes
        --hostfile""",
    "this program pre-trains and does nothing else": """
        --inference --inference-* --ds-inference --rl-* --grpo-* --perform-rl-step --kd --kd-*
        --load-teacher --*-teacher --export-* --logits-* --num-tokens-to-generate --modelopt-*
        --skip-train --finetune-hf-dataset""",
    "state stays on the device unless --edit-offload-outer-state is given": """
        --on-device-local-sgd""",
    "use --edit-weight-temperature": "--local-sgd-weight-softmax-temperature",
    "use --edit-weighting": "--local-sgd-pseudo-grad-reducer --local-sgd-pseudo-grad-normalize",
}

REFUSED_FLAGS = {
    pattern: reason for reason, patterns in _REASONS.items() for pattern in patterns.split()
}
"""Flag, or pattern of flags (`--moe-*`) -> why it is refused and what to use."""


def why_refused(flag: str) -> str | None:
    """Returns why a flag of another program is not here, or None if no program known has it."""
    if flag in REFUSED_FLAGS:
        return REFUSED_FLAGS[flag]
    reasons = (why for pattern, why in REFUSED_FLAGS.items() if fnmatchcase(flag, pattern))
    return next(reasons, None)
