"""EDiT: local-SGD training of Megatron-core models with layer-wise synchronisation."""

import warnings

__version__ = "0.1.0"

# On import megatron-core warns on every rank about each optional kernel that is not installed.
warnings.filterwarnings("ignore", module=r"megatron\.core")
