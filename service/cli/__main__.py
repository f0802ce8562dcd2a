"""`python -m service.cli`: the command line without its console script."""

from __future__ import annotations

from service.cli.main import main

main()
