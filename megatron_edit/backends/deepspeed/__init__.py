"""Replicas of any model, sharded by DeepSpeed's ZeRO."""
