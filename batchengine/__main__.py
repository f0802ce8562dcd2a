"""The console script of an installed package, and `python -m batchengine`.

A wheel has one package at the top, this one: the others lie in its folder `packages`, which goes on
the path here. Children take their path from this process (`child.command`). In a checkout they lie
beside this package.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

PACKAGES = Path(__file__).resolve().parent / "packages"


def main() -> None:
    """Runs one command."""
    if PACKAGES.is_dir():
        sys.path.insert(0, str(PACKAGES))
    importlib.import_module("service.cli.main").main()


if __name__ == "__main__":
    main()
