"""Model chunks of megatron-core as the engine sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.distributed.fsdp import FSDPModule

from megatron_edit.backends.megatron.data_parallel import EDiTDataParallel
from megatron_edit.backends.megatron.replica_average import ReplicaAverage
from megatron_edit.backends.megatron.units import MegatronUnit, unit_names
from megatron_edit.engine.backend import Unit
from megatron_edit.replicas.mesh import Mesh
from megatron_edit.replicas.peers import PeerGroup


class MegatronBackend:
    """The engine's :class:`~megatron_edit.engine.backend.Backend` of this rank's model chunks.

    Args:
        chunks: This rank's wrapped model chunks, in the order of their forward.
        mesh: The mesh.
        gradient_dtype: Type in which gradients cross between replicas, ``fp32`` or ``bf16``.
    """

    lands_in_forward = True

    def __init__(
        self, chunks: Sequence[EDiTDataParallel], mesh: Mesh, gradient_dtype: str = "fp32"
    ) -> None:
        self._chunks, self._mesh = chunks, mesh
        self._average = ReplicaAverage(chunks, mesh, gradient_dtype)
        model = chunks[0].module
        tied = model.share_embeddings_and_output_weights
        self.units: list[MegatronUnit] = [unit for chunk in chunks for unit in chunk.units]
        self.unit_names = unit_names(model.config.num_layers, tied)
        self.has_spanning_unit = tied and mesh.pipeline_parallel > 1

    def before_each_unit(
        self,
        before_unit: Callable[[Unit], None],
        after_forward: Callable[[Sequence[Unit]], None],
    ) -> None:
        """Hooks the units of all chunks."""
        for chunk in self._chunks:
            chunk.before_each_unit(before_unit, after_forward)

    def release(self) -> None:
        """Frees gathered parameters."""
        for chunk in self._chunks:
            chunk.release()

    def gather(self, unit: Unit) -> None:
        """Starts FSDP2's gather on the current stream.

        Left to itself FSDP2 gathers on a stream of its own, which waits for the optimizer at the
        start of the step but not for what happens to the shards later.
        """
        assert isinstance(unit, MegatronUnit), unit
        module = unit.modules[0]
        if isinstance(module, FSDPModule) and unit.locals[0].is_cuda:
            module.unshard(async_op=True)

    def expect_average(self, peers: PeerGroup) -> None:
        """Has gradient shards cross behind the last backward of the step that begins."""
        self._average.expect(peers)

    def average_gradients(self, peers: PeerGroup) -> None:
        """Averages the gradient shards."""
        self._average.finish(peers)

    def flush(self) -> None:
        """Nothing to do: FSDP2 gathers from the masters themselves."""
