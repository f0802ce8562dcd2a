"""What one key may take of a limit that all keys share, and the classes that it may ask for.

Pure functions of the configuration. A tenant is the name of a key; "" = no keys are configured.
"""

from __future__ import annotations

from batchengine.config.settings import ApiKey, Config
from batchengine.core import SlaClass


def is_alone(config: Config, tenant: str) -> bool:
    """Whether this tenant is the only one that can have requests."""
    return {key.name for key in config.auth} <= {tenant} and (tenant == "" or bool(config.auth))


def key_of(config: Config, tenant: str) -> ApiKey:
    """The key of a tenant; one with default settings if there is none of that name."""
    return next((key for key in config.auth if key.name == tenant), ApiKey(tenant))


def may_take(config: Config, tenant: str, held: int, limit: int, taken: int, own_max: int) -> bool:
    """Whether a tenant that holds `held` of `limit` places may take one more of the free ones.

    Without a maximum of its own (`own_max` 0) it may hold as many as stay free, times its weight
    over the largest: one key takes half, two a third each, and a place is left for the next key.
    """
    free = limit - taken
    if own_max:
        return free > 0 and held < own_max
    largest = max((key.weight for key in config.auth), default=1.0)
    return held < free * min(1.0, key_of(config, tenant).weight / largest)


def class_max(config: Config, tenant: str) -> SlaClass | None:
    """The most urgent class that requests of a tenant may have; None = any."""
    key = key_of(config, tenant)
    own = key.class_max or key.sla_class
    return own or (config.sla.default_class if len(config.auth) > 1 else None)
