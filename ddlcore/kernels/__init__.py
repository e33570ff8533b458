"""The CPU kernels: loops over raw memory. numba compiles them once for each machine, and ranks load the machine code."""
