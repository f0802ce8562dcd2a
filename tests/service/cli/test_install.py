"""`install-service`: what it writes, what it keeps; and the wheel, whose samples it installs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from batchengine.config import load
from service.cli.local import install
from service.cli.main import app, run
from service.cli.options import SHARED, model_file
from tools import check_wheel, make_shell_files

ROOT = Path(__file__).resolve().parents[3]
UNIT = "etc/systemd/system/batchengine.service"


def states(text: str) -> dict[str, str]:
    lines = [line.split() for line in text.splitlines()]
    return {Path(words[1]).name: words[0] for words in lines if len(words) == 2}


def test_the_service_is_installed_once_and_a_second_time_nothing_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["install-service", "--root", str(tmp_path)]
    assert run([*command, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "+Type=notify" in shown
    assert list(tmp_path.iterdir()) == []
    assert run(command) == 0
    shown = capsys.readouterr().out
    assert set(states(shown).values()) == {"new"}
    assert f"  {install.find_program()} check --config " in shown
    unit = (tmp_path / UNIT).read_text()
    assert f"ExecStart={install.find_program()} serve" in unit
    assert "complete" in (tmp_path / install.COMPLETIONS["bash"]).read_text()
    config = tmp_path / "etc/batchengine/batchengine.toml"
    assert load(str(config), {}).model.path == "/var/lib/batchengine/model.gguf"
    config.write_text(f"# mine\n{config.read_text()}")
    (tmp_path / UNIT).write_text("[Unit]\n")
    assert run([*command, "--dry-run"]) == 0
    assert (tmp_path / UNIT).read_text() == "[Unit]\n"
    capsys.readouterr()
    assert run(command) == 0
    found = states(capsys.readouterr().out)
    assert (found["batchengine.toml"], found["batchengine.service"]) == ("kept", "changed")
    assert set(found.values()) == {"kept", "changed", "same"}
    assert config.read_text().startswith("# mine")
    assert (tmp_path / UNIT).read_text() == unit


def test_the_unit_allows_the_networks_that_the_configuration_needs() -> None:
    sample = (SHARED / "systemd" / "batchengine.service").read_text()
    alone = load(None, {"model.path": "m.gguf"})
    assert "IPAddressAllow=localhost\n\n" in install.unit_text(sample, "/opt/b/bin/b", alone)
    keys = {"auth.keys.a.key": "k" * 32, "server.tls_terminated": True}
    open_to_all = load(None, {"model.path": "m.gguf", "server.host": "0.0.0.0", **keys})
    assert "localhost\nIPAddressAllow=any\n" in install.unit_text(sample, "/b", open_to_all)


def test_the_unit_allows_the_devices_of_a_gpu_lane(tmp_path: Path) -> None:
    sample = (SHARED / "systemd" / "batchengine.service").read_text()
    path = tmp_path / "batchengine.toml"
    path.write_text(
        '[model]\npath = "m.gguf"\n[[lane]]\nkind = "cpu"\n'
        '[[lane]]\nkind = "cuda"\nvram_bytes = 1_000_000_000\n'
    )
    settings = install.unit_text(sample, "/b", load(str(path), {})).splitlines()
    wanted = {"PrivateDevices=no", "DevicePolicy=closed", "DeviceAllow=char-nvidia* rw"}
    assert wanted <= set(settings)
    assert "PrivateDevices=yes" not in settings
    alone = install.unit_text(sample, "/b", load(None, {"model.path": "m.gguf"})).splitlines()
    assert set(alone) & wanted == {"DevicePolicy=closed"}
    assert "PrivateDevices=yes" in alone


def test_a_folder_that_cannot_be_written_is_a_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "etc").write_text("a file")
    assert run(["install-service", "--root", str(tmp_path)]) == 1
    assert "cannot install" in capsys.readouterr().err


def test_it_can_be_repeated_while_the_service_with_credentials_is_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the samples have it: the unit makes the file of the key."""
    command = ["install-service", "--root", str(tmp_path)]
    assert run(command) == 0
    sample = tmp_path / install.CONFIG
    sample.write_text(sample.read_text().replace("# [auth", "[auth").replace("# key_f", "key_f"))
    assert "\nkey_file = " in sample.read_text()
    capsys.readouterr()
    assert run(command) == 0
    assert states(capsys.readouterr().out)["batchengine.toml"] == "kept"


def test_a_program_in_a_home_folder_gets_a_hint() -> None:
    for folder in ("/home/a/.local", "/tmp/venv"):
        assert any("ProtectHome" in hint for hint in install.hints(f"{folder}/bin/batchengine"))


@pytest.mark.skipif(shutil.which("man") is None, reason="needs man")
def test_the_manual_is_understood(tmp_path: Path) -> None:
    page = tmp_path / "batchengine.1"
    page.write_text(install.manual(app))
    done = subprocess.run(["man", "--warnings", "-l", str(page)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "install-service" in done.stdout


def test_the_manual_names_every_command() -> None:
    page = install.manual(app)
    assert all(f'.SS "batchengine {name}"' in page for name in ("serve", "chat", "ps", "plan"))
    assert "\nbatchengine serve [OPTIONS] [ARGS]\n" in page  # not the module that was run
    assert page.isascii()  # what a terminal of any locale shows


def test_a_wheel_has_completion_and_manual_of_its_own_command_line(tmp_path: Path) -> None:
    make_shell_files.main(tmp_path)
    for name in check_wheel.SHARED:
        assert "install-service" in (tmp_path / "share" / name).read_text().replace("\\-", "-")
    assert "tools.make_shell_files" in (ROOT / "kernels" / "CMakeLists.txt").read_text()


def test_pocket_names_the_model_of_the_installation() -> None:
    assert model_file(Path("pocket")) == ROOT / "pocket" / "pocket-q4_0.gguf"
    assert model_file(Path("other.gguf")) == Path("other.gguf")


def test_the_wheel_has_one_package_at_the_top_and_all_that_is_installed(tmp_path: Path) -> None:
    """Without the native module, which takes minutes; `make wheel` makes and tries a whole one."""
    words = "pip wheel -q . --no-build-isolation --no-deps --config-settings=wheel.cmake=false -w"
    done = subprocess.run(
        [sys.executable, "-m", *words.split(), str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stat().st_size < 4 << 20
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"batchengine"}
    assert not [name for name in names if "csrc" in name or name.endswith(".cpp")]
    assert len([name for name in names if "/pocket/" in name]) == 1
    packages = "batchengine/packages"
    wanted = {f"{packages}/systemd/{name}" for name in install.NAMES}
    wanted |= {f"{packages}/pocket/pocket-q4_0.gguf", f"{packages}/service/cli/main.py"}
    wanted |= {f"{packages}/kernels/cuda/src/gpu.h", "batchengine/__main__.py"}
    assert not wanted - set(names)
    assert [name for name in names if name.endswith("licenses/LICENSE")]
