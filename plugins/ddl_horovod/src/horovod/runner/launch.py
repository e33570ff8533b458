"""The program `horovodrun`, also as `python -m horovod.runner.launch`."""

from __future__ import annotations

__all__ = ["run_commandline"]


def run_commandline() -> None:
    """Run horovodrun with the arguments of this process, and exit with its exit code."""
    from ddl_horovod.command import main

    main()


if __name__ == "__main__":
    run_commandline()
