"""What must hold of the parameters that become the first anchor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_edit.engine import fingerprint
from megatron_edit.engine.backend import Unit
from megatron_edit.replicas.mesh import Mesh


def check_first_anchor(units: Sequence[Unit], mesh: Mesh, step: int) -> None:
    """Refuses parameters on which the replicas do not agree bit for bit, or that are not finite.

    On the host, and on every rank together: those whose own shards are well would wait for the
    others in their next collective.

    Args:
        units: This rank's units.
        mesh: The mesh.
        step: Inner steps done, for the message.

    Raises:
        RuntimeError: The replicas hold different parameters, or such as are not finite.
    """
    masters = [local for unit in units for local in unit.locals]
    hashes = torch.stack([fingerprint.position_hash(master) for master in masters])
    gathered = mesh.peers.all_gather(hashes, "comparing the parameters of the replicas")
    if _anywhere((gathered != gathered[0]).any(), mesh):
        raise RuntimeError(
            f"the replicas hold different parameters at step {step}, where they should agree: same "
            "seed and checkpoint on all of them?"
        )
    norms = torch.stack(torch._foreach_norm(masters))
    if _anywhere((~torch.isfinite(norms)).any(), mesh):
        raise RuntimeError(
            f"the parameters are not finite at step {step}, where they would become the first "
            "anchor"
        )


def _anywhere(condition: torch.Tensor, mesh: Mesh) -> bool:
    """Whether a 0-dim condition holds on some rank of the replica."""
    found = condition.int()
    dist.all_reduce(found, dist.ReduceOp.MAX, group=mesh.worker_group)
    return bool(found)
