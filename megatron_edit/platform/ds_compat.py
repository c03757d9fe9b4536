"""What we use of DeepSpeed, and of torch, beyond their public interface; each name once."""

from __future__ import annotations

import logging
import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_edit.errors import ConfigurationError
from megatron_edit.platform import nccl


def name_accelerator() -> None:
    """Named before its import, DeepSpeed does not warn on every rank that it found none."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def init_distributed(backend: str, timeout_minutes: float) -> None:
    """Joins the process group and has DeepSpeed adopt it, under any launcher that sets RANK and so
    on.

    DeepSpeed's own call would bind the process to its GPU. With NCCL every group that is made
    afterwards, by megatron-core several for each rank of the world, is then a split of the world's
    communicator in which all ranks take part. Unbound, making a group costs no message, and a
    communicator is made by its members when they first use it.

    Args:
        backend: ``nccl`` or ``gloo``.
        timeout_minutes: Bound of every wait in the default group.

    Raises:
        ConfigurationError: The master port is in use.
    """
    name_accelerator()
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    if "RANK" not in os.environ:
        _be_the_only_rank()
    if backend == dist.Backend.NCCL:
        nccl.make_failures_readable(os.environ)
    compile_nothing_for_cpu()
    try:
        if not dist.is_initialized():
            dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes))
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error) and "address already in use" not in str(error):
            raise
        raise ConfigurationError(
            "MASTER_PORT is in use on this host; allowed: a free port; choose another with "
            "--master_port of the launcher"
        ) from None
    deepspeed.init_distributed(dist_backend=backend, verbose=False)


def compile_nothing_for_cpu() -> None:
    """Without a GPU DeepSpeed compiles an operator when ranks join, for over a minute and with a
    C++ compiler; nothing here uses it."""
    if not torch.cuda.is_available():
        name_accelerator()
        from deepspeed.ops import __compatible_ops__

        __compatible_ops__["deepspeed_shm_comm"] = False


def _be_the_only_rank() -> None:
    """Without a launcher DeepSpeed would look for MPI."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )


def default_store() -> dist.Store:
    """The key-value store by which the default process group was made."""
    return dist.distributed_c10d._get_default_store()


def monitor_master(ds_config: dict[str, Any], wandb_run: str = "") -> Any:
    """DeepSpeed's MonitorMaster (TensorBoard, csv, wandb) for the sections of a DeepSpeed JSON.

    Args:
        ds_config: The JSON.
        wandb_run: Name of the run on Weights & Biases; "" leaves it to choose one.
    """
    from deepspeed.monitor.config import get_monitor_config
    from deepspeed.monitor.monitor import MonitorMaster

    if wandb_run:
        # DeepSpeed passes no name on; wandb.init reads this.
        os.environ["WANDB_NAME"] = wandb_run

    return MonitorMaster(get_monitor_config(ds_config))


def configure_comms_logger(ds_config: dict[str, Any]) -> bool:
    """Sets DeepSpeed's comms logger up as the JSON says; returns whether it is on."""
    section = ds_config.get("comms_logger", {})
    if not section.get("enabled", False):
        return False
    from deepspeed.comm.comm import comms_logger
    from deepspeed.comm.config import DeepSpeedCommsConfig

    comms_logger.configure(DeepSpeedCommsConfig({"comms_logger": section}))
    return True


def log_collective(operation: str, milliseconds: float, size: int) -> None:
    """Adds one collective between replicas to DeepSpeed's comms logger.

    Args:
        operation: ``all_reduce``, ``all_gather_into_tensor`` or ``all_to_all_single``.
        milliseconds: From its start until its result was waited for.
        size: Bytes of the tensor, as DeepSpeed counts them.
    """
    from deepspeed.comm.comm import comms_logger

    comms_logger.append(operation, operation, milliseconds, size)


def print_comms_summary() -> None:
    """Prints DeepSpeed's table of logged collectives; to be called on all ranks."""
    import deepspeed.comm

    deepspeed.comm.log_summary()
