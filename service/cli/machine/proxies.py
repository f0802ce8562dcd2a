"""Proxies of the environment that keep clients from the daemon. This program itself uses none."""

from __future__ import annotations

import os
import urllib.request
from urllib.parse import urlsplit


def proxy_trouble(url: str) -> tuple[str, str] | None:
    """Which variable sends a client's requests for `url` to a proxy, and what to do; or None."""
    proxies = urllib.request.getproxies_environment()
    kind = next((kind for kind in ("http", "all") if kind in proxies), "")
    host = urlsplit(url).hostname or ""
    if not kind or urllib.request.proxy_bypass(host):
        return None
    name = next(name for name in os.environ if name.lower() == f"{kind}_proxy")
    hosts = ",".join(dict.fromkeys((host, "localhost", "127.0.0.1", "::1")))
    kept = proxies.get("no", "")
    value = f"{kept},{hosts}" if kept else hosts
    text = f"{name} is set, without {host} in no_proxy: agents, SDKs and curl ask that proxy"
    return text, f"export no_proxy={value} NO_PROXY={value}"
