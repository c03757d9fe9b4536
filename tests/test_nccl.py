"""What NCCL is asked for, without NCCL: options, environment, and how many groups are made."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_edit.backends.megatron.mesh import build_mesh
from megatron_edit.platform import nccl
from megatron_edit.replicas import mesh as replicas_mesh


class FakeOptions:
    """Stands for ``ProcessGroupNCCL.Options``, which a build for the CPU lacks."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(max_ctas=None)


def test_payloads_have_priority_and_few_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(
        dist, "ProcessGroupNCCL", SimpleNamespace(Options=FakeOptions), raising=False
    )
    options = nccl.payload_options()
    assert options is not None
    assert options.is_high_priority_stream
    assert options.config.max_ctas == nccl.PAYLOAD_SMS == 8


def test_what_a_user_has_set_stays() -> None:
    environment = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "7", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    nccl.make_failures_readable(environment)
    assert environment == {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "7",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_NCCL_ENABLE_MONITORING": "1",
    }


@pytest.mark.parametrize(
    ("backend", "connections", "warned"),
    [("nccl", "1", True), ("nccl", "8", False), ("nccl", None, False), ("gloo", "1", False)],
)
def test_one_queue_for_all_streams(
    backend: str, connections: str | None, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {} if connections is None else {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
    nccl.warn_of_one_queue(backend, environment)
    text = capsys.readouterr().out
    assert text.startswith("warning: CUDA_DEVICE_MAX_CONNECTIONS is 1") == warned
    assert text.count("\n") == warned


# --- groups, in a world that is only pretended


def _pretend(world: int) -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)


def _groups_of_a_mesh() -> list[tuple[str, str]]:
    _pretend(16)
    build_mesh(4, tensor_parallel=2, pipeline_parallel=2)
    return [
        (dist.get_backend(group), group.group_desc) for group in dist.distributed_c10d._world.pg_map
    ]


def test_groups_say_what_they_are_for_and_need_no_host() -> None:
    (groups,) = run_ranks(_groups_of_a_mesh, 1)
    # A rank on a GPU would otherwise open connections to all others of its groups over gloo.
    assert {backend for backend, _ in groups} == {"fake"}
    names = [name for _, name in groups]
    for name in ("stage", "payload between replicas", "scalars between replicas"):
        assert names.count(name) == 1
    assert "undefined" not in names[1:]


def _calls_where_the_device_is_bound() -> list[tuple[str, int]]:
    _pretend(64)
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    calls = []

    def split_group(**keywords: Any) -> Any:
        calls.append((keywords["group_desc"], len(keywords["split_ranks"])))
        assert keywords["timeout"] == timedelta(minutes=10)
        return dist.group.WORLD

    def no_group(*_: Any, **__: Any) -> None:
        raise AssertionError("a group is made by itself")

    dist.split_group = split_group
    dist.new_subgroups_by_enumeration = no_group
    replicas_mesh.build_mesh(4, tensor_parallel=2, pipeline_parallel=2)
    return calls


def test_a_bound_device_is_split_once_for_each_kind_of_group() -> None:
    assert run_ranks(_calls_where_the_device_is_bound, 1) == [
        [
            ("worker", 4),
            ("stage", 8),
            ("shard", 16),
            ("tensor", 32),
            ("pipeline", 32),
            ("payload between replicas", 16),
            ("scalars between replicas", 16),
        ]
    ]
