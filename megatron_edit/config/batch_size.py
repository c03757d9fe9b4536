"""Batch arithmetic: global batch = micro batch x accumulation x shard size x replicas."""

from dataclasses import dataclass

from megatron_edit.errors import ConfigurationError


@dataclass(frozen=True)
class Batch:
    """The three batch numbers; None = not given.

    Attributes:
        micro: Samples of one forward pass of one data-parallel rank.
        accumulation: Micro-batches of one step.
        total: Samples of one step over all replicas.
    """

    micro: int | None
    accumulation: int | None
    total: int | None


def complete_batch(batch: Batch, shard_size: int, replicas: int, layout: str) -> Batch:
    """Fills in the missing batch number.

    With the micro batch alone the accumulation is 1.

    Args:
        batch: What the user gave.
        shard_size: Data-parallel ranks of a replica.
        replicas: Number of replicas.
        layout: The world in words, for the error message.

    Raises:
        ConfigurationError: The numbers do not multiply; the message has a value that does.
    """
    mesh = f"shard size {shard_size} x replicas {replicas}"
    ranks = shard_size * replicas
    micro, accumulation, total = batch.micro, batch.accumulation, batch.total
    if total is None and micro is not None:
        return Batch(micro, accumulation or 1, micro * (accumulation or 1) * ranks)
    if total is None or (micro is None and accumulation is None):
        raise ConfigurationError(
            "the micro batch size is missing; give --micro-batch-size or "
            "train_micro_batch_size_per_gpu"
        )
    terms = []
    if micro is not None:
        terms.append(f"micro batch size {micro}")
    if accumulation is not None:
        terms.append(f"accumulation {accumulation}")
    unit = (micro or 1) * (accumulation or 1) * ranks
    product = f"{' x '.join(terms)} x {mesh} = {unit} ({layout})"
    if total % unit:
        raise ConfigurationError(
            f"global batch size {total} is not a multiple of {product}; "
            f"nearest that works: {max(1, round(total / unit)) * unit}"
        )
    if micro is not None and accumulation is not None and total != unit:
        raise ConfigurationError(
            f"global batch size {total} is not {product}; a global batch size of {unit} works, or "
            f"gradient_accumulation_steps {total // (micro * ranks)}"
        )
    return Batch(micro or total // unit, accumulation or total // unit, total)
