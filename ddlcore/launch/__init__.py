"""The launcher: starts the ranks, watches over them, and says how it ended; it knows nothing of tensors."""

__all__: list[str] = []
