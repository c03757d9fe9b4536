"""EDiT: local-SGD training of Megatron-core models with layer-wise synchronisation.

`__all__` has the public names. Each is imported on its first use, for torch and megatron-core take
seconds that a mistyped flag should not.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_edit.backends.megatron.build import get_edit_model_and_optimizer
    from megatron_edit.backends.megatron.data_parallel import EDiTDataParallel
    from megatron_edit.backends.megatron.mesh import build_mesh, destroy_mesh
    from megatron_edit.backends.megatron.optimizer import EDiTDistributedOptimizer
    from megatron_edit.config.arguments import parse_args
    from megatron_edit.config.edit_config import EditConfig
    from megatron_edit.engine.record import SyncRecord
    from megatron_edit.engine.sync_engine import SyncEngine
    from megatron_edit.errors import ConfigurationError
    from megatron_edit.replicas.mesh import Mesh
    from megatron_edit.run.huggingface import enable_edit
    from megatron_edit.run.zero import EDiT

__version__ = "0.1.0"

__all__ = [
    "ConfigurationError",
    "EDiT",
    "EDiTDataParallel",
    "EDiTDistributedOptimizer",
    "EditConfig",
    "Mesh",
    "SyncEngine",
    "SyncRecord",
    "build_mesh",
    "destroy_mesh",
    "enable_edit",
    "get_edit_model_and_optimizer",
    "parse_args",
]

_HOMES = {
    "ConfigurationError": "errors",
    "EDiT": "run.zero",
    "EDiTDataParallel": "backends.megatron.data_parallel",
    "EDiTDistributedOptimizer": "backends.megatron.optimizer",
    "EditConfig": "config.edit_config",
    "Mesh": "replicas.mesh",
    "SyncEngine": "engine.sync_engine",
    "SyncRecord": "engine.record",
    "build_mesh": "backends.megatron.mesh",
    "destroy_mesh": "backends.megatron.mesh",
    "enable_edit": "run.huggingface",
    "get_edit_model_and_optimizer": "backends.megatron.build",
    "parse_args": "config.arguments",
}

# On import megatron-core warns on every rank about each optional kernel that is not installed.
warnings.filterwarnings("ignore", module=r"megatron\.core")


def __getattr__(name: str) -> object:
    """Imports a public name."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
