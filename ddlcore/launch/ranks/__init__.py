"""The ranks of one host, whether the launcher or an agent starts them: their commands, environments and processes."""
