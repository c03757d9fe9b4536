"""The arithmetic of ranks: world = R replicas x S x PP x TP, the tensor-parallel rank innermost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Coordinate = Literal["replica", "shard", "stage", "tensor"]


class Place(NamedTuple):
    """Where a rank stands, each counted from 0."""

    replica: int
    shard: int
    stage: int
    tensor: int


@dataclass(frozen=True)
class Layout:
    """How many ranks stand along each coordinate.

    Attributes:
        replicas: R, the number of full copies of the model.
        shard: S, ranks that shard parameters, gradients and optimizer state of one stage.
        pipeline_parallel: PP, pipeline stages of a replica.
        tensor_parallel: TP.
    """

    replicas: int
    shard: int
    pipeline_parallel: int
    tensor_parallel: int

    @classmethod
    def of(cls, world: int, replicas: int, tensor_parallel: int, pipeline_parallel: int) -> Layout:
        """The layout of a world, in which S is what the others leave.

        Raises:
            ValueError: The world size is not divisible by replicas x TP x PP.
        """
        shard, rest = divmod(world, replicas * tensor_parallel * pipeline_parallel)
        if rest:
            raise ValueError(
                f"world size {world} is not divisible by replicas {replicas} x TP "
                f"{tensor_parallel} x PP {pipeline_parallel}"
            )
        return cls(replicas, shard, pipeline_parallel, tensor_parallel)

    @property
    def world_size(self) -> int:
        """Ranks of all replicas."""
        return self.replicas * self.shard * self.pipeline_parallel * self.tensor_parallel

    def place(self, rank: int) -> Place:
        """Where a rank of the world stands."""
        rank, tensor = divmod(rank, self.tensor_parallel)
        rank, stage = divmod(rank, self.pipeline_parallel)
        replica, shard = divmod(rank, self.shard)
        return Place(replica, shard, stage, tensor)

    def partition(self, *shared: Coordinate) -> list[list[int]]:
        """Divides the world into groups of ranks.

        Args:
            shared: The coordinates that the ranks of a group have in common.

        Returns:
            The groups; their ranks ascend, and so do their first ranks.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.place(rank)
            key = tuple(getattr(place, coordinate) for coordinate in shared)
            groups.setdefault(key, []).append(rank)
        return list(groups.values())
