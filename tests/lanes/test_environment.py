"""The variables that a worker gets of those of the daemon."""

from __future__ import annotations

import pytest

from batchengine.child.command import environment


def test_a_child_sees_the_devices_that_its_parent_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {
        "CUDA_VISIBLE_DEVICES": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_MPS_PIPE_DIRECTORY": "/run/mps",
        "CUDA_PATH": "/opt/cuda",
        "CUDA_HOME": "/opt/cuda",
    }
    for name, value in (chosen | {"SECRET_KEY": "s3cr3t"}).items():
        monkeypatch.setenv(name, value)
    child = environment()
    assert {name: child.get(name) for name in chosen} == chosen
    assert "SECRET_KEY" not in child
