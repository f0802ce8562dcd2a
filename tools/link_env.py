"""Make `.venv` see this checkout: the repository root on its path, and the `batchengine` command.

`pip install .` builds a real wheel; developing and demonstrating want edits to count at once, and
the native module is already in place (make native).
"""

from __future__ import annotations

import stat
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMAND = """#!{python}
import sys

from service.cli.main import main

sys.exit(main())
"""


def main() -> None:
    site = Path(sysconfig.get_paths()["purelib"])
    (site / "batchengine-checkout.pth").write_text(f"{ROOT}\n")
    command = Path(sys.prefix) / "bin" / "batchengine"
    command.write_text(COMMAND.format(python=sys.executable))
    command.chmod(command.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)


if __name__ == "__main__":
    main()
