"""Containerfile and compose file: what can be checked without building an image."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_image_is_made_of_what_is_there() -> None:
    text = (ROOT / "Containerfile").read_text()
    words = {line.split(" ", 1)[0] for line in text.splitlines() if line and line[0].isupper()}
    assert words <= {
        "FROM",
        "RUN",
        "COPY",
        "USER",
        "ENV",
        "VOLUME",
        "STOPSIGNAL",
        "ENTRYPOINT",
        "CMD",
    }
    assert re.search(r'(?m)^CMD \["serve", "pocket"\]$', text)
    assert re.search(r"(?m)^USER batchengine$", text)


def test_the_service_of_compose_listens_where_the_daemon_does() -> None:
    text = (ROOT / "compose.yaml").read_text()
    service = text.partition("services:\n")[2].partition("\nvolumes:")[0]
    keys = set(re.findall(r"(?m)^    ([a-z_]+):", service))
    assert keys == {
        *("build", "command", "network_mode", "restart", "stop_grace_period", "read_only"),
        *("tmpfs", "cap_drop", "security_opt", "volumes"),
    }
    assert "network_mode: host" in service
    assert "ports:" not in service
