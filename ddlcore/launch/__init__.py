"""The launcher: start the ranks, watch them, and report how the job ended. It knows nothing of tensors."""

__all__: list[str] = []
