"""Where ranks stand: a replica is one contiguous block, and every group lies as it should."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from megatron.core import parallel_state

from megatron_edit.backends.megatron.mesh import build_mesh, destroy_mesh
from megatron_edit.replicas import mesh as replicas_mesh
from megatron_edit.replicas.mesh import Mesh

GROUPS = ("worker_group", "stage_group", "shard_group", "tensor_group", "pipeline_group")


def _ranks(mesh: Mesh) -> dict[str, list[int]]:
    groups = {name: dist.get_process_group_ranks(getattr(mesh, name)) for name in GROUPS}
    return {**groups, "peers": mesh.peers.ranks}


def _describe(layouts: list[tuple[int, int, int]]) -> list[dict[str, Any]]:
    """Groups and coordinates of this rank in layouts ``(replicas, TP, PP)``, one after another."""
    described = []
    for replicas, tensor_parallel, pipeline_parallel in layouts:
        mesh = build_mesh(replicas, tensor_parallel, pipeline_parallel, timeout_minutes=1)
        alone = replicas_mesh.build_mesh(
            replicas, tensor_parallel, pipeline_parallel, timeout_minutes=1
        )
        assert _ranks(alone) == _ranks(mesh), "without megatron-core the groups are others"
        described.append(
            {
                **_ranks(mesh),
                "rank in peers": mesh.peers.rank,
                "replica": mesh.replica,
                "sizes": (mesh.replicas, mesh.pipeline_parallel, mesh.shard, mesh.tensor_parallel),
                "place": (mesh.pipeline_rank, mesh.shard_rank, mesh.tensor_rank),
                "last stage": mesh.is_last_stage,
                "text": mesh.describe(),
            }
        )
        destroy_mesh()
    return described


# (replicas, TP, PP) -> groups by name, each as the list of all its groups.
EIGHT = {
    (2, 1, 2): {
        "sizes": (2, 2, 2, 1),
        "worker_group": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "stage_group": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "shard_group": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "tensor_group": [[rank] for rank in range(8)],
        "pipeline_group": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "peers": [[0, 4], [1, 5], [2, 6], [3, 7]],
    },
    (2, 2, 2): {
        "sizes": (2, 2, 1, 2),
        "worker_group": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "stage_group": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "shard_group": [[rank] for rank in range(8)],
        "tensor_group": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "pipeline_group": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "peers": [[0, 4], [1, 5], [2, 6], [3, 7]],
    },
    (2, 2, 1): {
        "sizes": (2, 1, 2, 2),
        "worker_group": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "stage_group": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "shard_group": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "tensor_group": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "pipeline_group": [[rank] for rank in range(8)],
        "peers": [[0, 4], [1, 5], [2, 6], [3, 7]],
    },
}
FOUR = {
    (4, 1, 1): {
        "sizes": (4, 1, 1, 1),
        "worker_group": [[rank] for rank in range(4)],
        "stage_group": [[rank] for rank in range(4)],
        "shard_group": [[rank] for rank in range(4)],
        "tensor_group": [[rank] for rank in range(4)],
        "pipeline_group": [[rank] for rank in range(4)],
        "peers": [[0, 1, 2, 3]],
    },
    (1, 1, 1): {
        "sizes": (1, 1, 4, 1),
        "worker_group": [[0, 1, 2, 3]],
        "stage_group": [[0, 1, 2, 3]],
        "shard_group": [[0, 1, 2, 3]],
        "tensor_group": [[rank] for rank in range(4)],
        "pipeline_group": [[rank] for rank in range(4)],
        "peers": [[rank] for rank in range(4)],
    },
}


@pytest.mark.parametrize("expected", [FOUR, EIGHT], ids=["4 ranks", "8 ranks"])
def test_groups(expected: dict[tuple[int, int, int], dict[str, Any]]) -> None:
    layouts = list(expected)
    world = 8 if expected is EIGHT else 4
    results = run_ranks(_describe, world, layouts)
    for number, layout in enumerate(layouts):
        groups = expected[layout]
        replicas, pipeline_parallel, _, tensor_parallel = groups["sizes"]
        size = world // replicas
        for rank, described in enumerate(described[number] for described in results):
            for name in (*GROUPS, "peers"):
                (own,) = [group for group in groups[name] if rank in group]
                assert described[name] == own, (layout, rank, name)
            assert described["sizes"] == groups["sizes"]
            assert described["replica"] == described["rank in peers"] == rank // size
            assert described["worker_group"] == list(
                range(rank // size * size, (rank // size + 1) * size)
            )
            stage, shard_rank, tensor_rank = described["place"]
            place = (shard_rank * pipeline_parallel + stage) * tensor_parallel + tensor_rank
            assert place == rank % size
            assert described["last stage"] == (stage == pipeline_parallel - 1)


def test_first_line_of_a_run() -> None:
    texts = {rank[0]["text"] for rank in run_ranks(_describe, 4, [(2, 1, 2)])}
    assert texts == {
        "mesh: 1 host(s), 4 rank(s) = 2 replica(s) x PP 2 x S 1 x TP 1; "
        "replica r is ranks r*2 to r*2+1"
    }


@pytest.mark.parametrize(("variable", "hosts"), [("CROSS_SIZE", 3), ("GROUP_WORLD_SIZE", 2)])
def test_first_line_names_the_launchers_hosts(
    monkeypatch: pytest.MonkeyPatch, variable: str, hosts: int
) -> None:
    monkeypatch.setenv(variable, str(hosts))
    text = run_ranks(_describe, 1, [(1, 1, 1)])[0][0]["text"]
    assert text.startswith(f"mesh: {hosts} host(s), 1 rank(s)")


def _refused() -> list[str]:
    messages = []
    for replicas, tensor_parallel, pipeline_parallel in ((2, 1, 1), (1, 2, 1), (1, 1, 2)):
        try:
            build_mesh(replicas, tensor_parallel, pipeline_parallel)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_a_world_that_does_not_divide_is_refused() -> None:
    assert run_ranks(_refused, 3)[0] == [
        "world size 3 is not divisible by replicas 2 x TP 1 x PP 1",
        "world size 3 is not divisible by replicas 1 x TP 2 x PP 1",
        "world size 3 is not divisible by replicas 1 x TP 1 x PP 2",
    ]


def _collectives_without_megatron() -> dict[str, Any]:
    mesh = replicas_mesh.build_mesh(2, tensor_parallel=2, timeout_minutes=1)
    rank = torch.tensor(float(dist.get_rank()))
    everyone = mesh.peers.all_gather(rank.reshape(1), "gathering ranks")
    total = rank.clone()
    mesh.peers.all_reduce(total, "summing ranks").wait()
    return {
        "parallel state": parallel_state.is_initialized(),
        "tensor": float(mesh.sum_in_order(rank, mesh.tensor_group)),
        "shard": float(mesh.sum_in_order(rank, mesh.shard_group)),
        "peers": everyone.flatten().tolist(),
        "sum": float(total),
        "host": mesh.peers.all_gather_on_host([float(rank)], "gathering ranks on the host"),
        "worker host": dist.get_process_group_ranks(mesh.worker_host_group),
    }


def test_a_mesh_without_megatron() -> None:
    results = run_ranks(_collectives_without_megatron, 4)
    for rank, result in enumerate(results):
        first = rank // 2 * 2
        assert result == {
            "parallel state": False,
            "tensor": first + first + 1.0,
            "shard": float(rank),
            "peers": [rank % 2, rank % 2 + 2.0],
            "sum": rank % 2 * 2 + 2.0,
            "host": [[rank % 2], [rank % 2 + 2.0]],
            "worker host": [first, first + 1],
        }


def _given_wrongly() -> str:
    others = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]], group_desc="tensor")[0]
    try:
        replicas_mesh.build_mesh(2, pipeline_parallel=2, given={"tensor": others})
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_group_of_other_ranks_is_refused() -> None:
    assert run_ranks(_given_wrongly, 4)[2] == (
        "the tensor group has ranks [2, 3]; the layout divides [[0], [1], [2], [3]]"
    )
