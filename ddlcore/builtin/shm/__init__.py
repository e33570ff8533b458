"""The transport over shared memory between the processes of one Linux host.

The shared memory is one segment without a file name. The segment contains a ring of slots for each rank.
"""
