"""The commands, environments and processes of the ranks of one host. The launcher or an agent starts these ranks."""
