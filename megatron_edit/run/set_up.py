"""The start of a rank."""

from __future__ import annotations

import os
from argparse import Namespace

import torch

from megatron_edit.backends.megatron.mesh import build_mesh
from megatron_edit.config.arguments import describe
from megatron_edit.platform import cpu, ds_compat, nccl
from megatron_edit.replicas.mesh import Mesh


def set_up(args: Namespace) -> Mesh:
    """Joins the other ranks and says what runs where."""
    if torch.cuda.is_available():
        torch.cuda.set_device(args.local_rank)
    cpu.install()
    ds_compat.init_distributed(args.distributed_backend, args.distributed_timeout_minutes)
    mesh = build_mesh(
        args.replicas,
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        args.distributed_timeout_minutes,
    )
    if ds_compat.configure_comms_logger(args.ds_config):
        mesh.peers.on_collective = ds_compat.log_collective
    if args.rank == 0:
        print(mesh.describe(), flush=True)
        nccl.warn_of_one_queue(args.distributed_backend, os.environ)
        print(describe(args), flush=True)
    return mesh
