"""batchengine: the engine between the service above and kernels and kv_store below."""

__version__ = "0.1.0"
