"""The commands of README and docs as a script.

A fenced block of language `sh` is run by the tests: all blocks of a page one after the other, in
one shell, in a folder with the bundled model. A line that begins with `batchengine serve` starts a
daemon and goes on once it is ready; where the page starts another one, the first is stopped.
`sh elsewhere` marks blocks that need another machine, root or a network.
"""

from __future__ import annotations

import re
from pathlib import Path

_BLOCK = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PORT = "7717"

PRELUDE = f"""set -eu -o pipefail
printf '[server]\\nport = {PORT}\\n' > port.toml
"""
PRELUDE += """
stop_daemon() {
  if [ -n "${daemon:-}" ]; then kill "$daemon" 2>/dev/null || true; wait "$daemon" || true; fi
  daemon=""
}
trap stop_daemon EXIT
start_daemon() {
  stop_daemon
  "$@" > daemon.log 2>&1 &
  daemon=$!
  for _ in $(seq 600); do
    if grep -q "^ *ready " daemon.log; then return; fi
    if ! kill -0 "$daemon" 2>/dev/null; then cat daemon.log; exit 1; fi
    sleep 0.1
  done
  cat daemon.log; exit 1
}
"""


def blocks(page: Path) -> list[str]:
    """The blocks of a page that are run."""
    found = _BLOCK.findall(page.read_text())
    return [body for language, rest, body in found if language == "sh" and not rest.strip()]


def languages(page: Path) -> set[str]:
    """Every language with its words, as written behind the fence."""
    return {(language + rest).strip() for language, rest, _ in _BLOCK.findall(page.read_text())}


def script(page: Path, port: int) -> str:
    """A bash script of the page's commands, on another port than the usual one."""
    lines: list[str] = []
    for block in blocks(page):
        for line in block.splitlines():
            is_daemon = line.startswith("batchengine serve")
            if line.startswith("batchengine check ") and "--config" not in line:
                line += " --config port.toml"
            lines.append(f"start_daemon {line} --port {PORT}" if is_daemon else line)
    return (PRELUDE + "\n".join(lines)).replace(PORT, str(port)) + "\n"
