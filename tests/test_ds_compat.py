"""The names of DeepSpeed and torch that are not public are still there and do what we use."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.comm import comms_logger
from deepspeed.ops import __compatible_ops__
from distributed import free_port, run_ranks

from megatron_edit.backends.megatron.mesh import build_mesh
from megatron_edit.errors import ConfigurationError
from megatron_edit.platform import ds_compat


def _store() -> tuple[str, bool]:
    store = ds_compat.default_store()
    store.set(f"from {dist.get_rank()}", "here")
    store.wait([f"from {1 - dist.get_rank()}"], timedelta(seconds=20))
    # ExitAgreement needs these of it.
    return store.multi_get(["from 0"])[0].decode(), store.has_extended_api()


def test_the_default_store_is_shared_by_the_ranks() -> None:
    assert run_ranks(_store, 2) == [("here", True)] * 2


def test_the_op_that_deepspeed_would_compile_goes_by_that_name() -> None:
    if torch.cuda.is_available():
        pytest.skip("the op is the CPU's")
    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    assert builder.NAME == "deepspeed_shm_comm"
    assert builder.NAME in __compatible_ops__


def _join() -> tuple[str, bool]:
    """What init_distributed does with the environment of a launcher, and without one."""

    def no_build(*_: Any) -> None:
        raise AssertionError("DeepSpeed compiles an op")

    builder = type(get_accelerator().create_op_builder("ShareMemCommBuilder"))
    builder.load = no_build
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    ds_compat.init_distributed("gloo", 1)
    assert deepspeed.comm.is_initialized()
    return f"{dist.get_rank()} of {dist.get_world_size()}", __compatible_ops__["deepspeed_shm_comm"]


def test_joining_compiles_nothing_and_needs_no_launcher() -> None:
    assert run_ranks(_join, 1) == [("0 of 1", False)]


def _join_with_a_gpu() -> list[str]:
    """Keywords of the calls by which a rank joins, where DeepSpeed believes in a GPU."""
    dist.destroy_process_group()
    accelerator = get_accelerator()
    accelerator.device_name = lambda index=None: "cuda"  # type: ignore[method-assign]
    accelerator.device = lambda index=None: torch.device("cuda", index)  # type: ignore[method-assign]
    keywords: list[str] = []
    join = dist.init_process_group

    def init_process_group(backend: str, device_id: Any = None, **others: Any) -> None:
        keywords.extend(others)
        keywords.extend(["device_id"] if device_id is not None else [])
        join(backend, **others)

    dist.init_process_group = init_process_group
    ds_compat.init_distributed("gloo", 1)
    assert deepspeed.comm.is_initialized()
    return keywords


def test_joining_binds_no_gpu() -> None:
    # Bound, each group that megatron-core makes would be a collective of the whole world.
    assert run_ranks(_join_with_a_gpu, 2) == [["timeout"]] * 2


def _join_at(port: int) -> str:
    dist.destroy_process_group()
    os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_PORT=str(port))
    try:
        ds_compat.init_distributed("gloo", 1)
    except ConfigurationError as error:
        return str(error)
    return "joined"


def test_a_port_in_use_is_a_users_mistake() -> None:
    with socket.socket() as listener:
        listener.bind(("", free_port()))
        listener.listen()
        (message,) = run_ranks(_join_at, 1, listener.getsockname()[1])
    assert message.startswith("MASTER_PORT is in use on this host")
    assert "--master_port" in message


JSON = {"comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False}}


def _log_collectives() -> tuple[list[str], bool]:
    ds_compat.init_distributed("gloo", 1)
    assert not ds_compat.configure_comms_logger({})
    on = ds_compat.configure_comms_logger(JSON)
    mesh = build_mesh(2, timeout_minutes=1)
    mesh.peers.on_collective = ds_compat.log_collective
    for _ in range(3):
        mesh.peers.all_reduce(torch.ones(1024), "a test").wait()
    mesh.peers.all_gather(torch.ones(4), "a test")
    rows = [
        f"{operation} {size} x{len(figures[1])}"
        for operation, sizes in comms_logger.comms_dict.items()
        for size, figures in sizes.items()
    ]
    ds_compat.print_comms_summary()
    return rows, on


def test_collectives_between_replicas_are_logged() -> None:
    rows, on = run_ranks(_log_collectives, 2)[0]
    assert on
    assert set(rows) == {"all_reduce 4096 x3", "all_gather_into_tensor 32 x1"}


def _monitors(json: dict[str, Any]) -> list[str]:
    ds_compat.init_distributed("gloo", 1)
    master = ds_compat.monitor_master(json, "a run")
    kinds = ["tb_monitor", "csv_monitor", "wandb_monitor"]
    return [kind for kind in kinds if getattr(master, kind) is not None]


def test_the_monitor_master_reads_the_sections_and_writes_on_rank_0(tmp_path: Any) -> None:
    json = {
        "tensorboard": {"enabled": True, "output_path": str(tmp_path), "job_name": "a"},
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "b"},
    }
    assert run_ranks(_monitors, 2, json) == [["tb_monitor", "csv_monitor"], []]
    assert run_ranks(_monitors, 1, {}) == [[]]


def _wandb(run: str) -> dict[str, Any]:
    """With a stand-in for wandb, which is not installed."""
    import sys
    from types import SimpleNamespace

    seen: dict[str, Any] = {}

    def init(**settings: Any) -> None:
        seen.update(settings, name=os.environ.get("WANDB_NAME"))

    def log(data: dict[str, float], step: int, commit: Any) -> None:
        seen[f"{step}"] = data

    sys.modules["wandb"] = SimpleNamespace(init=init, log=log)  # type: ignore[assignment]
    ds_compat.init_distributed("gloo", 1)
    master = ds_compat.monitor_master({"wandb": {"enabled": True, "project": "p"}}, run)
    master.write_events([("lm loss", 1.5, 7)])
    return seen


def test_wandb_gets_project_and_name_of_the_run() -> None:
    (seen,) = run_ranks(_wandb, 1, "my run")
    assert (seen["project"], seen["name"], seen["7"]) == ("p", "my run", {"lm loss": 1.5})
    (seen,) = run_ranks(_wandb, 1, "")
    assert seen["name"] is None
