"""The launcher: start the ranks, watch them, and report how the job ended. It does not deal with tensors."""

__all__: list[str] = []
