"""The installed service under a real systemd: `make check-systemd`, as root.

A Debian 12 is made once below build/systemd (Debian packages debootstrap and systemd-container, and
a network), the newest wheel of dist/ is installed there with its packages, and systemd is started
as process 1 of a container without network, where `systemd_guest.py` makes the checks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "systemd"
SYSTEM = FOLDER / "root"
PACKAGES = "python3,python3-venv,systemd,systemd-sysv,dbus,procps"
PYTHON = "3.11"  # of Debian 12
CHECKS_S = 900
GUEST_UNIT = """\
[Unit]
After=basic.target dbus.service
SuccessAction=poweroff-force
FailureAction=poweroff-force
[Service]
StandardOutput=file:/root/guest.log
StandardError=inherit
ExecStart=/usr/bin/python3 -u /root/guest.py
[Install]
WantedBy=multi-user.target
"""


def call(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True)


def make_system() -> None:
    """The Debian, unless it is there already."""
    if (SYSTEM / "made").exists():
        return
    shutil.rmtree(SYSTEM, ignore_errors=True)
    call("debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", SYSTEM)
    (SYSTEM / "made").touch()


def install_wheel() -> None:
    """The wheel in an environment of the Debian's own Python; packages come from outside."""
    wheel = max((ROOT / "dist").glob("*.whl"), key=os.path.getmtime)
    wheels = SYSTEM / "root" / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    call(*pip, "download", "-q", "-d", wheels, "--only-binary=:all:",
         f"--python-version={PYTHON}", wheel)  # fmt: skip
    shutil.rmtree(SYSTEM / "opt" / "batchengine", ignore_errors=True)
    call("chroot", SYSTEM, "python3", "-m", "venv", "/opt/batchengine")
    call("chroot", SYSTEM, "/opt/batchengine/bin/pip", "install", "-q", "--no-index",
         "--find-links=/root/wheels", f"/root/wheels/{wheel.name}")  # fmt: skip


def prepare() -> None:
    """No trace of an earlier run; the checks as a unit that ends the container."""
    for name in (
        "var/lib/batchengine",
        "var/cache/batchengine",
        "etc/batchengine",
        "var/log/journal",
    ):
        shutil.rmtree(SYSTEM / name, ignore_errors=True)
    units = SYSTEM / "etc" / "systemd" / "system"
    for path in [*units.glob("batchengine*"), *units.glob("*.wants/batchengine*")]:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    (units / "guest.service").write_text(GUEST_UNIT)
    wants = units / "multi-user.target.wants"
    wants.mkdir(exist_ok=True)
    (wants / "guest.service").unlink(missing_ok=True)
    (wants / "guest.service").symlink_to("../guest.service")
    shutil.copy(ROOT / "tools" / "systemd_guest.py", SYSTEM / "root" / "guest.py")
    shutil.copy(ROOT / "pocket" / "pocket-q4_0.gguf", SYSTEM / "root" / "model.gguf")
    for name in ("guest.log", "failed"):
        (SYSTEM / "root" / name).unlink(missing_ok=True)


def main() -> int:
    missing = [name for name in ("debootstrap", "systemd-nspawn") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        print(f"needs root, and the programs {', '.join(missing) or '(all there)'}")
        return 2
    make_system()
    install_wheel()
    prepare()
    with open(FOLDER / "nspawn.log", "wb") as log:
        subprocess.run(
            ["systemd-nspawn", "-q", "--register=no", "--keep-unit", "--private-network", "-D",
             str(SYSTEM), "--console=pipe", "-b"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=CHECKS_S, check=False,
        )  # fmt: skip
    print((SYSTEM / "root" / "guest.log").read_text())
    return int((SYSTEM / "root" / "failed").read_text() != "0")


if __name__ == "__main__":
    sys.exit(main())
