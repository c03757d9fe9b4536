"""Replicas of megatron-core models, sharded by FSDP2."""
