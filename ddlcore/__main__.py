"""Run ``ddl`` as ``python -m ddlcore``, for systems on which the script ``ddl`` is not on PATH."""

from __future__ import annotations

import sys

from ddlcore.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
