"""The coordinator: what the launcher runs to decide which tensors the ranks reduce, and when. It does no I/O."""
