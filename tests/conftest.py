"""Keeps the parent process of forked ranks free of worker threads."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
# No process of a test may look for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

torch.set_num_threads(1)
