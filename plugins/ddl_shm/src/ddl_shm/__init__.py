"""Shared memory among the ranks of a host, and with it collectives across hosts. Users need not import anything."""
