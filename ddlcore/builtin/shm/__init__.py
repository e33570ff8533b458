"""Shared memory between the processes of one Linux host: a segment that has no name, and a ring of slots in it."""
