"""Shared memory between the processes of one Linux host: a segment without a name, with rings of slots in it."""
