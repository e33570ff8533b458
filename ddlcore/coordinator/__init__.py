"""The coordinator, which decides which tensors the ranks reduce, and when. It does no I/O."""
