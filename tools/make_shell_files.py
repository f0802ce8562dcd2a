"""Completion and manual page of the command line, as data files of a wheel: below FOLDER/share.

`python -m tools.make_shell_files FOLDER`; the build of a wheel runs it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from service.cli.local.install import shell_files
from service.cli.main import app


def main(folder: Path) -> None:
    for path, text in shell_files(app).items():
        place = folder / path.relative_to("usr/local")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
