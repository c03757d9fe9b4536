"""What we ask of NCCL: failures that can be read, and traffic that makes room for the training."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch.distributed as dist

# A link between replicas is far slower than one inside a host: a few blocks of threads fill it, and
# the GPU keeps the other SMs while payloads are under way.
PAYLOAD_SMS = 8

# torch's defaults have changed from release to release; what troubleshooting.md describes needs
# these.
READABLE_FAILURES = {
    # The watchdog ends a process whose collective has failed. Otherwise nobody would find out.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    # The flight recorder keeps that many collectives, each with its group, and writes them to a
    # file when one fails.
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_NCCL_ENABLE_MONITORING": "1",
}
# Older names, which torch still reads.
_SYNONYMS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
}


def make_failures_readable(environment: MutableMapping[str, str]) -> None:
    """Sets what torch reads when it makes its first NCCL group, where a user has not set it."""
    for name, value in READABLE_FAILURES.items():
        if _SYNONYMS.get(name) not in environment:
            environment.setdefault(name, value)


def warn_of_one_queue(backend: str, environment: Mapping[str, str]) -> None:
    """Prints a line where an environment made for another way of overlapping leaves none here."""
    if backend == dist.Backend.NCCL and environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        print(
            "warning: CUDA_DEVICE_MAX_CONNECTIONS is 1: all streams of a GPU share one queue, and "
            "synchronisations and gathers of parameters delay the computation; unset it, or with "
            "tensor parallelism measure both",
            flush=True,
        )


def payload_options() -> Any | None:
    """Options of the groups that carry payloads; None where the default group is not NCCL's.

    Their kernels are small and must start when their turn has come, not when the queue of the
    training has run dry: high priority. In return they get few SMs.
    """
    if dist.get_backend() != dist.Backend.NCCL:
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = PAYLOAD_SMS
    return options
