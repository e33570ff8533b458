"""The collectives in shared memory as machine code: counters, slots, and one function for each collective.

Only numba's compiler imports these modules, except for `frame`, the layout of memory.
"""
