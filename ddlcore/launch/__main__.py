"""Run the command ``ddl`` for ``python -m ddlcore.launch``, which is the older form of ``python -m ddlcore``."""

from __future__ import annotations

import sys

from ddlcore.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
