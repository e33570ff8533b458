"""The launcher: start the ranks, watch them, and report how the job has ended. This package does not use tensors."""

__all__: list[str] = []
