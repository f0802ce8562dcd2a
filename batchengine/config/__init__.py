"""Settings of `serve` with their bounds, and the loader that fills them.

Use `load`; everything else here is what it returns, asks or explains.
"""

from batchengine.config.loading import (
    KEY_CHARS_MIN,
    check_model_file,
    disk_warnings,
    is_key,
    limit_warnings,
    load,
    openness,
    warnings,
)
from batchengine.config.machine import INSTANCES, Machine, disk_bytes
from batchengine.config.settings import (
    CONTEXT_TOKENS_MIN,
    ApiKey,
    ClassConfig,
    Config,
    LaneConfig,
    LimitsConfig,
    ModelConfig,
    PeerConfig,
    PeersConfig,
    RouterConfig,
    ServerConfig,
    SlaConfig,
    StoreConfig,
)

__all__ = [
    "CONTEXT_TOKENS_MIN",
    "INSTANCES",
    "KEY_CHARS_MIN",
    "ApiKey",
    "ClassConfig",
    "Config",
    "LaneConfig",
    "LimitsConfig",
    "Machine",
    "ModelConfig",
    "PeerConfig",
    "PeersConfig",
    "RouterConfig",
    "ServerConfig",
    "SlaConfig",
    "StoreConfig",
    "check_model_file",
    "disk_bytes",
    "disk_warnings",
    "is_key",
    "limit_warnings",
    "load",
    "openness",
    "warnings",
]
