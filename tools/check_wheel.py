"""Install the newest wheel of a folder into a fresh environment, away from this checkout, and use
it: one package at the top, completion and manual, a conversation with the bundled model, the
service's files.

`make wheel` runs it. The packages that the wheel depends on come from the index that pip is set to.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHARED = (
    "bash-completion/completions/batchengine", "zsh/site-functions/_batchengine",
    "fish/vendor_completions.d/batchengine.fish", "man/man1/batchengine.1",
)  # fmt: skip
OWN = {"batchengine", "service", "kernels", "kv_store"}


def main(folder: Path) -> int:
    wheel = max(folder.glob("*.whl"), key=lambda path: path.stat().st_mtime)
    with tempfile.TemporaryDirectory() as home:
        environment = {"PATH": os.environ["PATH"], "HOME": home, "XDG_STATE_HOME": f"{home}/state"}
        environment["XDG_CACHE_HOME"] = f"{home}/cache"
        venv = Path(home) / "venv"
        began = time.monotonic()
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        subprocess.run([venv / "bin" / "pip", "install", "-q", wheel.absolute()], check=True)
        print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB, installed in"
              f" {time.monotonic() - began:.0f} s")  # fmt: skip
        (site,) = (venv / "lib").glob("python*/site-packages")
        top = {path.name for path in site.iterdir()} & OWN
        if top != {"batchengine"}:
            raise SystemExit(f"packages at the top of site-packages: {sorted(top)}")
        if missing := [name for name in SHARED if not (venv / "share" / name).is_file()]:
            raise SystemExit(f"files missing below share/: {missing}")
        program = venv / "bin" / "batchengine"
        for words, question in (
            (["version"], ""),
            (["install-service", "--dry-run", "--root", f"{home}/root"], ""),
            (["plan", "pocket"], ""),
            (["cluster", "demo", "--once", "--nodes", "2"], ""),
            (["chat", "pocket", "--temperature", "0"], "Tell me a story.\n"),
        ):
            began = time.monotonic()
            done = subprocess.run(
                [program, *words], input=question, env=environment, cwd="/", text=True,
                capture_output=True, timeout=300, check=False,
            )  # fmt: skip
            print(f"batchengine {' '.join(words)}: {time.monotonic() - began:.1f} s")
            if done.returncode or not done.stdout.strip():
                raise SystemExit(f"exit code {done.returncode}\n{done.stdout}{done.stderr}")
        print(done.stdout[-400:])
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
