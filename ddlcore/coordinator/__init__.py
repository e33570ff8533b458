"""The coordinator: it decides which tensors the ranks reduce together, and in which order. It does no I/O."""
