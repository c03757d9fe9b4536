"""Saving, resuming, and whole models from checkpoints."""
